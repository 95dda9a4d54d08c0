"""The cluster simulator: the planner's own plans, in simulated time, on ranks that are not there.

`training` plans the same sequences by several strategies with the very planner that trains
(`dcp.plan`), for any number of devices, and runs the plans in simulated time: with jitter, with
stragglers, with ranks on their own or in rounds. `step` does that for one plan. Nothing is known
of a device but its cost model, so a figure is as good as that model's constants.

Times are in seconds, lengths in tokens, sizes in bytes.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dcp import _dcp, planning
from dcp._dcp import ArgumentError, InfeasibleError
from dcp.cost import whole
from dcp.distributions import DISTRIBUTIONS, PAPER, Distribution, distribution
from dcp.network import network
from dcp.planning import CostModel, Plan
from dcp.time_to_loss import time_to_loss

__all__ = [
    "DISTRIBUTIONS",
    "PAPER",
    "PUBLISHED_INTER",
    "PUBLISHED_INTRA",
    "Agreement",
    "Distribution",
    "Simulation",
    "Span",
    "TimeLine",
    "against_measured",
    "distribution",
    "every_strategy",
    "network",
    "recompute_seconds",
    "sequences",
    "step",
    "time_to_loss",
    "training",
]

TOKENS_PER_DEVICE = 65_536  # of a step, where nothing else is said

# What the paper reports over bucket parallel on 32 H200 (Data-Centric Parallel, arXiv 2608.07524):
# sp and accumulation by length gain 1.68 to 2.70, with recompute by length up to 2.88. Its
# distributions, models and network are not published, and tokens a step differ between its runs.
PUBLISHED_INTER, PUBLISHED_INTRA = (1.68, 2.70), 2.88

Stragglers = Mapping[int, float] | Sequence[float]


@dataclass(frozen=True)
class Span:
    """A rank's time in one micro-batch.

    Attributes
    ----------
    micro_batch : int
        Index into the plan's list.
    start_s, end_s : float
        From the start of the step; all ranks of a micro-batch enter and leave together.
    work_s : float
        Of these, what the rank works; the rest it waits for its group.

    Examples
    --------
    >>> import dcp
    >>> plan = dcp.plan([5], dcp.CostModel(token_s=1.0), world_size=1)
    >>> dcp.simulate.step(plan).rank(0)
    [Span(micro_batch=0, start_s=0.0, end_s=5.0, work_s=5.0)]
    """

    micro_batch: int
    start_s: float
    end_s: float
    work_s: float


class TimeLine:
    """What every rank does in one simulated step; made by `step`.

    Attributes
    ----------
    plan : dcp.Plan
    makespan_s : float
        End of the last micro-batch.
    busy_s : ndarray of float64, shape (ranks,)
        What each rank works.
    rounds : bool
        Whether all ranks moved together.

    Examples
    --------
    >>> import dcp
    >>> plan = dcp.plan([5, 3, 2], dcp.CostModel(token_s=1.0), world_size=2, max_group=1)
    >>> line = dcp.simulate.step(plan)
    >>> line.makespan_s, line.busy_s.tolist(), line.rank(0)[0].end_s
    (5.0, [5.0, 5.0], 5.0)
    """

    def __init__(self, plan: Plan, fields: dict[str, Any], *, rounds: bool) -> None:
        self.plan, self.rounds = plan, rounds
        self.makespan_s: float = fields["makespan_s"]
        self.busy_s: NDArray[np.float64] = fields["busy_s"]
        self._fields = fields

    @property
    def idle_share(self) -> float:
        """Share of the ranks' time before the makespan in which they do not work."""
        if self.makespan_s <= 0:
            return 0.0
        return max(0.0, 1.0 - float(self.busy_s.sum()) / (self.makespan_s * len(self.busy_s)))

    def rank(self, rank: int) -> list[Span]:
        """The micro-batches of a rank, in the order of time."""
        rank = whole("rank", rank, 0, len(self.busy_s) - 1)
        first, last = self._fields["span_offsets"][rank : rank + 2].tolist()
        columns = (self._fields[key][first:last].tolist() for key in _SPAN_KEYS)
        return [Span(*row) for row in zip(*columns, strict=True)]

    def arrays(self) -> dict[str, NDArray[Any]]:
        """All spans as arrays, rank after rank; `span_offsets` says where each rank begins."""
        return {key: self._fields[key] for key in ("span_offsets", *_SPAN_KEYS)}

    def to_json(self) -> dict[str, Any]:
        """The time line as a JSON object."""
        return {
            "makespan_s": self.makespan_s,
            "idle_share": self.idle_share,
            "busy_s": self.busy_s.tolist(),
            "ranks": [
                [[s.micro_batch, s.start_s, s.end_s, s.work_s] for s in self.rank(r)]
                for r in range(len(self.busy_s))
            ],
        }

    def plot(self, **options: Any) -> Any:
        """Draw it with matplotlib; options as in `dcp.viz.plan_picture`."""
        from dcp import viz

        return viz.plan_picture(self, **options)

    def __repr__(self) -> str:
        return (
            f"<dcp.simulate.TimeLine {self.plan.strategy}: {len(self.busy_s)} ranks, "
            f"{self.makespan_s:.4g} s, {self.idle_share:.1%} idle>"
        )


