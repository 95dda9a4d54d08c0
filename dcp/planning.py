"""The step planner: the plan of one step.

A *plan* says which rank computes which sequences of a step, in which micro-batches. It is a pure
function of the lengths, the cost model, the world, the memory cap, the seed and the options, made
in C and proved before it is handed out. Lengths are in tokens, times in seconds, sizes in bytes.
"""

from __future__ import annotations

import dataclasses
import json
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dcp import _dcp
from dcp._dcp import ArgumentError
from dcp.cost import (
    KINDS,
    SCHEMA,
    CostModel,
    check_schema,
    lengths_array,
    recompute_counts,
    whole,
)

__all__ = ["CostModel", "MicroBatchPlan", "Plan", "plan", "split_steps", "strategies"]

_UINT64_MAX = (1 << 64) - 1


def strategies() -> tuple[str, ...]:
    """Names of the strategies that `plan` knows.

    Examples
    --------
    >>> from dcp import planning
    >>> "packed" in planning.strategies()
    True
    """
    return tuple(_dcp.plan_strategies())


@dataclass(frozen=True)
class MicroBatchPlan:
    """One micro-batch of a plan.

    Attributes
    ----------
    ranks : tuple of int
        The group that computes it: consecutive.
    sequences : tuple of int
        Indices into the plan's lengths.
    start_s, end_s : float
        Estimate, from the start of the step.
    bytes : int
        Estimate on each of its ranks, fixed part included.
    recompute : dict
        Layers per block kind that drop their activations; empty: none.
    round : int
        With ``rounds=True``, the round that it runs in; else 0.
    """

    ranks: tuple[int, ...]
    sequences: tuple[int, ...]
    start_s: float
    end_s: float
    bytes: int
    recompute: dict[str, int]
    round: int = 0


@dataclass(frozen=True)
class PlanOptions:
    """What a plan depends on beside lengths, cost model and world; see `plan`."""

    strategy: str = "dcp"
    seed: int = 0
    memory_bytes: int | None = None
    max_tokens: int | None = None
    longest: int | None = None
    max_group: int | None = None
    rounds: bool = False
    fixed_group: int = 1
    fixed_recompute: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        if not isinstance(self.strategy, str):
            raise _dcp.DTypeError(f"strategy = {self.strategy!r} must be a name")
        whole("seed", self.seed, 0, _UINT64_MAX)
        for name, high in (
            ("memory_bytes", (1 << 63) - 1),
            ("max_tokens", (1 << 63) - 1),
            ("longest", (1 << 63) - 1),
            ("max_group", 1 << 20),
        ):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, whole(name, getattr(self, name), 1, high))
        whole("fixed_group", self.fixed_group, 1, 1 << 20)

    def request(self, lengths: NDArray[Any], cost: CostModel, world_size: int) -> tuple[Any, ...]:
        """The tuple that the core reads."""
        return (
            lengths,
            cost._core(),
            world_size,
            self.memory_bytes or 0,
            self.max_tokens or 0,
            self.longest or 0,
            self.max_group or 0,
            self.rounds,
            self.fixed_group,
            self.fixed_recompute,
            self.seed,
            self.strategy,
        )


