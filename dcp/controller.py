"""The controller: precision of gradients and tokens a step, tuned together while training.

After every step it sees what the step took and what its gradients were like, and chooses the arm -
(precision, batch multiple) - that promises to reach a target loss soonest. It is a state machine in
the core without clock or randomness, so its log replays bit for bit.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcp import _dcp
from dcp._dcp import ArgumentError, FileError, MismatchError

__all__ = ["POLICIES", "PRECISIONS", "Controller", "DecisionLog"]

POLICIES = ("static", "precision", "accumulation", "decoupled", "joint")
PRECISIONS = ("fp32", "bf16", "fp8_e4m3", "fp8_e5m2", "int8", "int4")
LOG_VERSION = 1
REASONS = {
    1: "start",
    2: "another arm is better",
    4: "bandwidth jumped",
    8: "times are not as predicted",
    16: "its error is too large",
    32: "the loss rises",
    64: "step skipped",
    128: "from a log",
}


@dataclass(frozen=True)
class Controller:
    """Which arms there are, and how one is chosen.

    Parameters
    ----------
    policy : {"joint", "static", "precision", "accumulation", "decoupled"}
        `static`: base precision, least multiple. `precision`: the best precision at the least
        multiple. `accumulation`: the best multiple at the base precision. `decoupled`: the
        precision of the one with the multiple of the other. `joint`: the best pair.
    precisions : sequence of str
        Distinct; of ``fp32, bf16, fp8_e4m3, fp8_e5m2, int8, int4``.
    base : str, optional
        One of them; default the first.
    batch_multiples : sequence of int
        Ascending, from 1: tokens of a step = tokens_per_step x multiple.
    hysteresis : float
        Share of its objective that another arm must save.
    noise_steps : int
        Steps that are observed before the multiple changes.
    dwell_steps : int
        Least steps between two changes.
    error_limit : float
        Relative squared error above which a precision is not used.
    slope_limit : float
        Standard errors by which the loss must rise before a precision is left; 0: off.

    Raises
    ------
    dcp.ArgumentError
        A value breaks its rule.

    Notes
    -----
    Steps needed follow McCandlish et al. (arXiv 1812.06162) with the noise of quantising in it; the
    learning rate follows the batch by AdaScale's gain (arXiv 2007.05105), its square root for
    optimizers that normalise their update.

    Examples
    --------
    >>> import dcp
    >>> controller = dcp.Controller("joint", batch_multiples=(1, 2, 4))
    >>> core = controller.bind(16384, 2, dcp.optim.AdamW(lr=0.01))
    >>> core.start()["arm"]
    {'precision': 'fp32', 'multiple': 1}
    """

    policy: str = "joint"
    _: dataclasses.KW_ONLY
    precisions: Sequence[str] = ("fp32", "bf16", "int8", "int4")
    base: str | None = None
    batch_multiples: Sequence[int] = (1, 2, 4, 8)
    hysteresis: float = 0.05
    noise_steps: int = 8
    dwell_steps: int = 2
    error_limit: float = 0.5
    slope_limit: float = 4.0

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ArgumentError(f"policy = {self.policy!r} must be one of {', '.join(POLICIES)}")
        object.__setattr__(self, "precisions", tuple(self.precisions))
        object.__setattr__(self, "batch_multiples", tuple(self.batch_multiples))
        if not self.precisions:
            raise ArgumentError("precisions is empty: name at least one")
        if self.base is None:
            object.__setattr__(self, "base", self.precisions[0])
        self._core(1, 1, "fixed")  # checks the rest

    def _core(self, tokens_per_step: int, rank_count: int, lr_rule: str) -> _dcp.Controller:
        return _dcp.Controller(**self._keywords(tokens_per_step, rank_count, lr_rule))

    def _keywords(self, tokens_per_step: int, rank_count: int, lr_rule: str) -> dict[str, Any]:
        return {
            "policy": self.policy,
            "precisions": list(self.precisions),
            "base": self.base,
            "multiples": list(self.batch_multiples),
            "tokens_per_step": tokens_per_step,
            "rank_count": rank_count,
            "lr_rule": lr_rule,
            # 0 asks the core for its default, so none is asked for by a number below it
            "hysteresis": self.hysteresis if self.hysteresis > 0 else -1.0,
            "noise_steps": self.noise_steps,
            "dwell_steps": self.dwell_steps,
            "error_limit": self.error_limit,
            "slope_limit": self.slope_limit,
        }

    def settings(self, tokens_per_step: int, rank_count: int, optimizer: Any) -> dict[str, Any]:
        """What a log and a checkpoint keep: equal settings make equal controllers.

        Examples
        --------
        >>> import dcp
        >>> dcp.Controller().settings(4096, 2, dcp.optim.AdamW(lr=0.01))["lr_rule"]
        'sqrt_gain'
        """
        return self._keywords(tokens_per_step, rank_count, _lr_rule(optimizer))

    def bind(self, tokens_per_step: int, rank_count: int, optimizer: Any) -> _dcp.Controller:
        """Make the state machine for a run.

        Parameters
        ----------
        tokens_per_step : int
            Of multiple 1.
        rank_count : int
            Ranks whose gradients are summed.
        optimizer : dcp.optim.Optimizer
            Decides how the learning rate follows the batch.

        Returns
        -------
        dcp._dcp.Controller

        Examples
        --------
        See the class.
        """
        return self._core(tokens_per_step, rank_count, _lr_rule(optimizer))


def _lr_rule(optimizer: Any) -> str:
    """AdamW, Muon and Shampoo normalise their update; what follows the gradient itself does not."""
    return "gain" if getattr(optimizer, "name", "") == "sgd" else "sqrt_gain"


@dataclass(frozen=True)
class DecisionLog:
    """The decisions of a run, from its `metrics.jsonl`.

    Attributes
    ----------
    path : Path
    settings : dict
        Keywords of the controller that wrote it.
    state : bytes or None
        Where it began, of a run that was resumed.
    lines : list of dict
        One a step: step, observation, decision, inputs.

    Examples
    --------
    >>> import dcp, json, pathlib, tempfile
    >>> from dcp.controller import DecisionLog
    >>> from dcp.time_to_loss import decision_log, time_to_loss
    >>> run = time_to_loss(congestion=1, target=8.0, trace=True)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = pathlib.Path(folder, "metrics.jsonl")
    ...     _ = file.write_text(decision_log(run))
    ...     log = DecisionLog.read(file)
    >>> log.replay() == len(log.lines) == run.steps
    True
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
            It cannot be read, a line is damaged, it is of another version, or holds no decisions.

        Examples
        --------
        See the class.
        """
        try:
            texts = Path(path).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise FileError(f"log {path} cannot be read: {error}") from error
        settings: dict[str, Any] | None = None
        state: bytes | None = None
        lines: list[dict[str, Any]] = []
        for number, text in enumerate(texts, 1):
            try:
                line = json.loads(text)
                if line["kind"] != "control":
                    continue
                if "settings" in line:
                    version = line.get("version")
                    if version != LOG_VERSION:
                        raise FileError(
                            f"log {path}, line {number}: decisions of version {version}, this is "
                            f"version {LOG_VERSION}"
                        )
                    if settings is None:
                        settings = dict(line["settings"])
                        state = bytes.fromhex(line["state"]) if "state" in line else None
                lines.append({k: line[k] for k in ("step", "observation", "decision", "inputs")})
            except (ValueError, KeyError, TypeError) as error:
                if number < len(texts):  # the last line may be cut off by a kill
                    raise FileError(f"log {path}, line {number}: not a record: {error}") from error
        if settings is None or not lines:
            raise FileError(f"log {path} holds no decisions: it is not of a run with a controller")
        return cls(Path(path), settings, state, lines)

    def replay(self) -> int:
        """Let a fresh controller decide on what the log's saw, and compare bit for bit.

        Returns
        -------
        int
            Decisions compared.

        Raises
        ------
        dcp.MismatchError
            The first one that differs: step, field, both values.

        Examples
        --------
        See the class.
        """
        core = _dcp.Controller(**self.settings)
        if self.state is not None:
            core.load_state(self.state)
        for line in self.lines:
            decision = core.decide(line["observation"], **line["inputs"])
            for key, value in line["decision"].items():
                if decision[key] != value:
                    raise MismatchError(
                        f"log {self.path}, step {line['step']}: {key} of the decision is "
                        f"{decision[key]} here and {value} there"
                    )
        return len(self.lines)

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


def reasons(flags: int) -> list[str]:
    """What a decision's `reasons` say.

    Examples
    --------
    >>> from dcp.controller import reasons
    >>> reasons(6)
    ['another arm is better', 'bandwidth jumped']
    """
    return [text for bit, text in REASONS.items() if flags & bit]
