"""The command `dcp` from outside: exit codes, messages, what goes to which stream.

Long runs are in test_train_run.py; here nothing trains.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dcp
from dcp import cli

Run = subprocess.CompletedProcess[str]


def dcp_command(*args: Any) -> Run:
    return subprocess.run(
        [sys.executable, "-m", "dcp", *map(str, args)], capture_output=True, text=True, timeout=100
    )


def refused(*args: Any) -> str:
    """Run in this process; check that it is refused as bad input, and return the message."""
    from _pytest.capture import MultiCapture, SysCapture

    capture = MultiCapture(in_=None, out=SysCapture(1), err=SysCapture(2))
    capture.start_capturing()
    try:
        code = cli.run(list(map(str, args)))
        out, err = capture.readouterr()
    finally:
        capture.stop_capturing()
    assert code == cli.BAD_INPUT, err
    assert out == "" and "Traceback" not in err
    assert len(err.strip().splitlines()) == 1, f"one message: {err}"
    return err


def test_info() -> None:
    run = dcp_command("info", "--json", "-")
    assert run.returncode == 0 and run.stderr == ""
    document = json.loads(run.stdout)
    assert document["schema"] == 1 and document["command"] == "info"
    assert document["version"] == dcp.__version__
    assert document["cpu"]["isa"] in document["cpu"]["isas"] and document["cpu"]["cores"] >= 1
    assert set(document["backends"]) == {"self", "shm", "mpi", "nccl"}
    for backend in document["backends"].values():
        assert backend["available"] == (backend["reason"] is None)
    assert document["cuda"] == {
        "available": False,
        "reason": document["cuda"]["reason"],
        "devices": [],
    }
    table = dcp_command("info")
    assert table.returncode == 0 and document["cpu"]["blas"] in table.stdout


def test_json_to_a_file_leaves_standard_output_to_people(tmp_path: Path) -> None:
    run = dcp_command("info", "--json", tmp_path / "info.json")
    assert run.returncode == 0 and "cores" in run.stdout
    assert json.loads((tmp_path / "info.json").read_text())["command"] == "info"
    assert [path.name for path in tmp_path.iterdir()] == ["info.json"]
    assert "absent" in refused("info", "--json", tmp_path / "absent" / "info.json")


def test_help_and_version() -> None:
    assert dcp.__version__ in dcp_command("--version").stdout
    run = dcp_command("--help")
    assert run.returncode == 0
    for name in ("info", "train", "sample", "checkpoint", "launch"):
        assert name in run.stdout
        assert dcp_command(name, "--help").returncode == 0


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["trian"], "'train'"),
        (["train", "--stepss", "3"], "--steps"),
        (["train", "--steps", "three"], "three"),
        (["train", "--ranks", "0"], "ranks"),
        (["train", "--ranks", "-2"], "ranks"),
        (["train", "--ranks", "100000"], "ranks"),
        (["train", "--steps", "-1"], "steps"),
        (["train", "--tokens-per-step", "100"], "tokens"),
        (["train", "--set", "model.hiden_size=64"], "hidden_size"),
        (
            ["train", "--set", "model.hidden_size=100", "--set", "model.num_attention_heads=3"],
            "head",
        ),
        (["train", "--strategy", "paked"], "packed"),
        (["train", "--preset", "tny"], "tiny"),
        (["train", "--optimizer", "adam"], "adamw"),
        (["train", "--device", "cuda"], "cuda"),
        (["train", "--device", "emulated"], "emulated"),
        (["train", "--memory", "much"], "memory"),
        (["train", "--resume"], "--checkpoint"),
        (["train", "--compare", "packed,bukcet"], "'bucket'"),
        (["train", "--compare", "packed,packed"], "twice"),
        (["train", "--compare", ""], "unknown strategy ''"),
        (["train", "--compare", "packed,bucket", "--strategy", "packed"], "--strategy"),
        (["train", "--compare", "packed,bucket", "--checkpoint", "/tmp/x"], "--checkpoint"),
        (["train", "--set", "plan.sp=2"], "strategy 'fixed'"),
        (["train", "--set", "plan.cost=/no/such.json"], "/no/such.json"),
        (["train", "--save-every", "2"], "--checkpoint"),
        (["train", "--eval-every", "0"], "eval_every"),
        (["train", "--target-loss", "nan"], "target_loss"),
        (["train", "--config", "/no/such.toml"], "/no/such.toml"),
        (["profile", "--preset", "tinny"], "'tiny'"),
        (["profile", "--seconds", "0"], "--seconds 0"),
        (["profile", "--max-tokens", "3"], "max_tokens = 3"),
        (["profile", "--ranks", "0"], "ranks"),
        (["profile", "--out", "/no/such/cost.json"], "--out /no/such/cost.json"),
        (["sample", "--checkpoint", "/no/such"], "/no/such"),
        (["sample"], "--checkpoint"),
        (["checkpoint", "show", "/no/such"], "/no/such"),
        (["checkpoint", "verify", "/no/such"], "/no/such"),
        (["launch", "-n", "0", "x.py"], "ranks"),
        (["launch", "-n", "2", "/no/such.py"], "/no/such.py"),
        (["launch", "x.py"], "-n"),
    ],
)
def test_bad_input(args: list[str], words: str) -> None:
    assert words in refused(*args)


def test_bad_data(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "none" in refused("train", "--data", tmp_path / "none")
    assert "empty" in refused("train", "--data", tmp_path / "empty")
    (tmp_path / "blank").mkdir()
    (tmp_path / "blank" / "a.txt").write_text("")
    assert "blank" in refused("train", "--data", tmp_path / "blank")
    np.save(tmp_path / "floats.npy", np.ones(5, np.float32))
    assert "floats.npy" in refused("train", "--data", tmp_path / "floats.npy")
    (tmp_path / "torn.npy").write_bytes(b"\x93NUMPY\x01")
    assert "torn.npy" in refused("train", "--data", tmp_path / "torn.npy")
    np.save(tmp_path / "large.npy", np.full(50, 999, np.int32))
    assert "vocab_size=1000" in refused("train", "--data", tmp_path / "large.npy")
    tokens = ("train", "--data", tmp_path / "large.npy", "--set", "data.tokenizer=t.json")
    assert "data.tokenizer is for text" in refused(*tokens)
    assert "data.eos = 0" in refused("train", "--set", "data.eos=0")


@pytest.fixture
def no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting ranks is a failure."""

    def launch(*_: Any, **__: Any) -> Any:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(dcp, "launch", launch)