class Plan:
    """The plan of one step, made by `plan`; read-only.

    Attributes
    ----------
    lengths : ndarray of int64, shape (sequences,)
        The step's sequences, in tokens.
    world_size : int
    cost : CostModel
    options : PlanOptions
        Strategy, seed, caps.
    winner : str
        The strategy whose candidate this is.
    hash : str
        128 bits in hexadecimal of everything that the plan depends on and decides.
    makespan, bound : float
        Seconds to the end of the last micro-batch, and the least that any plan could take.
    """

    def __init__(
        self,
        *,
        lengths: NDArray[np.int64],
        world_size: int,
        cost: CostModel,
        options: PlanOptions,
        fields: dict[str, Any],
    ) -> None:
        self.lengths = lengths
        self.world_size = world_size
        self.cost = cost
        self.options = options
        self.winner: str = fields["winner"]
        self.hash: str = fields["hash"]
        self.makespan: float = fields["makespan_s"]
        self.bound: float = fields["bound_s"]
        self._fields = fields

    @property
    def strategy(self) -> str:
        """Name of the strategy that was asked for.

        Examples
        --------
        >>> import dcp
        >>> dcp.plan([3], dcp.CostModel(token_s=1.0), world_size=1, strategy="packed").strategy
        'packed'
        """
        return self.options.strategy

    @property
    def memory_bytes(self) -> int | None:
        """Most bytes that one rank may hold; None: no cap.

        Examples
        --------
        >>> import dcp
        >>> dcp.plan([3], dcp.CostModel(token_s=1.0), world_size=1).memory_bytes is None
        True
        """
        return self.options.memory_bytes

    @property
    def gap(self) -> float:
        """makespan / bound - 1; 0 for an empty step.

        Examples
        --------
        >>> import dcp
        >>> dcp.plan([5, 5], dcp.CostModel(token_s=1.0), world_size=2).gap
        0.0
        """
        return self.makespan / self.bound - 1 if self.bound > 0 else 0.0

    @property
    def idle_share(self) -> float:
        """Share of the ranks' time before the makespan in which they wait.

        Examples
        --------
        >>> import dcp
        >>> dcp.plan([4, 2], dcp.CostModel(token_s=1.0), world_size=2, max_group=1).idle_share
        0.25
        """
        if self.makespan <= 0:
            return 0.0
        spans = self._fields["end_s"] - self._fields["start_s"]
        busy = float(np.sum(spans * np.diff(self._fields["rank_offsets"])))
        return max(0.0, 1 - busy / (self.makespan * self.world_size))

    @cached_property
    def _shares(self) -> dict[str, NDArray[np.float64]]:
        """Of each micro-batch: what each of its ranks computes and what its time goes into."""
        f, cost = self._fields, self.cost
        first, count = f["ranks"][f["rank_offsets"][:-1]], np.diff(f["rank_offsets"])
        lengths = self.lengths[f["sequences"]].astype(np.float64)
        starts = f["sequence_offsets"][:-1]
        tokens, squares = np.zeros(len(count)), np.zeros(len(count))
        if len(count):
            tokens = np.add.reduceat(lengths, starts)
            squares = np.add.reduceat(lengths * lengths, starts)
        node = cost.node_ranks or self.world_size
        tier = (first // node != (first + count - 1) // node).astype(np.int64)
        layers, mlps = np.maximum(f["recompute"] - 1, 0).T
        group_s, hop_s = np.array(cost.group_s)[tier], np.array(cost.hop_s)[tier]
        gather_s, exchange_s = np.array(cost.gather_s)[tier], np.array(cost.exchange_s)[tier]
        moved = tokens * (count - 1) / count * (gather_s + exchange_s / count)
        again = layers * (cost.layer_token_s * tokens + cost.layer_square_s * squares)
        again += mlps * cost.mlp_token_s * tokens
        return {
            "tokens": tokens / count,
            "squares": squares / count,
            "busy_s": f["end_s"] - f["start_s"],
            "communication_s": np.where(count > 1, group_s + hop_s * (count - 1), 0.0)
            + moved * (1 + layers * cost.layer_comm_share),
            "recompute_s": again / count,
        }

    def _share_of_busy(self, name: str) -> float:
        ranks = np.diff(self._fields["rank_offsets"])
        busy = float(np.sum(self._shares["busy_s"] * ranks))
        return float(np.sum(self._shares[name] * ranks)) / busy if busy > 0 else 0.0

    def _imbalance(self, name: str) -> float:
        f = self._fields
        sums = np.zeros(self.world_size)
        np.add.at(sums, f["ranks"], np.repeat(self._shares[name], np.diff(f["rank_offsets"])))
        return float(sums.max() / sums.mean() - 1) if sums.any() else 0.0

    @property
    def token_imbalance(self) -> float:
        """Most tokens of a rank over the mean of all ranks, less 1; a group shares its tokens.

        Examples
        --------
        >>> import dcp
        >>> plan = dcp.plan([3, 1], dcp.CostModel(token_s=1.0), world_size=2, max_group=1)
        >>> plan.token_imbalance
        0.5
        """
        return self._imbalance("tokens")

    @property
    def attention_imbalance(self) -> float:
        """As `token_imbalance`, of the sum of squared lengths.

        Examples
        --------
        >>> import dcp
        >>> plan = dcp.plan([3, 1], dcp.CostModel(token_s=1.0), world_size=2, max_group=1)
        >>> round(plan.attention_imbalance, 6)
        0.8
        """
        return self._imbalance("squares")

    @property
    def communication_share(self) -> float:
        """Share of the ranks' busy time that groups spend on exchanging, fixed part included.

        Examples
        --------
        >>> import dcp
        >>> cost = dcp.CostModel(token_s=1.0, gather_s=(0.5, 0.5))
        >>> plan = dcp.plan([4], cost, world_size=2, strategy="fixed", fixed_group=2)
        >>> round(plan.communication_share, 6)
        0.333333
        """
        return self._share_of_busy("communication_s")

    @property
    def recompute_share(self) -> float:
        """Share of the ranks' busy time that goes into computing activations again.

        Examples
        --------
        >>> import dcp
        >>> dcp.plan([4], dcp.CostModel(token_s=1.0), world_size=2).recompute_share
        0.0
        """
        return self._share_of_busy("recompute_s")

    @cached_property
    def micro_batches(self) -> list[MicroBatchPlan]:
        """All micro-batches; those of one rank come in the order of time.

        Examples
        --------
        >>> import dcp
        >>> plan = dcp.plan([3, 2, 1], dcp.CostModel(token_s=1.0), world_size=2)
        >>> [(m.ranks, m.sequences) for m in plan.micro_batches]
        [((0,), (0,)), ((1,), (1, 2))]
        """
        f = self._fields
        rank_ends, sequence_ends = f["rank_offsets"].tolist(), f["sequence_offsets"].tolist()
        ranks, sequences = f["ranks"].tolist(), f["sequences"].tolist()
        rows = zip(
            f["start_s"].tolist(),
            f["end_s"].tolist(),
            f["bytes"].tolist(),
            f["recompute"].tolist(),
            f["round"].tolist(),
            strict=True,
        )
        return [
            MicroBatchPlan(
                ranks=tuple(ranks[rank_ends[m] : rank_ends[m + 1]]),
                sequences=tuple(sequences[sequence_ends[m] : sequence_ends[m + 1]]),
                start_s=start,
                end_s=end,
                bytes=size,
                recompute={kind: n for kind, n in zip(KINDS, counts, strict=True) if n},
                round=number,
            )
            for m, (start, end, size, counts, number) in enumerate(rows)
        ]

    @cached_property
    def groups(self) -> list[tuple[int, int]]:
        """Every group of two or more ranks, (first rank, count), distinct and sorted.

        Examples
        --------
        >>> import dcp
        >>> dcp.plan([3, 2], dcp.CostModel(token_s=1.0), world_size=2, strategy="packed").groups
        []
        """
        return sorted({(m.ranks[0], len(m.ranks)) for m in self.micro_batches if len(m.ranks) > 1})

    def for_rank(self, rank: int) -> list[MicroBatchPlan]:
        """The micro-batches of one rank, in the order of time.

        Parameters
        ----------
        rank : int
            0 to world_size - 1.

        Examples
        --------
        >>> import dcp
        >>> plan = dcp.plan([3, 2, 1], dcp.CostModel(token_s=1.0), world_size=2)
        >>> [m.sequences for m in plan.for_rank(1)]
        [(1, 2)]
        """
        rank = operator.index(rank)
        if not 0 <= rank < self.world_size:
            raise ArgumentError(f"rank = {rank} must lie in 0..{self.world_size - 1}")
        return [m for m in self.micro_batches if rank in m.ranks]

    def verify(self) -> Plan:
        """Prove the plan: every sequence once, memory, ranks, times, and the hash.

        Returns
        -------
        Plan
            Itself.

        Raises
        ------
        dcp.ArgumentError
            Names the rule that is broken.

        Examples
        --------
        >>> import dcp
        >>> dcp.plan([3, 2], dcp.CostModel(token_s=1.0), world_size=2).verify().makespan
        2.5
        """
        found = _dcp.plan_verify(self._request(), self._fields, self.makespan, self.bound)
        if found != self.hash:
            raise ArgumentError(
                f"plan breaks the rule 'hash of what it says': hash is {self.hash}, found {found}"
            )
        return self

    def _request(self) -> tuple[Any, ...]:
        return self.options.request(self.lengths, self.cost, self.world_size)

    def to_json(self) -> dict[str, Any]:
        """The plan as a JSON object; `from_json` reads it back.

        Examples
        --------
        >>> import dcp
        >>> document = dcp.plan([3, 2], dcp.CostModel(token_s=1.0), world_size=1).to_json()
        >>> document["micro_batches"][0]["sequences"]
        [0, 1]
        """
        return {
            "schema": SCHEMA,
            "hash": self.hash,
            "world": self.world_size,
            "lengths": self.lengths.tolist(),
            "makespan_s": self.makespan,
            "bound_s": self.bound,
            "gap": self.gap,
            "idle_share": self.idle_share,
            "token_imbalance": self.token_imbalance,
            "attention_imbalance": self.attention_imbalance,
            "communication_share": self.communication_share,
            "recompute_share": self.recompute_share,
            **dataclasses.asdict(self.options),
            "winner": self.winner,
            "cost": self.cost.to_json(),
            "micro_batches": [
                {
                    "ranks": list(m.ranks),
                    "sequences": list(m.sequences),
                    "start_s": m.start_s,
                    "end_s": m.end_s,
                    "bytes": m.bytes,
                    "recompute": m.recompute,
                    "round": m.round,
                }
                for m in self.micro_batches
            ],
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any] | str) -> Plan:
        """Read what `to_json` wrote (the object or its text), and prove it.

        Raises
        ------
        dcp.ArgumentError
            A field is missing or wrong, or the plan breaks a rule: the message names it.

        Examples
        --------
        >>> import dcp
        >>> plan = dcp.plan([3, 2], dcp.CostModel(token_s=1.0), world_size=2)
        >>> dcp.Plan.from_json(plan.to_json()).hash == plan.hash
        True
        """
        if isinstance(document, str):
            try:
                document = json.loads(document)
            except ValueError as error:
                raise ArgumentError(f"plan is not JSON: {error}") from error
        if not isinstance(document, Mapping):
            raise ArgumentError("plan must be a JSON object")
        check_schema(document, "plan")
        try:
            return cls._parse(document).verify()
        except KeyError as error:
            raise ArgumentError(f"plan lacks the field {error}") from error
        except (TypeError, ValueError, OverflowError) as error:
            if isinstance(error, _dcp.Error):
                raise
            raise ArgumentError(f"plan has a field of the wrong kind: {error}") from error

    @classmethod
    def _parse(cls, document: Mapping[str, Any]) -> Plan:
        batches = _kind(document, "micro_batches", list)
        for i, batch in enumerate(batches):
            if not isinstance(batch, Mapping):
                raise ArgumentError(f"plan's micro_batches[{i}] = {batch!r} must be an object")
        ranks = _columns(batches, "ranks", np.int32)
        sequences = _columns(batches, "sequences", np.int64)
        recompute = [recompute_counts(_kind(b, "recompute", Mapping), 0) for b in batches]
        fields: dict[str, Any] = {
            "hash": str(document["hash"]),
            "makespan_s": _number(document["makespan_s"], "makespan_s"),
            "bound_s": _number(document["bound_s"], "bound_s"),
            "winner": str(document["winner"]),
            "rank_offsets": _offsets(ranks),
            "ranks": np.concatenate([np.zeros(0, np.int32), *ranks]),
            "sequence_offsets": _offsets(sequences),
            "sequences": np.concatenate([np.zeros(0, np.int64), *sequences]),
            "recompute": np.array(recompute, np.int32).reshape(len(batches), len(KINDS)),
            "start_s": _numbers(batches, "start_s"),
            "end_s": _numbers(batches, "end_s"),
            "bytes": _whole_numbers([b["bytes"] for b in batches], np.int64, "bytes"),
            "round": _whole_numbers([b.get("round", 0) for b in batches], np.int32, "round"),
        }
        options = {
            f.name: document[f.name] for f in dataclasses.fields(PlanOptions) if f.name in document
        }
        counts = _whole_numbers(
            _kind({"fixed_recompute": [0, 0], **options}, "fixed_recompute", list | tuple),
            np.int32,
            "fixed_recompute",
        )
        if len(counts) != len(KINDS):
            raise ArgumentError(f"plan's fixed_recompute must be {len(KINDS)} counts")
        options["fixed_recompute"] = (int(counts[0]), int(counts[1]))
        return cls(
            lengths=_whole_numbers(_kind(document, "lengths", list), np.int64, "lengths"),
            world_size=int(_whole_numbers([document["world"]], np.int64, "world")[0]),
            cost=CostModel.from_json(_kind(document, "cost", Mapping)),
            options=PlanOptions(**options),
            fields=fields,
        )

    def plot(self, **options: Any) -> Any:
        """Draw the plan with matplotlib; options as in `dcp.viz.plan_picture`.

        Returns
        -------
        matplotlib.axes.Axes
        """
        from dcp import viz

        return viz.plan_picture(self, **options)

    def __repr__(self) -> str:
        return (
            f"<dcp.Plan {self.strategy}: {len(self.lengths)} sequences, "
            f"{int(self.lengths.sum())} tokens on {self.world_size} ranks in "
            f"{len(self._fields['bytes'])} micro-batches, makespan {self.makespan:.4g} s "
            f"(bound +{self.gap:.2%}), hash {self.hash[:8]}>"
        )

    def _repr_html_(self) -> str:
        """A row a rank, a block a micro-batch, time to the right, as inline SVG."""
        from dcp import viz

        return f"<code>{escape(repr(self))}</code>{viz.plan_html(self)}"