_SPAN_KEYS = ("micro_batch", "start_s", "end_s", "work_s")


def step(
    plan: Plan,
    *,
    rounds: bool | None = None,
    jitter: float = 0.0,
    stragglers: Stragglers | None = None,
    seed: int = 0,
    number: int = 0,
) -> TimeLine:
    """Run a plan in simulated time.

    Parameters
    ----------
    plan : dcp.Plan
    rounds : bool, optional
        Whether all ranks move together, each round as long as its longest micro-batch; else a
        micro-batch starts once all its ranks are free. Default: as the plan was made.
    jitter : float
        Standard deviation of the natural logarithm of the factor, of mean 1, by which a rank's
        share of a micro-batch takes longer or shorter than estimated; 0 to 4.
    stragglers : mapping or sequence of float, optional
        How many times its estimate a rank takes: by rank, or one for each.
    seed, number : int
        Jitter is a pure function of them (`number` is the step's), the micro-batch and the rank.

    Returns
    -------
    TimeLine

    Raises
    ------
    dcp.ArgumentError
        An option breaks its rule.

    Examples
    --------
    >>> import dcp
    >>> plan = dcp.plan([5, 3, 2], dcp.CostModel(token_s=1.0), world_size=2, max_group=1)
    >>> dcp.simulate.step(plan, stragglers={1: 1.5}).makespan_s
    7.5
    """
    together = plan.options.rounds if rounds is None else bool(rounds)
    fields = _dcp.sim_run(
        plan._fields,
        plan.world_size,
        together,
        float(jitter),
        _slowdown(stragglers, plan.world_size),
        whole("seed", seed, 0, (1 << 64) - 1),
        whole("number", number, 0),
    )
    return TimeLine(plan, fields, rounds=together)


def _slowdown(stragglers: Stragglers | None, world: int) -> NDArray[np.float64] | None:
    if stragglers is None:
        return None
    if not isinstance(stragglers, Mapping):
        return np.array(stragglers, np.float64)
    factors = np.ones(world)
    for rank, factor in stragglers.items():
        factors[whole("straggler", rank, 0, world - 1)] = factor
    return factors


def every_strategy() -> tuple[str, ...]:
    """What "all" means: the strategies that decide by themselves.

    Examples
    --------
    >>> "fixed" in dcp.simulate.every_strategy()
    False
    """
    return tuple(name for name in planning.strategies() if name != "fixed")


