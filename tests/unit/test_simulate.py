"""The cluster simulator and what a person sees of it.

Simulated time: work is conserved, no rank is in two places, the makespan is the last end, without
jitter the planner's own times. Comparisons: the same sequences for every strategy, the planner that
trains. The commands `dcp plan` and `dcp simulate`, and the pictures.
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dcp
from dcp import cli, distributions, planning, simulate, viz

COST = dcp.CostModel(
    latency_s=1e-3,
    token_s=1e-6,
    square_s=1e-10,
    group_s=(1e-4, 3e-4),
    hop_s=(1e-5, 2e-5),
    gather_s=(1e-8, 4e-8),
    exchange_s=(1e-7, 4e-7),
    layer_token_s=4e-8,
    layer_square_s=4e-12,
    mlp_token_s=2e-8,
    token_bytes=8000,
    layer_token_bytes=900,
    mlp_token_bytes=500,
    fixed_bytes=1_000_000,
    layer_count=8,
    node_ranks=4,
    name="test",
)


def check_line(line: simulate.TimeLine) -> None:
    """What holds whatever is simulated."""
    plan = line.plan
    last, seen = 0.0, []
    for rank in range(plan.world_size):
        before = work = 0.0
        for span in line.rank(rank):
            assert rank in plan.micro_batches[span.micro_batch].ranks
            assert before <= span.start_s and span.start_s + span.work_s <= span.end_s
            before, work = span.end_s, work + span.work_s
            seen.append((span.micro_batch, rank))
        assert work == pytest.approx(line.busy_s[rank], rel=1e-12)
        last = max(last, before)
    assert line.makespan_s == last
    wanted = [(m, r) for m, batch in enumerate(plan.micro_batches) for r in batch.ranks]
    assert sorted(seen) == wanted, "every micro-batch on each of its ranks, once"


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 6000), max_size=40),
    world=st.integers(1, 9),
    strategy=st.sampled_from(simulate.every_strategy()),
    rounds=st.booleans(),
)
def test_without_jitter_the_plans_own_times(
    lengths: list[int], world: int, strategy: str, rounds: bool
) -> None:
    try:
        plan = dcp.plan(
            lengths,
            COST,
            world_size=world,
            strategy=strategy,
            rounds=rounds,
            memory_bytes=40_000_000,
        )
    except dcp.InfeasibleError:
        return  # by its own rules; that it is reported is tested below
    line = simulate.step(plan)
    check_line(line)
    assert line.makespan_s == pytest.approx(plan.makespan, rel=1e-12)
    assert line.idle_share == pytest.approx(plan.idle_share, abs=1e-9)
    arrays = line.arrays()
    for key in ("start_s", "end_s"):
        wanted = plan._fields[key][arrays["micro_batch"]]
        assert np.abs(arrays[key] - wanted).max(initial=0.0) <= 1e-12 * plan.makespan


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 6000), min_size=1, max_size=40),
    world=st.integers(1, 9),
    rounds=st.booleans(),
    jitter=st.floats(0, 1),
    slow=st.floats(1, 3),
    seed=st.integers(0, 2**64 - 1),
)
def test_jitter_and_stragglers(
    lengths: list[int], world: int, rounds: bool, jitter: float, slow: float, seed: int
) -> None:
    strategy = simulate.every_strategy()[len(lengths) % len(simulate.every_strategy())]
    plan = dcp.plan(lengths, COST, world_size=world, strategy=strategy)
    options: dict[str, Any] = {"rounds": rounds, "jitter": jitter, "seed": seed}
    line = simulate.step(plan, stragglers={world - 1: slow}, **options)
    check_line(line)
    again = simulate.step(plan, stragglers=[1.0] * (world - 1) + [slow], **options)
    assert all((line.arrays()[k] == again.arrays()[k]).all() for k in line.arrays())
    if jitter == 0:
        alone = simulate.step(plan, rounds=rounds).makespan_s
        assert alone <= line.makespan_s * (1 + 1e-12)
        assert line.makespan_s <= slow * alone * (1 + 1e-12)
    together = simulate.step(plan, stragglers={world - 1: slow}, **(options | {"rounds": True}))
    own = simulate.step(plan, stragglers={world - 1: slow}, **(options | {"rounds": False}))
    assert own.makespan_s <= together.makespan_s * (1 + 1e-12), "waiting in rounds never helps"


def test_step_refuses() -> None:
    plan = dcp.plan([3, 2], COST, world_size=2)
    for options, text in (
        ({"jitter": -1.0}, "jitter = -1 must lie in 0..4"),
        ({"jitter": float("nan")}, "jitter"),
        ({"stragglers": {2: 1.5}}, "straggler = 2 must lie in 0..1"),
        ({"stragglers": {0: 0.0}}, "slowdown of rank 0 = 0 must be finite and > 0"),
        ({"stragglers": [1.0]}, "slowdown has 1 factors, the world has 2 ranks"),
        ({"seed": -1}, "seed = -1"),
    ):
        with pytest.raises(dcp.ArgumentError, match=text):
            simulate.step(plan, **options)
    with pytest.raises(dcp.ArgumentError, match="rank = 2"):
        simulate.step(plan).rank(2)


# ---- distributions ----------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "mean", "sd"), [("short", 5.5, 0.8), ("balanced", 7.0, 1.0)])
def test_log_normal(name: str, mean: float, sd: float) -> None:
    logs = np.log(simulate.distribution(name).sample(40_000, seed=3).astype(float) + 0.5)
    assert abs(logs.mean() - mean) < 0.02 and abs(logs.std() - sd) < 0.02


def test_long_is_cut() -> None:
    lengths = simulate.distribution("long").sample(40_000)
    assert lengths.max() == 131_072 and lengths.min() >= 1
    share = float((lengths == 131_072).mean())  # of a normal beyond (ln 131072 - 7.5) / 1.6 = 2.68
    assert 0.002 < share < 0.006


def test_histogram_has_its_shares() -> None:
    lengths = simulate.distribution("magi-documents").sample(100_000, seed=1)
    for upper, share in ((100, 8.33), (1024, 71.39), (8192, 97.43)):
        assert abs(100 * float((lengths <= upper).mean()) - share) < 0.6
    few = distributions.Distribution.histogram("x", [1, 2, 9], [1, 0, 1]).sample(1000)
    assert set(few.tolist()) <= {1, 3, 4, 5, 6, 7, 8, 9} and {1, 9} <= set(few.tolist())


@pytest.mark.parametrize("name", distributions.DISTRIBUTIONS)
def test_samples_are_pure(name: str) -> None:
    source = simulate.distribution(name)
    assert source.source, "says where its figures come from"
    a, b = source.sample(100, seed=5), source.sample(1000, seed=5)
    assert (a == b[:100]).all() and a.dtype == np.int64 and a.min() >= 1
    assert (a != source.sample(100, seed=6)).any() and len(source.sample(0)) == 0


def test_files(tmp_path: Path) -> None:
    text, array, table = (tmp_path / n for n in ("l.txt", "l.npy", "mine.csv"))
    text.write_text("5\n\n7\n")
    np.save(array, np.array([5, 7], np.uint16))
    table.write_text("upper bound,share\n10,25%\n20, 75\n")
    for path in (text, array):
        assert set(simulate.distribution(path).sample(99).tolist()) == {5, 7}
    drawn = simulate.distribution(str(table))
    assert drawn.name == "mine" and 0.7 < float((drawn.sample(2000) > 10).mean()) < 0.8
    assert set(simulate.distribution([3, 4]).sample(99).tolist()) == {3, 4}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("l.txt", "5\n0\n", "l.txt:2: length 0 must be >= 1"),
        ("l.txt", "5\n\n-3\n", "l.txt:3: length -3"),
        ("l.txt", "5\n1.5\n", "l.txt:2: '1.5' is no whole number"),
        ("l.txt", "\n", "holds no lengths"),
        ("l.csv", "10,1\n10,2\n", "upper bound 10 comes after 10"),
        ("l.csv", "10,1\nx,2\n", "l.csv:2: needs 'upper bound,share'"),
        ("l.csv", "10,-1\n", "share -1.0 must be finite and >= 0"),
        ("l.csv", "10,0\n", "add up to 0"),
        ("l.csv", "a,b\n", "0 upper bounds"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(dcp.ArgumentError, match=message):
        simulate.distribution(tmp_path / name)


def test_bad_distributions(tmp_path: Path) -> None:
    with pytest.raises(dcp.ArgumentError, match="did you mean 'balanced'"):
        simulate.distribution("balnced")
    with pytest.raises(dcp.DTypeError, match="whole numbers"):
        simulate.distribution([1.5])
    with pytest.raises(dcp.ArgumentError, match="length 1 is 0"):
        simulate.distribution([1, 0])
    (tmp_path / "l.txt").write_text("512\n\n0\n7\n")  # blank lines are passed over, and counted
    with pytest.raises(dcp.ArgumentError, match=r"l\.txt:3: length 0 must be >= 1: drop empty"):
        distributions.read_lengths(tmp_path / "l.txt")
    (tmp_path / "l.txt").write_text("512\n\n \n7\n")
    assert distributions.read_lengths(tmp_path / "l.txt").tolist() == [512, 7]
    (tmp_path / "l.npy").write_bytes(b"no array")
    with pytest.raises(dcp.FileError):
        distributions.read_lengths(tmp_path / "l.npy")


@settings(max_examples=30)
@given(budget=st.integers(1, 5000), steps=st.integers(1, 5), seed=st.integers(0, 99))
def test_sequences_fill_steps(budget: int, steps: int, seed: int) -> None:
    """As `split_steps` cuts a list without end: no step could take the next sequence too."""
    source = distributions.Distribution.lognormal("x", 5.0, 1.0, longest=2000)
    found = simulate.sequences(source, tokens_per_step=budget, steps=steps, seed=seed)
    everything = source.sample(sum(map(len, found)) + 1, seed=seed)
    assert len(found) == steps
    at = 0
    for lengths in found:
        assert (lengths == everything[at : at + len(lengths)]).all()
        at += len(lengths)
        assert len(lengths) == 1 or lengths.sum() <= budget
        assert lengths.sum() + everything[at] > budget


# ---- comparisons ------------------------------------------------------------------------------


def test_training_compares_equal_work() -> None:
    """Every strategy of the planner, on the same sequences and tokens; figures add up."""
    calls: list[tuple[int, int]] = []
    result = simulate.training(
        COST,
        ["short", "balanced"],
        devices=[2, 5],
        tokens_per_step=40_000,
        steps=3,
        seed=4,
        on_progress=lambda done, total: calls.append((done, total)),
    )
    names = simulate.every_strategy()
    assert len(result.rows) == 4 * len(names)
    assert calls[-1] == (len(calls), 12 * len(names))
    drawn = simulate.sequences(
        simulate.distribution("short"), tokens_per_step=40_000, steps=3, seed=4
    )
    longest = int(max(x.max() for x in drawn))
    for name in names:
        row = result.row("short", 5, name)
        plans = [
            dcp.plan(x, COST, world_size=5, strategy=name, seed=4, longest=longest) for x in drawn
        ]
        assert row["tokens_per_step"] == 40_000
        assert row["step_s"] == pytest.approx(sum(p.makespan for p in plans) / 3, rel=1e-12)
        tokens = sum(int(x.sum()) for x in drawn)
        assert row["tokens_per_s"] == pytest.approx(tokens / sum(p.makespan for p in plans))
        bucket = result.row("short", 5, "bucket")["step_s"]
        assert row["speedup_over_bucket"] == pytest.approx(bucket / row["step_s"])
        assert 0 <= row["idle_share"] < 1 and row["gap"] >= 0 and row["mean_group"] >= 1
        line = result.timeline(name, distribution="short", devices=5, number=2)
        assert line.plan.hash == plans[2].hash
    json.dumps(result.to_json(), allow_nan=False)
    assert len(result.table().splitlines()) == 1 + len(result.rows)
    assert "packed" in result._repr_html_()


def test_training_is_repeatable_with_jitter() -> None:
    options: dict[str, Any] = {"devices": 4, "tokens_per_step": 20_000, "steps": 2, "jitter": 0.2}
    a, b = (simulate.training(COST, "short", seed=s, **options) for s in (1, 1))
    for x, y in zip(a.rows, b.rows, strict=True):
        assert {**x, "plan_s": 0} == {**y, "plan_s": 0}
    other = simulate.training(COST, "short", seed=2, **options)
    assert other.rows[0]["step_s"] != a.rows[0]["step_s"]


def test_once_and_stragglers_cost() -> None:
    options: dict[str, Any] = {"devices": 3, "tokens_per_step": 9000, "strategies": "packed"}
    plain = simulate.training(COST, "short", **options).rows[0]
    once = simulate.training(COST, "short", once_s=0.5, **options).rows[0]
    assert once["step_s"] == pytest.approx(plain["step_s"] + 0.5)
    assert once["idle_share"] == pytest.approx(plain["idle_share"])
    slow = simulate.training(COST, "short", stragglers={0: 2.0}, **options).rows[0]
    assert slow["step_s"] > 1.5 * plain["step_s"]


def test_one_strategy_that_cannot_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fits by one strategy's rules and not by another's; what fits nowhere is an error."""
    real = planning.plan

    def plan(lengths: Any, cost: Any, *, strategy: str, **options: Any) -> Any:
        if strategy == "bucket":
            raise dcp.InfeasibleError("a class of 9 tokens fits nowhere")
        return real(lengths, cost, strategy=strategy, **options)

    monkeypatch.setattr(planning, "plan", plan)
    result = simulate.training(COST, [40, 50], devices=2, strategies=["bucket", "packed"], steps=1)
    bucket, packed = result.rows
    assert bucket["message"] == "a class of 9 tokens fits nowhere" and bucket["step_s"] is None
    assert packed["speedup_over_bucket"] is None and packed["step_s"] > 0
    assert " - " in result.table()
    with pytest.raises(dcp.InfeasibleError, match=r"lengths on 2 devices: a class of 9"):
        simulate.training(COST, [40, 50], devices=2, strategies=["bucket"], steps=1)


