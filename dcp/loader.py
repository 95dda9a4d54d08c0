"""From a data set to the micro-batches of one rank: sampler and loader.

The sampler picks the sequences of every step: an epoch is a seeded permutation of the data, and a
step takes sequences in that order until the next one would pass the token budget; the last step of
an epoch is what is left. So a step is the same for every strategy and world, every sequence comes
exactly once an epoch, and the whole state is (epoch, position). The loader plans each step one step
ahead, in a thread, and hands a rank its own micro-batches only.

The budget is `tokens_per_step` times a multiple that may change between any two steps: where a step
starts does not depend on it, only where it ends. A step that was planned ahead for another multiple
is dropped and planned again, which is cheap and changes nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dcp._dcp import ArgumentError, InfeasibleError
from dcp.cost import CostModel, whole
from dcp.data import Documents
from dcp.planning import MicroBatchPlan, Plan, plan, split_steps

__all__ = ["Loader", "MicroBatch", "Sampler", "Step"]

_logger = logging.getLogger("dcp")
_STATE_VERSION = 1
MOST_MULTIPLE = 1 << 16
S = TypeVar("S")


class WorldLike(Protocol):
    """What the loader asks of a world; `dcp.World` has it."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...


class Sampler:
    """Picks the sequences of each step: a pure function of (lengths, seed, epoch, position).

    Parameters
    ----------
    lengths : array_like of int, shape (sequences,)
        Tokens of each sequence.
    tokens_per_step : int
        Most tokens of a step, at least the longest sequence.
    seed : int
        0 to 2**64 - 1.

    Raises
    ------
    dcp.ArgumentError
        `tokens_per_step` is less than the longest sequence, or there is no sequence.

    Examples
    --------
    >>> from dcp.loader import Sampler
    >>> sampler = Sampler([3, 3, 3, 3], tokens_per_step=9, seed=0)
    >>> picked, epoch, position = sampler.step(0, 0)
    >>> len(picked), epoch, position
    (3, 0, 3)
    >>> [len(sampler.step(epoch, position)[0]), *sampler.step(epoch, position)[1:]]
    [1, 1, 0]
    """

    def __init__(self, lengths: ArrayLike, *, tokens_per_step: int, seed: int = 0) -> None:
        self.lengths = np.asarray(lengths, np.int64)
        self.tokens_per_step = whole("tokens_per_step", tokens_per_step, 1)
        self.seed = whole("seed", seed, 0, (1 << 64) - 1)
        if len(self.lengths) == 0:
            raise ArgumentError("there is no sequence to train on")
        longest = int(self.lengths.max())
        if longest > self.tokens_per_step:
            raise ArgumentError(
                f"tokens_per_step = {tokens_per_step} is less than the longest sequence, {longest} "
                "tokens: raise it or lower data.max_length"
            )
        self._epoch: tuple[int, NDArray[np.int64], NDArray[np.int64]] | None = None

    def order(self, epoch: int) -> NDArray[np.int64]:
        """The permutation of an epoch.

        It sorts raw words of the counter-based Philox generator, a stream that NumPy keeps for
        good, so a run can be resumed under another version.

        Examples
        --------
        >>> from dcp.loader import Sampler
        >>> sampler = Sampler([1] * 5, tokens_per_step=5)
        >>> sorted(sampler.order(3).tolist())
        [0, 1, 2, 3, 4]
        """
        words = np.random.Philox(key=self.seed + (epoch << 64)).random_raw(len(self.lengths))
        return np.argsort(words, kind="stable")

    def step(
        self, epoch: int, position: int, *, multiple: int = 1
    ) -> tuple[NDArray[np.int64], int, int]:
        """The step that starts at `position` of `epoch`, of `multiple` times `tokens_per_step`.

        Returns
        -------
        sequences : ndarray of int64
            At least one.
        epoch, position : int
            Where the next step starts.

        Examples
        --------
        See `Sampler`.
        """
        cached = self._epoch  # one read: another thread may be in another epoch
        if cached is None or cached[0] != epoch:
            fresh = self.order(epoch)
            ends = np.concatenate([[0], np.cumsum(self.lengths[fresh])])
            cached = self._epoch = (epoch, fresh, ends)
        _, order, ends = cached
        budget = ends[position] + min(multiple * self.tokens_per_step, int(ends[-1]))
        last = int(np.searchsorted(ends, budget, side="right")) - 1
        following = (epoch, last) if last < len(order) else (epoch + 1, 0)
        return order[position:last], *following


