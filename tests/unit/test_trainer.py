"""The training loop: order of steps, evaluation, saving, resuming, targets, metrics, records.

The model, the loader and the checkpoint folder are small stand-ins that record what the trainer
asks of them; the parts themselves have tests of their own, and test_train_run.py joins them.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import dcp
from dcp import trainer as trainer_module
from dcp.checkpoint import Run
from dcp.optim import AdamW
from dcp.trainer import Trainer


class FakeModel:
    """One number that every step changes; `losses` may name the loss of a step."""

    def __init__(self, rank: int = 0, size: int = 1, losses: dict[int, float] | None = None):
        self.world = SimpleNamespace(rank=rank, size=size)
        self.value, self.update_count = 1.0, 0
        self.losses = losses or {}
        self.calls: list[dict[str, Any]] = []
        self.config, self.shapes = {"size": 1}, {"w": (1,)}
        self.published = 0
        self.frozen = frozenset({"f", "g"})
        self.kept: set[str] = set()
        self.evaluated_groups: list[Any] = []

    def step(self, micro_batches: Any, **settings: Any) -> Any:
        self.calls.append(settings)
        loss = self.losses.get(settings["step"], self.value)
        skipped = not math.isfinite(loss)
        if skipped and settings["nonfinite"] == "stop":
            raise dcp.NumericError(f"step {settings['step']}: loss is not finite")
        if not skipped:
            self.value = self.value * 0.9 + 0.001 * sum(micro_batches)
            self.update_count += 1
        busy = [0.2] * self.world.size
        return SimpleNamespace(
            loss=loss, grad_norm=loss * 2, busy_s=busy, seconds=0.2, skipped=skipped
        )

    def evaluate(self, micro_batches: Any, *, scale: float, groups: Any) -> float:
        self.evaluated_groups.append(groups)
        return self.value * scale * len(micro_batches)

    def shards(self) -> dict[str, list[Run]]:
        return {"weights": [Run("w", 0, np.array([self.value]))]}

    def kind_shapes(self) -> dict[str, Any]:
        return {}

    def residual(self, *, make: bool = False) -> list[Run]:
        assert not make
        return []

    def set_optimizer(self, optimizer: Any, *, keep: bool) -> None:
        assert keep

    def state_names(self) -> dict[str, list[str]]:
        return {"adamw.m": ["w"]}

    def keep_state(self, states: Any, *, dtypes: Any) -> None:
        self.kept |= set(states["adamw.m"])

    def weights_changed(self) -> None:
        self.published += 1

    def memory(self) -> dict[str, int]:
        return {"peak": 100, "held": 50}


class FakeLoader:
    """Steps 0, 1, 2 ... with micro-batches that depend on the step.

    Every rank computes one sequence alone, rank 0 another one, and all share the last.
    """

    def __init__(self, held_out: int = 2, world_size: int = 1):
        self.at, self.held_out, self.world_size = 0, held_out, world_size

    def __iter__(self) -> Iterator[Any]:
        while True:
            index = self.at
            self.at += 1
            yield SimpleNamespace(
                index=index,
                epoch=0,
                plan=self._plan(index),
                lengths=[3, 4],
                trainable=10 + index,
                sequence_count=2,
                scale=1.0 / (10 + index),
                micro_batches=[index, index + 1],
            )

    def _plan(self, index: int) -> Any:
        ranks = [[rank] for rank in range(self.world_size)] + [[0], [*range(self.world_size)]]
        return SimpleNamespace(
            hash=f"{index:016x}",
            winner="packed",
            micro_batches=[SimpleNamespace(ranks=r, sequences=[i]) for i, r in enumerate(ranks)],
            groups=[(0, self.world_size)] if self.world_size > 1 else [],
        )

    def evaluation(self, *, tokens: int) -> Iterator[Any]:
        for index in range(self.held_out):
            yield SimpleNamespace(
                micro_batches=[index], scale=1.0 / self.held_out, plan=self._plan(index)
            )

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A checkpoint module whose folders are entries of a dict."""
    saved: dict[int, tuple[Any, Any]] = {}

    def save(path: Path, *, step: int, shards: Any, state: Any, **_: Any) -> None:
        saved[step] = (copy.deepcopy(shards), json.loads(json.dumps(state)))

    def load(path: int, **_: Any) -> Any:
        return saved[path][1]

    from dcp import checkpoint

    monkeypatch.setattr(checkpoint, "save", save)
    monkeypatch.setattr(checkpoint, "load", load)
    monkeypatch.setattr(checkpoint, "latest", lambda path: max(saved))
    tensors = [
        {"name": "w", "shape": [1], "kinds": ["weights", "adamw.m"]},
        {"name": "f", "shape": [2], "kinds": ["weights", "adamw.m"]},
        {"name": "g", "shape": [3], "kinds": ["weights"]},
    ]
    monkeypatch.setattr(
        checkpoint,
        "show",
        lambda path: {"tensors": tensors, "kinds": {"adamw.m": {"dtype": "F32"}}, "state": {}},
    )
    return SimpleNamespace(path=tmp_path / "run", saved=saved)


