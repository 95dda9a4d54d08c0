"""Any list of tensors, fully sharded over ranks: gather, use, reduce, step.

The model of the world: every rank owns a shard of each tensor, cut at block borders only, and its
optimizer state. Tensors belong to groups (a layer, say); a group lies in one buffer, so that one
collective gathers or sums it, whatever the number of tensors in it - or in one buffer a row length
where together they would pad much (`dcp.layout.plan_groups`).

==============  ===================================  ==========================================
                `windows` (ranks of one machine)     without
==============  ===================================  ==========================================
weights         one copy a machine, read in place    a shard; whole groups while gathered
bfloat16 copy   one a machine                        whole groups while gathered
gradients       whole on each rank (`reduce="step"`), or whole groups while in use and a shard of
                the sums (`reduce="layer"`)
==============  ===================================  ==========================================

A gathered tensor is a view of the buffer at an address that never changes. Nothing is copied on
the way: gathers and sums work in place, and `ShardedTensors.traffic` counts it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from dcp import _dcp
from dcp.checkpoint import Run
from dcp.layout import ORDERS
from dcp.sharded_part import DEMAND, SHARD, SHARED, Part
from dcp.tensor_list import Init, Tensor, group_tensors, match, read_tensors, resolve_ties

if TYPE_CHECKING:
    from dcp.world import World

__all__ = ["ShardedTensors", "UpdateResult"]

FloatArray = NDArray[np.float32]
_COMPUTE = ("float32", "bfloat16")
_ALL = -1
_LARGEST = 2**63 // 8  # elements of a tensor, so that bytes of a buffer can be counted


@dataclass(frozen=True)
class UpdateResult:
    """What `ShardedTensors.step` did; the same on every rank.

    Attributes
    ----------
    grad_norm : float
        Norm of the whole gradient before clipping.
    lr : float
        Learning rate of the step.
    skipped : bool
        True if the gradient was not finite and nothing was changed.
    """

    grad_norm: float
    lr: float
    skipped: bool


class ShardedTensors:
    """Tensors sharded over the ranks of a world; made by `dcp.fully_shard`. Collective.

    All ranks give the same arguments. Methods marked *collective* are called by all ranks in the
    same order; `gather` and `release` too. A context manager.

    Parameters
    ----------
    tensors : mapping, or list of (name, value)
        A value is a float32 array (NumPy, or anything with DLPack, such as a torch tensor; read
        only for this rank's shard, the same on all ranks), a shape, or (shape, init).
    world : dcp.World
        The ranks.
    groups : "layer", int, or list of lists
        What is gathered and summed together: by the name up to its first number
        (``model.layers.3``), tensors between layers together; as many as fit this number of fp32
        bytes; or lists of names or ``*`` patterns that cover all.
    block_rows : int, "whole" or mapping
        Rows (of the last dimension) that stay on one rank, >= 1, "whole" for the whole tensor, or a
        row-major `dcp.layout.Tile`; a mapping of names or ``*`` patterns to these: the first that
        fits counts, else 1.
    order : {"model", "shape", "size", "search"}
        Order of tensors inside a group, see `dcp.plan_layout`.
    compute_dtype : {"float32", "bfloat16"}
        Type of gathered weights; the main ones are float32. NumPy has no bfloat16, its bits come as
        uint16 (``torch.from_dlpack(x).view(torch.bfloat16)``).
    reduce_dtype : "float32"
        Type in which gradients are summed.
    frozen, ignored : sequence of str
        Names or ``*`` patterns: of tensors that are not trained (no gradient, no state), and of
        tensors that are left alone, whole on every rank, outside of all buffers.
    tied : mapping
        Name -> name of the tensor that it shares: one storage, one gradient, stored once.
    init : callable (name, first, count) -> float32 array
        Values of tensors given by shape; called for this rank's own runs only, so nothing whole is
        ever allocated. Without, they are 0.
    replicas : int
        Hybrid sharding: the world is this many copies of a sharded model, of consecutive ranks.
        Gradients are summed inside a copy, then across copies.
    windows : bool
        Whether ranks read each other's memory in place.
    reduce : {"step", "layer"}
        Whether gradients are whole on every rank until they are reduced, or by groups.

    Raises
    ------
    dcp.ArgumentError
        A name twice, a pattern that names nothing, shapes of tied tensors that differ, sizes that
        64 bits cannot count; the message names it.
    dcp.UnsupportedError
        A `reduce_dtype` other than float32.
    dcp.MismatchError
        Ranks disagree on the tensors or settings.

    Examples
    --------
    >>> import dcp, numpy as np
    >>> tensors = {"0.weight": np.ones((4, 2), np.float32), "0.bias": (4,)}
    >>> with dcp.init("self") as world, dcp.fully_shard(tensors, world) as model:
    ...     weights = model.gather("0")
    ...     model.gradients("0.weight")[:] = 3.0
    ...     model.gradients("0.bias")[0] = 5.0
    ...     norm, largest = model.grad_norm(), model.grad_norm(ord=math.inf)
    ...     result = model.step(dcp.optim.AdamW(lr=0.1, warmup_steps=0, weight_decay=0.0))
    ...     norm == result.grad_norm, largest, round(float(weights["0.weight"][0, 0]), 3)
    ...     del weights
    (True, 5.0, 0.9)

    With torch, no copy:

    >>> def use_with_torch(model):  # doctest: +SKIP
    ...     weight = torch.from_dlpack(model.gather("0")["0.weight"])
    ...     gradient = torch.from_dlpack(model.gradients("0.weight"))
    """

    def __init__(
        self,
        tensors: Mapping[str, Any] | Iterable[tuple[str, Any]],
        world: World,
        *,
        groups: str | int | Sequence[Sequence[str]] = "layer",
        block_rows: int | str | Mapping[str, int | str] = 1,
        order: str = "model",
        compute_dtype: str = "float32",
        reduce_dtype: str = "float32",
        frozen: Sequence[str] = (),
        ignored: Sequence[str] = (),
        tied: Mapping[str, str] | None = None,
        init: Init | None = None,
        replicas: int = 1,
        windows: bool = True,
        reduce: Literal["step", "layer"] = "step",
    ) -> None:
        if compute_dtype not in _COMPUTE:
            raise _dcp.ArgumentError(
                f"compute_dtype = {compute_dtype!r} must be one of {', '.join(_COMPUTE)}"
            )
        if reduce_dtype != "float32":
            raise _dcp.UnsupportedError(
                f"reduce_dtype = {reduce_dtype!r}: this version sums gradients in float32 only"
            )
        if reduce not in ("step", "layer"):
            raise _dcp.ArgumentError(f'reduce = {reduce!r} must be "step" or "layer"')
        if order not in ORDERS:
            raise _dcp.ArgumentError(f"order = {order!r} must be one of {', '.join(ORDERS)}")
        if not isinstance(replicas, int) or replicas < 1 or world.size % replicas:
            raise _dcp.ArgumentError(
                f"replicas = {replicas} must be at least 1 and divide the {world.size} ranks"
            )
        self.world = world
        self.compute_dtype, self.windows, self.reduce_mode = compute_dtype, bool(windows), reduce
        self.replicas = replicas
        self.order = order
        given = read_tensors(tensors, block_rows, _LARGEST)
        names = [tensor.name for tensor in given]
        self._left_alone = match(names, ignored, "ignored")
        self._ties = resolve_ties(given, dict(tied or {}), self._left_alone)
        patterns = match(names, frozen, "frozen")
        self._frozen = {self._ties.get(name, name) for name in patterns} - self._left_alone
        stored = [t for t in given if t.name not in self._left_alone and t.name not in self._ties]
        self._group_names = group_tensors(stored, groups, self._ties)
        self._agree(given)
        self._shards, self._replicas = self._split(world)
        self._stored = stored
        self._trained = Part(self, [t for t in stored if t.name not in self._frozen], True)
        self._parts = [self._trained]
        if self._frozen:
            self._parts.append(Part(self, [t for t in stored if t.name in self._frozen], False))
        self._part_of = {name: part for part in self._parts for name in part.index}
        self._ignored = {t.name: t.whole(init) for t in given if t.name in self._left_alone}
        self._fresh: set[int] = set()  # gathered since the weights changed
        self._in_use: set[int] = set()  # gathered and not released
        self._reduced = False
        self._touched: set[int] = set()  # buffers of gradients that hold some
        self._gather_order: list[int] = []
        self._next, self._depth = 0, 0
        self._pending: deque[int] = deque()
        self._updates = 0
        self._optimizer: Any = None
        self._settings: Any = None
        self._rules: list[tuple[Any, ...]] = []
        self._kept: dict[str, list[Run]] = {}
        self._kept_shapes: dict[str, dict[str, tuple[int, ...]]] = {}
        self._fill(given, init)

    def _weight_kind(self) -> tuple[int, bool]:
        if self.windows:
            return SHARED, False
        return (SHARD, False) if self.compute_dtype == "bfloat16" else (DEMAND, True)

    def _agree(self, given: list[Tensor]) -> None:
        """All ranks shard the same tensors in the same way. Collective."""
        settings = [
            [[t.name, t.shape, t.group, t.block, t.name in self._frozen] for t in given],
            sorted(self._ties.items()),
            sorted(self._left_alone),
            [self.compute_dtype, self.windows, self.reduce_mode, self.replicas, self.order],
        ]
        digest = hashlib.sha256(json.dumps(settings).encode()).digest()
        hashes = self.world.allgatherv(np.frombuffer(digest, np.uint8).copy()).reshape(-1, 32)
        for rank, other in enumerate(hashes):
            if (other != hashes[0]).any():
                raise _dcp.MismatchError(
                    f"ranks disagree on the tensors or settings to shard: rank {rank} differs from "
                    "rank 0"
                )

    def _split(self, world: World) -> tuple[World, World]:
        """The ranks of this copy of the model, and those with the same shard."""
        if self.replicas == 1:
            return world, world
        width = world.size // self.replicas
        first = world.rank // width * width
        shards = world.group(range(first, first + width))
        replicas = world.group(range(world.rank - first, world.size, width))
        assert shards is not None and replicas is not None  # every rank is in its own
        return shards, replicas

    def _fill(self, given: list[Tensor], init: Init | None) -> None:
        """Writes this rank's runs of the weights. Collective."""
        by_name = {tensor.name: tensor for tensor in given}
        for part in self._parts:
            for i, first, array in part.weights.runs():
                by_name[part.tensors[i].name].write(first, array, init)
        self.weights_changed()

    # What is there

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every stored tensor: tied ones once, ignored ones not."""
        return {tensor.name: tensor.shape for tensor in self._stored}

    @property
    def groups(self) -> dict[str, list[str]]:
        """Names of the stored tensors of each group."""
        return {
            name: [tensor.name for tensor in self._stored if tensor.group == i]
            for i, name in enumerate(self._group_names)
        }

    @property
    def frozen(self) -> frozenset[str]:
        """Names of the stored tensors that are not trained."""
        return frozenset(self._frozen)

    @property
    def update_count(self) -> int:
        """Optimizer updates done so far. Set it when loading a checkpoint."""
        return self._updates

    @update_count.setter
    def update_count(self, value: int) -> None:
        self._updates = int(value)

    def local_range(self, name: str) -> tuple[int, int]:
        """First element and number of elements of a tensor that this rank owns; (0, 0): none."""
        name = self._name(name)
        found: tuple[int, int] = self._part_of[name].runs.get(name, (0, 0))
        return found

    def _name(self, name: str) -> str:
        stored = self._ties.get(name, name)
        if stored not in self._part_of:
            kind = "is ignored, so it is not sharded" if name in self._ignored else "is no tensor"
            raise _dcp.ArgumentError(f"{name!r} {kind} of these")
        return stored

    def _group(self, group: str | int) -> int:
        if isinstance(group, str):
            if group in self._group_names:
                return self._group_names.index(group)
            raise _dcp.ArgumentError(
                f"group {group!r} must be one of {', '.join(self._group_names)}"
            )
        if not 0 <= group < len(self._group_names):
            raise _dcp.ArgumentError(f"group {group} must lie in 0..{len(self._group_names) - 1}")
        return int(group)

    # Weights

    def gather(self, group: str | int) -> dict[str, NDArray[Any]]:
        """The whole weights of a group, by name, read-only views in `compute_dtype`. Collective.

        With windows and float32 they are the shards themselves and nothing is done; else the
        group is put together, unless it is there already. Tied names are included.

        Raises
        ------
        dcp.ArgumentError
            No such group.
        dcp.StateError
            An order is declared (`prefetch`) and another group is next.
        """
        number = self._group(group)
        if self._gather_order:
            self._gather_ahead(number)
        elif number not in self._fresh:
            for part in self._parts:
                if part.whole is not self._shared_weights(part):
                    for buffer in part.groups.get(number, ()):
                        part.whole.gather(buffer, part.source)
            self._fresh.add(number)
        self._in_use.add(number)
        return self._views(number)

    def _shared_weights(self, part: Part) -> Any:
        """The buffer that needs no gather; None where all do."""
        return part.weights if self.windows else None

    def _views(self, number: int) -> dict[str, NDArray[Any]]:
        names = [tensor.name for tensor in self._stored if tensor.group == number]
        names += [alias for alias, name in self._ties.items() if name in names]
        found = {}
        for name in names:
            stored = self._ties.get(name, name)
            part = self._part_of[stored]
            found[name] = part.view(part.whole, stored, False)
        return found

    def release(self, group: str | int) -> None:
        """Give the memory of a gathered group back to the system. Collective.

        Views keep their address and read as zeros until the group is gathered again. Nothing
        happens with windows, where the one copy belongs to all ranks.
        """
        number = self._group(group)
        if self.windows:
            return
        self._fresh.discard(number)
        self._in_use.discard(number)
        for part in self._parts:
            for buffer in part.groups.get(number, ()):
                part.whole.release(buffer)

    def prefetch(self, order: Sequence[str | int], *, depth: int = 1) -> None:
        """Declare the order in which groups will be gathered, and gather ahead. Collective.

        From then on `gather` follows it, again from its start where it ends; while a group is
        used, a thread gathers the `depth` next ones, none beyond the end of the order and none that
        is in use. `step` starts it anew. An empty order ends this. With windows nothing needs to be
        gathered ahead, and any order is accepted.

        Raises
        ------
        dcp.MismatchError
            Orders differ between ranks.
        """
        if depth < 0:
            raise _dcp.ArgumentError(f"depth = {depth} must not be negative")
        numbers = [self._group(group) for group in order]
        if self.windows:
            return
        for part in self._parts:
            mine = [buffer for g in numbers for buffer in part.groups.get(g, ())]
            part.whole.gather_order(np.array(mine, np.int32), part.source)
        self._gather_order, self._depth, self._next = numbers, depth, 0
        self._pending.clear()
        self._fresh.clear()

    def _begin_next(self) -> None:
        number = self._gather_order[self._next]
        for part in self._parts:
            for buffer in part.groups.get(number, ()):
                part.whole.gather_begin(buffer)
        self._pending.append(number)
        self._next += 1

    def _gather_ahead(self, number: int) -> None:
        if not self._pending:
            if self._next == len(self._gather_order):
                self._next = 0
            expected = self._gather_order[self._next]
        else:
            expected = self._pending[0]
        if number != expected:
            raise _dcp.StateError(
                f"group {self._group_names[number]!r} is not the next of the declared order: that "
                f"is {self._group_names[expected]!r}"
            )
        if not self._pending:
            self._begin_next()
        self._pending.popleft()
        self._in_use.add(number)
        while len(self._pending) < self._depth and self._next < len(self._gather_order):
            following = self._gather_order[self._next]
            if following in self._in_use or following in self._pending:
                break  # its memory is in use, and given back before
            self._begin_next()
        for part in self._parts:
            for buffer in part.groups.get(number, ()):
                part.whole.gather_wait(buffer)

    def _restart(self) -> None:
        """The weights change: what is on its way is of no use."""
        if self._gather_order:
            for part in self._parts:
                if any(group in part.groups for group in self._gather_order):
                    part.whole.gather_restart()
        self._next = 0
        self._pending.clear()
        self._fresh.clear()

    def parameters(self) -> dict[str, NDArray[Any]]:
        """All whole weights by name, tied and ignored ones included. Collective.

        Without windows every group is gathered; `release` gives it back.
        """
        if self._gather_order:
            raise _dcp.StateError("an order of gathers is declared: gather groups in it")
        found: dict[str, NDArray[Any]] = {}
        for number in range(len(self._group_names)):
            found |= self.gather(number)
        return found | self._ignored

    def weights_changed(self) -> None:
        """Publish weights that were written through `shards`. Collective."""
        self._restart()
        self.world.barrier()

    # Gradients

    def gradients(self, name: str) -> FloatArray:
        """The whole gradient of a tensor on this rank, to add to: a writable view.

        Nothing is summed over ranks before `reduce`. Ranks may add to different tensors, any number
        of times. The view stays good; what is written between `reduce` and `zero_gradients` (or the
        `step` that does it) is lost or spoils the sum.

        Raises
        ------
        dcp.StateError
            The tensor is frozen, or the gradients have been reduced and not yet zeroed.
        """
        stored = self._name(name)
        if stored in self._frozen:
            raise _dcp.StateError(f"{name!r} is frozen: it has no gradient")
        if self._reduced and self.reduce_mode == "step":
            raise _dcp.StateError(
                "the gradients have been reduced: call zero_gradients before adding to them"
            )
        part = self._trained
        if self.reduce_mode == "layer":
            buffer = part.buffer_of[stored]
            part.gradients.acquire(buffer)
            self._touched.add(buffer)
        return part.view(part.gradients, stored, True)

    def add_gradient(self, name: str, gradient: Any) -> None:
        """Add an array of the tensor's shape to its gradient on this rank."""
        view = self.gradients(name)
        array = Tensor.array_of(gradient, f"gradient of {name!r}")
        if array.shape != view.shape:
            raise _dcp.ArgumentError(
                f"gradient of {name!r} has shape {array.shape}, the tensor {view.shape}"
            )
        view += array

    def reduce(self, group: str | int | None = None) -> None:
        """Sum gradients over all ranks, each rank its shard, in rank order. Collective.

        With ``reduce="layer"`` one group may be named, as soon as its backward pass ends: its sum
        is added to this rank's shard and its memory given back. Otherwise all are summed.
        """
        part = self._trained
        if self.reduce_mode == "layer":
            self._reduce_groups(group)
            return
        if group is not None:
            raise _dcp.StateError('one group alone is reduced where reduce="layer"')
        if self._reduced:
            raise _dcp.StateError("the gradients have been reduced already")
        self.world.barrier()  # nobody adds any more
        part.gradients.reduce(_ALL)
        self.world.barrier()  # everybody has read its peers'
        self._reduced = True

    def _reduce_groups(self, group: str | int | None) -> None:
        part = self._trained
        if group is None:
            used = np.zeros(len(part.tensors) + 1, np.int32)  # by buffer
            used[list(self._touched)] = 1
            used = self.world.allreduce(used, "max")
            buffers = np.flatnonzero(used).tolist()
        else:
            buffers = part.groups.get(self._group(group), [])
        for buffer in buffers:
            part.gradients.acquire(buffer)  # zeros, where this rank did not use it
            part.gradients.reduce(buffer)
            part.sums.add(buffer, 1.0, part.gradients)
            part.gradients.release(buffer)
            self._touched.discard(buffer)
        self._reduced = True

    def zero_gradients(self) -> None:
        """Set all gradients to 0, the reduced ones too; `step` does it."""
        for buffer in {id(b): b for b in (self._trained.gradients, self._trained.sums)}.values():
            buffer.zero()
        for buffer in sorted(self._touched):
            self._trained.gradients.release(buffer)
        self._touched.clear()
        self._reduced = False

    def _ensure_reduced(self) -> None:
        """Collective: all ranks come here in the same state."""
        if not self._reduced or self.reduce_mode == "layer":
            self.reduce()

    def grad_norm(self, *, ord: float = 2, replicated: Iterable[Any] = ()) -> float:
        """The true norm of the whole gradient, the same bits on every rank. Collective.

        Gradients that were not yet reduced are.

        Parameters
        ----------
        ord : {2, math.inf}
            Root of the sum of squares, or the largest absolute value.
        replicated : iterable of float32 arrays
            Gradients of tensors that every rank holds whole, the same on all; they count once.
        """
        if ord not in (2, math.inf):
            raise _dcp.ArgumentError(f"ord = {ord} must be 2 or inf")
        self._ensure_reduced()
        extras = [Tensor.array_of(array, "replicated") for array in replicated]
        return float(self._trained.sums.norm(None, ord == math.inf, extras))

    def clip(
        self, max_norm: float, *, ord: float = 2, replicated: Sequence[FloatArray] = ()
    ) -> float:
        """Scale the gradient down to `max_norm` where its norm is larger; the norm. Collective.

        `replicated` gradients take part in the norm and are scaled too, in place.

        Raises
        ------
        dcp.NumericError
            The norm is not finite; nothing was changed.
        """
        if not max_norm > 0:
            raise _dcp.ArgumentError(f"max_norm = {max_norm} must be > 0")
        norm = self.grad_norm(ord=ord, replicated=replicated)
        if not math.isfinite(norm):
            raise _dcp.NumericError(f"the gradient's norm is {norm}")
        if norm > max_norm:
            factor = np.float32(max_norm / norm)
            self.scale_gradients(float(factor))
            for array in replicated:
                array *= factor
        return norm

    def scale_gradients(self, factor: float) -> None:
        """Multiply this rank's shard of the reduced gradient."""
        self._trained.sums.scale(_ALL, factor)

    def gradients_finite(self) -> bool:
        """Whether this rank's shard of the reduced gradient is finite."""
        return bool(self._trained.sums.nonfinite(_ALL) == 0)

    # Updates

    def set_optimizer(self, optimizer: Any) -> None:
        """Make the state of an optimizer (`dcp.optim`), or give it new numbers. Collective.

        Same kinds of rule for every tensor: the state goes on. Others: it starts anew, and
        `update_count` is 0 again.
        """
        rules = self._rules_of(optimizer)
        if self._optimizer is not None:
            if self._has_state_of(rules):
                self._optimizer.set_rules(rules)
                self._rules, self._settings = rules, optimizer
                return
            self._optimizer.close()
            self._optimizer = None
            self._updates = 0
        self._optimizer = _dcp.ShardOptimizer(
            self._shards,
            self._trained.layout,
            self._trained.weights,
            self._trained.sums,
            [tensor.shape for tensor in self._trained.tensors],
            rules,
            no_windows=not self.windows,
        )
        self._rules, self._settings = rules, optimizer

    def _rules_of(self, optimizer: Any) -> list[tuple[Any, ...]]:
        tensors = [(tensor.name, tensor.shape) for tensor in self._trained.tensors]
        return [rule.core() for rule in optimizer.rules(tensors)]

    def _has_state_of(self, rules: list[tuple[Any, ...]]) -> bool:
        return [rule[0] for rule in rules] == [rule[0] for rule in self._rules]

    def _use(self, optimizer: Any) -> None:
        """Update with these settings from now on; state is never dropped on the way."""
        if self._optimizer is None and self._updates > 0:
            raise _dcp.StateError(
                f"update_count = {self._updates}, but no state was loaded: call set_optimizer "
                "first, then load into shards()"
            )
        if self._optimizer is not None and not self._has_state_of(self._rules_of(optimizer)):
            raise _dcp.ArgumentError(
                f"optimizer {optimizer.name!r} needs another state than "
                f"{self._settings.name!r} has here: set_optimizer starts anew"
            )
        self.set_optimizer(optimizer)

    def _agree_on_step(self, optimizer: Any, rate: float, skip: bool) -> None:
        """All ranks are about to make the same update. Collective."""
        digest = hashlib.sha256(repr((self._rules, skip)).encode()).digest()
        numbers = [self._updates, rate, optimizer.clip or 0.0, int.from_bytes(digest[:6], "big")]
        rows = self.world.allgatherv(np.array(numbers, np.float64)).reshape(-1, len(numbers))
        for rank, row in enumerate(rows):
            if row.tobytes() != rows[0].tobytes():
                first, other = (f"{int(x[0])}, {x[1]:g} and {x[2]:g}" for x in (rows[0], row))
                raise _dcp.MismatchError(
                    f"ranks disagree before an update: update_count, lr and clip are {first} on "
                    f"rank 0, {other} on rank {rank}; or the optimizer's other settings differ"
                )

    def step(
        self,
        optimizer: Any,
        *,
        lr: float | None = None,
        replicated: Iterable[Any] = (),
        nonfinite: Literal["stop", "skip"] = "stop",
    ) -> UpdateResult:
        """Reduce what is not yet reduced, clip, update the shards, zero the gradients. Collective.

        Parameters
        ----------
        optimizer : dcp.optim.Optimizer
            Its state is made at its first step; clips to ``optimizer.clip``.
        lr : float, optional
            Learning rate; default ``optimizer.lr_at(update_count)``.
        replicated : iterable of float32 arrays
            Gradients of ignored tensors, for the norm only: they are the caller's to update.
        nonfinite : {"stop", "skip"}
            A gradient that is not finite: raise `dcp.NumericError`, or change nothing and go on.

        Raises
        ------
        dcp.ArgumentError
            The state that is there belongs to another optimizer: see `set_optimizer`.
        dcp.StateError
            `update_count` was set, but no optimizer, so that its state is missing.
        dcp.MismatchError
            Ranks disagree on the rate, clipping, the optimizer or `update_count`.
        """
        if optimizer is not self._settings:
            self._use(optimizer)
        rate = float(optimizer.lr_at(self._updates) if lr is None else lr)
        self._agree_on_step(optimizer, rate, nonfinite == "skip")
        norm = self.grad_norm(replicated=replicated)
        if not math.isfinite(norm):
            if nonfinite == "stop":
                raise _dcp.NumericError(
                    f"update {self._updates}: the gradient's norm is {norm}, stopped before it"
                )
            self.zero_gradients()
            return UpdateResult(norm, rate, True)
        scale = optimizer.clip / norm if optimizer.clip and norm > optimizer.clip else 1.0
        self._restart()
        self._optimizer.step(self._updates, rate, scale)
        self._updates += 1
        self.zero_gradients()
        self.world.barrier()  # the new weights are there
        return UpdateResult(norm, rate, False)

    # State

    def full_tensor(self, name: str, *, kind: str = "weights") -> NDArray[Any]:
        """A whole tensor from the shards of all ranks, as an array of its own. Collective.

        Parameters
        ----------
        name : str
            Of a tensor, tied ones included.
        kind : str
            "weights" (float32), "gradients" (those not yet reduced are), or a state of the
            optimizer that this tensor has ("adamw.m", ...), maybe of another shape: `kind_shapes`.

        Raises
        ------
        dcp.ArgumentError
            There is no such tensor, or it has no such state.
        dcp.StateError
            The gradient of a frozen tensor.
        """
        stored = self._name(name)
        part = self._part_of[stored]
        if kind not in ("weights", "gradients"):
            return self._full_state(stored, kind)
        buffer = part.weights if kind == "weights" else part.sums
        if buffer is None:
            raise _dcp.StateError(f"{name!r} is frozen: it has no gradient")
        if kind == "gradients":
            self._ensure_reduced()
        mine = [array for i, _, array in buffer.runs() if i == part.index[stored]]
        flat = self._shards.allgatherv(mine[0] if mine else np.zeros(0, np.float32))
        return flat.reshape(part.tensors[part.index[stored]].shape)

    def _full_state(self, name: str, kind: str) -> NDArray[Any]:
        """A tensor's state from all ranks' runs of it. Collective."""
        states = self._optimizer.states() if self._optimizer is not None else []
        found = {
            of: (np.dtype(dtype), shapes[self._trained.index[name]])
            for of, dtype, shapes in states
            if name not in self._frozen and self._trained.index[name] in shapes
        }
        if kind not in found:
            known = ["weights", "gradients"][: 1 if name in self._frozen else 2] + list(found)
            raise _dcp.ArgumentError(f"kind: {name!r} has no {kind!r}, only {', '.join(known)}")
        dtype, shape = found[kind]
        mine = [run for run in self.shards()[kind] if run.name == name]
        table = np.array([(run.first, run.array.size) for run in mine], np.int64).ravel()
        data = np.frombuffer(b"".join(run.array.tobytes() for run in mine), np.uint8)
        del mine
        tables = self._shards.allgatherv(table).reshape(-1, 2).tolist()
        flat = self._shards.allgatherv(data).view(dtype)
        out, start = np.zeros(math.prod(shape), dtype), 0
        for first, count in tables:
            out[first : first + count] = flat[start : start + count]
            start += count
        return out.reshape(shape)

    def shards(self, *, saving: bool = False) -> dict[str, list[Run]]:
        """This rank's part of the weights and of the optimizer's state, as writable views.

        For `dcp.checkpoint`; call `weights_changed` after writing weights. With `saving`, ranks of
        all copies but the first give nothing, so that a checkpoint holds everything once.
        """
        found: dict[str, list[Run]] = {"weights": []}
        for part in self._parts:
            found["weights"] += [
                Run(part.tensors[i].name, first, array) for i, first, array in part.weights.runs()
            ]
        for number, (kind, _) in enumerate(self._states()):
            found[kind] = [
                Run(self._trained.tensors[i].name, first, array)
                for i, first, array in self._optimizer.state_runs(number)
            ]
        for kind, runs in self._kept.items():
            found[kind] = found.get(kind, []) + runs
        if saving and self.world.rank >= self._shards.size:
            return {kind: [] for kind in found}
        return found

    def _states(self) -> list[tuple[str, dict[int, tuple[int, ...]]]]:
        states = self._optimizer.states() if self._optimizer is not None else []
        return [(kind, shapes) for kind, _, shapes in states]

    def kind_shapes(self) -> dict[str, dict[str, tuple[int, ...]]]:
        """Kind of state -> tensor -> shape, for kinds whose shape is not the tensor's."""
        names = [tensor.name for tensor in self._trained.tensors]
        found = {
            kind: {names[i]: tuple(shape) for i, shape in of.items()} for kind, of in self._states()
        }
        for kind, kept in self._kept_shapes.items():
            found[kind] = found.get(kind, {}) | kept
        shapes = self.shapes
        return {
            kind: of
            for kind, of in found.items()
            if any(shape != shapes[name] for name, shape in of.items())
        }

    def keep_state(
        self,
        states: Mapping[str, Mapping[str, Sequence[int]]],
        *,
        dtypes: Mapping[str, str] | None = None,
    ) -> None:
        """Make room in `shards` for state of tensors that were trained before and are frozen now.

        So what a checkpoint holds of them stays in the next one. Each rank has a part.

        Parameters
        ----------
        states : mapping
            Kind of state -> name of a frozen tensor -> shape of its state.
        dtypes : mapping, optional
            Kind of state -> dtype; default float32.

        Raises
        ------
        dcp.ArgumentError
            A name is no tensor, or is not frozen.
        """
        for kind, of in states.items():
            dtype = np.dtype((dtypes or {}).get(kind, "float32"))
            for name, given in of.items():
                if name not in self._part_of or name not in self._frozen:
                    raise _dcp.ArgumentError(f"states: {name!r} is no frozen tensor")
                shape = tuple(int(size) for size in given)
                self._kept_shapes.setdefault(kind, {})[name] = shape
                size, rank, ranks = math.prod(shape), self._shards.rank, self._shards.size
                first = size * rank // ranks
                count = size * (rank + 1) // ranks - first
                if count:
                    run = Run(name, first, np.zeros(count, dtype))
                    self._kept.setdefault(kind, []).append(run)

    def traffic(self) -> dict[str, int]:
        """Bytes moved and copied by this rank, and groups gathered and reduced, so far."""
        total = {"moved_bytes": 0, "copied_bytes": 0, "gathers": 0, "reduces": 0}
        for part in self._parts:
            for buffer in part.buffers():
                for key, count in buffer.traffic().items():
                    total[key] += count
        return total

    def memory(self) -> dict[str, int]:
        """Bytes that the core holds in this process: ``held`` now, ``peak`` at most."""
        return dict(_dcp.memory())

    def close(self) -> None:
        """Let go of all buffers. Arrays over them must be gone by then.

        Raises
        ------
        dcp.StateError
            Arrays still look into a buffer.
        """
        if self._optimizer is not None:
            self._optimizer.close()
            self._optimizer = None
        for part in self._parts:
            for buffer in part.buffers():
                buffer.close()
        if self.replicas > 1:
            self._shards.close()
            self._replicas.close()

    def __enter__(self) -> ShardedTensors:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self.close()

    def __repr__(self) -> str:
        count = sum(math.prod(tensor.shape) for tensor in self._stored)
        return (
            f"<dcp.ShardedTensors of {len(self._stored)} tensors, {count:,} elements, in "
            f"{len(self._group_names)} groups over {self.world.size} ranks>"
        )
