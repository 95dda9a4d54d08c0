"""Optimizers of whole matrices: Muon and Shampoo.

Both look at a matrix as such, not at its elements one by one, and a shard of a matrix is not
enough for that. So every matrix (Muon) or row of blocks (Shampoo) has one owner among the ranks,
dearest ones dealt first; a step carries gradients to the owners and updates back, in rounds of
bounded memory: in place through a window on one machine, as messages of the overlapping ranges
elsewhere. The same numbers are computed in the same order in every world.

They are for the matrices inside the layers. Embeddings, an untied output head, norms and biases
are left to AdamW, as both papers advise.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from typing import ClassVar

from dcp._dcp import ArgumentError
from dcp.optim_base import Optimizer, Rule, check_number, check_whole

__all__ = ["Muon", "Shampoo"]

# Matrices whose rows or columns are tokens.
_TOKEN_MATRICES = ("*embed*", "*wte*", "*wpe*", "*lm_head*", "output.weight")
_MOST_BLOCK = 1024  # of shampoo.c
_MOST_ITERATIONS = 100  # of muon.c


@dataclass(frozen=True, kw_only=True)
class _Matrices(Optimizer):
    """One rule for the matrices of the layers, AdamW with `betas` and `eps` for the rest."""

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("eps", self.eps, open_end=True)
        if len(self.betas) != 2 or not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ArgumentError(f"optimizer.betas = {self.betas} must be two numbers in [0, 1)")
        object.__setattr__(self, "betas", tuple(self.betas))

    def kind_of(self, name: str, shape: tuple[int, ...]) -> str:
        """This optimizer for matrices, "adamw" for embeddings, the head and all else."""
        tokens = any(fnmatch.fnmatchcase(name, pattern) for pattern in _TOKEN_MATRICES)
        return self.name if len(shape) >= 2 and not tokens else "adamw"

    def rule_of(self, kind: str) -> Rule:
        """The numbers of this optimizer for tensors that `kind` updates, decay left out."""
        if kind in ("adamw", "adamw8bit"):
            return Rule(kind=kind, beta1=self.betas[0], beta2=self.betas[1], eps=self.eps)
        return super().rule_of(kind)


@dataclass(frozen=True, kw_only=True)
class Muon(_Matrices):
    """Momentum, orthogonalised matrix by matrix (Jordan et al. 2024; arXiv 2502.16982).

    ``w -= lr (0.2 sqrt(max(rows, columns)) O + weight_decay w)``, where O is what a few steps of a
    Newton-Schulz iteration make of the momentum: the same singular vectors, singular values near 1
    (0.68 to 1.14 after five). With that factor an update is as large as AdamW's usually is, so one
    learning rate serves both. A tensor of three dimensions is as many matrices as its first one
    counts (experts).

    Parameters
    ----------
    momentum : float
        Decay of the running sum of gradients, in [0, 1).
    nesterov : bool
        Orthogonalise ``gradient + momentum * sum`` rather than the sum.
    iterations : int
        Newton-Schulz steps, 1 to 100.
    betas, eps
        Of AdamW, for embeddings, the head and tensors of one dimension.
    lr, weight_decay, clip, warmup_steps, schedule, schedule_steps, groups
        See `dcp.optim.Optimizer`.

    Raises
    ------
    dcp.ArgumentError
        Names the setting, its value and the rule.

    Notes
    -----
    State: 4 bytes a parameter, divided by the ranks. Beside it a rank holds up to twice the
    largest matrix (or 4 MiB, if that is more), four times where windows are off, and scratch of
    one matrix and twice its smaller side squared. Cost a step: about ``20 n^2 m + 10 n^3`` flops
    a matrix with sides n <= m, on its owner.

    Examples
    --------
    >>> import dcp
    >>> muon = dcp.optim.Muon(lr=3e-3)
    >>> tensors = [("embed_tokens", (257, 64)), ("layers.0.up", (128, 64)), ("norm", (64,))]
    >>> [rule.kind for rule in muon.rules(tensors)]
    ['adamw', 'muon', 'adamw']
    """

    name: ClassVar[str] = "muon"

    momentum: float = 0.95
    nesterov: bool = True
    iterations: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("momentum", self.momentum, below=1.0)
        check_whole("iterations", self.iterations, 1)
        if self.iterations > _MOST_ITERATIONS:
            raise ArgumentError(
                f"optimizer.iterations = {self.iterations} must be <= {_MOST_ITERATIONS}"
            )
        if not isinstance(self.nesterov, bool):
            raise ArgumentError(f"optimizer.nesterov = {self.nesterov!r} must be true or false")

    def rule_of(self, kind: str) -> Rule:
        """The numbers of this optimizer for tensors that `kind` updates, decay left out."""
        if kind == "muon":
            return Rule(
                kind=kind,
                momentum=self.momentum,
                nesterov=self.nesterov,
                iterations=self.iterations,
            )
        return super().rule_of(kind)


@dataclass(frozen=True, kw_only=True)
class Shampoo(_Matrices):
    """Shampoo in blocks, grafted to AdamW (arXiv 1802.09568, 2002.09018, 2309.06497).

    A matrix is cut evenly into blocks of at most `block` x `block`. Each keeps running means of
    ``G G^T`` and ``G^T G`` of its gradient G; the update is the running mean of G between their
    inverse fourth roots, with the norm that AdamW's update of this block would have.

    Parameters
    ----------
    betas : (float, float)
        Decay of the running mean of the gradient, and of the statistics and squares; also AdamW's,
        for embeddings, the head and tensors of one dimension.
    eps : float
        AdamW's. The ridge of the roots is 1e-6 of the largest eigenvalue.
    block : int
        Most rows and columns of a block, 1 to 1024.
    every : int
        Steps from one inverse root of a block to the next, >= 1. The first step makes all; after
        that each step makes its share of them.
    lr, weight_decay, clip, warmup_steps, schedule, schedule_steps, groups
        See `dcp.optim.Optimizer`.

    Raises
    ------
    dcp.ArgumentError
        Names the setting, its value and the rule.

    Notes
    -----
    State: 24 bytes a parameter of square blocks, divided by the ranks; all of a block lies with its
    owner. Kinds: ``shampoo.left``, ``.right``, ``.left_root``, ``.right_root`` of shape [blocks,
    side, side], blocks by rows, then columns; ``shampoo.m`` and ``.v`` as the tensor.

    Examples
    --------
    >>> import dcp
    >>> dcp.optim.Shampoo(block=64).rules([("layers.0.up", (128, 64))])[0].block
    64
    """

    name: ClassVar[str] = "shampoo"

    block: int = 128
    every: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("block", self.block, 1)
        check_whole("every", self.every, 1)
        if self.block > _MOST_BLOCK:
            raise ArgumentError(f"optimizer.block = {self.block} must be <= {_MOST_BLOCK}")

    def rule_of(self, kind: str) -> Rule:
        """The numbers of this optimizer for tensors that `kind` updates, decay left out."""
        if kind == "shampoo":
            return Rule(
                kind=kind,
                beta1=self.betas[0],
                beta2=self.betas[1],
                eps=self.eps,
                block=self.block,
                every=self.every,
            )
        return super().rule_of(kind)
