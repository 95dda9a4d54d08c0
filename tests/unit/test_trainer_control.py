"""The training loop under a controller: arms, token intervals, logs, resuming, replaying.

The first half runs on stand-ins (those of test_trainer.py and a controller that decides by a
script), where every decision is known; the second trains a small model on ranks.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_trainer import ADAMW, FakeLoader, FakeModel, folder

import dcp
from dcp.trainer import Replay, Trainer
from dcp.trainer_control import Steering

__all__ = ["folder"]  # a fixture


class FakeCore:
    """Decides by a script: step -> (precision, multiple, lr factor); else as before."""

    def __init__(self, script: dict[int, tuple[str, int, float]]):
        self.script, self.seen = script, list[dict[str, Any]]()
        self.arm, self.lr = {"precision": "fp32", "multiple": 1}, 1.0

    def _decision(self, step: int, changed: int) -> dict[str, Any]:
        return {
            "step": step,
            "arm": dict(self.arm),
            "lr_factor": self.lr,
            "reasons": 2 * changed,
            "changed": changed,
            "bandwidth": 1e6,
            "noise_tokens": None,
            "predicted_s": 0.1,
        }

    def start(self) -> dict[str, Any]:
        return self._decision(0, 0)

    def decide(self, observation: dict[str, Any], **inputs: Any) -> dict[str, Any]:
        assert set(inputs) == {"reduce_bytes", "codec_s"}
        self.seen.append(observation)
        step, before = observation["step"], self.arm
        if step in self.script:
            precision, multiple, self.lr = self.script[step]
            self.arm = {"precision": precision, "multiple": multiple}
        return self._decision(step + 1, int(self.arm != before))

    def step(self, model: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        return model.noted, self.decide(model.noted, **model.inputs), model.inputs

    def state(self) -> bytes:
        return json.dumps([self.arm, self.lr, len(self.seen)]).encode()

    def load_state(self, state: bytes) -> None:
        self.arm, self.lr, count = json.loads(state)
        self.seen = [{} for _ in range(count)]


class FakeController:
    """Stands for `dcp.Controller`: settings, and `bind`."""

    def __init__(self, script: dict[int, tuple[str, int, float]] | None = None, policy: str = "a"):
        self.script, self.policy, self.core = script or {}, policy, None

    def settings(self, *bound: Any) -> dict[str, Any]:
        return {"policy": self.policy, "tokens_per_step": bound[0], "rank_count": bound[1]}

    def bind(self, tokens_per_step: int, rank_count: int, optimizer: Any) -> FakeCore:
        self.core = FakeCore(self.script)
        return self.core


class ControlledModel(FakeModel):
    """Notes what the trainer says of a step, as the sharded model does."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.core = self
        self.inputs = {"reduce_bytes": {"fp32": 8.0}, "codec_s": {"fp32": 0.0}}
        self.noted: dict[str, Any] = {}

    def note_step(self, precision: str, multiple: int, seconds: float) -> None:
        call = self.calls[-1]
        assert call["statistics"] and call["precision"] == precision
        self.noted = {
            "step": call["step"],
            "arm": {"precision": precision, "multiple": multiple},
            "step_s": seconds,
            "compute_s": 0.05,
            "loss": call["step"] * 0.1,
        }

    def step(self, micro_batches: Any, **settings: Any) -> Any:
        result = super().step(micro_batches, **settings)
        result.loss = settings["step"] * 0.1
        return result


class MultipleLoader(FakeLoader):
    """Counts the budgets that it handed out."""

    tokens_per_step = 100

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.multiple, self.handed = 1, list[int]()

    def use_multiple(self, multiple: int) -> None:
        self.multiple = multiple

    def __iter__(self) -> Any:
        for step in super().__iter__():
            self.handed.append(self.multiple)
            yield step


SCRIPT = {0: ("int8", 1, 1.0), 2: ("int8", 4, 1.5), 5: ("int4", 2, 1.25)}


