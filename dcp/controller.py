"""The controller of a training run: gradient precision and tokens of a step, chosen together.

After every step it sees what that step showed - times, gradient noise, the error of every
precision - and picks the arm (precision, batch multiple) that promises to reach a target loss
soonest: least steps needed times seconds a step (csrc/include/dcp/control.h). It is a state
machine without clock and randomness, so a log of what it saw gives the same decisions again.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from dcp import _dcp
from dcp._dcp import ArgumentError, FileError, MismatchError

__all__ = ["Controller", "DecisionLog"]

LOG_VERSION = 2  # 1: errors of codes under Adam were means over blocks
_REASONS = {  # bits of a decision's `reasons` (csrc/include/dcp/control.h)
    1: "first choice",
    2: "promises less time to the target",
    4: "bandwidth jumped",
    8: "steps took other times than predicted",
    16: "error of a precision too great",
    32: "loss rises",
    64: "step was not finite",
}


@dataclass(frozen=True)
class Controller:
    """Settings of a controller; `dcp.Trainer` makes it for the run.

    Parameters
    ----------
    policy : {"joint", "decoupled", "precision", "accumulation", "static"}
        What it may choose: both together; each alone, then both; one of the two; nothing (`base`
        and the least multiple).
    precisions : sequence of str
        "fp32", "bf16", "fp8_e4m3", "fp8_e5m2", "int8", "int4".
    base : str
        One of them, to begin with; the precision of "accumulation" and "static".
    batch_multiples : sequence of int
        Times `tokens_per_step` that a step may have, ascending.
    lr_rule : {"fixed", "gain", "sqrt_gain"} or None
        How the learning rate follows the multiple (AdaScale, arXiv 2007.05105); None: what suits
        the optimizer, for those that normalise their update the square root of the gain.
    hysteresis : float
        Share by which another arm must promise less time, at once or, in smaller promises step
        after step, six times that in all; 0: none.
    bandwidth_mean : float
        Weight of the newest bandwidth in the running mean of its logarithm.
    jump, jump_count : float, int
        After so many differences of the logarithm above `jump` in one direction the mean begins
        anew.
    noise_mean, noise_steps : float, int
        Weight of the newest noise numbers; observations before the multiple may leave the least.
    dwell_steps : int
        Least steps between two changes.
    error_limit : float
        A precision of greater relative squared error is not used.
    slope_limit : float
        A precision after whose choice the loss rises, by so many standard errors of its slope, is
        left for a while; 0: never.

    Raises
    ------
    dcp.ArgumentError
        A name is unknown, a grid empty or unordered, a number breaks its rule.

    Examples
    --------
    >>> import dcp
    >>> controller = dcp.Controller("joint", precisions=("fp32", "int8"), batch_multiples=(1, 2))
    >>> core = controller.bind(4096, 2, dcp.optim.AdamW())
    >>> core.start()["arm"]
    {'precision': 'fp32', 'multiple': 1}
    """

    policy: str = "joint"
    _: KW_ONLY
    precisions: tuple[str, ...] = ("fp32", "bf16", "int8", "int4")
    base: str = "fp32"
    batch_multiples: tuple[int, ...] = (1, 2, 4, 8)
    lr_rule: str | None = None
    hysteresis: float = 0.05
    bandwidth_mean: float = 0.3
    jump: float = 0.5
    jump_count: int = 3
    noise_mean: float = 0.05
    noise_steps: int = 8
    dwell_steps: int = 2
    error_limit: float = 0.5
    slope_limit: float = 4.0

    def __post_init__(self) -> None:
        for name in ("precisions", "batch_multiples"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
            if not getattr(self, name):
                raise ArgumentError(f"{name} is empty: name at least one")
        for name in ("hysteresis", "bandwidth_mean", "jump", "noise_mean", "error_limit"):
            value = getattr(self, name)
            if not (0 <= value < math.inf) or (value == 0 and name != "hysteresis"):
                least = ">= 0" if name == "hysteresis" else "> 0"
                raise ArgumentError(f"{name} = {value!r} must be {least} and finite")
        for name in ("jump_count", "noise_steps", "dwell_steps"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"{name} = {getattr(self, name)!r} must be >= 1")
        self.bind(1, 1, None)

    def settings(self, tokens_per_step: int, rank_count: int, optimizer: Any) -> dict[str, Any]:
        """What decides a run's controller, as plain data: keywords of ``dcp._dcp.Controller``.

        Parameters
        ----------
        tokens_per_step : int
            Tokens of a step of multiple 1, for which the learning rate is set.
        rank_count : int
            Ranks whose quantised gradients are summed.
        optimizer : dcp.optim.Optimizer or None
            Decides the rule of the learning rate where none is given.

        Examples
        --------
        >>> import dcp
        >>> dcp.Controller().settings(4096, 2, dcp.optim.AdamW())["lr_rule"]
        'sqrt_gain'
        """
        values = dataclasses.asdict(self)
        values["multiples"] = list(values.pop("batch_multiples"))
        values["precisions"] = list(values["precisions"])
        values["lr_rule"] = self.lr_rule or getattr(optimizer, "lr_rule", "sqrt_gain")
        values["hysteresis"] = self.hysteresis or -1.0  # 0 means the default there
        return values | {"tokens_per_step": int(tokens_per_step), "rank_count": int(rank_count)}

    def bind(self, tokens_per_step: int, rank_count: int, optimizer: Any) -> Any:
        """Make the controller of one run; arguments as `settings`.

        Returns
        -------
        dcp._dcp.Controller

        Examples
        --------
        See the class.
        """
        return _dcp.Controller(**self.settings(tokens_per_step, rank_count, optimizer))


@dataclass(frozen=True)
class DecisionLog:
    """The decisions of a run, from its `metrics.jsonl`.

    Attributes
    ----------
    path : Path
    settings : dict
        Of the controller.
    state : bytes or None
        That the log begins with, where the run was resumed into a new file.
    lines : list of dict
        ``step``, ``observation``, ``decision``, ``inputs``, in order.

    Examples
    --------
    >>> import json, pathlib, tempfile
    >>> import dcp
    >>> from dcp.controller import DecisionLog
    >>> controller = dcp.Controller("static", precisions=["int8"], base="int8")
    >>> core = controller.bind(4096, 2, None)
    >>> seen = {"step": 0, "arm": core.start()["arm"], "tokens": 4096, "step_s": 0.5}
    >>> inputs = {"reduce_bytes": {"int8": 1e6}, "codec_s": {"int8": 1e-3}}
    >>> line = {"kind": "control", "step": 0, "version": 2, "observation": seen, "inputs": inputs,
    ...         "decision": core.decide(seen, **inputs),
    ...         "settings": controller.settings(4096, 2, None)}
    >>> folder = tempfile.TemporaryDirectory()
    >>> file = pathlib.Path(folder.name, "metrics.jsonl")
    >>> _ = file.write_text(json.dumps(line))
    >>> [decision["arm"]["precision"] for decision in DecisionLog.read(file).replay()]
    ['int8']
    >>> folder.cleanup()
    """

    path: Path
    settings: dict[str, Any]
    state: bytes | None
    lines: list[dict[str, Any]]

    @classmethod
    def read(cls, path: str | Path) -> DecisionLog:
        """Read a log.

        Raises
        ------
        dcp.FileError
            It cannot be read, is of another version, or holds no decisions.

        Examples
        --------
        See the class.
        """
        try:
            texts = Path(path).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise FileError(f"log {path} cannot be read: {error}") from error
        lines: list[dict[str, Any]] = []
        for number, text in enumerate(texts, 1):
            try:
                values = json.loads(text)
                if values["kind"] == "control":
                    lines.append(decision_line(values))
            except (ValueError, KeyError, TypeError) as error:
                if number < len(texts):  # the last line may be cut off by a kill
                    raise FileError(f"log {path}, line {number}: not a record: {error}") from error
        if not lines:
            raise FileError(f"log {path} holds no decisions of a controller")
        head = lines[0]
        if head.get("version") != LOG_VERSION:
            raise FileError(
                f"log {path} has decisions of version {head.get('version')!r}, this dcp reads "
                f"{LOG_VERSION}"
            )
        try:
            state = bytes.fromhex(head["state"]) if "state" in head else None
            return cls(Path(path), dict(head["settings"]), state, lines)
        except (ValueError, KeyError, TypeError) as error:
            raise FileError(f"log {path} does not say of which controller: {error}") from error

    def replay(self) -> list[dict[str, Any]]:
        """Give a fresh controller what was observed, and compare its decisions bit for bit.

        Returns
        -------
        list of dict
            The decisions.

        Raises
        ------
        dcp.MismatchError
            A decision differs: the log is of another version's controller, or was changed.
        dcp.FileError
            It holds what no run writes.

        Examples
        --------
        See the class.
        """
        where = f"log {self.path}"
        try:
            core = _dcp.Controller(**self.settings)
        except (TypeError, ValueError, OverflowError) as error:
            raise FileError(f"{where} has no settings of a controller: {error}") from error
        if self.state is not None:
            core.load_state(self.state)
        return [decide_again(core, line, where) for line in self.lines]

    def rows(self) -> list[dict[str, Any]]:
        """One row a step, for tables and plots.

        Returns
        -------
        list of dict
            step, precision, multiple (of the step), seconds (from the log's start to its end),
            step_s, predicted_s (by the decision before it), bandwidth, noise_tokens, loss,
            changed, reasons (after it).

        Examples
        --------
        See the class.
        """
        rows, clock, predicted = [], 0.0, None
        for line in self.lines:
            seen, decision = line["observation"], line["decision"]
            clock += seen["step_s"] or 0.0
            rows.append(
                {
                    "step": line["step"],
                    "precision": seen["arm"]["precision"],
                    "multiple": seen["arm"]["multiple"],
                    "seconds": clock,
                    "step_s": seen["step_s"],
                    "predicted_s": predicted,
                    "bandwidth": decision["bandwidth"],
                    "noise_tokens": decision["noise_tokens"],
                    "loss": seen["loss"],
                    "changed": bool(decision["changed"]),
                    "reasons": reasons(decision["reasons"]),
                }
            )
            predicted = decision["predicted_s"]
        return rows


def decision_line(values: dict[str, Any]) -> dict[str, Any]:
    """A line of a log, once it is known to hold a decision.

    Raises
    ------
    KeyError, TypeError
        They say what is missing, or of another kind.

    Examples
    --------
    >>> from dcp.controller import decision_line
    >>> try:
    ...     decision_line({"step": 3, "observation": {"arm": {}}})
    ... except KeyError as error:
    ...     print(error)
    'precision'
    """
    kinds: dict[tuple[str, ...], type] = {
        ("step",): int,
        ("observation", "arm", "precision"): str,
        ("observation", "arm", "multiple"): int,
        ("decision", "arm", "precision"): str,
        ("decision", "arm", "multiple"): int,
        ("decision", "lr_factor"): float,
        ("decision", "reasons"): int,
        ("inputs", "reduce_bytes"): dict,
        ("inputs", "codec_s"): dict,
    }
    for path, kind in kinds.items():
        found: Any = values
        for key in path:
            found = found[key]
        if not isinstance(found, (float, int) if kind is float else kind):
            raise TypeError(f"{'.'.join(path)} is {found!r}, no {kind.__name__}")
    return values


def decide_again(core: Any, line: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Let a controller see what a line of a log holds; its decision, once it is that of the log.

    Parameters
    ----------
    core : dcp._dcp.Controller
    line : mapping
        As `decision_line` gives it.
    where : str
        What errors begin with.

    Raises
    ------
    dcp.MismatchError
        The decision is another.
    dcp.FileError
        The line holds what no run writes.

    Examples
    --------
    See `DecisionLog`.
    """
    try:
        decision: dict[str, Any] = core.decide(line["observation"], **line["inputs"])
    except (TypeError, OverflowError) as error:
        raise FileError(f"{where}: not a record after step {line['step']}: {error}") from error
    for key, value in line["decision"].items():
        if decision.get(key) != value:
            raise MismatchError(
                f"{where}: {key} after step {line['step']} is {decision.get(key)!r} here and "
                f"{value!r} there: the controller's settings or version are others"
            )
    return decision


def reasons(flags: int) -> list[str]:
    """What a decision's `reasons` say.

    Examples
    --------
    >>> from dcp.controller import reasons
    >>> reasons(6)
    ['promises less time to the target', 'bandwidth jumped']
    """
    return [text for bit, text in _REASONS.items() if flags & bit]