def test_fits_nowhere() -> None:
    """Case P-11: the sequence and its length are named, before any step."""
    with pytest.raises(dcp.InfeasibleError, match="50000"):
        simulate.training(COST, [100] * 50 + [50_000], devices=2, steps=9, memory_bytes=10_000_000)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategies": "paked"}, "did you mean 'packed'"),
        ({"strategies": []}, "no strategy"),
        ({"devices": [4, 4]}, "distinct"),
        ({"devices": 0}, "devices = 0"),
        ({"steps": 0}, "steps = 0"),
        ({"tokens_per_step": 0}, "tokens_per_step = 0"),
        ({"once_s": -1.0}, "once_s"),
        ({"stragglers": {8: 2.0}, "devices": [16, 8]}, "straggler = 8"),
    ],
)
def test_training_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(dcp.ArgumentError, match=message):
        simulate.training(COST, "short", **({"devices": 2, "steps": 1} | options))


def test_recompute_seconds_follow_the_cost_model() -> None:
    """The share of time that is computed again, against the cost model with and without."""
    lengths = [900, 400, 2000]
    for recompute, counts in (("full", (8, 0)), ("selective", (0, 8)), ("none", (0, 0))):
        plan = dcp.plan(lengths, COST, world_size=1, strategy="packed", max_tokens=10_000)
        plan._fields["recompute"] = np.array([counts], np.int32)
        again = COST.time(lengths, 1, recompute) - COST.time(lengths, 1, "none")
        assert simulate.recompute_seconds(plan) == pytest.approx(again, rel=1e-9, abs=1e-15)