@dataclass(frozen=True)
class MicroBatch:
    """What one rank computes at once: whole sequences, one after the other.

    Attributes
    ----------
    tokens : ndarray of int32, shape (T,)
    offsets : ndarray of int64, shape (sequences + 1,)
        Borders of the sequences.
    labels : ndarray of int32, shape (T,)
        Target of each position, -100: not trained on.
    weights : ndarray of float32, shape (T,), or None
        Weight of each position's loss; None: 1.
    row_ids : ndarray of int64, shape (T,)
        Number of each token in its step, whatever the plan.
    group : tuple of two ints
        (first rank, count) of the ranks that share it. All of them hold all its sequences.
    recompute : tuple of two ints
        (layers, MLPs) that drop their activations.
    """

    tokens: NDArray[np.int32]
    offsets: NDArray[np.int64]
    labels: NDArray[np.int32]
    weights: NDArray[np.float32] | None
    row_ids: NDArray[np.int64]
    group: tuple[int, int]
    recompute: tuple[int, int]


@dataclass(frozen=True)
class Step:
    """One step as one rank sees it.

    Attributes
    ----------
    index : int
        Number of the step, from 0.
    epoch : int
    plan : dcp.Plan
        Of all ranks.
    sequences : ndarray of int64, shape (sequences,)
        Numbers of the data set's pieces, in the order of the step.
    lengths : ndarray of int64, shape (sequences,)
        Their tokens.
    trainable : int
        Tokens with a target, of all ranks: N.
    sequence_count : int
        Sequences of all ranks.
    scale : float
        Factor of every loss: 1/N, or with ``weighting="sequence"`` one over the number of
        sequences with a target; 0 where nothing is trained on.
    micro_batches : list of MicroBatch
        This rank's, in the order of time; may be empty.
    """

    index: int
    epoch: int
    plan: Plan
    sequences: NDArray[np.int64]
    lengths: NDArray[np.int64]
    trainable: int
    sequence_count: int
    scale: float
    micro_batches: list[MicroBatch]