ADAMW = AdamW(lr=0.5, warmup_steps=2)


def test_steps_in_order_with_what_each_needs() -> None:
    model = FakeModel()
    report = Trainer(model, ADAMW, FakeLoader(), seed=7).fit(4)
    assert [record.step for record in report.steps] == [0, 1, 2, 3]
    assert [call["step"] for call in model.calls] == [0, 1, 2, 3]
    assert [call["lr"] for call in model.calls] == [0.25, 0.5, 0.5, 0.5]
    assert [call["trainable"] for call in model.calls] == [10, 11, 12, 13]
    assert [call["scale"] * call["trainable"] for call in model.calls] == [1.0] * 4
    assert [call["plan_hash"] for call in model.calls] == [f"{i:016x}" for i in range(4)]
    assert len({call["dropout_seed"] for call in model.calls}) == 4
    again = FakeModel()
    Trainer(again, ADAMW, FakeLoader(), seed=8).fit(1)
    assert again.calls[0]["dropout_seed"] != model.calls[0]["dropout_seed"]


def test_record_holds_what_the_command_prints() -> None:
    model = FakeModel(size=2)
    report = Trainer(model, ADAMW, FakeLoader(world_size=2)).fit(1)
    record = report.steps[0]
    assert model.calls[0]["groups"] == [(0, 2)] and model.evaluated_groups == [[(0, 2)]] * 2
    assert record.tokens == 10 and record.sequences == 2
    assert record.micro_batches == [3, 2] and record.sp == [1, 1, 2]
    assert record.winner == "packed"
    assert record.plan == "0" * 16 and record.arm is None and record.grad_norm == 2.0
    json.dumps(vars(record), allow_nan=False)


def test_idle_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dcp.config.core_count", lambda: 2)
    assert trainer_module._idle_share([4.0, 2.0]) == pytest.approx(0.25)
    assert trainer_module._idle_share([3.0, 3.0]) == 0.0
    assert trainer_module._idle_share([1.0, 1.0, 1.0]) is None, "more ranks than cores"
    assert trainer_module._idle_share([0.0]) is None


def test_throughput_leaves_out_two_steps() -> None:
    report = Trainer(FakeModel(), ADAMW, FakeLoader()).fit(5)
    seconds = [2.0, 1.0, 4.0, 4.0, 2.0]
    report.steps = [
        trainer_module.StepRecord(**(vars(record) | {"seconds": s}))
        for record, s in zip(report.steps, seconds, strict=True)
    ]
    assert report.tokens_per_s == pytest.approx((12 + 13 + 14) / 10.0)
    report.steps = report.steps[:2]
    assert report.tokens_per_s is None