def _offsets(lists: Sequence[NDArray[Any]]) -> NDArray[np.int64]:
    out = np.zeros(len(lists) + 1, np.int64)
    np.cumsum([len(x) for x in lists], out=out[1:])
    return out


def _kind(document: Mapping[str, Any], name: str, kind: Any) -> Any:
    """A field that must be a list or an object."""
    value = document[name]
    if not isinstance(value, kind):
        wanted = "an object" if kind is Mapping else "a list"
        raise ArgumentError(f"plan's {name} = {value!r:.60} must be {wanted}")
    return value


def _whole_numbers(
    values: Sequence[Any], dtype: type[np.signedinteger[Any]], name: str
) -> NDArray[Any]:
    limits = np.iinfo(dtype)
    numbers = []
    for i, value in enumerate(values):
        if not isinstance(value, int | np.integer) or isinstance(value, bool):
            raise ArgumentError(f"plan's {name}[{i}] = {value!r} must be a whole number")
        if not limits.min <= value <= limits.max:
            raise ArgumentError(f"plan's {name}[{i}] = {value} does not fit {np.dtype(dtype)}")
        numbers.append(value)
    return np.array(numbers, dtype)


def _number(value: Any, name: str) -> float:
    if not isinstance(value, int | float | np.number) or isinstance(value, bool):
        raise ArgumentError(f"plan's {name} = {value!r:.60} must be a number")
    return float(value)


