"""Measure a model and fit the cost model to it.

Steps of a few shapes run on two depths of the model, with each recompute choice and each group size
that the ranks offer. Every cost is linear in the number of layers, so that two depths give that of
any: ``latency = a0 + a1 L`` and so on. Terms are fitted by non-negative least squares on relative
errors; steps with sequences of mixed lengths are left out of the fit, and judge it. Bytes are not
measured: the core reckons them for the very model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dcp import fitting
from dcp._dcp import ArgumentError
from dcp.cost import CostModel, Measured, Residual, whole

if TYPE_CHECKING:
    from dcp.models import Model, Transformer1D
    from dcp.world import World

__all__ = ["fit_times", "profile"]

# Share of the communication that a layer computed again repeats: keys and values pass forward and
# backward, their gradients backward; one pass of three. Fixed, since a share of a fitted term
# cannot be fitted along with it.
COMM_SHARE = 1 / 3
MOST_TOKENS, LEAST_TOKENS, MOST_TURNS = 8192, 256, 50


@dataclass(frozen=True)
class _Job:
    """One step that is timed: the same micro-batch, or group of ranks' micro-batch, on all."""

    lengths: tuple[int, ...]
    micro_batches: int
    ranks: int
    recompute: tuple[int, int]
    layers: int
    held_out: bool = False

    def row(self, seconds: float) -> Residual:
        return Residual(
            sequences=len(self.lengths),
            tokens=sum(self.lengths),
            squares=sum(n * n for n in self.lengths),
            micro_batches=self.micro_batches,
            ranks=self.ranks,
            recompute=self.recompute,
            layers=self.layers,
            measured_s=seconds,
            predicted_s=0.0,
            held_out=self.held_out,
        )


def profile(
    model: Model | Transformer1D,
    world: World | None = None,
    *,
    ranks: int | None = None,
    depths: tuple[int, int] | None = None,
    max_tokens: int | None = None,
    repeats: int = 3,
    seconds: float = 20.0,
    seed: int = 0,
    on_progress: Callable[[int, int], None] | None = None,
) -> CostModel:
    """Measure a model on this machine and fit the cost model to it.

    Parameters
    ----------
    model : dcp.Model or dcp.Transformer1D
        Whose shape is measured; weights are not touched.
    world : dcp.World, optional
        Ranks to measure on: collective, all of them call it and get the same. None: processes are
        started and ended.
    ranks : int, optional
        How many to start where `world` is None; default 1. Groups of up to so many are measured.
    depths : tuple of two int, optional
        Layers of the models that run. Default: half of the layers and all, for up to 4 layers; else
        2 and 4.
    max_tokens : int, optional
        Of the largest micro-batch; default what `seconds` allow, up to 8192.
    repeats : int
        Each step is timed so often, and more often where `seconds` allow; the shortest counts,
        since what disturbs only adds.
    seconds : float
        What the measurement should take, about.
    seed : int
        Of tokens and of the mixed lengths.
    on_progress : callable, optional
        Called with (steps done, steps in all); on rank 0.

    Returns
    -------
    CostModel
        With `measured`, `residuals` and `step_s`.

    Raises
    ------
    dcp.ArgumentError
        Depths that are not two different ones of the model's, or a count below 1.

    Examples
    --------
    >>> import dcp
    >>> config = dcp.Transformer1D(64, 16, 32, 2, 2)
    >>> cost = dcp.profile(config, max_tokens=256, repeats=1)
    >>> cost.layer_count, cost.measured.ranks, cost.time([200]) > 0
    (2, (1,), True)
    """
    given: Any = model
    config: Transformer1D = getattr(given, "config", given)
    options = _Options(
        depths=_depths(config.num_hidden_layers, depths),
        max_tokens=None if max_tokens is None else whole("max_tokens", max_tokens, 16),
        repeats=whole("repeats", repeats, 1),
        seconds=float(seconds),
        seed=whole("seed", seed, 0),
    )
    if not options.seconds > 0:
        raise ArgumentError(f"seconds = {seconds!r} must be > 0")
    if world is not None:
        if ranks not in (None, world.size):
            raise ArgumentError(f"ranks = {ranks} must be the world's {world.size}, or None")
        report = on_progress if world.rank == 0 else None
        return _profile_rank(world, config, options, report)
    import dcp

    def show(event: Any) -> None:
        if on_progress is not None:
            on_progress(*event)

    count = whole("ranks", 1 if ranks is None else ranks, 1)
    found: list[CostModel] = dcp.launch(_launched, count, (config, options), on_event=show)
    return found[0]


@dataclass(frozen=True)
class _Options:
    depths: tuple[int, int]
    max_tokens: int | None
    repeats: int
    seconds: float
    seed: int


