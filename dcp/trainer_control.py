"""What a run's steps are run with - the arm - and the controller that chooses it.

A controller sees one observation after every step and decides for the next one. Rank 0's decision
becomes every rank's inside the core, so nothing here may differ between ranks. Decisions depend on
measured times; a log of them repeats a run bit for bit: a replay hands the logged observations to
the same state machine instead of measured ones, and whatever else differs is an error.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dcp._dcp import ArgumentError, MismatchError
from dcp.controller import LOG_VERSION, decide_again

__all__ = ["Steering"]

_logger = logging.getLogger("dcp")


class Steering:
    """Precision, batch multiple and learning-rate factor of the next step.

    Parameters
    ----------
    model : dcp.ShardedModel
    optimizer : dcp.optim.Optimizer
    tokens_per_step : int
        Of multiple 1.
    controller : dcp.Controller or None
        None: the arm stays as it is.
    precision : str
        How gradients travel without a controller.
    feedback, hadamard, nearest : bool
        How they are quantised.
    seed : int
        Of the random bits of quantising.
    replay : mapping or None
        Step -> a line of the log of another run, whose decisions are taken.
    replay_path : path
        Where that log lies, for messages.

    Attributes
    ----------
    arm : dict
        Of the next step: ``{"precision": ..., "multiple": ...}``.
    lr_factor : float
        Of the next step's learning rate.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        *,
        tokens_per_step: int,
        controller: Any = None,
        precision: str = "fp32",
        feedback: bool = True,
        hadamard: bool = False,
        nearest: bool = False,
        seed: int = 0,
        replay: Mapping[int, dict[str, Any]] | None = None,
        replay_path: Path | None = None,
    ) -> None:
        if controller is not None and not hasattr(controller, "bind"):
            raise ArgumentError(f"controller = {controller!r} must be a dcp.Controller or None")
        if controller is not None and precision != "fp32":
            raise ArgumentError(
                f"precision = {precision!r} is for runs without a controller, which chooses it"
            )
        if replay is not None and controller is None:
            raise ArgumentError(
                f"replay: {replay_path} is of a run with a controller: give the same one"
            )
        self._model, self.controller = model, controller
        self._ways = {"feedback": feedback, "hadamard": hadamard, "nearest": nearest}
        self._seed = seed
        self._replay, self._path = replay, replay_path
        self._core: Any = None
        self.arm: dict[str, Any] = {"precision": precision, "multiple": 1}
        self.lr_factor = 1.0
        self.settings: dict[str, Any] | None = None
        if controller is not None:
            self._core = controller.bind(tokens_per_step, model.world.size, optimizer)
            self.settings = controller.settings(tokens_per_step, model.world.size, optimizer)
            self._use(self._core.start())
        self._first_state: bytes | None = None  # of a run that was resumed

    def _use(self, decision: Mapping[str, Any]) -> None:
        self.arm = dict(decision["arm"])
        self.lr_factor = float(decision["lr_factor"])

    @property
    def multiple(self) -> int:
        """Times `tokens_per_step` of the next step."""
        return int(self.arm["multiple"])

    def shown_arm(self) -> dict[str, Any] | None:
        """The arm as records hold it; None where there is nothing to choose and none was asked."""
        if self.controller is None and self.arm["precision"] == "fp32":
            return None
        return dict(self.arm)

    def step_options(self) -> dict[str, Any]:
        """What the next `ShardedModel.step` is told."""
        return {
            "precision": self.arm["precision"],
            "quantise_seed": self._seed,
            "statistics": self.controller is not None,
            **self._ways,
        }

    def after(self, step: int, loss: float, seconds: float) -> dict[str, Any] | None:
        """Decide on the step after `step`, which took `seconds`. Collective.

        Returns
        -------
        dict or None
            The line of the log; None without a controller.

        Raises
        ------
        dcp.MismatchError
            A replayed log does not fit this run.
        """
        if self.controller is None:
            return None
        if self._replay is not None:
            line = self._replayed(step, loss)
        else:
            self._model.note_step(self.arm["precision"], self.multiple, seconds)
            observation, decision, inputs = self._core.step(self._model.core)
            line = {
                "step": step,
                "observation": observation,
                "decision": decision,
                "inputs": inputs,
            }
        self._use(line["decision"])
        return line

    def _replayed(self, step: int, loss: float) -> dict[str, Any]:
        """The logged line of a step, once it is known to be of the same run."""
        assert self._replay is not None
        where = f"replay of {self._path}: step {step}"
        if step not in self._replay:
            raise MismatchError(f"{where}: the log holds no decision after it")
        line = self._replay[step]
        seen = line["observation"]
        mine = None if math.isnan(loss) else loss
        for what, here, there in (
            ("arm", self.arm, dict(seen["arm"])),
            ("loss", mine, seen.get("loss")),
        ):
            if here != there:
                raise MismatchError(
                    f"{where} has {what} {here} here and {there} there: data, settings or version "
                    "are not those of that run"
                )
        decide_again(self._core, line, f"replay of {self._path}")
        return {"step": step, **{k: line[k] for k in ("observation", "decision", "inputs")}}

    def head(self) -> dict[str, Any]:
        """What the first line of a log also holds: how to make the controller that wrote it."""
        head: dict[str, Any] = {"version": LOG_VERSION, "settings": self.settings}
        if self._first_state is not None:
            head["state"] = self._first_state.hex()
        return head

    def state_dict(self) -> dict[str, Any] | None:
        """What a checkpoint keeps, as plain data; None without a controller."""
        if self.controller is None:
            return None
        return {
            "settings": self.settings,
            "state": self._core.state().hex(),
            "arm": dict(self.arm),
            "lr_factor": self.lr_factor,
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on from what `state_dict` gave.

        A run with another grid, world or policy starts its controller anew, and says so: what was
        learnt in a checkpoint without one, or of other arms, does not hold.
        """
        if self.controller is None:
            return
        other = state is None or state.get("settings") != self.settings
        if state is not None and not other:
            self._core.load_state(bytes.fromhex(state["state"]))
            self._use(state)
            self._first_state = self._core.state()
        elif self._replay is not None:
            raise ArgumentError(
                "replay: the checkpoint's controller has other settings than this run's"
            )
        elif state is not None and self._model.world.rank == 0:
            _logger.warning("the controller's settings changed, it starts anew")
