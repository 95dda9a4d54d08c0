"""A model sharded over ranks: each owns a shard of the weights, and does a share of the work.

Two settings decide who holds what; results are the same. With *windows* ranks read each other's
weights where they lie, one copy a machine; without, each layer's weights are gathered by all ranks
when a pass comes to them. Gradients are reduced once a *step*, from a full copy on every rank, or
by *layer*, as soon as its backward pass ends, so that a rank holds a shard of them only.

==========  ==========  ==========================  ==========================  ===================
`windows`   `reduce`    weights of a rank           gradients of a rank         micro-batches
==========  ==========  ==========================  ==========================  ===================
True        "step"      a shard                     all                         any number
True        "layer"     a shard                     a shard, two groups         as many on all ranks
False       "step"      a shard, one group          all                         as many on all ranks
False       "layer"     a shard, one group          a shard, one group          as many on all ranks
==========  ==========  ==========================  ==========================  ===================

A group is a layer, the embedding, or final norm and head. Tied embeddings add themselves once, and
so does, without windows, the largest group where *prefetch* gathers the next one ahead.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, overload

import numpy as np
from numpy.typing import NDArray

from dcp import _dcp
from dcp.checkpoint import Run

if TYPE_CHECKING:
    from dcp.models import Model, Transformer1D
    from dcp.optim_base import Optimizer
    from dcp.sharded_tensors import ShardedTensors
    from dcp.world import World

__all__ = ["ShardedModel", "StepResult", "fully_shard"]

_WEIGHTS, _GRADIENTS = range(2)  # dcp_sharded_kind_t
_SEQUENCE_KINDS = ("auto", "ulysses", "ring")  # dcp_sequence_kind_t


class MicroBatchLike(Protocol):
    """What a micro-batch must offer; `dcp.loader.MicroBatch` does.

    It may also have `group`, (first rank, count) of the ranks that share its rows (default: this
    rank alone), and `recompute`, (layers, MLPs) that drop their activations (default: none).
    """

    @property
    def tokens(self) -> NDArray[np.int32]: ...
    @property
    def offsets(self) -> NDArray[np.int64]: ...
    @property
    def labels(self) -> NDArray[np.int32]: ...
    @property
    def weights(self) -> NDArray[np.float32] | None: ...
    @property
    def row_ids(self) -> NDArray[np.int64] | None: ...


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did; the same on every rank but for `seconds`.

    Attributes
    ----------
    loss : float
        Sum over all ranks of the scaled loss: with ``scale = 1/N`` the mean per trainable token.
    grad_norm : float
        Norm of the whole gradient before clipping.
    seconds : float
        Wall time of the step on this rank.
    busy_s : list of float
        Seconds that each rank computed.
    skipped : bool
        True if nothing was changed: no trainable token, or not finite.
    gathered_bytes, reduced_bytes : int
        What this rank received of others: weights to gather layers, gradients to sum them.
    reduce_count : int
        Reductions of the step, counted: 1, or with ``reduce="layer"`` one a micro-batch; 0 where
        gradients were not finite and so no codes were sent.
    statistics_s : float
        Seconds that measuring took this rank.
    observation : dict or None
        With ``statistics=True`` what a controller learns from: fields of ``dcp_observation_t``.
    """

    loss: float
    grad_norm: float
    seconds: float
    busy_s: list[float]
    skipped: bool
    gathered_bytes: int = 0
    reduced_bytes: int = 0
    reduce_count: int = 1
    statistics_s: float = 0.0
    observation: dict[str, Any] | None = None