@pytest.mark.usefixtures("no_launch")
def test_what_fits_nowhere_is_said_before_ranks_start(tmp_path: Path) -> None:
    """Case P-11: the sequence, its length and the bytes are named, also with --compare."""
    (tmp_path / "a.txt").write_text("x" * 700)
    (tmp_path / "b.txt").write_text("x" * 30)
    small = ("train", "--data", tmp_path, "--ranks", 2, "--set", "train.eval_share=0")
    for more in ((), ("--compare", "packed,bucket")):
        message = refused(*small, *more, "--memory", "20MB")
        assert "sequence 0" in message and "700 tokens" in message and "20000000" in message
        message = refused(*small, *more, "--memory", "20kB")  # less than weights and gradients
        assert "memory_bytes = 20000 is less than" in message and "700" not in message


def test_settings_of_every_strategy() -> None:
    from dcp.cli import InputError
    from dcp.cli.compare import output_of, settings_of
    from dcp.config import load

    base = load(options={"seed": 5, "ranks": 2})
    both = settings_of("bucket, packed", base)
    assert [one.strategy for one in both] == ["bucket", "packed"]
    assert all(one.seed == 5 and one.ranks == 2 for one in both)
    with pytest.raises(InputError, match="did you mean 'packed'"):
        settings_of("bucket,paked", base)
    assert output_of(None, "bucket", folder=True) is None
    assert output_of(Path("a/t.json"), "bucket", folder=False) == Path("a/t-bucket.json")
    assert output_of(Path("a/m"), "bucket", folder=True) == Path("a/m/bucket")


def test_loss_difference() -> None:
    from dcp.cli.compare import loss_difference

    assert loss_difference([4.0, 2.0], [4.0, 2.0]) == 0.0
    assert loss_difference([4.0, 2.0], [4.0, 2.1]) == pytest.approx(0.1 / 2.1)
    assert loss_difference([4.0, None], [4.0, None]) == 0.0
    assert loss_difference([4.0, None], [4.0, 2.0]) is None


def test_compare_table_says_whether_losses_are_equal() -> None:
    import io

    from dcp.cli.compare import compare_table

    def run(name: str, difference: float | None, idle: float | None) -> dict[str, Any]:
        return {
            "strategy": name,
            "tokens_per_s": 1000.0 if name == "bucket" else 1500.0,
            "steps": [{"loss": 2.0, "idle_share": idle}],
            "peak_memory_bytes": {"ranks": [2**20, 2**21]},
            "loss_difference": difference,
        }

    for difference, word in ((1e-9, "losses equal"), (1e-3, "DIFFER"), (None, "DIFFER")):
        text = io.StringIO()
        compare_table([run("bucket", 0.0, 0.25), run("packed", difference, None)], to=text)
        assert word in text.getvalue() and "1.50x" in text.getvalue()
        assert "25.0%" in text.getvalue() and "2.0 MiB" in text.getvalue()