def _numbers(batches: Sequence[Mapping[str, Any]], name: str) -> NDArray[np.float64]:
    values = [_number(b[name], f"micro_batches[{i}].{name}") for i, b in enumerate(batches)]
    return np.array(values, np.float64)


def _columns(
    batches: Sequence[Mapping[str, Any]], name: str, dtype: type[np.signedinteger[Any]]
) -> list[NDArray[Any]]:
    return [
        _whole_numbers(_kind(b, name, list), dtype, f"micro_batches[{i}].{name}")
        for i, b in enumerate(batches)
    ]


def _whole_lengths(array: NDArray[Any]) -> NDArray[Any]:
    """`array`, or an error that names the first of its items that is no integer."""
    if array.dtype.kind in "fO" and array.ndim == 1 and len(array):
        values = array.tolist()
        broken = [i for i, x in enumerate(values) if not isinstance(x, int | float) or x % 1]
        index = (broken or [0])[0]
        if broken or array.dtype.kind == "f":
            raise _dcp.DTypeError(f"lengths[{index}] = {values[index]!r} must be an integer")
    return array


def plan(
    lengths: ArrayLike,
    cost: CostModel,
    *,
    world_size: int,
    memory_bytes: int | None = None,
    strategy: str = "dcp",
    seed: int = 0,
    tokens_per_step: int | None = None,
    max_tokens: int | None = None,
    longest: int | None = None,
    max_group: int | None = None,
    rounds: bool = False,
    fixed_group: int = 1,
    fixed_recompute: str | Mapping[str, int] = "none",
) -> Plan:
    """Plan one step.

    Ranks may get different numbers of micro-batches, and none where sequences are few. Every
    sequence is planned exactly once, nothing is padded. Other threads run while it works.

    Parameters
    ----------
    lengths : array_like of int, shape (sequences,)
        Tokens of each sequence of the step, each >= 1; any integer type.
    cost : CostModel
        Seconds and bytes of a micro-batch.
    world_size : int
        Number of ranks.
    memory_bytes : int, optional
        Most bytes that one rank may hold, as the cost model counts them.
    strategy : str
        "dcp" chooses group sizes, recompute and packing jointly, prices what every other strategy
        would do, and returns the best. The others are baselines, see `strategies`; "fixed" runs
        `fixed_group` and `fixed_recompute`.
    seed : int
        Of the run: 0 to 2**64 - 1. It is part of the hash; these strategies draw no random numbers.
    tokens_per_step : int, optional
        The step's budget: lengths that add up to more are an error (see `split_steps`).
    max_tokens : int, optional
        Most tokens of one micro-batch on each of its ranks. Default: none where `memory_bytes` is
        given; else 4096, or the longest sequence if that is longer.
    longest : int, optional
        Longest sequence of the whole run, for strategies that settle once a run.
    max_group : int, optional
        Most ranks that share a sequence; default `world_size`.
    rounds : bool
        Whether all ranks move together, micro-batch by micro-batch, because each layer is gathered
        by all of them; else each runs on its own.
    fixed_group, fixed_recompute
        Ranks of every group and what is recomputed, of strategy "fixed".

    Returns
    -------
    Plan
        Proved.

    Raises
    ------
    dcp.ArgumentError
        A length, the world or an option breaks its rule, or the strategy is not known.
    dcp.InfeasibleError
        A sequence fits nowhere: the message names its index, length, bytes needed, the cap and the
        smallest world that would do. Or the cap is less than what a rank holds in any case.
    dcp.DTypeError
        lengths are not integers.

    Examples
    --------
    >>> import dcp
    >>> cost = dcp.CostModel(token_s=1e-6, square_s=1e-9, gather_s=(1e-6, 1e-5))
    >>> plan = dcp.plan([4000, 300, 200, 2500, 40, 1900], cost, world_size=2)
    >>> [(m.ranks, m.sequences) for m in plan.micro_batches]
    [((0,), (0,)), ((1,), (3,)), ((1,), (1, 2, 4, 5))]
    """
    if not isinstance(cost, CostModel):
        raise _dcp.DTypeError(f"cost must be a dcp.CostModel, got {type(cost).__name__}")
    world_size = whole("world_size", world_size, 1, 1 << 20)
    options = PlanOptions(
        strategy=strategy,
        seed=seed,
        memory_bytes=memory_bytes,
        max_tokens=max_tokens,
        longest=longest,
        max_group=max_group,
        rounds=bool(rounds),
        fixed_group=fixed_group,
        fixed_recompute=recompute_counts(fixed_recompute, cost.layer_count),
    )
    array = _whole_lengths(lengths_array(lengths))
    fields = _dcp.plan(options.request(array, cost, world_size))
    own = np.array(array, np.int64)
    own.flags.writeable = False
    if tokens_per_step is not None and own.sum() > whole("tokens_per_step", tokens_per_step, 1):
        raise ArgumentError(
            f"lengths add up to {own.sum()} tokens, more than tokens_per_step = {tokens_per_step}: "
            "cut them into steps first"
        )
    return Plan(
        lengths=own,
        world_size=world_size,
        cost=cost,
        options=options,
        fields=fields,
    )


def split_steps(lengths: ArrayLike, tokens_per_step: int) -> list[slice]:
    """Cut a list of sequences into steps: in order, until the next would pass the budget.

    Parameters
    ----------
    lengths : array_like of int
        Tokens of each sequence.
    tokens_per_step : int
        The budget. A sequence longer than it makes a step of its own.

    Returns
    -------
    list of slice
        One a step; together they cover the list.

    Examples
    --------
    >>> from dcp import planning
    >>> planning.split_steps([3, 3, 3, 9, 1], 6)
    [slice(0, 2, None), slice(2, 3, None), slice(3, 4, None), slice(4, 5, None)]
    """
    budget = whole("tokens_per_step", tokens_per_step, 1)
    array = np.asarray(lengths_array(lengths), np.int64)
    ends = np.concatenate([[0], np.cumsum(array)])
    steps, first = [], 0
    while first < len(array):
        last = int(np.searchsorted(ends, ends[first] + budget, side="right")) - 1
        last = max(last, first + 1)
        steps.append(slice(first, last))
        first = last
    return steps