def sequences(
    lengths: Distribution, *, tokens_per_step: int, steps: int, seed: int = 0
) -> list[NDArray[np.int64]]:
    """The lengths of each step: drawn in order and cut as `dcp.planning.split_steps` does.

    Parameters
    ----------
    lengths : Distribution
    tokens_per_step : int
        Budget of a step.
    steps : int
    seed : int

    Returns
    -------
    list of ndarray of int64

    Examples
    --------
    >>> found = dcp.simulate.sequences(
    ...     dcp.simulate.distribution("short"), tokens_per_step=10_000, steps=3)
    >>> [bool(9_000 < s.sum() <= 10_000) for s in found]
    [True, True, True]
    """
    steps, budget = whole("steps", steps, 1), whole("tokens_per_step", tokens_per_step, 1)
    count = 64
    while True:
        drawn = lengths.sample(count, seed=seed)
        cuts = planning.split_steps(drawn, budget)
        if len(cuts) > steps:  # the last one may lack sequences that are still to be drawn
            return [drawn[cut] for cut in cuts[:steps]]
        have = float(drawn.sum()) / budget
        count = int(count * max(1.2, min(16.0, 1.1 * (steps + 1) / have)))


@dataclass
class Simulation:
    """Result of `training`.

    Attributes
    ----------
    rows : list of dict
        One for each distribution, number of devices and strategy: `distribution`, `devices`,
        `strategy`, `tokens_per_step` (the budget), `step_s` (mean), `tokens_per_s`,
        `speedup_over_bucket`, `idle_share`, `gap` (of the plans to the least possible), `plan_s`
        (planning time of a step), `recompute_share` (of the busy time), `mean_group` (ranks of a
        token), `message` (why a strategy has no figures; else None).
    settings : dict
        What was simulated.

    Examples
    --------
    >>> import dcp
    >>> cost = dcp.CostModel(latency_s=1e-3, token_s=1e-6, square_s=1e-10)
    >>> result = dcp.simulate.training(cost, "short", devices=2, steps=1, tokens_per_step=8000)
    >>> result.speedup("short", 2, "dcp", over="bucket") >= 1
    True
    >>> result.timeline("dcp").makespan_s == result.row("short", 2, "dcp")["step_s"]
    True
    """

    rows: list[dict[str, Any]]
    settings: dict[str, Any]
    _plan: Callable[[str, int, str, int], tuple[Plan, TimeLine]] = field(repr=False)

    def row(self, distribution: str, devices: int, strategy: str) -> dict[str, Any]:
        """The row of one setting."""
        for row in self.rows:
            if (row["distribution"], row["devices"], row["strategy"]) == (
                distribution,
                devices,
                strategy,
            ):
                return row
        raise ArgumentError(f"nothing was simulated for {distribution}, {devices}, {strategy}")

    def speedup(self, distribution: str, devices: int, strategy: str, *, over: str) -> float | None:
        """How many times faster one strategy is than another; None where one has no figure."""
        mine = self.row(distribution, devices, strategy)["step_s"]
        other = self.row(distribution, devices, over)["step_s"]
        return other / mine if mine and other else None

    def timeline(
        self,
        strategy: str = "dcp",
        *,
        distribution: str | None = None,
        devices: int | None = None,
        number: int = 0,
    ) -> TimeLine:
        """The time line of one step, planned again: a plan is a pure function.

        Parameters
        ----------
        strategy : str
        distribution, devices
            Default: the first that was simulated.
        number : int
            Of the step, from 0.
        """
        first = self.rows[0]
        where = (distribution or first["distribution"], devices or first["devices"])
        self.row(*where, strategy)
        whole("number", number, 0, self.settings["steps"] - 1)
        return self._plan(*where, strategy, number)[1]

    def to_json(self) -> dict[str, Any]:
        """The rows and the settings as a JSON object."""
        return {"settings": self.settings, "results": self.rows}

    def table(self, *, over: str = "bucket") -> str:
        """The rows as text, with speed-ups over a strategy."""
        head = ("data", "devices", "strategy", "step s", "tokens/s", f"x {over}", "idle", "gap")
        lines = [head]
        for row in self.rows:
            other = next((r["step_s"] for r in self._same(row) if r["strategy"] == over), None)
            where = (row["distribution"], str(row["devices"]), row["strategy"])
            if row["step_s"] is None:
                lines.append((*where, "-", "-", "-", "-", "-"))
                continue
            ratio = f"{other / row['step_s']:.2f}" if other else "-"
            lines.append(
                (
                    *where,
                    f"{row['step_s']:.3f}",
                    f"{row['tokens_per_s']:,.0f}",
                    ratio,
                    f"{row['idle_share']:.1%}",
                    f"{row['gap']:.1%}",
                )
            )
        widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
        text = []
        for line in lines:
            cells = [
                cell.ljust(width) if i in (0, 2) else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            ]
            text.append("  ".join(cells).rstrip())
        return "\n".join(text)

    def _same(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        keys = ("distribution", "devices")
        return [r for r in self.rows if all(r[k] == row[k] for k in keys)]

    def plot(self, *, over: str = "bucket-published", **options: Any) -> Any:
        """Bars of speed-ups over a strategy; options as in `dcp.viz.speedup_picture`."""
        from dcp import viz

        return viz.speedup_picture(self.rows, over=over, **options)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self.table())}</pre>"


