"""What a run writes beside checkpoints - metrics.jsonl, TensorBoard, a trace - and reads again.

A line of `metrics.jsonl` is one JSON object: a step, an evaluation, a save, a refit of the cost
model, a decision of the controller. Floats are written so that reading gives the same bits, so the
log of a run whose plans or arms depended on the clock can repeat it.
"""

from __future__ import annotations

import importlib.util
import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from dcp._dcp import FileError, MismatchError
from dcp.controller import LOG_VERSION, decision_line

__all__ = ["Metrics", "Replay", "Trace"]

_logger = logging.getLogger("dcp")


@dataclass(frozen=True)
class Replay:
    """What an earlier run measured, from its `metrics.jsonl`.

    Attributes
    ----------
    path : Path
    busy_s : dict
        Step -> seconds that each rank computed.
    plans : dict
        Step -> hash of its plan.
    decisions : dict
        Step -> what its controller saw and decided after it.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> from dcp.trainer_log import Replay
    >>> folder = tempfile.TemporaryDirectory()
    >>> file = pathlib.Path(folder.name, "metrics.jsonl")
    >>> _ = file.write_text('{"kind": "refit", "step": 0, "busy_s": [0.5, 0.25]}\\n')
    >>> Replay.read(file).busy_s
    {0: [0.5, 0.25]}
    >>> folder.cleanup()
    """

    path: Path
    busy_s: dict[int, list[float]]
    plans: dict[int, str]
    decisions: dict[int, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: str | Path) -> Replay:
        """Read the log.

        Raises
        ------
        dcp.FileError
            It cannot be read, is of another version, or holds neither refits nor decisions.

        Examples
        --------
        See the class.
        """
        busy_s: dict[int, list[float]] = {}
        plans: dict[int, str] = {}
        decisions: dict[int, dict[str, Any]] = {}
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise FileError(f"log {path} cannot be read: {error}") from error
        for number, line in enumerate(lines, 1):
            try:
                values = json.loads(line)
                if values["kind"] == "refit":
                    busy_s[int(values["step"])] = [float(b) for b in values["busy_s"]]
                elif values["kind"] == "step":
                    plans[int(values["step"])] = str(values["plan"])
                elif values["kind"] == "control":
                    if (version := values.get("version", LOG_VERSION)) != LOG_VERSION:
                        raise FileError(
                            f"log {path} has decisions of version {version!r}, this dcp reads "
                            f"{LOG_VERSION}"
                        )
                    decisions[values["step"]] = decision_line(values)
            except (ValueError, KeyError, TypeError) as error:
                if number < len(lines):  # the last line may be cut off by a kill
                    raise FileError(f"log {path}, line {number}: not a record: {error}") from error
        if not busy_s and not decisions:
            raise FileError(
                f"log {path} holds no refits and no decisions: it is of no run with plan.refit or "
                "a controller"
            )
        return cls(Path(path), busy_s, plans, decisions)

    def busy(self, record: Any, busy: list[float]) -> list[float]:
        """The times of a step as they were, once its plan is known to be the same.

        Raises
        ------
        dcp.MismatchError
            The plan differs, or the log ends before this step.

        Examples
        --------
        See the class.
        """
        wanted = self.plans.get(record.step, record.plan)
        if wanted != record.plan:
            raise MismatchError(
                f"replay of {self.path}: step {record.step} has plan {record.plan} here and "
                f"{wanted} there: data, settings or version are not those of that run"
            )
        found = self.busy_s.get(record.step)
        if found is None or len(found) != len(busy):
            raise MismatchError(
                f"replay of {self.path}: no times of step {record.step} for {len(busy)} ranks"
            )
        return found


class Metrics:
    """`metrics.jsonl` and TensorBoard of one folder; with none, nothing happens.

    A run that was killed after its last checkpoint left lines of steps that will run again:
    those from `first_step` on are dropped at opening.
    """

    def __init__(self, folder: Path | None, *, first_step: int) -> None:
        self._file: IO[str] | None = None
        self._board: Any = None
        self.has_control = False  # a line of a controller stands in the file
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        kept = _lines_before(path, first_step) if path.exists() and first_step > 0 else []
        self.has_control = any('"kind": "control"' in line for line in kept)
        aside = path.with_name(".metrics.jsonl")
        aside.write_text("".join(kept), encoding="utf-8")
        aside.replace(path)
        self._file = path.open("a", encoding="utf-8", buffering=1)
        if (writer := _board_writer()) is not None:
            self._board = writer(str(folder / "tensorboard"), purge_step=first_step)

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()

    def write(self, kind: str, values: dict[str, Any]) -> None:
        self.has_control = self.has_control or kind == "control"
        if self._file is not None:
            self._file.write(json.dumps({"kind": kind} | values, allow_nan=False) + "\n")
        if self._board is not None:
            for name, value in {**values, **_decision_scalars(values)}.items():
                if isinstance(value, float):
                    self._board.add_scalar(name, value, values["step"])


def _decision_scalars(values: dict[str, Any]) -> dict[str, float]:
    """What a controller's line draws over the steps."""
    decision = values.get("decision", {})
    found = {f"control/{k}": v for k, v in decision.items() if isinstance(v, float)}
    if decision:
        found["control/multiple"] = float(decision["arm"]["multiple"])
    return found


def _lines_before(path: Path, step: int) -> list[str]:
    """The whole lines of `path` that belong to steps before `step`."""
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            values = json.loads(line)
        except json.JSONDecodeError:
            continue  # cut off by a kill
        # an evaluation or a save "at step n" follows n steps
        done = step if values["kind"] in ("eval", "save") else step - 1
        if values["step"] <= done:
            kept.append(line)
    return kept


def _board_writer() -> Any:
    """The class that writes TensorBoard files, or None."""
    try:
        if importlib.util.find_spec("tensorboardX") is not None:
            from tensorboardX import SummaryWriter

            return SummaryWriter
        if all(importlib.util.find_spec(name) is not None for name in ("tensorboard", "torch")):
            from torch.utils.tensorboard import SummaryWriter as TorchWriter

            return TorchWriter
    except ImportError as error:
        _logger.warning("TensorBoard is installed but does not load: %s", error)
    return None


class Trace:
    """Chrome trace of the steps: one row a rank with its busy time, one for the whole step."""

    def __init__(self, path: Path | None, world_size: int) -> None:
        self._path, self._events, self._now_us = path, list[dict[str, Any]](), 0.0
        names = [f"rank {rank}" for rank in range(world_size)] + ["step"]
        for row, name in enumerate(names):
            self._events.append(
                {"ph": "M", "name": "thread_name", "pid": 0, "tid": row, "args": {"name": name}}
            )

    def __enter__(self) -> Trace:
        return self

    def add(self, record: Any, busy: list[float]) -> None:
        if self._path is None:
            return
        for row, seconds in enumerate([*busy, record.seconds]):
            self._events.append(
                {
                    "ph": "X",
                    "name": f"step {record.step}",
                    "pid": 0,
                    "tid": row,
                    "ts": self._now_us,
                    "dur": seconds * 1e6,
                    "args": {"loss": record.loss, "plan": record.plan},
                }
            )
        self._now_us += record.seconds * 1e6

    def __exit__(self, *_: object) -> None:
        if self._path is not None:
            self._path.write_text(json.dumps({"traceEvents": self._events}), encoding="utf-8")