def run(steps: int, **options: Any) -> tuple[Any, ControlledModel, MultipleLoader, Any]:
    model, loader = ControlledModel(), MultipleLoader()
    options = {"controller": FakeController(SCRIPT), **options}
    trainer = Trainer(model, ADAMW, loader, **options)
    return trainer.fit(steps), model, loader, trainer


def test_a_decision_holds_from_the_next_step_on() -> None:
    report, model, loader, _ = run(8)
    precisions = ["fp32", "int8", "int8", "int8", "int8", "int8", "int4", "int4"]
    multiples = [1, 1, 1, 4, 4, 4, 2, 2]
    assert [call["precision"] for call in model.calls] == precisions
    assert loader.handed == multiples
    factors = [1.0, 1.0, 1.0, 1.5, 1.5, 1.5, 1.25, 1.25]
    rates = [ADAMW.lr_at(step) * factor for step, factor in enumerate(factors)]
    assert [call["lr"] for call in model.calls] == rates
    assert [record.lr for record in report.steps] == rates
    assert [record.arm for record in report.steps] == [
        {"precision": p, "multiple": m} for p, m in zip(precisions, multiples, strict=True)
    ]


def test_a_fixed_precision_without_controller() -> None:
    report, model, loader, _ = run(3, controller=None, precision="int4", hadamard=True, seed=9)
    assert [record.arm for record in report.steps] == [{"precision": "int4", "multiple": 1}] * 3
    call = model.calls[1]
    assert call["precision"] == "int4" and call["feedback"] and call["hadamard"]
    assert not call["nearest"] and not call["statistics"] and call["quantise_seed"] == 9
    report, *_ = run(2, controller=None)
    assert [record.arm for record in report.steps] == [None, None]
    assert loader.handed == [1, 1, 1]


def test_evaluation_comes_at_token_intervals() -> None:
    """Every 3 budgets: with multiple 4 after every step, with multiple 1 after every third."""
    events: list[dict[str, Any]] = []
    run(12, eval_every=3, on_event=events.append)
    # budgets done after each step: 1 2 3 7 11 15 17 19 21 23 25 27
    evaluated = [event["step"] for event in events if event["kind"] == "eval"]
    assert evaluated == [3, 4, 5, 6, 8, 9, 11, 12]
    events.clear()
    run(12, eval_every=3, on_event=events.append, controller=None)
    assert [e["step"] for e in events if e["kind"] == "eval"] == [3, 6, 9, 12]


