"""Optimizers as settings: what a step does to the parameters, without any state.

The state (momentum, variance) lives in the shards of the model; an optimizer here is a frozen
dataclass that says which rule and which numbers. The learning rate of a step depends on the
step's number and these settings only, never on how long the run will be, so a run that is
resumed, or continued for longer, follows the same curve.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dcp._dcp import ArgumentError

__all__ = ["SCHEDULES", "AdamW"]

SCHEDULES = ("constant", "cosine", "linear")


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """AdamW with decoupled weight decay, clipping by the global norm, and a warm-up.

    Parameters
    ----------
    lr : float
        Learning rate after the warm-up, > 0.
    betas : (float, float)
        Decay of the running mean of the gradient and of its square, each in [0, 1).
    eps : float
        Added to the root of the running square, > 0.
    weight_decay : float
        Share of a parameter taken off per step and unit of learning rate, >= 0.
    clip : float or None
        Largest global norm of the gradient; larger ones are scaled down to it. None: no clipping.
    warmup_steps : int
        The rate grows linearly over this many steps; step 0 has ``lr / warmup_steps``.
    schedule : {"constant", "cosine", "linear"}
        What follows the warm-up. `cosine` and `linear` fall to 0 at step `schedule_steps` and
        stay there.
    schedule_steps : int or None
        Number of steps, warm-up included, of `cosine` and `linear`; they need it.

    Raises
    ------
    dcp.ArgumentError
        Names the setting, its value and the rule.

    Examples
    --------
    >>> import dcp
    >>> adamw = dcp.optim.AdamW(lr=0.01, warmup_steps=10, schedule="linear", schedule_steps=110)
    >>> [round(adamw.lr_at(step), 6) for step in (0, 9, 10, 60, 110, 500)]
    [0.001, 0.01, 0.01, 0.005, 0.0, 0.0]
    """

    lr: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float | None = 1.0
    warmup_steps: int = 10
    schedule: str = "constant"
    schedule_steps: int | None = None

    def __post_init__(self) -> None:
        for name, least, open_end in (
            ("lr", 0.0, True),
            ("eps", 0.0, True),
            ("weight_decay", 0.0, False),
        ):
            value = getattr(self, name)
            if not math.isfinite(value) or value < least or (open_end and value == least):
                rule = "> 0" if open_end else ">= 0"
                raise ArgumentError(f"optimizer.{name} = {value} must be a finite number {rule}")
        if len(self.betas) != 2 or not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ArgumentError(f"optimizer.betas = {self.betas} must be two numbers in [0, 1)")
        if self.clip is not None and not self.clip > 0.0:
            raise ArgumentError(f"optimizer.clip = {self.clip} must be > 0 (or none)")
        if self.warmup_steps < 0:
            raise ArgumentError(f"optimizer.warmup_steps = {self.warmup_steps} must be >= 0")
        if self.schedule not in SCHEDULES:
            raise ArgumentError(
                f"optimizer.schedule = {self.schedule!r} must be one of {', '.join(SCHEDULES)}"
            )
        if self.schedule != "constant" and self.schedule_steps is None:
            raise ArgumentError(
                f"optimizer.schedule = {self.schedule!r} needs optimizer.schedule_steps: "
                "the number of steps until the rate is 0"
            )
        if self.schedule_steps is not None and self.schedule_steps <= self.warmup_steps:
            raise ArgumentError(
                f"optimizer.schedule_steps = {self.schedule_steps} must be more than "
                f"optimizer.warmup_steps = {self.warmup_steps}"
            )

    def lr_at(self, step: int) -> float:
        """Return the learning rate of step number `step`, counted from 0."""
        if step < 0:
            raise ArgumentError(f"step = {step} must be >= 0")
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.schedule == "constant" or self.schedule_steps is None:
            return self.lr
        done = (step - self.warmup_steps) / (self.schedule_steps - self.warmup_steps)
        done = min(done, 1.0)
        if self.schedule == "linear":
            return self.lr * (1.0 - done)
        return self.lr * 0.5 * (1.0 + math.cos(math.pi * done))