def test_checkpoint_folders_that_cannot_be_used(tmp_path: Path) -> None:
    step = tmp_path / "half" / "step-00000004"
    step.mkdir(parents=True)
    (step / "index.json").write_text('{"half": ')
    half = step.parent
    assert "step-00000004" in refused("train", "--checkpoint", half, "--resume")
    assert "step-00000004" in refused("checkpoint", "show", half)
    assert "--resume" in refused("train", "--checkpoint", half), "a used folder"
    (tmp_path / "new").mkdir()
    assert "no checkpoint" in refused("train", "--checkpoint", tmp_path / "new", "--resume")
    assert "no such folder" in refused("train", "--checkpoint", tmp_path / "absent", "--resume")
    (tmp_path / "file").write_text("")
    assert "not a folder" in refused("train", "--checkpoint", tmp_path / "file")


def test_print_config_reads_back(tmp_path: Path) -> None:
    run = dcp_command("train", "--steps", 5, "--set", "data.max_length=128", "--print-config")
    assert run.returncode == 0 and run.stderr == ""
    (tmp_path / "c.toml").write_text(run.stdout)
    again = dcp_command("train", "--config", tmp_path / "c.toml", "--print-config")
    assert again.stdout == run.stdout and "max_length = 128" in run.stdout


def test_debug_shows_the_traceback() -> None:
    run = dcp_command("train", "--steps", -1, "--debug")
    assert run.returncode == cli.BAD_INPUT and "Traceback" in run.stderr


def test_closed_standard_output_is_no_traceback() -> None:
    run = subprocess.run(
        f"{sys.executable} -m dcp train --print-config | true",
        shell=True,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert "Traceback" not in run.stderr


def test_documents_hold_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    cli.write_json({"a": [float("nan"), 1.0], "b": {"c": float("inf")}, "d": (2,)}, "-")
    assert json.loads(capsys.readouterr().out) == {"a": [None, 1.0], "b": {"c": None}, "d": [2]}


def test_faults_of_ours_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from dcp.cli import info

    def broken() -> Any:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(info, "collect", broken)
    assert cli.run(["info"]) == cli.FAILED
    err = capsys.readouterr().err
    assert "ZeroDivisionError: oops" in err and "fault in dcp" in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KeyboardInterrupt(), cli.INTERRUPTED),
        (dcp.ArgumentError("x"), cli.BAD_INPUT),
        (dcp.UnsupportedError("x"), cli.BAD_INPUT),
        (dcp.InfeasibleError("x"), cli.BAD_INPUT),
        (dcp.RankError("rank 1 (pid 7) died"), cli.FAILED),
        (dcp.NumericError("x"), cli.FAILED),
        (dcp.FileError("x"), cli.FAILED),
        (MemoryError("x"), cli.FAILED),
    ],
)
def test_exit_codes(
    error: BaseException,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from dcp.cli import info

    def broken() -> Any:
        raise error

    monkeypatch.setattr(info, "collect", broken)
    assert cli.run(["info"]) == code
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err != ""


def test_sample_slides_its_window_and_is_seeded() -> None:
    from dcp.cli.sample import sample

    config = dcp.Transformer1D(257, 16, 32, 1, 2, max_position_embeddings=8)
    model = dcp.Model(config, seed=3)
    first = sample(model, "abc", tokens=20, seed=1, temperature=1.0)
    assert (
        first.startswith("abc") and sample(model, "abc", tokens=0, seed=1, temperature=1.0) == "abc"
    )
    assert sample(model, "abc", tokens=20, seed=1, temperature=1.0) == first
    assert sample(model, "abc", tokens=20, seed=2, temperature=1.0) != first
    cold = [sample(model, "abc", tokens=20, seed=s, temperature=0.0) for s in (1, 2)]
    assert cold[0] == cold[1], "at temperature 0 the likeliest byte is taken"


def test_sample_draws_what_the_model_says() -> None:
    """Frequencies of the next byte follow softmax(logits / temperature)."""
    from types import SimpleNamespace

    from dcp.cli.sample import sample

    logits = np.full((1, 257), -1e9, np.float32)
    logits[0, [97, 98]] = [0.0, 2.0]
    model = SimpleNamespace(
        config=SimpleNamespace(max_position_embeddings=1), logits=lambda tokens, offsets: logits
    )
    for temperature in (1.0, 2.0):
        text = sample(model, "x", tokens=2000, seed=0, temperature=temperature)
        share = text.count("a") / 2000
        assert share == pytest.approx(1 / (1 + np.exp(2.0 / temperature)), abs=0.03)


def test_sample_ends_with_the_document() -> None:
    from types import SimpleNamespace

    from dcp.cli.sample import sample

    logits = np.zeros((1, 257), np.float32)
    logits[0, 256] = 100.0
    model = SimpleNamespace(
        config=SimpleNamespace(max_position_embeddings=1), logits=lambda tokens, offsets: logits
    )
    assert sample(model, "x", tokens=50, seed=0, temperature=1.0) == "x"