def lines_of(path: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def test_decisions_are_logged(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    run(4, metrics=tmp_path, on_event=events.append)
    lines = lines_of(tmp_path, "control")
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert lines[0]["version"] == 2 and lines[0]["settings"]["policy"] == "a"
    assert all("settings" not in line for line in lines[1:])
    assert lines[2]["decision"]["arm"] == {"precision": "int8", "multiple": 4}
    assert lines[2]["inputs"] == {"reduce_bytes": {"fp32": 8.0}, "codec_s": {"fp32": 0.0}}
    seconds = [r["step_s"] for r in (line["observation"] for line in lines)]
    sent = [e for e in events if e["kind"] == "control"]
    assert [e["observation"]["step_s"] for e in sent] == seconds, "floats survive the log"
    kinds = [e["kind"] for e in events[:3]]
    assert kinds == ["step", "control", "step"]


def test_resume_goes_on_with_the_controllers_state(folder: Any) -> None:
    whole, model, loader, _ = run(9)
    run(4, checkpoint=folder.path, save_every=2)
    second, loader2 = ControlledModel(), MultipleLoader()
    second.value = float(folder.saved[4][0]["weights"][0].array[0])
    options = {"controller": FakeController(SCRIPT), "checkpoint": folder.path, "resume": True}
    trainer = Trainer(second, ADAMW, loader2, **options)
    assert trainer.budgets == 7 and trainer.steering.multiple == 4
    assert len(options["controller"].core.seen) == 4, "the state was loaded"
    rest = trainer.fit(9)
    assert second.calls == model.calls[4:] and loader2.handed == loader.handed[4:]
    assert [r.arm for r in rest.steps] == [r.arm for r in whole.steps[4:]]
    lines = lines_of(folder.path, "control")
    assert [line["step"] for line in lines] == list(range(9))
    assert sum("settings" in line for line in lines) == 1


def test_resume_with_another_controller_starts_it_anew(
    folder: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for controller, words in ((None, ""), (FakeController(policy="b"), "starts anew")):
        folder.saved.clear()
        run(4, checkpoint=folder.path)
        options = {"controller": controller, "checkpoint": folder.path, "resume": True}
        loader = MultipleLoader()
        loader.multiple = 4  # as its state says
        report = Trainer(ControlledModel(), ADAMW, loader, **options).fit(6)
        assert words in caplog.text
        assert loader.handed == [1, 1] and [r.lr for r in report.steps] == [0.5, 0.5]


def test_time_to_target_survives_a_resume(folder: Any) -> None:
    """The evaluation before the kill is one end of the line to the target."""
    first = Trainer(
        FakeModel(), ADAMW, FakeLoader(), checkpoint=folder.path, eval_every=2, target_loss=0.01
    )
    first.fit(2)
    seconds, loss = folder.saved[2][1]["last_loss"]
    assert seconds == first.train_seconds and loss > 0.75
    second = FakeModel()
    second.value = float(folder.saved[2][0]["weights"][0].array[0])
    resumed = Trainer(
        second, ADAMW, FakeLoader(), checkpoint=folder.path, resume=True, target_loss=0.75
    )
    report = resumed.fit(4)
    assert report.seconds_to_target is not None
    assert seconds < report.seconds_to_target < resumed.train_seconds


def test_replay_takes_decisions_from_the_log(tmp_path: Path) -> None:
    report, model, loader, _ = run(8, metrics=tmp_path / "first")
    log = tmp_path / "first" / "metrics.jsonl"
    again, model2, loader2, _ = run(8, replay=log, metrics=tmp_path / "second")
    assert model2.calls == model.calls and loader2.handed == loader.handed
    assert [r.arm for r in again.steps] == [r.arm for r in report.steps]
    assert lines_of(tmp_path / "second", "control") == lines_of(tmp_path / "first", "control")
    with pytest.raises(dcp.MismatchError, match="step 8: the log holds no decision"):
        run(9, replay=log)
    with pytest.raises(dcp.ArgumentError, match="give the same one"):
        run(2, replay=log, controller=None)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda line: line["observation"].update(loss=7.0), "step 3 has loss .* and 7.0 there"),
        (
            lambda line: line["observation"]["arm"].update(multiple=2),
            r"step 3 has arm .*'multiple': 4\} here .*'multiple': 2\} there",
        ),
        (lambda line: line["decision"].update(lr_factor=9.0), "lr_factor after step 3 is 1.5"),
    ],
)
def test_replay_of_another_run_is_refused(tmp_path: Path, change: Any, words: str) -> None:
    run(8, metrics=tmp_path)
    path = tmp_path / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line["kind"] == "control" and line["step"] == 3:
            change(line)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(dcp.MismatchError, match=words):
        run(8, replay=path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"kind": "control", "step": 0, "version": 1}\n', "version 1, this dcp reads 2"),
        ('{"kind": "control", "step": 0, "version": 2}\n{"kind": "eval"}\n', "line 1"),
        ('{"kind": "control", "step": 0, "observation": 3}\n\n', "line 1"),
        ('{"kind": "step", "step": 0, "plan": "0"}\n', "no refits and no decisions"),
    ],
)
def test_logs_that_cannot_be_replayed(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)
    with pytest.raises(dcp.FileError, match=words):
        Replay.read(path)


def test_controllers_that_are_none() -> None:
    with pytest.raises(dcp.ArgumentError, match=r"must be a dcp\.Controller"):
        run(1, controller="joint")
    with pytest.raises(dcp.ArgumentError, match="precision = 'int4'"):
        run(1, precision="int4")
    with pytest.raises(dcp.ArgumentError, match="give the same one"):
        Steering(SimpleNamespace(), ADAMW, tokens_per_step=1, replay={0: {}})
