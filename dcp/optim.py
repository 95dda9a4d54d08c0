"""Optimizers as settings: what a step does to the parameters, without any state.

============  ==================================================  ==================================
name          updates                                             state of a parameter, bytes
============  ==================================================  ==================================
``adamw``     every element by itself                             8
``adamw8bit`` the same, with block-wise 8-bit state               about 2.1; tensors of fewer than
                                                                  4,096 elements: 8
``muon``      whole matrices, one rank each; AdamW the rest       4
``shampoo``   blocks of matrices, on one rank each; AdamW the     24 (blocks of 128)
              rest
============  ==================================================  ==================================

Given identical gradients, weights and state are the same bits for any number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dcp._dcp import ArgumentError
from dcp.optim_base import KINDS, SCHEDULES, Group, Optimizer, Rule, check_number
from dcp.optim_matrix import Muon, Shampoo

__all__ = [
    "KINDS",
    "OPTIMIZERS",
    "SCHEDULES",
    "AdamW",
    "AdamW8bit",
    "Group",
    "Muon",
    "Optimizer",
    "Rule",
    "Shampoo",
]


@dataclass(frozen=True, kw_only=True)
class AdamW(Optimizer):
    """AdamW (Loshchilov & Hutter 2019): decoupled weight decay, clipping, a warm-up.

    Parameters
    ----------
    betas : (float, float)
        Decay of the running mean of the gradient and of its square, each in [0, 1).
    eps : float
        Added to the root of the running square, > 0.
    lr, weight_decay, clip, warmup_steps, schedule, schedule_steps, groups
        See `dcp.optim.Optimizer`.

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

    name: ClassVar[str] = "adamw"

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("eps", self.eps, open_end=True)
        if len(self.betas) != 2 or not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ArgumentError(f"optimizer.betas = {self.betas} must be two numbers in [0, 1)")
        object.__setattr__(self, "betas", tuple(self.betas))

    def rule_of(self, kind: str) -> Rule:
        """The numbers of this optimizer for tensors that `kind` updates, decay left out."""
        if kind in ("adamw", "adamw8bit"):
            return Rule(kind=kind, beta1=self.betas[0], beta2=self.betas[1], eps=self.eps)
        return super().rule_of(kind)


@dataclass(frozen=True, kw_only=True)
class AdamW8bit(AdamW):
    """AdamW whose running means are kept in 8 bits an element, with one scale a block.

    Blocks are of 256 elements of a row; each value becomes the nearest of 255 (mean) or 256
    (square) that lie denser near zero, times the largest of the block: the dynamic code of Dettmers
    et al., arXiv 2110.02861. A step computes with the new means before they are rounded. Tensors
    of fewer than 4,096 elements, over all ranks, keep fp32 state: how a model is sharded or grouped
    changes nothing.

    Parameters
    ----------
    betas, eps, lr, weight_decay, clip, warmup_steps, schedule, schedule_steps, groups
        See `dcp.optim.AdamW`.

    Raises
    ------
    dcp.ArgumentError
        Names the setting, its value and the rule.

    Examples
    --------
    >>> import dcp
    >>> dcp.optim.AdamW8bit(lr=0.01).rules([("w", (64, 64))])[0].kind
    'adamw8bit'
    """

    name: ClassVar[str] = "adamw8bit"


OPTIMIZERS: dict[str, type[Optimizer]] = {
    cls.name: cls for cls in (AdamW, AdamW8bit, Muon, Shampoo)
}