def test_resumed_run_equals_the_uninterrupted_one(folder: Any) -> None:
    whole = FakeModel()
    Trainer(whole, ADAMW, FakeLoader()).fit(9)
    first = FakeModel()
    Trainer(first, ADAMW, FakeLoader(), checkpoint=folder.path, save_every=3).fit(5)
    assert sorted(folder.saved) == [3, 5], "every third step, and the last one"
    second = FakeModel()
    second.value = float(folder.saved[5][0]["weights"][0].array[0])
    resumed = Trainer(second, ADAMW, FakeLoader(), checkpoint=folder.path, resume=True)
    assert second.published == 1 and second.update_count == 5
    report = resumed.fit(9)
    assert [record.step for record in report.steps] == [5, 6, 7, 8]
    assert second.value == whole.value
    assert second.calls == whole.calls[5:], "rates, seeds and plans go on as if never stopped"


def test_resuming_a_finished_run_does_nothing_and_says_the_loss(folder: Any) -> None:
    Trainer(FakeModel(), ADAMW, FakeLoader(), checkpoint=folder.path).fit(4)
    model = FakeModel()
    trainer = Trainer(model, ADAMW, FakeLoader(), checkpoint=folder.path, resume=True, eval_every=2)
    report = trainer.fit(4)
    assert report.steps == [] and model.calls == [] and report.eval_loss is not None


def test_resume_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(dcp.FileError, match="holds no checkpoint"):
        Trainer(FakeModel(), ADAMW, FakeLoader(), checkpoint=tmp_path, resume=True)


def test_metrics_of_steps_that_run_again_are_dropped(folder: Any) -> None:
    """A killed run has lines after its last checkpoint, the last one cut off."""
    Trainer(FakeModel(), ADAMW, FakeLoader(), checkpoint=folder.path, save_every=2).fit(4)
    metrics = folder.path / "metrics.jsonl"
    with metrics.open("a") as file:
        file.write('{"kind": "step", "step": 4, "loss": 99.0}\n{"kind": "step", "st')
    Trainer(FakeModel(), ADAMW, FakeLoader(), checkpoint=folder.path, resume=True).fit(6)
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [line["step"] for line in lines if line["kind"] == "step"]
    assert steps == [0, 1, 2, 3, 4, 5]
    assert all(line.get("loss") != 99.0 for line in lines)
    assert [line["step"] for line in lines if line["kind"] == "eval"] == [4, 6]


def test_evaluation_and_target() -> None:
    events: list[dict[str, Any]] = []
    model = FakeModel()
    trainer = Trainer(
        model, ADAMW, FakeLoader(), eval_every=2, target_loss=0.75, on_event=events.append
    )
    report = trainer.fit(100)
    evaluated = [event for event in events if event["kind"] == "eval"]
    assert [event["step"] for event in evaluated] == list(range(2, report.last_step + 1, 2))
    assert report.eval_loss is not None and report.eval_loss <= 0.75
    assert all(event["eval_loss"] > 0.75 for event in evaluated[:-1])
    ends = list(itertools.accumulate(record.seconds for record in report.steps))
    (at, above), (end, below) = ((e["step"], e["eval_loss"]) for e in evaluated[-2:])
    share = (above - 0.75) / (above - below)
    wanted = ends[at - 1] + share * (ends[end - 1] - ends[at - 1])
    assert report.seconds_to_target == pytest.approx(wanted) and 0 < share <= 1


def test_target_that_the_last_step_reaches_counts() -> None:
    report = Trainer(FakeModel(), ADAMW, FakeLoader(), target_loss=0.95).fit(3)
    seconds = sum(record.seconds for record in report.steps)
    assert report.seconds_to_target == pytest.approx(seconds), "no evaluation before this one"
    report = Trainer(FakeModel(), ADAMW, FakeLoader(), target_loss=0.01).fit(3)
    assert report.seconds_to_target is None and report.eval_loss is not None


def test_no_held_out_documents() -> None:
    report = Trainer(FakeModel(), ADAMW, FakeLoader(held_out=0), eval_every=1).fit(2)
    assert report.eval_loss is None and report.seconds_to_target is None