def training(
    cost: CostModel,
    lengths: Any = "balanced",
    *,
    devices: int | Iterable[int] = 32,
    strategies: str | Iterable[str] = "all",
    tokens_per_step: int | None = None,
    steps: int = 10,
    seed: int = 0,
    memory_bytes: int | None = None,
    rounds: bool = False,
    jitter: float = 0.0,
    stragglers: Stragglers | None = None,
    once_s: float = 0.0,
    max_tokens: int | None = None,
    max_group: int | None = None,
    fixed_group: int = 1,
    fixed_recompute: str | Mapping[str, int] = "none",
    on_progress: Callable[[int, int], None] | None = None,
) -> Simulation:
    """Compare strategies on a cluster: same planner, same sequences, same tokens a step.

    Parameters
    ----------
    cost : dcp.CostModel
        Seconds and bytes of a micro-batch on a device; its `node_ranks` is the topology.
    lengths : str, path, Distribution, array_like of int or a list of names
        As `distribution` takes it; "all" is short, balanced and long.
    devices : int or iterable of int
        Ranks.
    strategies : str or iterable of str
        Names, or "all" (all but "fixed").
    tokens_per_step : int, optional
        Budget of a step of all devices; default 65,536 a device.
    steps : int
    seed : int
        Of the lengths and the jitter.
    memory_bytes : int, optional
        Most bytes that a device may hold; None: no cap.
    rounds : bool
        Whether each layer's parameters are gathered by all ranks, which then move together; else
        they are resident or read one-sidedly, and every rank goes its own way.
    jitter, stragglers
        As in `step`. The planner does not know of them.
    once_s : float
        What every step costs beside its micro-batches (reduction, optimizer), the same for every
        plan; it is added to `step_s`.
    max_tokens, max_group, fixed_group, fixed_recompute
        As in `dcp.plan`.
    on_progress : callable, optional
        Called with (steps planned, steps in all).

    Returns
    -------
    Simulation

    Raises
    ------
    dcp.ArgumentError
        An option breaks its rule, or a name is not known.
    dcp.InfeasibleError
        A sequence fits nowhere by any strategy. Where only some can do without, their rows say why.

    Examples
    --------
    >>> cost = dcp.CostModel(latency_s=1e-3, token_s=1e-6, square_s=1e-10)
    >>> result = dcp.simulate.training(
    ...     cost, "short", devices=4, strategies=["bucket", "packed"], steps=2)
    >>> result.row("short", 4, "packed")["speedup_over_bucket"] >= 1
    True
    """
    job = _Job(
        cost=cost,
        distributions=_distributions(lengths),
        devices=_devices(devices),
        strategies=_strategies(strategies),
        tokens_per_step=tokens_per_step,
        steps=whole("steps", steps, 1),
        seed=whole("seed", seed, 0, (1 << 64) - 1),
        plan_options={
            "memory_bytes": memory_bytes,
            "rounds": bool(rounds),
            "max_tokens": max_tokens,
            "max_group": max_group,
            "fixed_group": fixed_group,
            "fixed_recompute": fixed_recompute,
        },
        run_options={"jitter": float(jitter), "stragglers": stragglers},
        once_s=float(once_s),
    )
    if tokens_per_step is not None:
        whole("tokens_per_step", tokens_per_step, 1)
    if not math.isfinite(job.once_s) or job.once_s < 0:
        raise ArgumentError(f"once_s = {once_s!r} must be finite and >= 0")
    for count in job.devices:
        _slowdown(stragglers, count)
    return Simulation(rows=job.run(on_progress), settings=job.settings(), _plan=job.plan)


