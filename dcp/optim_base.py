"""What every optimizer has in common: rates, clipping, groups of tensors, rules for the core.

An optimizer is a frozen dataclass of settings without any state. `Optimizer.rules` turns it into
one `Rule` a tensor, which is all that the core knows; its state lives beside the shards. The
learning rate of a step depends on the step's number and the settings only, never on how long the
run will be, so a run that is resumed, or continued for longer, follows the same curve.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from dcp._dcp import ArgumentError

__all__ = ["KINDS", "SCHEDULES", "Group", "Optimizer", "Rule"]

SCHEDULES = ("constant", "cosine", "linear")
EIGHT_BIT_LEAST = 4096  # elements of a tensor that may have 8-bit state
EIGHT_BIT_BLOCK = 256  # of them share a scale; both are the core's (optim.h)
KINDS = ("none", "adamw", "adamw8bit", "muon", "shampoo")  # dcp_optimizer_kind_t


def check_number(
    name: str, value: Any, *, least: float = 0.0, open_end: bool = False, below: float = math.inf
) -> None:
    """`value` is a finite number >= `least` (> where `open_end`) and < `below`, or an error.

    Raises
    ------
    dcp.ArgumentError
        Names the setting, its value and the rule.
    """
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good or value < least or value >= below or (open_end and value == least):
        rule = f"{'>' if open_end else '>='} {least:g}"
        rule += f" and < {below:g}" if below < math.inf else ""
        raise ArgumentError(f"optimizer.{name} = {value} must be a finite number {rule}")


def check_whole(name: str, value: Any, least: int) -> None:
    """`value` is an integer >= `least`, or a `dcp.ArgumentError` that names it."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ArgumentError(f"optimizer.{name} = {value!r} must be an integer >= {least}")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How the core updates one tensor: the fields of ``dcp_optimizer_rule_t``, in their order.

    Attributes
    ----------
    kind : str
        One of `KINDS`; "none" leaves the tensor as it is and has no state.
    lr_scale : float
        Times the step's learning rate.
    weight_decay : float
        Share of a parameter taken off per step and unit of its learning rate.
    beta1, beta2, eps : float
        Of AdamW, its 8-bit form and Shampoo.
    momentum, nesterov, iterations
        Of Muon.
    block, every : int
        Of Shampoo.

    Examples
    --------
    >>> from dcp.optim import Rule
    >>> Rule(kind="adamw", weight_decay=0.1).core()[:3]
    (1, 1.0, 0.1)
    """

    kind: str
    lr_scale: float = 1.0
    weight_decay: float = 0.0
    beta1: float = 0.0
    beta2: float = 0.0
    eps: float = 0.0
    momentum: float = 0.0
    nesterov: bool = False
    iterations: int = 0
    block: int = 0
    every: int = 0

    def core(self) -> tuple[Any, ...]:
        """Return the fields as the core takes them.

        Examples
        --------
        See the class.
        """
        return (
            KINDS.index(self.kind),
            float(self.lr_scale),
            float(self.weight_decay),
            float(self.beta1),
            float(self.beta2),
            float(self.eps),
            float(self.momentum),
            bool(self.nesterov),
            int(self.iterations),
            int(self.block),
            int(self.every),
        )


@dataclass(frozen=True, kw_only=True)
class Group:
    """Tensors, by name, that are updated otherwise than the optimizer says by itself.

    Parameters
    ----------
    match : str
        Name of a tensor, or a pattern with ``*``, ``?`` and ``[...]``. A tensor belongs to the
        first group that matches it.
    optimizer : str or None
        Another optimizer for these tensors, one of `KINDS`, with its default numbers where the
        main one has none of that name; "none": they are left alone and have no state.
    lr_scale : float or None
        Factor of the learning rate.
    weight_decay : float or None
        In place of the optimizer's, also on tensors of one dimension.

    Raises
    ------
    dcp.ArgumentError
        Names the setting, its value and the rule.

    Examples
    --------
    >>> import dcp
    >>> from dcp.optim import Group
    >>> adamw = dcp.optim.AdamW(groups=[Group(match="*norm*", lr_scale=0.1)])
    >>> rules = adamw.rules([("model.norm.weight", (8,)), ("lm_head.weight", (16, 8))])
    >>> [(rule.lr_scale, rule.weight_decay) for rule in rules]
    [(0.1, 0.0), (1.0, 0.1)]
    """

    match: str
    optimizer: str | None = None
    lr_scale: float | None = None
    weight_decay: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.match, str) or not self.match:
            raise ArgumentError(
                f"optimizer.groups: match = {self.match!r} must be a tensor's name or a pattern"
            )
        if self.optimizer is not None and self.optimizer not in KINDS:
            from dcp.config import suggest

            raise ArgumentError(
                f"optimizer.groups: optimizer = {self.optimizer!r} of {self.match!r} is unknown"
                f"{suggest(str(self.optimizer), KINDS)}"
            )
        for name in ("lr_scale", "weight_decay"):
            if getattr(self, name) is not None:
                check_number(f"groups: {name} of {self.match!r}", getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Settings that all optimizers have; use one of `dcp.optim`, such as `dcp.optim.AdamW`.

    Parameters
    ----------
    lr : float
        Learning rate after the warm-up, > 0.
    weight_decay : float
        Share of a parameter taken off per step and unit of learning rate, >= 0. Tensors of one
        dimension (norms, biases) have none, unless a group gives them one.
    clip : float or None
        Largest global norm of the gradient; larger ones are scaled down to it. None: no clipping.
    warmup_steps : int
        The rate grows linearly over this many steps; step 0 has ``lr / warmup_steps``.
    schedule : {"constant", "cosine", "linear"}
        What follows the warm-up. `cosine` and `linear` fall to 0 at step `schedule_steps` and
        stay there.
    schedule_steps : int or None
        Number of steps, warm-up included, of `cosine` and `linear`; they need it.
    groups : sequence of Group or of mappings with its fields
        Tensors that are updated otherwise; the first group that matches a name holds.

    Raises
    ------
    dcp.ArgumentError
        Names the setting, its value and the rule.

    Examples
    --------
    See `dcp.optim.AdamW`.
    """

    name: ClassVar[str] = "none"  # of KINDS; what `optimizer.name` calls it

    lr: float = 3e-3
    weight_decay: float = 0.1
    clip: float | None = 1.0
    warmup_steps: int = 10
    schedule: str = "constant"
    schedule_steps: int | None = None
    groups: Sequence[Group | Mapping[str, Any]] = ()

    def __post_init__(self) -> None:
        check_number("lr", self.lr, open_end=True)
        check_number("weight_decay", self.weight_decay)
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
        object.__setattr__(self, "groups", tuple(_group(group) for group in self.groups))

    @classmethod
    def lr_beside(cls, adamw_lr: float) -> float:
        """Learning rate to start with, for a model that AdamW trains well at `adamw_lr`.

        The same: all optimizers here make steps about as large as AdamW's.

        Examples
        --------
        >>> import dcp
        >>> dcp.optim.AdamW8bit.lr_beside(1e-3)
        0.001
        """
        return adamw_lr

    def lr_at(self, step: int) -> float:
        """Return the learning rate of step number `step`, counted from 0.

        Raises
        ------
        dcp.ArgumentError
            `step` is negative.

        Examples
        --------
        >>> import dcp
        >>> dcp.optim.AdamW(lr=0.01, warmup_steps=10).lr_at(4)
        0.005
        """
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

    def kind_of(self, name: str, shape: tuple[int, ...]) -> str:
        """Which of `KINDS` updates a tensor that no group speaks of.

        Examples
        --------
        >>> import dcp
        >>> dcp.optim.AdamW().kind_of("model.norm.weight", (8,))
        'adamw'
        """
        return self.name

    def rule_of(self, kind: str) -> Rule:
        """The numbers of this optimizer for tensors that `kind` updates, decay left out.

        Examples
        --------
        >>> import dcp
        >>> dcp.optim.AdamW(betas=(0.9, 0.99)).rule_of("adamw").beta2
        0.99
        """
        if kind == "none":
            return Rule(kind="none")
        from dcp.optim import OPTIMIZERS

        if kind not in OPTIMIZERS:
            raise ArgumentError(f"optimizer {kind!r} must be one of {', '.join(OPTIMIZERS)}")
        return OPTIMIZERS[kind]().rule_of(kind)

    def rules(self, tensors: Sequence[tuple[str, tuple[int, ...]]]) -> list[Rule]:
        """One rule a tensor, in the order of `tensors`: (name, shape) each.

        Raises
        ------
        dcp.ArgumentError
            A group matches no tensor.

        Examples
        --------
        >>> import dcp
        >>> config = dcp.Transformer1D.preset("tiny")
        >>> rules = dcp.optim.AdamW().rules(config.tensors())
        >>> len(rules) == len(config.tensors())
        True
        """
        groups = [group for group in self.groups if isinstance(group, Group)]
        names = [name for name, _ in tensors]
        for group in groups:
            if not fnmatch.filter(names, group.match):
                raise ArgumentError(
                    f"optimizer.groups: {group.match!r} names no tensor of this model"
                )
        return [self._rule(name, tuple(shape), groups) for name, shape in tensors]

    def _rule(self, name: str, shape: tuple[int, ...], groups: Sequence[Group]) -> Rule:
        group = next((g for g in groups if fnmatch.fnmatchcase(name, g.match)), Group(match="*"))
        rule = self.rule_of(group.optimizer or self.kind_of(name, shape))
        if rule.kind in ("muon", "shampoo") and len(shape) < 2:
            raise ArgumentError(
                f"optimizer.groups: {group.match!r} gives {rule.kind} to {name!r} of shape "
                f"{shape}: it is for matrices; adamw is for the rest"
            )
        decay = self.weight_decay if len(shape) >= 2 else 0.0
        return replace(
            rule,
            lr_scale=rule.lr_scale * (1.0 if group.lr_scale is None else group.lr_scale),
            weight_decay=decay if group.weight_decay is None else group.weight_decay,
        )


def _group(given: Group | Mapping[str, Any]) -> Group:
    """A group from its fields, as a TOML file has them."""
    if isinstance(given, Group):
        return given
    if not isinstance(given, Mapping):
        raise ArgumentError(f"optimizer.groups: {given!r} must be a Group or a table of its fields")
    known = tuple(Group.__dataclass_fields__)
    for key in given:
        if key not in known:
            from dcp.config import suggest

            raise ArgumentError(f"optimizer.groups: unknown key {key!r}{suggest(str(key), known)}")
    if "match" not in given:
        raise ArgumentError(f"optimizer.groups: {dict(given)!r} needs match, a name or a pattern")
    return Group(**given)