def test_nonfinite_stops_or_skips() -> None:
    losses = {1: math.nan, 3: math.inf}
    with pytest.raises(dcp.NumericError, match="step 1"):
        Trainer(FakeModel(losses=losses), ADAMW, FakeLoader()).fit(5)
    model = FakeModel(losses=losses)
    report = Trainer(model, ADAMW, FakeLoader(), nonfinite="skip").fit(5)
    assert report.skipped == 2 and model.update_count == 3
    assert [record.loss is None for record in report.steps] == [False, True, False, True, False]
    assert [record.skipped for record in report.steps] == [False, True, False, True, False]


def test_only_rank_0_reports(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    for rank in (1, 0):
        model = FakeModel(rank=rank, size=2)
        trainer = Trainer(
            model,
            ADAMW,
            FakeLoader(world_size=2),
            metrics=tmp_path / str(rank),
            trace=tmp_path / f"{rank}.json",
            on_event=events.append,
        )
        trainer.fit(2)
        if rank == 1:
            assert not events and not list(tmp_path.iterdir())
    assert [event["kind"] for event in events] == ["step", "step", "eval"]
    trace = json.loads((tmp_path / "0.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in trace) == 2 * (2 + 1)


def test_tensorboard_files_where_it_is_installed(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    Trainer(FakeModel(), ADAMW, FakeLoader(), metrics=tmp_path).fit(2)
    assert list((tmp_path / "tensorboard").glob("events.out.tfevents.*"))


def test_loader_of_another_step_is_refused() -> None:
    loader = FakeLoader()
    loader.at = 3
    with pytest.raises(dcp.StateError, match="loader is at step 3"):
        Trainer(FakeModel(), ADAMW, loader).fit(5)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"nonfinite": "ignore"}, "nonfinite"),
        ({"eval_every": 0}, "eval_every"),
        ({"save_every": 2}, "checkpoint"),
        ({"resume": True}, "checkpoint"),
        ({"controller": object()}, "controller"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, Any], words: str) -> None:
    with pytest.raises((dcp.ArgumentError, dcp.UnsupportedError), match=words):
        Trainer(FakeModel(), ADAMW, FakeLoader(), **settings)
    with pytest.raises(dcp.ArgumentError, match="steps = -1"):
        Trainer(FakeModel(), ADAMW, FakeLoader()).fit(-1)


def test_learning_rate_depends_on_the_step_only() -> None:
    for schedule in ("constant", "cosine", "linear"):
        adamw = AdamW(lr=1.0, warmup_steps=4, schedule=schedule, schedule_steps=24)
        rates = [adamw.lr_at(step) for step in range(40)]
        assert rates[:4] == [0.25, 0.5, 0.75, 1.0] and rates[4] == 1.0
        assert all(after <= before for before, after in itertools.pairwise(rates[4:]))
        assert rates[-1] == (1.0 if schedule == "constant" else 0.0)
        assert rates[14] == pytest.approx(1.0 if schedule == "constant" else 0.5)
    assert AdamW(lr=1.0, warmup_steps=0).lr_at(0) == 1.0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lr": 0.0}, "optimizer.lr"),
        ({"lr": math.nan}, "optimizer.lr"),
        ({"betas": (0.9, 1.0)}, "optimizer.betas"),
        ({"eps": -1e-8}, "optimizer.eps"),
        ({"weight_decay": -0.1}, "optimizer.weight_decay"),
        ({"clip": 0.0}, "optimizer.clip"),
        ({"warmup_steps": -1}, "optimizer.warmup_steps"),
        ({"schedule": "cosin"}, "optimizer.schedule"),
        ({"schedule": "cosine"}, "schedule_steps"),
        ({"schedule": "linear", "schedule_steps": 10, "warmup_steps": 10}, "schedule_steps"),
    ],
)
def test_optimizer_settings_that_cannot_work(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(dcp.ArgumentError, match=words):
        AdamW(**settings)