def _distributions(spec: Any) -> dict[str, Distribution]:
    if isinstance(spec, str) and spec == "all":
        spec = list(PAPER)
    listed = isinstance(spec, list | tuple) and all(
        isinstance(item, str | os.PathLike | Distribution) for item in spec
    )
    found = [distribution(item) for item in (spec if listed and spec else [spec])]
    names = [d.name for d in found]
    if len(set(names)) != len(names):
        raise ArgumentError(f"distributions {names} must have distinct names")
    return dict(zip(names, found, strict=True))


def _devices(devices: int | Iterable[int]) -> list[int]:
    found = [
        whole("devices", count, 1, 1 << 20)
        for count in (devices if isinstance(devices, Iterable) else [devices])
    ]
    if not found or len(set(found)) != len(found):
        raise ArgumentError(f"devices = {found} must be distinct numbers")
    return found


def _strategies(names: str | Iterable[str]) -> list[str]:
    if isinstance(names, str):
        names = every_strategy() if names == "all" else [names]
    found = list(dict.fromkeys(names))
    known = planning.strategies()
    for name in found:
        if name not in known:
            from dcp.config import suggest

            raise ArgumentError(f"unknown strategy {name!r}{suggest(str(name), known)}")
    if not found:
        raise ArgumentError("no strategy is named")
    return found


@dataclass(frozen=True)
class _Step:
    """What is kept of one planned and simulated step."""

    step_s: float
    busy_s: float
    tokens: int
    makespan_s: float  # planned
    bound_s: float
    plan_s: float
    recompute_s: float  # rank-seconds
    token_ranks: float  # sum over tokens of the ranks that share them