class ShardedModel:
    """Made by `fully_shard`, which says what the settings mean.

    Each rank owns, updates and saves its shard of the weights and of the optimizer's state.
    Methods marked *collective* must be called by all ranks in the same order, and by one thread at
    a time of a process, beside which no other thread computes with dcp. A context manager.

    Examples
    --------
    >>> import dcp
    >>> with dcp.init("self") as world:
    ...     tiny = dcp.Transformer1D.preset("tiny")
    ...     with dcp.fully_shard(tiny, world, frozen=["*norm*"]) as model:
    ...         model.parameters()["model.norm.weight"].tolist()[:2], len(model.frozen)
    ([1.0, 1.0], 9)
    """

    def __init__(
        self,
        config: Transformer1D,
        world: World,
        *,
        block_rows: int = 1,
        seed: int = 0,
        frozen: Sequence[str] = (),
        initialise: bool = True,
        forward_only: bool = False,
        windows: bool = True,
        reduce: Literal["step", "layer"] = "step",
        device: str = "cpu",
        sequence_parallel: Literal["auto", "ulysses", "ring"] = "auto",
        prefetch: int = 0,
        gather: Literal["layer", "step"] = "layer",
        machine_ranks: int = 1,
    ) -> None:
        if gather not in ("layer", "step"):
            raise _dcp.ArgumentError(f'gather = {gather!r} must be "layer" or "step"')
        if prefetch not in (0, 1):
            raise _dcp.ArgumentError(f"prefetch = {prefetch!r} must be 0 or 1")
        if reduce not in ("step", "layer"):
            raise _dcp.ArgumentError(f'reduce = {reduce!r} must be "step" or "layer"')
        if sequence_parallel not in _SEQUENCE_KINDS:
            raise _dcp.ArgumentError(
                f"sequence_parallel = {sequence_parallel!r} must be one of {_SEQUENCE_KINDS}"
            )
        self.config = config
        self.world = world
        tensors = config.tensors()
        self._names = [name for name, _ in tensors]
        self._frozen = _match(self._names, frozen)
        self._core = _dcp.Sharded(
            world,
            config.core(),
            device=device,
            block_rows=block_rows,
            seed=seed,
            initialise=initialise,
            forward_only=forward_only,
            sequence_parallel=_SEQUENCE_KINDS.index(sequence_parallel),
            frozen=np.array([name in self._frozen for name in self._names], np.uint8),
            no_windows=not windows,
            reduce_layer=reduce == "layer",
            prefetch=bool(prefetch),
            gather_step=gather == "step",
            machine_ranks=machine_ranks,
        )
        self.gather = gather
        self.windows = bool(windows)
        self.reduce = reduce
        self._updates = 0
        self._optimizer: Optimizer | None = None
        self._kept: dict[str, list[Run]] = {}  # state of frozen tensors, by kind
        self._kept_dtypes: dict[str, np.dtype[Any]] = {}
        self._kept_shapes: dict[str, dict[str, tuple[int, ...]]] = {}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor, by Hugging Face name, in model order."""
        return {name: tuple(shape) for name, shape, _, _ in self._core.tensors()}

    @property
    def frozen(self) -> frozenset[str]:
        """Names of the tensors that are not trained."""
        return frozenset(self._frozen)

    @property
    def update_count(self) -> int:
        """Optimizer updates done so far: Adam's t. Set it when loading a checkpoint."""
        return self._updates

    @update_count.setter
    def update_count(self, value: int) -> None:
        self._updates = int(value)

    @property
    def in_rounds(self) -> bool:
        """Whether all ranks must run equally many micro-batches: see `dcp.rounds.pad_rounds`."""
        return not self.windows or self.reduce == "layer"

    def parameters(self) -> dict[str, NDArray[np.float32]]:
        """The whole weights, by name, read-only: views without a copy.

        Without windows no rank has them: then they are gathered, *collective*, a full copy on
        every rank.
        """
        if not self.windows:
            gathered = self._gather(_WEIGHTS)
            for array in gathered.values():
                array.flags.writeable = False
            return gathered
        return {name: self._core.tensor_view(_WEIGHTS, i) for i, name in enumerate(self._names)}

    def _gather(self, kind: int) -> dict[str, NDArray[np.float32]]:
        """Whole tensors from the shards of all ranks. Collective."""
        runs = self._core.runs(kind)
        table = np.array([(t, first, array.size) for t, first, array in runs], np.int64).ravel()
        values = np.concatenate([array for _, _, array in runs] or [np.zeros(0, np.float32)])
        tables = self.world.allgatherv(table).reshape(-1, 3)
        flat = self.world.allgatherv(values)
        shapes = list(self.shapes.values())
        out = [np.zeros(int(np.prod(shape)), np.float32) for shape in shapes]
        start = 0
        for tensor, first, count in tables.tolist():
            out[tensor][first : first + count] = flat[start : start + count]
            start += count
        return {
            name: array.reshape(shape)
            for name, array, shape in zip(self._names, out, shapes, strict=True)
        }

    def shards(self) -> dict[str, list[Run]]:
        """This rank's part of the weights and of the optimizer's state, as writable views.

        Kinds are "weights" and the states of the optimizer that is set ("adamw.m", ...), each of
        the tensors that have it: frozen tensors have none, unless `keep_state` brought it. A state
        whose shape is not the tensor's is in `kind_shapes`. Call `weights_changed` after writing
        weights.
        """
        shards = {"weights": self._runs(self._core.runs(_WEIGHTS))}
        for number, (kind, _, _) in enumerate(self._core.states()):
            shards[kind] = self._runs(self._core.state_runs(number))
        for kind, runs in self._kept.items():
            shards[kind] = shards.get(kind, []) + runs
        return shards

    def _runs(self, runs: Iterable[tuple[int, int, NDArray[Any]]]) -> list[Run]:
        return [Run(self._names[tensor], first, array) for tensor, first, array in runs]

    def state_names(self) -> dict[str, list[str]]:
        """Kind of state -> the tensors that have it, over all ranks; empty before one is set."""
        return {
            kind: [self._names[tensor] for tensor in shapes]
            for kind, _, shapes in self._core.states()
        }

    def local_range(self, name: str) -> tuple[int, int]:
        """First element and number of elements of a tensor that this rank owns; (0, 0): none."""
        index = self._index(name)
        for tensor, first, array in self._core.runs(_WEIGHTS):
            if tensor == index:
                return first, int(array.size)
        return 0, 0

    def full_tensor(self, name: str, *, kind: str = "weights") -> NDArray[Any]:
        """A whole tensor from the shards of all ranks, as an array of its own. Collective.

        Parameters
        ----------
        name : str
            Of a tensor.
        kind : str
            "weights", or a state of the optimizer that this tensor has ("adamw.m", ...), which may
            have a shape of its own: `kind_shapes`.

        Raises
        ------
        dcp.ArgumentError
            There is no such tensor, or it has no such state.
        """
        shape = self.shapes[self._names[self._index(name)]]
        names = {"weights": self._names} | self.state_names()
        if name not in [*names.get(kind, ()), *self._kept_shapes.get(kind, ())]:
            known = [k for k, of in names.items() if name in of]
            raise _dcp.ArgumentError(f"{name!r} has no {kind!r}, only {', '.join(known)}")
        shape = self.kind_shapes().get(kind, {}).get(name, shape)
        runs = [run for run in self.shards()[kind] if run.name == name]
        table = np.array([(run.first, run.array.size) for run in runs], np.int64).ravel()
        values = b"".join(run.array.tobytes() for run in runs)
        dtype = self._state_dtype(kind)
        out = np.zeros(math.prod(shape), dtype)
        tables = self.world.allgatherv(table).reshape(-1, 2).tolist()
        flat = self.world.allgatherv(np.frombuffer(values, np.uint8)).view(dtype)
        start = 0
        for first, count in tables:
            out[first : first + count] = flat[start : start + count]
            start += count
        return out.reshape(shape)

    def _state_dtype(self, kind: str) -> np.dtype[Any]:
        """Of a kind, also on a rank that holds nothing of it."""
        dtypes = {name: np.dtype(dtype) for name, dtype, _ in self._core.states()}
        return dtypes.get(kind, self._kept_dtypes.get(kind, np.dtype(np.float32)))

    def _index(self, name: str) -> int:
        if name not in self._names:
            raise _dcp.ArgumentError(f"{name!r} is no tensor of this model")
        return self._names.index(name)

    def kind_shapes(self) -> dict[str, dict[str, tuple[int, ...]]]:
        """Kind of state -> tensor -> shape, for the kinds whose shape is not the tensor's.

        Runs of these kinds in `shards` count elements of that shape.
        """
        shapes = self.shapes
        found = {
            kind: {self._names[tensor]: shape for tensor, shape in of.items()}
            for kind, _, of in self._core.states()
        }
        for kind, kept in self._kept_shapes.items():
            found[kind] = found.get(kind, {}) | kept
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

        `dcp.Trainer` calls it when it resumes, so that what was learned before a tensor was frozen
        stays in the checkpoints. The arrays are NumPy's own, each rank has its part.

        Parameters
        ----------
        states : mapping
            Kind of state -> name of a frozen tensor -> shape of its state.
        dtypes : mapping, optional
            Kind of state -> dtype; default float32.

        Raises
        ------
        dcp.ArgumentError
            A name is no tensor of this model, or is not frozen.
        """
        shapes = self.shapes
        weights = self._runs(self._core.runs(_WEIGHTS))
        for kind, of in states.items():
            dtype = np.dtype((dtypes or {}).get(kind, "float32"))
            self._kept_dtypes[kind] = dtype
            for name, shape in of.items():
                if name not in shapes:
                    raise _dcp.ArgumentError(f"states: {name!r} is no tensor of this model")
                if name not in self._frozen:
                    raise _dcp.ArgumentError(f"states: {name!r} is trained: its state is there")
                self._kept_shapes.setdefault(kind, {})[name] = tuple(shape)
                if tuple(shape) == shapes[name]:
                    parts = [(run.first, run.array.size) for run in weights if run.name == name]
                else:  # any cut serves, as long as ranks cover it once
                    size, rank, ranks = math.prod(shape), self.world.rank, self.world.size
                    first = size * rank // ranks
                    parts = [(first, size * (rank + 1) // ranks - first)]
                self._kept.setdefault(kind, []).extend(
                    Run(name, first, np.zeros(count, dtype)) for first, count in parts if count
                )

    def set_optimizer(self, optimizer: Optimizer, *, keep: bool = False) -> None:
        """Make the optimizer's state, zero, beside this rank's shard. Collective.

        State of an earlier optimizer is dropped, and `update_count` is 0 again; arrays from
        `shards` must be gone by then. With `keep` the state that is there goes on under new
        numbers, as in `step`; the first optimizer gets its state either way.

        Raises
        ------
        dcp.ArgumentError
            A rule of the optimizer is broken, a group matches no tensor, or, with `keep`, the
            optimizer needs another state.
        dcp.MismatchError
            Ranks have different optimizers.
        """
        if keep:
            self._use(optimizer)
            return
        self._core.set_optimizer(self._rules(optimizer), False)
        self._optimizer = optimizer
        self._updates = 0

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer whose state is there; None before one is set."""
        return self._optimizer

    def _rules(self, optimizer: Optimizer) -> list[tuple[Any, ...]]:
        return [rule.core() for rule in optimizer.rules(list(self.shapes.items()))]

    def _use(self, optimizer: Optimizer) -> None:
        """Update with these settings from now on: the first ones, or others for the same state."""
        if self._optimizer is None:
            if self._updates > 0:
                raise _dcp.StateError(
                    f"update_count = {self._updates}, but no state was loaded: call "
                    "set_optimizer first, then load into shards()"
                )
            self._core.set_optimizer(self._rules(optimizer), False)
        elif optimizer is not self._optimizer and optimizer != self._optimizer:
            try:
                self._core.set_optimizer(self._rules(optimizer), True)
            except _dcp.ArgumentError as error:
                raise _dcp.ArgumentError(
                    f"optimizer {optimizer.name!r}: this model has the state of "
                    f"{self._optimizer.name!r}; ShardedModel.set_optimizer starts anew ({error})"
                ) from error
        self._optimizer = optimizer

    def weights_changed(self) -> None:
        """Publish weights that were written through `shards`. Collective."""
        self._core.publish()

    def step(
        self,
        micro_batches: Sequence[MicroBatchLike],
        *,
        scale: float,
        trainable: int,
        lr: float,
        step: int,
        optimizer: Optimizer,
        plan_hash: str = "0",
        dropout_seed: int = 0,
        nonfinite: Literal["stop", "skip"] = "stop",
        groups: Sequence[tuple[int, int]] = (),
        precision: str = "fp32",
        hadamard: bool = False,
        nearest: bool = False,
        feedback: bool = True,
        quantise_seed: int = 0,
        statistics: bool = False,
    ) -> StepResult:
        """One optimizer step over this rank's micro-batches. Collective.

        Parameters
        ----------
        micro_batches : sequence
            This rank's share, any number of them, none included; as many as on every other rank
            where `in_rounds`, else `dcp.MismatchError` on all ranks.
        scale : float
            Factor of every token's loss: 1/N for the N trainable tokens of all ranks.
        trainable : int
            N. With 0 nothing is updated.
        lr : float
            Learning rate of this step.
        step : int
            Number of the step; must agree on all ranks.
        optimizer : dcp.optim.Optimizer
            Settings of the update. The first one is set (`set_optimizer`); a later one may have
            other numbers, for the same state.
        plan_hash : str
            Hexadecimal; must agree on all ranks, else `dcp.MismatchError` before anything runs.
        dropout_seed : int
            Seed of this step's dropout masks.
        nonfinite : {"stop", "skip"}
            What to do, on all ranks alike, when loss or gradient is not finite: raise
            `dcp.NumericError`, or change nothing and go on.
        groups : sequence of (first rank, count)
            Every group of two or more ranks that any micro-batch of the step has, on any rank;
            the same on all ranks: `dcp.Plan.groups`.
        precision : {"fp32", "bf16", "fp8_e4m3", "fp8_e5m2", "int8", "int4"}
            In how many bits gradients travel: each rank quantises what goes to every other once,
            sums are taken in fp32. Needs ``reduce="step"``.
        hadamard : bool
            Rotate each block of 128 before it is quantised, which spreads outliers.
        nearest : bool
            Round to nearest instead of stochastically.
        feedback : bool
            Keep what the codes leave out (4 bytes a parameter on every rank, from the first such
            step on) and add it to what is sent next; in fp32 all of it is sent. Without, what was
            kept before is added once. A step without trainable tokens leaves it as it is.
        quantise_seed : int
            Of the random bits; with the step's number and the rank it decides them.
        statistics : bool
            Measure what a controller needs, in `StepResult.observation`. Needs ``reduce="step"``.
        """
        self._use(optimizer)
        result = self._core.step(
            micro_batches,
            scale=scale,
            step=step,
            update_count=self._updates,
            trainable_count=trainable,
            plan_hash=int(plan_hash, 16) & 0xFFFFFFFFFFFFFFFF,
            clip=optimizer.clip or 0.0,  # 0: no clipping
            lr=lr,
            skip_nonfinite=nonfinite == "skip",
            dropout_seed=dropout_seed,
            groups=groups,
            precision=precision,
            hadamard=hadamard,
            nearest=nearest,
            feedback=feedback,
            quantise_seed=quantise_seed,
            statistics=statistics,
        )
        if not result["skipped"]:
            self._updates += 1
        return StepResult(**result)

    @property
    def core(self) -> Any:
        """What functions and types of the C module take, such as ``dcp._dcp.Controller.step``."""
        return self._core

    def note_step(self, precision: str, multiple: int, seconds: float) -> None:
        """Complete the observation of the latest step for a controller. Collective.

        Parameters
        ----------
        precision, multiple
            The arm that it ran with.
        seconds : float
            How long all of it took on this rank; the longest counts.
        """
        self._core.note_step(precision, multiple, seconds)

    def residual(self, *, make: bool = False) -> list[Run]:
        """What quantising left out so far on this rank, whole tensors, as writable views.

        Empty before the first step with `feedback` in fewer bits than fp32; with `make`,
        *collective*, there is one from now on, zero at first, and the next step sends what was
        written. Every rank has its own.
        """
        return self._runs(self._core.residual(make))

    def accumulate(
        self,
        micro_batches: Sequence[MicroBatchLike],
        *,
        scale: float,
        step: int = 0,
        plan_hash: str = "0",
        dropout_seed: int = 0,
        groups: Sequence[tuple[int, int]] = (),
        statistics: bool = False,
    ) -> float:
        """Add this rank's micro-batches to the gradients, without an update. Collective.

        The next `step` (or `loss_and_gradients`) includes them: what it does is bit for bit what
        one call with all micro-batches, in this order, would do. Ranks exchange the loss and no
        gradients, unless ``reduce="layer"``, where every pass sums its layers' gradients as always.
        Dropout masks depend on `row_ids`, which should differ between the calls of one step.
        Checkpoints do not hold what is accumulated. Where the step measures `statistics`, so must
        these calls, or its observation has no squares of micro-batches (None).

        Returns
        -------
        float
            Sum over all ranks of the scaled loss, of this and the calls before since the last step.
        """
        return float(
            self._core.accumulate(
                micro_batches,
                scale=scale,
                step=step,
                plan_hash=int(plan_hash, 16) & 0xFFFFFFFFFFFFFFFF,
                dropout_seed=dropout_seed,
                groups=groups,
                statistics=statistics,
            )
        )

    def loss_and_gradients(
        self,
        micro_batches: Sequence[MicroBatchLike],
        *,
        scale: float,
        dropout_seed: int = 0,
        groups: Sequence[tuple[int, int]] = (),
    ) -> tuple[float, dict[str, NDArray[np.float32]]]:
        """Loss and the whole gradient, summed over ranks; no update. Collective.

        Meant for checks: every rank gets a full copy of the gradient.
        """
        loss = self._core.gradients(
            micro_batches, scale=scale, dropout_seed=dropout_seed, groups=groups
        )
        return loss, self._gather(_GRADIENTS)

    def evaluate(
        self,
        micro_batches: Sequence[MicroBatchLike],
        *,
        scale: float,
        groups: Sequence[tuple[int, int]] = (),
    ) -> float:
        """Sum over all ranks of the scaled loss, without dropout and gradients. Collective.

        Ranks may bring different numbers of micro-batches, whatever the settings. Micro-batches
        of several ranks come in the same round on all of these where there are no windows.
        """
        return float(self._core.evaluate(micro_batches, scale, groups))

    def parameters_sha256(self) -> str:
        """SHA-256 of all parameters' bytes, in the order of their names.

        Collective where there are no windows, as `parameters`.
        """
        digest = hashlib.sha256()
        for _, array in sorted(self.parameters().items()):
            digest.update(array.data)
        return digest.hexdigest()

    def memory(self) -> dict[str, int]:
        """Bytes that the core holds in this process: ``held`` now, ``peak`` at most."""
        return dict(_dcp.memory())

    def close(self) -> None:
        """Let go of all buffers. Arrays from `parameters` and `shards` must be gone by then."""
        self._core.close()

    def __enter__(self) -> ShardedModel:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        count = self.config.parameter_count()
        return f"<dcp.ShardedModel of {count:,} parameters over {self.world.size} ranks>"