def _depths(layers: int, depths: tuple[int, int] | None) -> tuple[int, int]:
    if depths is None:
        return (max(layers // 2, 1), layers) if layers <= 4 else (2, 4)
    low, high = sorted(depths)
    if not 1 <= low < high <= layers:
        raise ArgumentError(f"depths = {depths} must be two different numbers in 1..{layers}")
    return low, high


def _launched(world: World, config: Transformer1D, options: _Options) -> CostModel:
    return _profile_rank(world, config, options, lambda done, of: world.emit((done, of)))


def _profile_rank(
    world: World,
    config: Transformer1D,
    options: _Options,
    report: Callable[[int, int], None] | None,
) -> CostModel:
    """Measure on one rank; what it returns is the same on all."""
    with contextlib.ExitStack() as stack:
        timers = {
            depth: stack.enter_context(_Timer(world, config, depth, options.seed))
            for depth in sorted(set(options.depths))
        }
        tokens = options.max_tokens or _affordable(world, config, timers, options)
        jobs = list(_jobs(config, tokens, options.depths, world.size, options.seed))
        times = _measure(world, timers, jobs, options, report)
    rows = [job.row(min(taken)) for job, taken in zip(jobs, times, strict=True)]
    return fit_times(rows, config, ranks=world.size)


def _measure(
    world: World,
    timers: dict[int, _Timer],
    jobs: Sequence[_Job],
    options: _Options,
    report: Callable[[int, int], None] | None,
) -> list[list[float]]:
    """Time all steps turn by turn, so that a disturbance does not meet all times of one step."""
    times: list[list[float]] = [[] for _ in jobs]
    turns, done = options.repeats + 1, 0
    start = time.perf_counter()
    turn = 0
    while turn < turns:
        for job, taken in zip(jobs, times, strict=True):
            seconds = timers[job.layers].time(job)
            if turn > 0:  # the first turn warms up
                taken.append(seconds)
            done += 1
            if report is not None:
                report(done, turns * len(jobs))
        if turn == 0:
            each = world.allreduce(np.array([time.perf_counter() - start]), "max")[0]
            turns = max(turns, min(int(options.seconds / each), MOST_TURNS))
        turn += 1
    return times


class _Timer:
    """A model of some depth on the ranks, and the time of its steps."""

    def __init__(self, world: World, config: Transformer1D, layers: int, seed: int) -> None:
        import dcp

        self.world = world
        self.config = dataclasses.replace(config, num_hidden_layers=layers)
        self.model = dcp.fully_shard(self.config, world, seed=seed)
        self.optimizer = dcp.optim.AdamW()
        self.random = np.random.default_rng(seed)
        self.steps = 0

    def __enter__(self) -> _Timer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.world.barrier()  # the weights lie in windows of all ranks: leave together
        self.model.close()

    def time(self, job: _Job) -> float:
        """Seconds of a step on the slowest rank. Collective."""
        from dcp.loader import MicroBatch
        from dcp.models import next_token_labels

        size, rank = self.world.size, self.world.rank
        first = rank // job.ranks * job.ranks
        works = first + job.ranks <= size  # where groups do not divide the ranks, the last rest
        tokens = self.random.integers(0, self.config.vocab_size, sum(job.lengths), dtype=np.int32)
        offsets = np.concatenate([[0], np.cumsum(job.lengths)]).astype(np.int64)
        batch = MicroBatch(
            tokens=tokens,
            offsets=offsets,
            labels=next_token_labels(tokens, offsets).astype(np.int32),
            weights=None,
            row_ids=np.arange(len(tokens), dtype=np.int64),
            group=(first, job.ranks),
            recompute=job.recompute,
        )
        groups = [(g, job.ranks) for g in range(0, size - job.ranks + 1, job.ranks)]
        self.world.barrier()
        result = self.model.step(
            [batch] * job.micro_batches if works else [],
            scale=1.0 / max(len(tokens), 1),
            trainable=len(tokens),
            lr=0.0,
            step=self.steps,
            optimizer=self.optimizer,
            groups=groups if job.ranks > 1 else (),
        )
        self.steps += 1
        return float(self.world.allreduce(np.array([result.seconds]), "max")[0])


def _affordable(
    world: World, config: Transformer1D, timers: dict[int, _Timer], options: _Options
) -> int:
    """Tokens of the largest micro-batch that time and memory allow; a power of two."""
    deep = max(timers)
    trial = _Job((LEAST_TOKENS // 2,) * 2, 1, 1, (0, 0), deep)
    per_token = min(timers[deep].time(trial) for _ in range(4)) / LEAST_TOKENS
    jobs = _jobs(config, MOST_TOKENS, options.depths, world.size, 0)
    share = sum(sum(j.lengths) * j.micro_batches * j.layers / j.ranks for j in jobs)
    share = share / MOST_TOKENS / deep * (options.repeats + 1)
    room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2 / world.size
    tokens = MOST_TOKENS
    shallow = timers[deep].config
    while tokens > LEAST_TOKENS and (
        tokens * share * per_token > options.seconds or shallow.activation_bytes(tokens) > room
    ):
        tokens //= 2
    return tokens


def _jobs(
    config: Transformer1D, most: int, depths: tuple[int, int], ranks: int, seed: int
) -> Iterable[_Job]:
    """The steps that are timed."""
    low, deep = depths
    longest = min(most, config.max_position_embeddings)
    part = max(most // 4, 1)
    few = max(most // 16, 1)

    def one(tokens: int) -> tuple[int, ...]:
        return (min(tokens, longest),)

    def many(tokens: int, count: int) -> tuple[int, ...]:
        return (max(tokens // count, 1),) * count

    half = (deep // 2, deep - deep // 2)
    none, selective, full = (0, 0), (0, deep), (deep, 0)
    for lengths, count in (
        (one(most), 1),
        (many(most, 32), 1),
        (one(part), 1),
        (many(part, 8), 1),
        (many(part, 4), 3),
        (one(few), 1),
        (many(few, 4), 1),
        (one(few), 4),
    ):
        yield _Job(lengths, count, 1, none, deep)
    if low != deep:
        for lengths, count in ((one(most), 1), (many(part, 8), 1), (one(few), 1), (one(few), 4)):
            yield _Job(lengths, count, 1, none, low)
    if deep > 1:
        for choice in dict.fromkeys((full, selective, half)):
            for lengths in (one(most), many(part, 8), one(few)):
                yield _Job(lengths, 1, 1, choice, deep)
    for group in _groups(ranks):
        for lengths, count in ((one(most), 1), (many(part, 8), 1), (one(part), 2), (one(few), 4)):
            yield _Job(lengths, count, group, none, deep)
        yield _Job(one(part), 1, group, full, deep)
        if low != deep:
            yield _Job(one(part), 1, group, none, low)
    random = np.random.default_rng(seed + 1)
    for i in range(6):
        mixed = _mixed(random, most if i % 2 == 0 else part, longest)
        choice = (none, none, none, full, selective, half)[i] if deep > 1 else none
        yield _Job(mixed, 1 + i % 3, 1, choice, deep, held_out=True)
    for group in _groups(ranks):
        for tokens, choice in ((most, none), (part, none), (part, full)):
            mixed = _mixed(random, tokens, longest)
            yield _Job(mixed, 1, group, choice if deep > 1 else none, deep, held_out=True)


def _mixed(random: np.random.Generator, tokens: int, longest: int) -> tuple[int, ...]:
    """Log-normal lengths (median 400, as source code has) that add up to `tokens`."""
    lengths: list[int] = []
    while tokens > 0:
        length = int(min(max(random.lognormal(6.0, 1.2), 1), longest, tokens))
        lengths.append(length)
        tokens -= length
    return tuple(lengths)


def _groups(ranks: int) -> list[int]:
    """Sizes of groups that are measured: all up to 4, powers of two, and the whole world."""
    return [p for p in range(2, ranks + 1) if p <= 4 or p & (p - 1) == 0 or p == ranks]


# Columns of the fit: what a step pays, as (term, per layer?) in the order of `_features`.
_TERMS = (
    ("step_s", False),
    ("step_s", True),
    ("latency_s", False),
    ("latency_s", True),
    ("token_s", False),
    ("token_s", True),
    ("square_s", True),
    ("layer_token_s", None),
    ("layer_square_s", None),
    ("mlp_token_s", None),
    ("group_s", True),
    ("hop_s", True),
    ("gather_s", True),
    ("exchange_s", True),
)


def _features(row: Residual) -> list[float]:
    """How often a step pays each term: the formulas of `CostModel`, written out by depth."""
    p, layers, count = row.ranks, row.layers, row.micro_batches
    again, mlps = max(row.recompute[0] - 1, 0), max(row.recompute[1] - 1, 0)
    tokens, squares = count * row.tokens / p, count * row.squares / p
    grouped = count if p > 1 else 0
    passed = grouped * row.tokens * (p - 1) / p * (layers + again * COMM_SHARE)
    return [
        1.0,
        layers,
        count,
        count * layers,
        tokens,
        tokens * layers,
        squares * layers,
        again * tokens,
        again * squares,
        mlps * tokens,
        grouped * layers,
        grouped * layers * (p - 1),
        passed,
        passed / p,
    ]


def fit_times(rows: Sequence[Residual], config: Transformer1D, *, ranks: int = 1) -> CostModel:
    """The cost model whose times are nearest to measured steps, in relative terms.

    Parameters
    ----------
    rows : sequence of Residual
        Measured steps; `predicted_s` is not looked at. Those `held_out` are only predicted.
    config : dcp.Transformer1D
        The model that costs are wanted for; rows may be of fewer layers.
    ranks : int
        Of the machine that measured: what each has of its threads decides the bytes.

    Returns
    -------
    CostModel
        With `residuals`: the rows, predicted.

    Raises
    ------
    dcp.ArgumentError
        No rows to fit, or a time that is not positive.

    Examples
    --------
    >>> import dcp
    >>> from dcp.cost import Residual
    >>> from dcp.profiling import fit_times
    >>> config = dcp.Transformer1D(64, 16, 32, 2, 2)
    >>> rows = [Residual(1, t, t * t, 1, 1, (0, 0), 2, 0.5 + 1e-3 * t, 0.0) for t in (100, 900)]
    >>> cost = fit_times(rows, config)
    >>> [round(r.predicted_s, 6) for r in cost.residuals]
    [0.6, 1.4]
    """
    used = [row for row in rows if not row.held_out]
    if not used:
        raise ArgumentError("rows: there is none to fit")
    for row in rows:
        if not row.measured_s > 0:
            raise ArgumentError(f"rows: measured_s = {row.measured_s} must be > 0")
    matrix = np.array([_features(row) for row in used])
    # one group size cannot tell what grows with it from what does not
    keep = [name not in _unseen(used) for name, _ in _TERMS]
    weights = 1 / np.array([row.measured_s for row in used])
    found = fitting.nnls(matrix[:, keep] * weights[:, None], np.ones(len(used)))
    values = np.zeros(len(_TERMS))
    values[keep] = found
    fields = _at_depth(values, config.num_hidden_layers)
    predicted = tuple(
        dataclasses.replace(row, predicted_s=float(np.dot(_features(row), values))) for row in rows
    )
    base = CostModel.for_model(config, threads=_threads(ranks))
    return dataclasses.replace(
        base,
        **fields,
        layer_comm_share=COMM_SHARE / config.num_hidden_layers,
        name=f"measured on {ranks} rank{'s' if ranks > 1 else ''}: "
        + base.name.removesuffix(" on cpu"),
        measured=_range(used),
        residuals=predicted,
    )


def _threads(ranks: int) -> int:
    from dcp import _env

    return _env.thread_count(ranks)


def _unseen(rows: Sequence[Residual]) -> set[str]:
    """Terms of groups that these rows cannot tell apart."""
    sizes = {row.ranks for row in rows if row.ranks > 1}
    if not sizes:
        return {"group_s", "hop_s", "gather_s", "exchange_s"}
    return {"hop_s", "exchange_s"} if len(sizes) == 1 else set()


def _at_depth(values: NDArray[np.float64], layers: int) -> dict[str, Any]:
    """The fitted terms for a model of so many layers; groups are taken inside one machine."""
    fields: dict[str, Any] = {}
    for (name, by_layer), value in zip(_TERMS, values.tolist(), strict=True):
        fields[name] = fields.get(name, 0.0) + (value * layers if by_layer else value)
    for name in ("group_s", "hop_s", "gather_s", "exchange_s"):
        fields[name] = (fields[name], fields[name])
    return fields


def _range(rows: Sequence[Residual]) -> Measured:
    shares = [-(-row.tokens // row.ranks) for row in rows]
    kinds = ("layer", "mlp")
    return Measured(
        tokens=(min(shares), max(shares)),
        longest=max(row.tokens if row.sequences == 1 else 0 for row in rows)
        or max(-(-row.tokens // row.sequences) for row in rows),
        ranks=tuple(sorted({row.ranks for row in rows})),
        recompute=tuple(
            kind for i, kind in enumerate(kinds) if any(row.recompute[i] > 1 for row in rows)
        ),
    )


def errors(cost: CostModel) -> dict[str, float | None]:
    """Median and worst |predicted / measured - 1| of the steps that were fitted and left out.

    Examples
    --------
    >>> import dcp
    >>> from dcp.profiling import errors
    >>> errors(dcp.CostModel())["fitted_median"] is None
    True
    """
    out: dict[str, float | None] = {}
    for label, held_out in (("fitted", False), ("held_out", True)):
        found = [abs(row.error) for row in cost.residuals if row.held_out == held_out]
        out[f"{label}_median"] = statistics.median(found) if found else None
        out[f"{label}_worst"] = max(found, default=None)
    return out