@dataclass
class _Job:
    cost: CostModel
    distributions: dict[str, Distribution]
    devices: list[int]
    strategies: list[str]
    tokens_per_step: int | None
    steps: int
    seed: int
    plan_options: dict[str, Any]
    run_options: dict[str, Any]
    once_s: float
    _drawn: dict[tuple[str, int], list[NDArray[np.int64]]] = field(default_factory=dict)

    def settings(self) -> dict[str, Any]:
        return {
            "cost": self.cost.to_json(),
            "distributions": {d.name: d.source for d in self.distributions.values()},
            "devices": self.devices,
            "strategies": self.strategies,
            "steps": self.steps,
            "seed": self.seed,
            "once_s": self.once_s,
            "jitter": self.run_options["jitter"],
            **self.plan_options,
        }

    def budget(self, devices: int) -> int:
        return self.tokens_per_step or TOKENS_PER_DEVICE * devices

    def drawn(self, name: str, devices: int) -> list[NDArray[np.int64]]:
        if (name, devices) not in self._drawn:
            self._drawn[name, devices] = sequences(
                self.distributions[name],
                tokens_per_step=self.budget(devices),
                steps=self.steps,
                seed=self.seed,
            )
        return self._drawn[name, devices]

    def plan(self, name: str, devices: int, strategy: str, number: int) -> tuple[Plan, TimeLine]:
        drawn = self.drawn(name, devices)
        made = planning.plan(
            drawn[number],
            self.cost,
            world_size=devices,
            strategy=strategy,
            seed=self.seed,
            longest=int(max(lengths.max() for lengths in drawn)),
            **self.plan_options,
        )
        return made, step(made, seed=self.seed, number=number, **self.run_options)

    def one(self, name: str, devices: int, strategy: str, number: int) -> _Step | str:
        start = time.perf_counter()
        try:
            made, line = self.plan(name, devices, strategy, number)
        except InfeasibleError as error:
            return str(error)
        took = time.perf_counter() - start
        groups = np.diff(made._fields["rank_offsets"])
        tokens = _tokens_of(made)
        return _Step(
            step_s=line.makespan_s + self.once_s,
            busy_s=float(line.busy_s.sum()),
            tokens=int(made.lengths.sum()),
            makespan_s=made.makespan,
            bound_s=made.bound,
            plan_s=took,
            recompute_s=recompute_seconds(made),
            token_ranks=float((groups * tokens).sum()),
        )

    def run(self, on_progress: Callable[[int, int], None] | None) -> list[dict[str, Any]]:
        """Every setting, its steps planned side by side (the planner lets other threads run)."""
        rows, done = [], 0
        settings = [(name, devices) for name in self.distributions for devices in self.devices]
        total = len(settings) * len(self.strategies) * self.steps
        with ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="dcp-simulate") as pool:
            for name, devices in settings:
                self.drawn(name, devices)
                found: dict[str, list[_Step] | str] = {}
                for strategy in self.strategies:
                    results = []
                    for result in pool.map(
                        lambda n, s=strategy: self.one(name, devices, s, n),  # noqa: B023
                        range(self.steps),
                    ):
                        results.append(result)
                        done += 1
                        if on_progress is not None:
                            on_progress(done, total)
                    messages = [r for r in results if isinstance(r, str)]
                    found[strategy] = (
                        messages[0] if messages else [r for r in results if isinstance(r, _Step)]
                    )
                rows += self._rows(name, devices, found)
                del self._drawn[name, devices]
        return rows

    def _rows(
        self, name: str, devices: int, found: dict[str, list[_Step] | str]
    ) -> list[dict[str, Any]]:
        failed = [steps for steps in found.values() if isinstance(steps, str)]
        if len(failed) == len(found):
            raise InfeasibleError(f"{name} on {devices} devices: {failed[0]}")
        bucket = found.get("bucket")
        reference = (
            sum(s.step_s for s in bucket) / len(bucket) if isinstance(bucket, list) else None
        )
        rows = []
        for strategy, steps in found.items():
            row: dict[str, Any] = {
                "distribution": name,
                "devices": devices,
                "strategy": strategy,
                "tokens_per_step": self.budget(devices),
            }
            rows.append(row | _figures(steps, devices, self.once_s, reference))
        return rows


_FIGURES = (
    "step_s",
    "tokens_per_s",
    "speedup_over_bucket",
    "idle_share",
    "gap",
    "plan_s",
    "recompute_share",
    "mean_group",
)


def _figures(
    steps: list[_Step] | str, devices: int, once_s: float, bucket_s: float | None
) -> dict[str, Any]:
    if isinstance(steps, str):
        return {**dict.fromkeys(_FIGURES), "message": steps}
    seconds = sum(s.step_s for s in steps)
    step_s = seconds / len(steps)
    working = devices * (seconds - once_s * len(steps))
    busy, tokens = sum(s.busy_s for s in steps), sum(s.tokens for s in steps)
    values = (
        step_s,
        tokens / seconds if seconds > 0 else None,
        bucket_s / step_s if bucket_s and step_s > 0 else None,
        max(0.0, 1.0 - busy / working) if working > 0 else 0.0,
        sum(s.makespan_s for s in steps) / bound - 1
        if (bound := sum(s.bound_s for s in steps)) > 0
        else 0.0,
        sum(s.plan_s for s in steps) / len(steps),
        sum(s.recompute_s for s in steps) / busy if busy > 0 else 0.0,
        sum(s.token_ranks for s in steps) / tokens if tokens else 0.0,
    )
    return {**dict(zip(_FIGURES, values, strict=True)), "message": None}