# ---- commands ---------------------------------------------------------------------------------

MACHINE = ("--device", "h200", "--model", "llama-3-8b")


def run_cli(capsys: pytest.CaptureFixture[str], *args: Any) -> tuple[int, str, str]:
    code = cli.run(list(map(str, args)))
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def lengths_file(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.txt"
    lengths = simulate.distribution("short").sample(60, seed=2)
    path.write_text("\n".join(map(str, lengths.tolist())))
    return path


def test_plan_command(lengths_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run_cli(
        capsys, "plan", "--lengths", lengths_file, "--world", 4, *MACHINE, "--strategy", "all",
        "--plans", "--json", "-",
    )  # fmt: skip
    assert code == 0
    document = json.loads(out)
    assert document["schema"] == 1 and document["command"] == "plan"
    assert [s["strategy"] for s in document["strategies"]] == list(simulate.every_strategy())
    assert document["memory_bytes"] == 141_000_000_000
    assert "tokens/s" in err and "rank" in err, "the table goes to standard error"
    cost = dcp.CostModel.analytic("llama-3-8b", device="h200")
    for row in document["strategies"]:
        (plan,) = row["plans"]
        assert row["steps"] == 1 and row["message"] is None and row["plan_s"] > 0
        assert row["makespan_s"] == plan["makespan_s"] and row["bound_s"] == plan["bound_s"]
        assert row["gap"] == pytest.approx(row["makespan_s"] / row["bound_s"] - 1)
        assert row["tokens_per_s"] == pytest.approx(sum(plan["lengths"]) / plan["makespan_s"])
        loaded = dcp.Plan.from_json(plan)  # verifies
        assert loaded.cost._core() == cost._core() and loaded.memory_bytes == 141_000_000_000
        assert row["idle_share"] == pytest.approx(loaded.idle_share)


def test_plan_command_in_steps(
    lengths_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(lengths_file.read_text()))
    code, out, _ = run_cli(
        capsys, "plan", "--lengths", "-", "--world", 2, *MACHINE, "--strategy", "bucket,packed",
        "--tokens-per-step", 4000, "--plans", "--json", "-",
    )  # fmt: skip
    assert code == 0
    lengths = [int(line) for line in lengths_file.read_text().split()]
    steps = [lengths[cut] for cut in planning.split_steps(lengths, 4000)]
    for row in json.loads(out)["strategies"]:
        assert [p["lengths"] for p in row["plans"]] == steps and row["steps"] == len(steps)
        assert row["makespan_s"] == pytest.approx(sum(p["makespan_s"] for p in row["plans"]))


def test_plan_command_reads_a_cost_file(
    lengths_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cost.json"
    dcp.CostModel.analytic("llama-3-8b", device="h100").save(file)
    args = ("plan", "--lengths", lengths_file, "--world", 8, "--strategy", "packed", "--cost", file)
    code, out, _ = run_cli(capsys, *args, "--model", "llama-3-8b", "--memory", "80GB")
    assert code == 0 and "llama-3-8b on h100" in out and " 7 █" in out
    code, out, err = run_cli(capsys, *args, "--model", "llama-2-7b")
    assert code == cli.BAD_INPUT and out == "" and "another model" in err


def test_simulate_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run_cli(
        capsys, "simulate", "--distribution", "all", "--devices", "2,4", *MACHINE,
        "--strategy", "all", "--steps", 2, "--json", "-", "--memory", "4TB",
    )  # fmt: skip
    assert code == 0
    rows = json.loads(out)["results"]
    assert len(rows) == 3 * 2 * len(simulate.every_strategy())
    for row in rows:
        assert row["tokens_per_step"] == 65_536 * row["devices"]
        assert row["distribution"] in ("short", "balanced", "long")
        if row["strategy"] == "bucket":
            assert row["speedup_over_bucket"] == 1.0
    assert "x bucket" in err


def test_simulate_command_takes_files_and_constants(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "mine.csv"
    table.write_text("500,1\n1000,1\n")
    args = (
        "simulate", "--distribution", table, "--devices", 2, *MACHINE, "--strategy",
        "packed", "--steps", 1, "--tokens-per-step", 30_000, "--json", "-",
    )  # fmt: skip
    plain = json.loads(run_cli(capsys, *args)[1])["results"][0]
    slow = json.loads(run_cli(capsys, *args, "--set", "matmul_flops_per_s=1e14")[1])["results"][0]
    late = json.loads(run_cli(capsys, *args, "--straggler", "1:2", "--once", "1")[1])["results"][0]
    assert plain["distribution"] == "mine" and slow["step_s"] > 3 * plain["step_s"]
    assert late["step_s"] > 1 + 1.9 * plain["step_s"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--strategy", "paked"), "did you mean 'packed'"),
        (("--device", "h2000"), "did you mean 'h200'"),
        (("--model", "lama-3-8b"), "did you mean 'llama-3-8b'"),
        (("--memory", "lots"), "--memory = 'lots' must be a size"),
        (("--memory", "1GB"), "1000000000"),
        (("--set", "bytes_per=1"), "bytes_per_s"),
        (("--set", "bytes_per_s"), "must be CONSTANT=NUMBER"),
        (("--cost", "/no/such/file"), "--cost FILE says what"),
        (("--lengths", "/no/such/file"), "/no/such/file"),
        (("--tokens-per-step", "5"), "the longest sequence has"),
        (("--plot", "/no/such/folder/x.png"), "no such folder"),
        (("--plot", "/tmp/x.nonsense"), "nonsense"),
    ],
)
def test_plan_command_refuses(
    lengths_file: Path, capsys: pytest.CaptureFixture[str], args: tuple[str, ...], message: str
) -> None:
    if "x.nonsense" in args[1]:
        pytest.importorskip("matplotlib")
    base = ("plan", "--lengths", lengths_file, "--world", 2, *MACHINE, "--strategy", "packed")
    code, out, err = run_cli(capsys, *base, *args)
    assert code == cli.BAD_INPUT and out == "", err
    assert message in err and len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--devices", "8,x"), "--devices 8,x"),
        (("--devices", "0"), "--devices 0"),
        (("--distribution", "shorts"), "did you mean 'short'"),
        (("--straggler", "1"), "--straggler 1: must be RANK:FACTOR"),
        (("--straggler", "9:2"), "with 2 devices ranks end at 1"),
        (("--strategy", ","), "no strategy is named"),
    ],
)
def test_simulate_command_refuses(
    capsys: pytest.CaptureFixture[str], args: tuple[str, ...], message: str
) -> None:
    base = ("simulate", *MACHINE, "--steps", 1, "--devices", "2", "--distribution", "short")
    code, out, err = run_cli(capsys, *base, *args)
    assert code == cli.BAD_INPUT and out == "" and message in err
    code, _, err = run_cli(capsys, "simulate", "--model", "llama-3-8b")
    assert code == cli.BAD_INPUT and "--device NAME --model NAME, or --cost FILE" in err


# ---- pictures ---------------------------------------------------------------------------------

# Rank 0 and 1 share a long sequence that recomputes all layers, then go their own ways.
DRAWN: dict[str, Any] = {
    "world": 3,
    "lengths": [8000, 500, 400, 300],
    "bound_s": 0.9,
    "strategy": "dcp",
    "cost": {"layer_count": 4, "node_ranks": 2},
    "micro_batches": [
        {"ranks": [0, 1], "sequences": [0], "start_s": 0, "end_s": 0.6, "recompute": {"layer": 4}},
        {"ranks": [2], "sequences": [2, 3], "start_s": 0, "end_s": 0.5, "recompute": {"mlp": 2}},
        {"ranks": [0], "sequences": [1], "start_s": 0.6, "end_s": 1.0, "recompute": {}},
    ],
}


def test_html_says_everything() -> None:
    html = viz.plan_html(DRAWN)
    assert html.count("<title>") == 3
    assert "ranks 0 to 1\n1 sequence, 8,000 tokens, longest 8,000" in html
    assert "recomputes 4 layers" in html and "recomputes 2 mlps" in html
    assert "dcp-again-2)" in html and "dcp-again-1)" in html and "nan" not in html.lower()
    assert "11.11% above the least possible" in html and "30.0% idle" in html
    many = {**DRAWN, "world": 400}
    assert "the first 256 ranks are drawn" in viz.plan_html(many)


def test_html_of_plans() -> None:
    for lengths in ([], [1], [5, 5, 5]):
        plan = dcp.plan(lengths, COST, world_size=2)
        assert plan._repr_html_().count("<title>") == len(plan.micro_batches)


def test_lines_for_a_terminal() -> None:
    lines = viz.plan_lines(DRAWN, width=20).plain.splitlines()
    assert lines[0] == " 0 █2██████████▐███████"
    assert lines[1] == " 1 █2██████████········"
    assert lines[2].count("█") == 10
    assert "tokens of the longest sequence" in lines[3]
    with pytest.raises(dcp.ArgumentError, match="width"):
        viz.plan_lines(DRAWN, width=2)


def test_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("MPLBACKEND", "agg")
    import matplotlib.pyplot as plt

    axes = viz.plan_picture(DRAWN)
    blocks = [p for p in axes.patches if p.get_facecolor()[3] > 0 and p.get_zorder() == 2]
    assert [b.get_height() for b in blocks] == [2, 1, 1], "a block is as tall as its group"
    assert blocks[0].get_width() == pytest.approx(600)
    assert {t.get_text() for t in axes.texts} == {"1 on 2", "2", "1"}
    plan = dcp.plan([900, 400, 300, 20], COST, world_size=2)
    line = simulate.step(plan, jitter=0.3)
    assert line.plot().get_xlabel() == "milliseconds (simulated)"
    result = simulate.training(COST, "short", devices=[2, 3], tokens_per_step=9000, steps=1)
    panels = result.plot(over="bucket")
    assert [p.get_title(loc="left") for p in panels] == ["2 devices", "3 devices"]
    for name, drawn in (("plan", axes), ("speed", panels[0])):
        drawn.figure.savefig(tmp_path / f"{name}.png")
    plt.close("all")
    with pytest.raises(dcp.ArgumentError, match="over = 'nobody'"):
        result.plot(over="nobody")
