"""`dcp control` from outside: tables, documents, pictures, and what it refuses."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dcp
from dcp import cli
from dcp.controller import DecisionLog
from dcp.time_to_loss import POLICIES, Setup, decision_log, time_to_loss
from dcp.trainer_log import Replay

Capture = pytest.CaptureFixture[str]
QUICK = ("--target", 6, "--seeds", 1, "--dwell", 20)


def run_cli(capsys: Capture, *args: Any) -> tuple[int, str, str]:
    code = cli.run(["control", *map(str, args)])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    run = time_to_loss("joint", congestion=3, dwell_s=20, target=4.5, trace=True)
    other = json.dumps({"kind": "step", "step": 0, "loss": 1.0}) + "\n"
    path.write_text(other + decision_log(run))
    return path


def test_simulate(capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("MPLBACKEND", "agg")
    picture = tmp_path / "times.png"
    code, out, err = run_cli(
        capsys, "simulate", "--congestion", "0,2", *QUICK, "--plot", picture, "--json", "-"
    )
    assert code == 0, err
    document = json.loads(out)
    assert document["schema"] == 1 and document["command"] == "control"
    rows = document["results"]
    assert len(rows) == 2 * 2 * len(POLICIES)
    wanted = "base congestion dwell_s policy seed time_to_target_s steps tokens ratio_to_oracle"
    for row in rows:
        assert set(wanted.split()) <= set(row)
        assert row["ratio_to_oracle"] > 0.9
        assert row["time_to_target_s"] > 0 and row["steps"] > 0 and row["tokens"] > 0
    assert {r["base"] for r in rows} == {"fp32", "bf16"}
    assert {r["congestion"] for r in rows} == {0, 2} and {r["dwell_s"] for r in rows} == {20.0}
    assert document["setup"]["target_loss"] == 6.0
    assert document["published"]["decoupled_over_joint"] == [1.13, 1.42]
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert "decoupled / joint: fp32" in err and "1.13 to 1.42" in err and "GPT" not in out


def test_simulate_prints_a_table(capsys: Capture) -> None:
    code, out, err = run_cli(
        capsys, "simulate", "--policies", "joint,static", "--congestion", 1, *QUICK,
        "--base", "bf16", "--set", "rack_hosts=4", "--set", "oversubscription=2.0",
    )  # fmt: skip
    assert code == 0 and err == ""
    lines = out.splitlines()
    assert "mean of 1 seed" in lines[0]
    assert lines[1].split() == ["base", "jobs", "dwell", "s", "joint", "static"]
    assert lines[2].split()[:3] == ["bf16", "1", "20"]
    assert "racks of 4, oversubscribed 2" in out


def test_simulate_writes_a_file_and_takes_grids(capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    code, out, _ = run_cli(
        capsys, "simulate", "--policies", "precision,oracle", "--congestion", 0, *QUICK,
        "--precisions", "int8,fp32", "--base", "fp32", "--batch-multiples", "1,4", "--json", file,
    )  # fmt: skip
    assert code == 0 and "oracle s" in out
    rows = json.loads(file.read_text())["results"]
    assert [row["policy"] for row in rows] == ["precision", "oracle"]
    assert rows[0]["arm"] == "int8 x 1"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--policies", "joined"], "did you mean 'joint'"),
        (["--policies", ""], "empty"),
        (["--policies", "joint,joint"], "distinct"),
        (["--precisions", "fp32,int5"], "did you mean 'int"),
        (["--precisions", ","], "empty"),
        (["--base", "bf61"], "did you mean 'bf16'"),
        (["--base", "fp32", "--precisions", "bf16,int8"], "--base fp32: must be one of"),
        (["--congestion", "-1"], "--congestion -1"),
        (["--congestion", ""], "empty"),
        (["--congestion", "many"], "--congestion many"),
        (["--congestion", "65"], "0..64"),
        (["--dwell", "-5"], "--dwell -5"),
        (["--dwell", "nan"], "--dwell nan"),
        (["--batch-multiples", "0,2"], "--batch-multiples 0,2"),
        (["--batch-multiples", "4,2"], "must ascend"),
        (["--batch-multiples", ",".join(map(str, range(1, 19)))], "1 to 16"),
        (["--target", "1.5"], "floor of 2"),
        (["--target", "nan"], "target"),
        (["--target", "20"], "below 10.8"),
        (["--seeds", "0"], "--seeds 0"),
        (["--set", "hots=4"], "did you mean 'hosts'"),
        (["--set", "hosts=few"], "is not a number"),
        (["--set", "hosts=0"], "hosts = 0"),
        (["--plot", "no/such/folder/a.png"], "no such folder"),
        (["--plot", "a.png", "--policies", "joint"], "--policies needs it"),
    ],
)
def test_simulate_refuses(args: list[str], message: str, capsys: Capture) -> None:
    code, out, err = run_cli(capsys, "simulate", *args, "--json", "-")
    assert code == cli.BAD_INPUT and out == ""
    assert message in err and len(err.strip().splitlines()) == 1


def test_show(log: Path, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("MPLBACKEND", "agg")
    picture = tmp_path / "run.png"
    code, out, err = run_cli(capsys, "show", log, "--plot", picture, "--json", "-")
    assert code == 0, err
    document = json.loads(out)
    steps = document["steps"]
    read = DecisionLog.read(log)
    assert len(steps) == len(read.lines) and document["settings"] == read.settings
    assert sum(arm["steps"] for arm in document["arms"]) == len(steps)
    assert sum(arm["time_share"] for arm in document["arms"]) == pytest.approx(1.0)
    for row, line, before in zip(steps[1:], read.lines[1:], read.lines, strict=False):
        assert row["predicted_s"] == before["decision"]["predicted_s"]
        assert row["step_s"] == line["observation"]["step_s"]
        assert row["bandwidth"] == line["decision"]["bandwidth"]
        assert row["noise_tokens"] == line["decision"]["noise_tokens"]
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert "promises less time to the target" in err and "policy joint" in err
    assert run_cli(capsys, "show", log.parent)[0] == 0, "the folder of a run"


def test_replay(log: Path, capsys: Capture, tmp_path: Path) -> None:
    code, out, err = run_cli(capsys, "replay", log, "--json", "-")
    count = len(DecisionLog.read(log).lines)
    assert code == 0 and json.loads(out)["decisions"] == count and f"{count:,}" in err
    lines = log.read_text().splitlines()
    changed = json.loads(lines[30])
    changed["decision"]["noise_tokens"] *= 1.0 + 1e-12
    other = tmp_path / "changed.jsonl"
    other.write_text("\n".join([*lines[:30], json.dumps(changed), *lines[31:]]) + "\n")
    code, out, err = run_cli(capsys, "replay", other, "--json", "-")
    assert code == cli.FAILED and out == ""
    assert f"noise_tokens after step {changed['step']}" in err


@pytest.mark.parametrize("command", ["show", "replay"])
def test_logs_that_are_none(command: str, log: Path, capsys: Capture, tmp_path: Path) -> None:
    """Missing, empty, broken and of another version: bad input, and nothing on standard output."""
    empty, broken, newer = (tmp_path / n for n in ("empty.jsonl", "broken.jsonl", "newer.jsonl"))
    empty.write_text("")
    lines = log.read_text().splitlines()
    broken.write_text("\n".join([lines[1], "{", lines[2]]))
    first = json.loads(lines[1])
    newer.write_text(json.dumps(first | {"version": 99}) + "\n")
    for path, message in (
        (tmp_path / "none.jsonl", "cannot be read"),
        (empty, "no decisions"),
        (broken, "line 2"),
        (newer, "version 99"),
    ):
        code, out, err = run_cli(capsys, command, path, "--json", "-")
        assert code == cli.BAD_INPUT and out == ""
        assert message in err and len(err.strip().splitlines()) == 1


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damaged_logs_are_errors_of_dcp(log: Path, tmp_path: Path, data: st.DataObject) -> None:
    """A value of some line is replaced or gone, or bytes are: read, replayed, or refused."""
    lines = log.read_text().splitlines()[:20]
    number = data.draw(st.integers(0, len(lines) - 1))
    values: Any = json.loads(lines[number])
    place = values
    while isinstance(place, dict) and place:
        key = data.draw(st.sampled_from(sorted(place)))
        if not isinstance(place[key], dict) or data.draw(st.booleans()):
            place[key] = data.draw(st.sampled_from([None, 3, -1.5, 1e300, 2**70, "x", [], {}]))
            if data.draw(st.booleans()):
                del place[key]
            break
        place = place[key]
    lines[number] = json.dumps(values)
    if data.draw(st.booleans()):
        cut = data.draw(st.integers(0, len(lines[number])))
        lines[number] = lines[number][:cut]
    path = tmp_path / "damaged.jsonl"
    path.write_text("\n".join(lines))
    with contextlib.suppress(dcp.Error):
        Replay.read(path)
    with contextlib.suppress(dcp.Error):
        found = DecisionLog.read(path)
        found.replay()


def test_pictures(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("MPLBACKEND", "agg")
    import matplotlib.pyplot as plt

    from dcp.control_plot import draw_decisions, draw_sweep
    from dcp.time_to_loss import sweep

    done = sweep(
        ["oracle", "static", "joint"], congestion=[0, 1], base=["fp32"], dwell_s=[0, 20], seeds=1,
        target=8.0,
    )  # fmt: skip
    axes = draw_sweep(done).axes
    assert [a.get_title(loc="left") for a in axes] == [
        "base fp32, jobs stay",
        "base fp32, jobs come and go every 20 s",
    ]
    drawn = {line.get_label(): line.get_ydata() for line in axes[1].lines}
    ratio = done.ratio("static", "oracle")
    assert list(drawn["static"]) == [ratio["fp32", c, 20.0] for c in (0, 1)]
    read = DecisionLog.read(log)
    panels = draw_decisions(read).axes
    assert len(panels) == 4
    ends = [row["seconds"] for row in read.rows()]
    assert list(panels[1].lines[0].get_xdata()) == ends
    plt.close("all")
    alone = sweep(["joint"], congestion=[0], base=["fp32"], dwell_s=[20], seeds=1, target=8.0)
    with pytest.raises(dcp.ArgumentError, match="needs the oracle"):
        draw_sweep(alone)


def test_constants_are_those_of_the_setup(capsys: Capture) -> None:
    """What the table states is what ran."""
    code, out, _ = run_cli(capsys, "simulate", "--congestion", 0, *QUICK, "--policies", "static")
    setup = Setup()
    assert code == 0
    for text in ("774M parameters on 8 hosts", "100 Gbit/s", f"{setup.tokens_per_step:,} tokens"):
        assert text in " ".join(out.split())