class PlannedSteps(Generic[S]):
    """What every loader does: plans ahead in a thread, and goes on where it stopped.

    A subclass gives `_build`, a pure function from a place (epoch, position, step) and the multiple
    of the token budget to the step there and the next place, and keeps its place in `_epoch`,
    `_position` and `_index`.
    """

    def __init__(self, world: WorldLike, cost: CostModel, options: Mapping[str, Any]) -> None:
        self._costs: list[tuple[int, CostModel]] = [(0, cost)]
        self.rank, self.size = int(world.rank), int(world.size)
        self._options = {"world_size": self.size, **options}
        self._epoch, self._position, self._index = 0, 0, 0
        self._multiple = 1

    def _plan(self, lengths: NDArray[np.int64], index: int = 0) -> Plan:
        """The plan of step `index`, with the cost model that was set for it."""
        return plan(lengths, self._cost_at(index), **self._options)

    def _cost_at(self, index: int) -> CostModel:
        return next(cost for first, cost in reversed(self._costs) if first <= index)

    @property
    def cost(self) -> CostModel:
        """The cost model of the next step.

        Examples
        --------
        See `use_cost`.
        """
        return self._cost_at(self._index)

    def use_cost(self, cost: CostModel, *, first: int) -> None:
        """Plan steps from `first` on with another cost model. Call it on every rank alike.

        Parameters
        ----------
        cost : dcp.CostModel
        first : int
            Number of a step that is not being planned yet: while step n runs, step n + 1 is.

        Raises
        ------
        dcp.ArgumentError
            The step is planned already, or being planned.

        Examples
        --------
        >>> import dcp
        >>> from types import SimpleNamespace
        >>> text = dcp.data.TextFiles("stdlib", max_length=512)
        >>> world, cost = SimpleNamespace(rank=0, size=2), dcp.CostModel(token_s=1.0)
        >>> loader = dcp.Loader(text, world, cost, tokens_per_step=4096)
        >>> steps = iter(loader)
        >>> loader.use_cost(dcp.CostModel(token_s=2.0), first=next(steps).index + 2)
        >>> [next(steps).plan.cost.token_s for _ in range(2)]
        [1.0, 2.0]
        """
        if whole("first", first, 0) <= self._index:
            raise ArgumentError(
                f"first = {first}: step {self._index} is being planned already, so it must be "
                f">= {self._index + 1}"
            )
        kept = [(at, one) for at, one in self._costs if at < first]
        # of those that begin at or before the next step, the last one counts
        past = [at for at, _ in kept if at <= self._index]
        self._costs = [*((at, one) for at, one in kept if at >= max(past)), (first, cost)]

    def costs_dict(self) -> list[dict[str, Any]]:
        """The cost models of the next step and of those after it, as plain data.

        Examples
        --------
        >>> import dcp
        >>> from types import SimpleNamespace
        >>> text = dcp.data.TextFiles("stdlib", max_length=512)
        >>> world = SimpleNamespace(rank=0, size=1)
        >>> one, two = (
        ...     dcp.Loader(text, world, dcp.CostModel(token_s=t), tokens_per_step=4096)
        ...     for t in (1.0, 2.0)
        ... )
        >>> two.load_costs_dict(one.costs_dict())
        >>> two.cost.token_s
        1.0
        """
        return [{"first": first, "cost": cost.to_json()} for first, cost in self._costs]

    def load_costs_dict(self, costs: Sequence[Mapping[str, Any]]) -> None:
        """Go on with the cost models of `costs_dict`.

        Raises
        ------
        dcp.ArgumentError
            A field is missing, or none is for the next step.

        Examples
        --------
        See `costs_dict`.
        """
        try:
            found = [(int(one["first"]), CostModel.from_json(one["cost"])) for one in costs]
        except KeyError as error:
            raise ArgumentError(f"cost models lack the field {error}") from error
        if not any(first <= self._index for first, _ in found):
            raise ArgumentError(f"cost models: none is for step {self._index}")
        self._costs = sorted(found, key=lambda one: one[0])

    def use_multiple(self, multiple: int) -> None:
        """Let the next step and those after it have `multiple` times `tokens_per_step` tokens.

        Call it on every rank alike, between two steps; the last call before a step counts. The
        order of the data stays, and every sequence comes once an epoch, whatever the multiples.

        Parameters
        ----------
        multiple : int
            1 to 65,536. Evaluations do not follow it.

        Raises
        ------
        dcp.ArgumentError
            It is no such number.

        Examples
        --------
        >>> import dcp
        >>> from types import SimpleNamespace
        >>> text = dcp.data.TextFiles("stdlib", max_length=512)
        >>> world, cost = SimpleNamespace(rank=0, size=2), dcp.CostModel(token_s=1.0)
        >>> loader = dcp.Loader(text, world, cost, tokens_per_step=4096)
        >>> steps = iter(loader)
        >>> first = next(steps)
        >>> loader.use_multiple(4)
        >>> int(first.lengths.sum()) <= 4096, 15000 < int(next(steps).lengths.sum()) <= 4 * 4096
        (True, True)
        """
        self._multiple = whole("multiple", multiple, 1, MOST_MULTIPLE)

    @property
    def multiple(self) -> int:
        """Multiple of `tokens_per_step` that the next step has.

        Examples
        --------
        See `use_multiple`.
        """
        return self._multiple

    def __iter__(self) -> Iterator[S]:
        """Steps from the loader's place on. A new iterator goes on where the last one stopped."""
        with ThreadPoolExecutor(1, thread_name_prefix="dcp-plan") as ahead:
            wanted = (*self._place(), self._multiple)
            coming = ahead.submit(self._build, *wanted)
            while True:
                # a state was loaded, another iterator went on, or the budget changed
                if wanted != (now := (*self._place(), self._multiple)):
                    wanted = now
                    coming.cancel()
                    coming = ahead.submit(self._build, *wanted)
                step, place = coming.result()
                wanted = (*place, self._multiple)
                coming = ahead.submit(self._build, *wanted)
                self._epoch, self._position, self._index = place
                self._taken(step)
                yield step

    def _place(self) -> tuple[int, int, int]:
        return self._epoch, self._position, self._index

    def _build(
        self, epoch: int, position: int, index: int, multiple: int
    ) -> tuple[S, tuple[int, int, int]]:
        """The step at a place, and the place after it; runs ahead, so it changes nothing."""
        raise NotImplementedError

    def _taken(self, step: S) -> None:
        """Called with every step before it is handed out."""

    def _same(self) -> dict[str, Any]:
        """What must be the same for a state to mean the same."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """The place of the next step, its multiple, and what must be the same to go on.

        It does not depend on the world, so a run resumes exactly on another number of ranks.

        Returns
        -------
        dict
            Plain integers and text; give it to `load_state_dict`.

        Examples
        --------
        See `load_state_dict`.
        """
        epoch, position, step = self._place()
        place = {"epoch": epoch, "position": position, "step": step}
        return {**place, "multiple": self._multiple, **self._same()}

    def _load_state(self, state: Mapping[str, Any], last_position: Callable[[int], int]) -> None:
        state = {"multiple": 1, **state}  # those of earlier versions have none
        missing = set(self.state_dict()) - set(state)
        if missing:
            raise ArgumentError(f"loader state lacks {sorted(missing)}")
        for key, value in self._same().items():
            if state[key] != value:
                what = "the data (files, max_length, long)" if key == "data" else key
                raise ArgumentError(
                    f"loader state is of other settings: {what} is {state[key]!r} there and "
                    f"{value!r} here"
                )
        epoch, step = whole("epoch", state["epoch"], 0), whole("step", state["step"], 0)
        position = whole("position", state["position"], 0, last_position(epoch))
        multiple = whole("multiple", state["multiple"], 1, MOST_MULTIPLE)
        self._epoch, self._position, self._index = epoch, position, step
        self._multiple = multiple


def in_rounds(made: Plan, rank: int) -> list[MicroBatchPlan | None]:
    """A rank's micro-batch of every round, None where it has none, in the order of time.

    Examples
    --------
    >>> import dcp
    >>> from dcp.loader import in_rounds
    >>> cost = dcp.CostModel(token_s=1.0)
    >>> made = dcp.plan([3], cost, world_size=2, strategy="fixed", rounds=True)
    >>> sorted(str(in_rounds(made, rank)[0])[:4] for rank in (0, 1))
    ['Micr', 'None']
    """
    if not made.options.rounds:
        return list(made.for_rank(rank))
    rounds = 1 + max((m.round for m in made.micro_batches), default=-1)
    mine = {m.round: m for m in made.for_rank(rank)}
    return [mine.get(number) for number in range(rounds)]


def setting_of(planned: MicroBatchPlan | None, rank: int) -> dict[str, tuple[int, int]]:
    """`group` and `recompute` of a micro-batch; None: an empty one of this rank alone.

    Examples
    --------
    >>> from dcp.loader import setting_of
    >>> setting_of(None, 3)
    {'group': (3, 1), 'recompute': (0, 0)}
    """
    if planned is None:
        return {"group": (rank, 1), "recompute": (0, 0)}
    counts = planned.recompute
    return {
        "group": (planned.ranks[0], len(planned.ranks)),
        "recompute": (counts.get("layer", 0), counts.get("mlp", 0)),
    }


class Loader(PlannedSteps[Step]):
    """Yields the steps of a run, without end. Make one on every rank, with equal arguments.

    Parameters
    ----------
    dataset : dcp.data.Documents
        For example `dcp.data.TextFiles`.
    world : dcp.World
        Anything with `rank` and `size`.
    cost : dcp.CostModel
        What the planner balances.
    tokens_per_step : int
        Most tokens of a step of all ranks, at least `dataset.max_length`.
    strategy : str
        As `dcp.plan`.
    seed : int
        Decides the order of the data.
    memory_bytes : int, optional
        Most that one rank may hold.
    weighting : {"token", "sequence"}
        Whether all tokens of a step count alike, or all sequences do.
    eval_share : float
        About how many of the documents are held out, by a hash of their content.
    max_tokens, max_group, rounds, fixed_group, fixed_recompute
        As `dcp.plan`. With ``rounds=True`` every rank gets equally many micro-batches: those that
        are missing are empty.

    Raises
    ------
    dcp.ArgumentError
        `tokens_per_step` below `dataset.max_length`, an unknown strategy or weighting.
    dcp.InfeasibleError
        The longest sequence fits nowhere: index, length, bytes needed, and the world that would do.

    Examples
    --------
    >>> import dcp
    >>> from types import SimpleNamespace
    >>> text = dcp.data.TextFiles("stdlib", max_length=512)
    >>> world = SimpleNamespace(rank=1, size=4)
    >>> loader = dcp.Loader(text, world, dcp.CostModel(token_s=1.0), tokens_per_step=8192)
    >>> step = next(iter(loader))
    >>> 7000 < step.trainable <= 8192, len(step.micro_batches) >= 1, loader.state_dict()["step"]
    (True, True, 1)
    """

    def __init__(
        self,
        dataset: Documents,
        world: WorldLike,
        cost: CostModel,
        *,
        tokens_per_step: int,
        strategy: str = "dcp",
        seed: int = 0,
        memory_bytes: int | None = None,
        weighting: Literal["token", "sequence"] = "token",
        eval_share: float = 0.01,
        max_tokens: int | None = None,
        max_group: int | None = None,
        rounds: bool = False,
        fixed_group: int = 1,
        fixed_recompute: str | Mapping[str, int] = "none",
    ) -> None:
        if weighting not in ("token", "sequence"):
            raise ArgumentError(f"weighting = {weighting!r} must be 'token' or 'sequence'")
        tokens_per_step = whole("tokens_per_step", tokens_per_step, 1)
        if tokens_per_step < dataset.max_length:
            raise ArgumentError(
                f"tokens_per_step = {tokens_per_step} is less than data.max_length = "
                f"{dataset.max_length}: the longest document would not fit into a step"
            )
        options = {
            "memory_bytes": memory_bytes,
            "strategy": strategy,
            "seed": seed,
            "max_tokens": max_tokens,
            "longest": int(dataset.lengths.max()),
            "max_group": max_group,
            "rounds": bool(rounds),
            "fixed_group": fixed_group,
            "fixed_recompute": fixed_recompute,
        }
        super().__init__(world, cost, options)
        self.dataset, self.strategy = dataset, strategy
        self.tokens_per_step, self.seed = tokens_per_step, seed
        self.weighting, self.eval_share = weighting, eval_share
        self._train, self._held_out = dataset.held_out(eval_share)
        self._sampler = Sampler(
            dataset.lengths[self._train], tokens_per_step=tokens_per_step, seed=seed
        )
        self._warned = False
        self._check_longest()

    def _check_longest(self) -> None:
        """Whether every sequence fits is decided before the first step, not when it comes."""
        lengths = self.dataset.lengths
        longest = int(np.argmax(lengths))
        self._plan(lengths[:0])  # a cap below what every rank holds is no sequence's fault
        try:
            self._plan(lengths[longest : longest + 1])
        except InfeasibleError as error:
            raise InfeasibleError(
                f"{self.dataset.name}: sequence {longest} of {lengths[longest]} tokens fits "
                f"nowhere, lower data.max_length or raise the memory cap ({error})"
            ) from error

    def _taken(self, step: Step) -> None:
        if step.trainable == 0 and self.rank == 0 and not self._warned:
            self._warned = True
            _logger.warning("step %d: no token has a target, nothing to learn", step.index)

    def _build(
        self, epoch: int, position: int, index: int, multiple: int
    ) -> tuple[Step, tuple[int, int, int]]:
        picked, next_epoch, next_position = self._sampler.step(epoch, position, multiple=multiple)
        step = self._step(
            self._train[picked],
            index=index,
            epoch=epoch,
            weighting=self.weighting,
            planned_as=index,
        )
        return step, (next_epoch, next_position, index + 1)

    def _step(
        self,
        sequences: NDArray[np.int64],
        *,
        index: int,
        epoch: int,
        weighting: str,
        planned_as: int,
        scale: float | None = None,
    ) -> Step:
        lengths = self.dataset.lengths[sequences]
        trainable = self.dataset.trainable[sequences]
        total = int(trainable.sum())
        if scale is None:
            count = total if weighting == "token" else int(np.count_nonzero(trainable))
            scale = 1.0 / count if count else 0.0
        made = self._plan(lengths, planned_as)
        starts = np.cumsum(lengths) - lengths
        return Step(
            index=index,
            epoch=epoch,
            plan=made,
            sequences=sequences,
            lengths=lengths,
            trainable=total,
            sequence_count=len(sequences),
            scale=scale,
            micro_batches=[
                self._micro_batch(sequences, lengths, trainable, starts, batch, weighting)
                for batch in in_rounds(made, self.rank)
            ],
        )

    def _micro_batch(
        self,
        sequences: NDArray[np.int64],
        lengths: NDArray[np.int64],
        trainable: NDArray[np.int64],
        starts: NDArray[np.int64],
        planned: MicroBatchPlan | None,
        weighting: str,
    ) -> MicroBatch:
        chosen = planned.sequences if planned is not None else ()
        offsets = np.zeros(len(chosen) + 1, np.int64)
        np.cumsum(lengths[list(chosen)], out=offsets[1:])
        count = int(offsets[-1])
        tokens, labels = np.empty(count, np.int32), np.empty(count, np.int32)
        row_ids = np.arange(count, dtype=np.int64)
        weights = np.ones(count, np.float32) if weighting == "sequence" else None
        for i, sequence in enumerate(chosen):
            run = slice(int(offsets[i]), int(offsets[i + 1]))
            self.dataset.write(int(sequences[sequence]), tokens[run], labels[run])
            row_ids[run] += starts[sequence] - offsets[i]
            if weights is not None:
                weights[run] = 1.0 / max(1, int(trainable[sequence]))
        return MicroBatch(
            tokens,
            offsets,
            labels,
            weights,
            row_ids,
            **setting_of(planned, self.rank),
        )

    def evaluation(self, *, tokens: int) -> Iterator[Step]:
        """The held-out sequences, the same ones in the same order every time and for every seed.

        Parameters
        ----------
        tokens : int
            About how many: sequences are taken until the next one would pass it, at least one.

        Yields
        ------
        Step
            Their `scale` is one over the trainable tokens of the whole evaluation, so that the sum
            of the scaled losses of all is the mean per token. Nothing where nothing is held out.

        Examples
        --------
        >>> import dcp
        >>> from types import SimpleNamespace
        >>> text = dcp.data.TextFiles("stdlib", max_length=512)
        >>> loader = dcp.Loader(text, SimpleNamespace(rank=0, size=1), dcp.CostModel(token_s=1.0),
        ...                     tokens_per_step=4096, eval_share=0.05)
        >>> 7000 < sum(step.trainable for step in loader.evaluation(tokens=8192)) <= 8192
        True
        """
        budget = whole("tokens", tokens, 1)
        ends = np.cumsum(self.dataset.lengths[self._held_out])
        if len(ends) == 0:
            return
        chosen = self._held_out[: max(1, int(np.searchsorted(ends, budget, side="right")))]
        total = int(self.dataset.trainable[chosen].sum())
        scale = 1.0 / total if total else 0.0
        parts = split_steps(self.dataset.lengths[chosen], self.tokens_per_step)
        for index, part in enumerate(parts):
            yield self._step(
                chosen[part],
                index=index,
                epoch=0,
                weighting="token",
                planned_as=self._index,
                scale=scale,
            )

    def _same(self) -> dict[str, Any]:
        return {
            "version": _STATE_VERSION,
            "seed": self.seed,
            "tokens_per_step": self.tokens_per_step,
            "eval_share": self.eval_share,
            "data": self.dataset.fingerprint(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken.

        Raises
        ------
        dcp.ArgumentError
            The state is of other data or settings; names them.

        Examples
        --------
        >>> import dcp
        >>> from types import SimpleNamespace
        >>> text = dcp.data.TextFiles("stdlib", max_length=512)
        >>> def loader(size):
        ...     world = SimpleNamespace(rank=0, size=size)
        ...     return dcp.Loader(text, world, dcp.CostModel(token_s=1.0), tokens_per_step=4096)
        >>> first, second = loader(4), loader(2)
        >>> steps = iter(first)
        >>> _ = next(steps)
        >>> second.load_state_dict(first.state_dict())
        >>> bool((next(steps).sequences == next(iter(second)).sequences).all())
        True
        """
        self._load_state(state, lambda epoch: len(self._train) - 1)