@overload
def fully_shard(
    model: Model | Transformer1D,
    world: World,
    *,
    block_rows: int = 1,
    seed: int = 0,
    frozen: Sequence[str] = (),
    windows: bool = True,
    reduce: Literal["step", "layer"] = "step",
    sequence_parallel: Literal["auto", "ulysses", "ring"] = "auto",
    compute_dtype: Literal["float32", "bfloat16"] | None = None,
    prefetch: int = 0,
    gather: Literal["layer", "step"] = "layer",
    machine_ranks: int = 1,
) -> ShardedModel: ...


@overload
def fully_shard(
    model: Mapping[str, Any] | Sequence[tuple[str, Any]], world: World, **options: Any
) -> ShardedTensors: ...


def fully_shard(
    model: Model | Transformer1D | Mapping[str, Any] | Sequence[tuple[str, Any]],
    world: World,
    *,
    block_rows: Any = 1,
    seed: int = 0,
    frozen: Sequence[str] = (),
    windows: bool = True,
    reduce: Literal["step", "layer"] = "step",
    sequence_parallel: Literal["auto", "ulysses", "ring"] = "auto",
    compute_dtype: Literal["float32", "bfloat16"] | None = None,
    prefetch: int = 0,
    gather: Literal["layer", "step"] = "layer",
    machine_ranks: int = 1,
    **options: Any,
) -> ShardedModel | ShardedTensors:
    """Shard parameters, gradients and optimizer state over the ranks of a world. Collective.

    Shards are cut only at block borders (RaggedShard of veScale-FSDP, arXiv 2602.22437). With
    windows they lie in shared memory: the gathered weights *are* the shards, one set a machine, no
    copy. See `dcp.sharded` for a table of what each rank holds.

    Parameters
    ----------
    model : dcp.Model, dcp.Transformer1D, or a mapping or list of (name, tensor)
        A model whose weights are taken over (the same on every rank), or a configuration whose
        weights are initialised from `seed`, each rank its own shard. Tensors of any other model
        make a `dcp.sharded_tensors.ShardedTensors`, which see for its further settings.
    world : dcp.World
        The ranks.
    block_rows : int
        Rows (of the last dimension) that must stay on one rank, at least 1.
    seed : int
        Of the initial weights.
    frozen : sequence of str
        Names or ``*`` patterns of tensors that are not trained.
    windows : bool
        Whether ranks read each other's weights in place. Without, each group of tensors is gathered
        by all ranks when a pass comes to it, and dropped when it leaves.
    reduce : {"step", "layer"}
        When gradients are summed over ranks: once a step (least traffic; every rank holds all
        gradients), or as each layer's backward pass ends (a shard of the gradients; as many times
        the traffic as there are micro-batches).
    sequence_parallel : {"auto", "ulysses", "ring"}
        How the ranks of a group share attention: by heads, evenly or not ("ulysses", arXiv
        2309.14509), by rows in zigzag order ("ring", arXiv 2310.01889), or by heads as far as the
        group's size and the number of heads have a common divisor, and the rest by rows.
    compute_dtype : {"float32", "bfloat16"}, optional
        What products multiply, instead of what the configuration says: see `dcp.Transformer1D`.
        With "bfloat16" and without windows, groups are gathered in bfloat16: half the bytes.
    prefetch : int
        Of a model without windows: how many groups of tensors are gathered ahead, 0 or 1, while a
        pass computes. 1 holds a second group and takes a thread; it pays where links, not the cores
        that also compute, do the gathering. Results are the same bits.
    gather : {"layer", "step"}
        Of a model without windows: whether gathered weights are dropped as a pass leaves them, or
        stay until they change, which moves them once a step and holds a whole copy.
    machine_ranks : int
        Ranks of one machine, in a row; divides the ranks. Above 1 gradients in few bits are first
        summed in fp32 among the ranks of a machine: only machines exchange codes.

    Returns
    -------
    ShardedModel or ShardedTensors

    Raises
    ------
    dcp.ArgumentError
        A setting breaks a rule, or a pattern of `frozen` names no tensor.

    Examples
    --------
    >>> import dcp
    >>> with dcp.init("self") as world:
    ...     with dcp.fully_shard(dcp.Transformer1D.preset("tiny"), world) as model:
    ...         len(model.shapes) == len(model.parameters())
    True
    """
    if isinstance(model, Mapping | list | tuple):
        from dcp.sharded_tensors import ShardedTensors

        if prefetch:
            raise TypeError(
                "fully_shard: 'prefetch' is a setting of models; tensors have the method `prefetch`"
            )
        if gather != "layer" or machine_ranks != 1:
            raise TypeError("fully_shard: 'gather' and 'machine_ranks' are settings of models")
        return ShardedTensors(
            model,
            world,
            block_rows=block_rows,
            frozen=frozen,
            windows=windows,
            reduce=reduce,
            compute_dtype=compute_dtype or "float32",
            **options,
        )
    if options:
        raise TypeError(
            f"fully_shard: {sorted(options)[0]!r} is a setting of tensors, not of models"
        )
    config: Any = getattr(model, "config", model)
    if compute_dtype is not None:
        config = dataclasses.replace(config, compute_dtype=compute_dtype)
    source = model.parameters() if hasattr(model, "parameters") else None
    sharded = ShardedModel(
        config,
        world,
        block_rows=block_rows,
        seed=seed,
        frozen=frozen,
        initialise=source is None,
        windows=windows,
        reduce=reduce,
        sequence_parallel=sequence_parallel,
        prefetch=prefetch,
        gather=gather,
        machine_ranks=machine_ranks,
    )
    if source is not None:
        for run in sharded.shards()["weights"]:
            run.array[:] = source[run.name].reshape(-1)[run.first : run.first + run.array.size]
        del run
        sharded.weights_changed()
    return sharded


def _match(names: Sequence[str], patterns: Sequence[str]) -> set[str]:
    found: set[str] = set()
    for pattern in patterns:
        hits = fnmatch.filter(names, pattern)
        if not hits:
            raise _dcp.ArgumentError(f"frozen: {pattern!r} names no tensor of this model")
        found.update(hits)
    return found