@dataclass(frozen=True)
class Agreement:
    """How well a cost model foresaw measured steps; made by `against_measured`.

    Attributes
    ----------
    scale : float
        By which all predictions were multiplied, from the steps that were fitted; else 1.
    predicted_s, measured_s : tuple of float
        Time of the longest rank of each step that was not fitted, scaled.
    errors : tuple of float
        predicted / measured - 1.

    Examples
    --------
    >>> found = dcp.simulate.Agreement(1.0, (1.1, 2.0), (1.0, 2.0), (0.1, 0.0))
    >>> round(found.median_error, 3)
    0.05
    """

    scale: float
    predicted_s: tuple[float, ...]
    measured_s: tuple[float, ...]
    errors: tuple[float, ...]

    @property
    def median_error(self) -> float:
        """Median of the errors' sizes."""
        return float(np.median(np.abs(self.errors)))


def against_measured(
    plans: Sequence[Plan], busy_s: Sequence[Sequence[float]], *, fit_steps: int = 0
) -> Agreement:
    """Compare plans with what their steps took.

    Parameters
    ----------
    plans : sequence of dcp.Plan
    busy_s : sequence of sequence of float
        Of each step, the time that each rank computed: `dcp.sharded.StepResult.busy_s`.
    fit_steps : int
        The first so many steps only set one factor for all predictions (the median of measured over
        predicted), for a cost model whose ratios are meant and whose seconds are not; 0: none.

    Returns
    -------
    Agreement
        Of the steps after these.

    Raises
    ------
    dcp.ArgumentError
        Not one list of times a plan, or no step is left to judge by.

    Examples
    --------
    >>> import dcp
    >>> cost = dcp.CostModel(token_s=1.0)
    >>> plans = [dcp.plan(lengths, cost, world_size=2, max_group=1)
    ...          for lengths in ([4, 2], [3, 5], [6, 1])]
    >>> found = dcp.simulate.against_measured(
    ...     plans, [(8.0, 4.0), (6.0, 10.0), (15.0, 2.0)], fit_steps=2)
    >>> found.scale, round(found.errors[0], 3)
    (2.0, -0.2)
    """
    fitted = whole("fit_steps", fit_steps, 0)
    if len(plans) != len(busy_s) or len(plans) <= fitted:
        raise ArgumentError(
            f"{len(plans)} plans, times of {len(busy_s)} steps, {fitted} to fit: one list of times "
            "a plan is needed, and a step that is not fitted"
        )
    predicted = [plan.makespan for plan in plans]
    measured = [max(float(b) for b in busy) for busy in busy_s]
    ratios = [m / p for m, p in zip(measured[:fitted], predicted[:fitted], strict=True)]
    scale = float(np.median(ratios)) if ratios else 1.0
    rest = [
        (scale * p, m) for p, m in zip(predicted[fitted:], measured[fitted:], strict=True) if m > 0
    ]
    return Agreement(
        scale=scale,
        predicted_s=tuple(p for p, _ in rest),
        measured_s=tuple(m for _, m in rest),
        errors=tuple(p / m - 1 for p, m in rest),
    )


def _sums_of(plan: Plan, values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sum over the sequences of each micro-batch."""
    offsets = plan._fields["sequence_offsets"]
    running = np.concatenate([[0.0], np.cumsum(values[plan._fields["sequences"]])])
    return np.asarray(running[offsets[1:]] - running[offsets[:-1]], np.float64)


def _tokens_of(plan: Plan) -> NDArray[np.float64]:
    return _sums_of(plan, plan.lengths.astype(np.float64))


def recompute_seconds(plan: Plan) -> float:
    """Rank-seconds that a plan's micro-batches spend computing dropped activations again.

    Examples
    --------
    >>> from dcp import planning, simulate
    >>> plan = planning.plan([8], dcp.CostModel(token_s=1.0), world_size=1)
    >>> simulate.recompute_seconds(plan)
    0.0
    """
    cost = plan.cost
    again = np.maximum(plan._fields["recompute"] - 1, 0).astype(np.float64)
    if not again.any():
        return 0.0
    lengths = plan.lengths.astype(np.float64)
    tokens, squares = _sums_of(plan, lengths), _sums_of(plan, lengths**2)
    # forward again; what that repeats of the group's communication counts as communication
    seconds = again[:, 0] * (cost.layer_token_s * tokens + cost.layer_square_s * squares)
    return float((seconds + again[:, 1] * cost.mlp_token_s * tokens).sum())
