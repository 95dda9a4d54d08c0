"""`dcp train` for real: documents, JSON, checkpoints, resuming, sampling, and how runs end.

A small model and short documents, so that each run takes about a second.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

SMALL = [
    *("train", "--tokens-per-step", "1024", "--seed", "3"),
    *("--set", "data.max_length=256", "--set", "model.hidden_size=32"),
    *("--set", "model.num_attention_heads=2", "--set", "model.num_hidden_layers=1"),
    *("--set", "model.intermediate_size=64", "--set", "train.eval_tokens=512"),
]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of documents with a long tail, some of them held out."""
    folder = tmp_path_factory.mktemp("text")
    for i in range(300):
        words = f"def function_{i}(x):\n    return x + {i}\n" * (1 + (i * 7919) % 9)
        (folder / f"{i:03d}.txt").write_text(words)
    return folder


def command(*args: Any) -> list[str]:
    return [sys.executable, "-m", "dcp", *map(str, args)]


def train(data: Path, *args: Any, code: int = 0) -> Any:
    """Run `dcp train` on the small model; return the document, or the messages of a failure."""
    run = subprocess.run(
        command(*SMALL, "--data", data, *args, "--json", "-"),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert run.returncode == code, run.stderr
    if code != 0:
        assert run.stdout == ""
        return run.stderr
    return json.loads(run.stdout)


def losses(document: Any) -> list[float]:
    return [step["loss"] for step in document["steps"]]


@pytest.fixture(scope="module")
def two_ranks(text: Path) -> Any:
    return train(text, "--ranks", 2, "--steps", 8)


def test_document(two_ranks: Any) -> None:
    """Every key of the contract, with its type; nothing is NaN (json would not parse it)."""
    document = two_ranks
    assert document["schema"] == 1 and document["command"] == "train" and document["world"] == 2
    assert document["model"]["hidden_size"] == 32 and document["parameter_count"] > 0
    assert len(document["steps"]) == 8
    for number, step in enumerate(document["steps"]):
        assert step["step"] == number and 0 < step["tokens"] <= 1024 and step["sequences"] > 0
        assert step["loss"] > 0 and step["grad_norm"] > 0 and step["seconds"] > 0
        assert step["lr"] > 0 and len(step["micro_batches"]) == 2 and step["arm"] is None
        assert len(step["sp"]) == step["micro_batches"][0] and set(step["sp"]) <= {1, 2}
        assert len(step["plan"]) >= 16
        assert step["idle_share"] is None or 0 <= step["idle_share"] < 1
    assert document["tokens_per_s"] > 0 and len(document["parameters_sha256"]) == 64
    memory = document["peak_memory_bytes"]
    assert len(memory["ranks"]) == 2 and memory["node"] == sum(memory["ranks"]) > 0
    assert document["eval_loss"] > 0 and document["seconds_to_target"] is None


def test_worlds_agree_and_repeats_are_bitwise(text: Path, two_ranks: Any) -> None:
    again = train(text, "--ranks", 2, "--steps", 8)
    assert again["parameters_sha256"] == two_ranks["parameters_sha256"]
    assert losses(again) == losses(two_ranks)
    for ranks in (1, 3):
        other = train(text, "--ranks", ranks, "--steps", 8)
        assert losses(other) == pytest.approx(losses(two_ranks), rel=1e-5)
        assert [s["tokens"] for s in other["steps"]] == [s["tokens"] for s in two_ranks["steps"]]


def test_resume_is_bitwise_and_moves_to_another_world(
    text: Path, two_ranks: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    keep = ("--checkpoint", folder, "--save-every", 2)
    first = train(text, "--ranks", 2, "--steps", 4, *keep)
    assert "already holds checkpoints" in train(text, "--steps", 8, *keep, code=2)
    (folder / "step-00000099").mkdir()  # a kill while saving
    resumed = train(text, "--ranks", 2, "--steps", 8, *keep, "--resume")
    assert losses(first) + losses(resumed) == losses(two_ranks)
    assert resumed["parameters_sha256"] == two_ranks["parameters_sha256"]
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    assert [line["step"] for line in steps if line["kind"] == "step"] == list(range(8))
    other = train(text, "--ranks", 3, "--steps", 10, *keep, "--resume")
    assert [step["step"] for step in other["steps"]] == [8, 9]
    message = train(text, "--steps", 3, *keep, "--resume", code=2)
    assert "--steps 3" in message
    message = train(
        text, "--steps", 12, *keep, "--resume", "--set", "model.intermediate_size=80", code=2
    )
    assert "another model: intermediate_size is 64 there and 80 here" in message

    shown = subprocess.run(
        command("checkpoint", "show", folder, "--json", "-"), capture_output=True, text=True
    )
    document = json.loads(shown.stdout)
    assert document["step"] == 10 and document["world"] == 3 and document["bytes"] > 0
    assert len(document["tensors"]) > 10
    verified = subprocess.run(command("checkpoint", "verify", folder), capture_output=True)
    assert verified.returncode == 0
    kept = [path.name for path in sorted(folder.glob("step-*")) if any(path.iterdir())]
    assert kept == ["step-00000006", "step-00000008", "step-00000010"]

    sampled = [
        subprocess.run(
            command(
                "sample", "--checkpoint", folder, "--tokens", 20, "--json", "-", "--seed", seed
            ),
            capture_output=True,
            text=True,
        )
        for seed in (1, 1, 2)
    ]
    texts = [json.loads(run.stdout)["text"] for run in sampled]
    assert texts[0] == texts[1] != texts[2] and texts[0].startswith("def ")


def test_target_loss_stops_the_run(text: Path, two_ranks: Any) -> None:
    target = (losses(two_ranks)[0] + losses(two_ranks)[-1]) / 2
    document = train(text, "--ranks", 1, "--steps", 60, "--target-loss", target, "--eval-every", 1)
    assert len(document["steps"]) < 60 and document["eval_loss"] <= target
    assert 0 < document["seconds_to_target"] <= sum(s["seconds"] for s in document["steps"])


def test_loss_that_is_not_finite(text: Path) -> None:
    """A rate that blows up: stop names the step, skip goes on; alike on two ranks."""
    blow = (
        "--ranks",
        2,
        "--steps",
        6,
        "--set",
        "optimizer.lr=1e30",
        "--set",
        "optimizer.clip=none",
    )
    message = train(text, *blow, code=1)
    assert "step" in message and "Traceback" not in message
    document = train(text, *blow, "--set", "train.nonfinite=skip")
    skipped = [step["loss"] is None or step["grad_norm"] is None for step in document["steps"]]
    assert 0 < document["skipped_steps"] == sum(skipped) < 6


def test_sequence_weighting_is_another_loss(text: Path, two_ranks: Any) -> None:
    document = train(text, "--ranks", 2, "--steps", 1, "--set", "train.weighting=sequence")
    assert losses(document)[0] != losses(two_ranks)[0]
    assert losses(document)[0] == pytest.approx(losses(two_ranks)[0], rel=0.1)


def test_compare_trains_each_on_the_same_sequences(text: Path, tmp_path: Path) -> None:
    names = ["bucket", "packed"]
    args = ("--ranks", 3, "--steps", 4, "--compare", ",".join(names), "--metrics", tmp_path)
    document = train(text, *args)
    runs = document["compare"]
    assert [run["strategy"] for run in runs] == names and document["world"] == 3
    alone = train(text, "--ranks", 3, "--steps", 4, "--strategy", "bucket")
    assert set(alone) - {"schema", "command"} <= set(runs[0])
    assert alone["parameters_sha256"] == runs[0]["parameters_sha256"], "a fresh model each time"
    for run in runs:
        assert losses(run) == pytest.approx(losses(runs[0]), rel=1e-5)
        assert run["loss_difference"] <= 1e-5
        same = [[s[key] for key in ("tokens", "sequences")] for s in run["steps"]]
        assert same == [[s[key] for key in ("tokens", "sequences")] for s in runs[0]["steps"]]
        assert {s["winner"] for s in run["steps"]} == {run["strategy"]}
        lines = (tmp_path / run["strategy"] / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["kind"] for line in lines] == ["step"] * 4 + ["eval"]
    assert runs[0]["steps"][0]["plan"] != runs[1]["steps"][0]["plan"]


FIXED = ("--strategy", "fixed", "--steps", 3)


def test_any_fixed_setting_gives_the_same_losses(text: Path) -> None:
    """Sequence-parallel sizes and recompute; recompute choices are bitwise alike."""
    alone = train(text, *FIXED, "--ranks", 1)
    for ranks, sp in ((2, 2), (3, 3), (4, 2)):
        shared = train(text, *FIXED, "--ranks", ranks, "--set", f"plan.sp={sp}")
        assert losses(shared) == pytest.approx(losses(alone), rel=1e-5)
        assert set(shared["steps"][0]["sp"]) == {sp}
    for kind in ("ulysses", "ring"):
        sets = ("--set", "plan.sp=3", "--set", f"plan.sequence_parallel={kind}")
        shared = train(text, *FIXED, "--ranks", 3, *sets)
        assert losses(shared) == pytest.approx(losses(alone), rel=1e-5)
    hashes = set()
    for recompute in ("none", "selective", "full", "{layer = 1}"):
        sets = ("--set", "plan.sp=2", "--set", f"plan.recompute={recompute}")
        hashes.add(train(text, *FIXED, "--ranks", 2, *sets)["parameters_sha256"])
    assert len(hashes) == 1


@pytest.mark.parametrize(("windows", "reduce"), [("false", "step"), ("true", "layer")])
def test_without_windows_and_by_layer(text: Path, windows: str, reduce: str) -> None:
    """All ranks run as many micro-batches; the losses are those of any other run."""
    sets = ("--set", f"plan.windows={windows}", "--set", f"plan.reduce={reduce}")
    sets += ("--set", "plan.prefetch=1")
    more = ("--ranks", 3, "--steps", 3, "--set", "plan.max_tokens=256", "--eval-every", 1)
    other = train(text, *more, *sets)
    plain = train(text, *more)
    assert losses(other) == pytest.approx(losses(plain), rel=1e-5)
    assert other["eval_loss"] == pytest.approx(plain["eval_loss"], rel=1e-5)


def test_compare_with_a_fixed_setting(text: Path) -> None:
    """plan.sp is for "fixed" alone; the others beside it choose their own."""
    args = ("--ranks", 2, "--steps", 2, "--compare", "packed,fixed", "--set", "plan.sp=2")
    packed, fixed = train(text, *args)["compare"]
    assert set(fixed["steps"][0]["sp"]) == {2}
    assert losses(packed) == pytest.approx(losses(fixed), rel=1e-5)
    refused = train(text, "--compare", "packed,dcp", "--set", "plan.sp=2", code=2)
    assert "plan.sp = 2 is the setting of strategy 'fixed'" in refused


def plans(document: Any) -> list[str]:
    return [step["plan"] for step in document["steps"]]


def test_refit_is_logged_and_repeats_from_its_log(text: Path, tmp_path: Path) -> None:
    """Plans follow the clock; from the log they repeat bitwise, also over a save and a resume."""
    refit = ("--ranks", 2, "--set", "plan.refit=true")
    run = train(text, *refit, "--steps", 6, "--metrics", tmp_path / "a")
    log = tmp_path / "a" / "metrics.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    refits = [line for line in lines if line["kind"] == "refit"]
    assert [line["step"] for line in refits] == list(range(6))
    assert all(len(line["busy_s"]) == 2 and line["scales"] for line in refits)
    fixed = train(text, "--ranks", 2, "--steps", 6)
    same = [a == b for a, b in zip(plans(run), plans(fixed), strict=True)]
    assert same == [True, True, False, False, False, False], "step n counts from step n + 2 on"
    assert losses(run) == pytest.approx(losses(fixed), rel=1e-5)

    again = train(text, "--ranks", 2, "--steps", 6, "--replay", log)
    assert plans(again) == plans(run)
    assert again["parameters_sha256"] == run["parameters_sha256"]

    half = ("--ranks", 2, "--replay", log, "--checkpoint", tmp_path / "c")
    train(text, *half, "--steps", 3)
    rest = train(text, *half, "--steps", 6, "--resume")
    assert plans(rest) == plans(run)[3:]
    assert rest["parameters_sha256"] == run["parameters_sha256"]


def test_logs_that_cannot_be_replayed(text: Path, tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    short = ("--ranks", 2, "--steps", 3)
    train(text, *short, "--metrics", tmp_path)
    assert "no refits" in train(text, *short, "--replay", log, code=2)
    refit = ("--set", "plan.refit=true")
    assert "--metrics" in train(text, *short, *refit, code=2)
    train(text, *short, *refit, "--metrics", tmp_path)
    more = ("--ranks", 2, "--steps", 4, "--replay", log)
    assert "no times of step 3" in train(text, *more, code=2)
    other = ("--ranks", 3, "--steps", 3, "--replay", log)
    assert "is of 2 ranks" in train(text, *other, code=2)
    seed = ("--seed", 4, "--replay", log)
    assert "step 0 has plan" in train(text, *short, *seed, code=1)


def test_memory_mapped_tokens_train_on_any_world(tmp_path: Path) -> None:
    """Several .npy files with document borders and labels (case E-04: mapped read-only)."""
    random = np.random.default_rng(3)
    for number, dtype in enumerate((np.uint16, np.int32)):
        tokens = random.integers(1, 250, 4000).astype(dtype)
        tokens[random.integers(0, 4000, 60)] = 0
        np.save(tmp_path / f"part{number}.npy", tokens)
        labels = np.where(random.random(4000) < 0.3, -100, np.roll(tokens.astype(np.int32), -1))
        np.save(tmp_path / f"part{number}.labels.npy", labels)
    runs = [
        train(tmp_path, "--ranks", ranks, "--steps", 3, "--set", "data.eos=0") for ranks in (1, 2)
    ]
    assert losses(runs[0]) == pytest.approx(losses(runs[1]), rel=1e-5)
    assert [s["tokens"] for s in runs[0]["steps"]] == [s["tokens"] for s in runs[1]["steps"]]
    assert 0.6 < runs[0]["steps"][0]["tokens"] / 1024 < 0.8, "30% have no label"


def test_memory_cap_too_small_is_refused(text: Path) -> None:
    message = train(text, "--ranks", 2, "--steps", 1, "--memory", "20kB", code=2)
    assert "memory" in message.lower()


def ends_with(data: Path, folder: Path, stop: Any) -> tuple[int, str]:
    """Start a long run, call `stop(process)` once it has trained, return code and messages."""
    before = segments()
    process = subprocess.Popen(
        command(*SMALL, "--data", data, "--ranks", 3, "--steps", 10**6, "--metrics", folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stderr is not None
    seen = []
    for line in process.stderr:  # blocks until the first step is shown
        seen.append(line)
        if line.startswith("step "):
            break
    timer = threading.Timer(60, process.kill)
    timer.start()
    try:
        stop(process)
        out, err = process.communicate()
    finally:
        timer.cancel()
    assert out == ""
    assert segments() <= before, "shared memory is left behind"
    return process.returncode, "".join(seen) + err


def segments() -> set[str]:
    """Shared memory of dcp that has a name (other programs have some too)."""
    return {name for name in os.listdir("/dev/shm") if "dcp" in name}


def children(pid: int) -> list[int]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path(f"/proc/{name}/stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.append(int(name))
    return sorted(found)


def test_killed_rank_is_named(text: Path, tmp_path: Path) -> None:
    victims: list[int] = []

    def kill(process: subprocess.Popen[str]) -> None:
        def work(pid: int) -> int:
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            return int(fields[11])

        victims.append(max(children(process.pid), key=work))
        os.kill(victims[0], signal.SIGKILL)

    code, messages = ends_with(text, tmp_path, kill)
    assert code == 1 and str(victims[0]) in messages and "rank" in messages
    assert "Traceback" not in messages


@pytest.mark.parametrize("whole_group", [True, False])
def test_interrupt(text: Path, tmp_path: Path, whole_group: bool) -> None:
    """Ctrl-C reaches the whole group; a service manager signals the parent alone (case X-06)."""

    def interrupt(process: subprocess.Popen[str]) -> None:
        if whole_group:
            os.killpg(process.pid, signal.SIGINT)
        else:
            process.send_signal(signal.SIGINT)

    code, messages = ends_with(text, tmp_path, interrupt)
    assert code == 130 and "interrupted" in messages and "Traceback" not in messages


def test_terminated_run_leaves_nothing(text: Path, tmp_path: Path) -> None:
    ranks: list[int] = []

    def terminate(process: subprocess.Popen[str]) -> None:
        ranks.extend(children(process.pid))
        process.terminate()

    code, messages = ends_with(text, tmp_path, terminate)
    assert code == 128 + signal.SIGTERM and "Traceback" not in messages
    assert len(ranks) == 3 and not any(Path(f"/proc/{rank}").exists() for rank in ranks)
