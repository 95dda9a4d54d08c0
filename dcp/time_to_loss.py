"""The experiment of ML-for-ML in simulation: how long each policy takes to a target loss.

A job in front shares a network with jobs behind it that come and go. Its controller is the one that
trains; steps take what the network simulator says; progress follows the steps formula with a noise
scale that grows as the loss falls. Constants are ours and stated in `Setup`: the published work
names its jobs (GPT-2 Large in front, GPT-1B behind) and not its rates.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcp import _dcp
from dcp._dcp import ArgumentError
from dcp.controller import LOG_VERSION

__all__ = ["POLICIES", "Result", "Setup", "Sweep", "sweep", "time_to_loss"]

POLICIES = (
    "static",
    "precision",
    "accumulation",
    "decoupled",
    "joint",
    "oracle",
    "best_fixed",
)
PUBLISHED_BAND = (1.13, 1.42)  # decoupled over joint, as ML-for-ML reports it
_COLLECTIVES = ("ring", "alltoall", "two_level")

# Relative squared errors of blocks of 128 with stochastic rounding, of values like Student's t with
# 4 degrees of freedom, as gradients have them; bf16 to nearest.
ERRORS = {
    "fp32": 0.0,
    "bf16": 2.7e-6,
    "fp8_e4m3": 1.2e-3,
    "fp8_e5m2": 4.4e-3,
    "int8": 2.4e-4,
    "int4": 0.076,
}


@dataclass(frozen=True)
class Setup:
    """What is simulated. Defaults: GPT-2 Large on 8 hosts with 100 Gbit/s, GPT-1B jobs behind.

    Attributes
    ----------
    hosts : int
        Of the job in front and of every job behind, one rank each.
    host_rate : float
        Bytes a second of a host's link, each direction.
    rack_hosts : int
        Hosts of a rack; 0: one switch for all.
    oversubscription : float
        Uplink of a rack: its hosts' rates over this.
    latency_s : float
    collective, background_collective : {"alltoall", "ring", "two_level"}
    parameter_count : float
        Of the job in front.
    tokens_per_step : int
        Of batch multiple 1: 8 hosts of 4 sequences of 1,024.
    compute_s : float
        Forward and backward of these.
    backward_share, optimizer_s : float
    bucket_count : int
        Buckets of gradients, reduced as they become ready; 1: no overlap.
    codec_bytes_per_s : float
        Of the fp32 gradient that is quantised and decoded.
    background_parameters, background_compute_s : float
        Of a job behind; its gradients are fp32.
    loss_start, loss_floor, loss_knee, loss_power : float
        L(p) = floor + (start - floor) (1 + p / knee)^-power. The knee makes a run of the best
        policy forty minutes: a hundred phases of 20 s, and several of 600 s.
    noise_scale, noise_power : float
        B_s(L) = noise_scale / L^(1 / noise_power) tokens (Kaplan et al., arXiv 2001.08361).
    target_loss : float
    time_noise : float
        Standard deviation of the logarithm of measured times.
    micro_batches, noise_dimensions : float
        How much measured noise scales scatter.

    Examples
    --------
    >>> from dcp.time_to_loss import Setup
    >>> Setup().hosts, Setup(hosts=16).hosts
    (8, 16)
    """

    hosts: int = 8
    host_rate: float = 12.5e9
    rack_hosts: int = 0
    oversubscription: float = 1.0
    latency_s: float = 5e-5
    collective: str = "alltoall"
    background_collective: str = "alltoall"
    parameter_count: float = 774e6
    tokens_per_step: int = 32768
    compute_s: float = 0.16
    backward_share: float = 2.0 / 3.0
    optimizer_s: float = 0.005
    bucket_count: int = 8
    codec_bytes_per_s: float = 500e9
    background_parameters: float = 1e9
    background_compute_s: float = 0.3
    loss_start: float = 10.8
    loss_floor: float = 2.0
    loss_knee: float = 52.0
    loss_power: float = 0.6
    noise_scale: float = 2e8
    noise_power: float = 0.21
    target_loss: float = 3.3
    time_noise: float = 0.1
    micro_batches: float = 8.0
    noise_dimensions: float = 256.0
    step_limit: int = 0

    def inputs(self) -> dict[str, Any]:
        """What the controller knows of communication: bytes, codecs, overlap."""
        hosts = max(1, self.hosts)  # fewer are refused by the core
        count = int(self.parameter_count)
        whole = {q: float(_dcp.precision_bytes(q, count)) for q in ERRORS}
        codec = 4.0 * count / self.codec_bytes_per_s if self.codec_bytes_per_s > 0 else 0.0
        phases = 2 if self.collective == "two_level" else 1
        return {
            "reduce_bytes": {q: 2.0 * b * (hosts - 1) / hosts for q, b in whole.items()},
            "reduce_calls": dict.fromkeys(ERRORS, float(self.bucket_count * phases)),
            "codec_s": {q: 0.0 if q == "fp32" else codec for q in ERRORS},
            "bucket_count": self.bucket_count,
            "backward_share": self.backward_share,
        }

    def core(self, congestion: int, dwell_s: float) -> dict[str, float]:
        """The numbers as the core takes them."""
        fields = dataclasses.asdict(self)
        for name in ("collective", "background_collective"):
            if fields[name] not in _COLLECTIVES:
                raise ArgumentError(f"{name} = {fields[name]!r} must be one of {_COLLECTIVES}")
            fields[name] = _COLLECTIVES.index(fields[name])
        del fields["tokens_per_step"], fields["background_parameters"]
        return {name: float(value) for name, value in fields.items()} | {
            "background_count": float(congestion),
            "background_bytes": 4.0 * self.background_parameters,
            "background_dwell_s": float(dwell_s),
        }


@dataclass(frozen=True)
class Result:
    """One run.

    Attributes
    ----------
    base : str
        Precision of `static` and `accumulation`.
    congestion : int
        Jobs behind.
    dwell_s : float
        Mean time that one is there, and is away.
    policy : str
    seed : int
    time_to_target_s : float
    steps : int
    tokens : float
    changes : int
        Of the arm.
    arm : str
        The one used longest, "int8 x 4".
    """

    base: str
    congestion: int
    dwell_s: float
    policy: str
    seed: int
    time_to_target_s: float
    steps: int
    tokens: float
    changes: int
    arm: str
    trace: list[Any] | None = dataclasses.field(default=None, repr=False, compare=False)
    settings: dict[str, Any] | None = dataclasses.field(default=None, repr=False, compare=False)
    inputs: dict[str, Any] | None = dataclasses.field(default=None, repr=False, compare=False)

    def plot(self) -> Any:
        """Draw the decisions of a traced run, as `dcp.control_plot.draw_decisions` does.

        Returns
        -------
        matplotlib.figure.Figure

        Raises
        ------
        dcp.ArgumentError
            The run has no trace, or no controller decided in it.
        dcp.UnsupportedError
            matplotlib is not installed.

        Examples
        --------
        >>> from dcp.time_to_loss import time_to_loss
        >>> len(time_to_loss(target=8.0, trace=True).plot().axes)
        4
        """
        from dcp.control_plot import draw_decisions
        from dcp.controller import DecisionLog

        lines = [json.loads(line) for line in decision_log(self).splitlines()]
        return draw_decisions(DecisionLog(Path("simulated"), lines[0]["settings"], None, lines))


def _whole(name: str, value: int, least: int) -> int:
    if isinstance(value, bool) or int(value) != value or value < least:
        raise ArgumentError(f"{name} = {value!r} must be a whole number >= {least}")
    return int(value)


def grid_of(base: str, precisions: Sequence[str] | None) -> tuple[str, ...]:
    """The precisions of a grid: all that have no more bits than the base, unless they are given.

    Examples
    --------
    >>> from dcp.time_to_loss import grid_of
    >>> grid_of("bf16", None)
    ('bf16', 'int8', 'int4')
    """
    if precisions is None:
        order = ("fp32", "bf16", "int8", "int4")
        if base not in order:
            return (base, *(q for q in order[2:]))
        return order[order.index(base) :]
    return tuple(precisions)


class _Case:
    """One cell and seed: what all its policies share."""

    def __init__(
        self,
        setup: Setup,
        base: str,
        congestion: int,
        dwell_s: float,
        seed: int,
        precisions: Sequence[str],
        multiples: Sequence[int],
    ) -> None:
        self.base, self.congestion, self.dwell_s, self.seed = base, congestion, dwell_s, seed
        self.precisions, self.multiples = tuple(precisions), tuple(multiples)
        for name, values in (("precisions", precisions), ("batch_multiples", multiples)):
            if not values:
                raise ArgumentError(f"{name} is empty: name at least one")
        self._numbers = setup.core(congestion, dwell_s)
        self._inputs = setup.inputs()
        self._control = {
            "precisions": self.precisions,
            "base": base,
            "multiples": list(self.multiples),
            "tokens_per_step": setup.tokens_per_step,
            "rank_count": setup.hosts,
        }

    def run(
        self, policy: str, *, fixed: tuple[str, int] | None = None, trace: bool = False
    ) -> Result:
        arm = {"precision": fixed[0], "multiple": fixed[1]} if fixed is not None else None
        simulated = {"oracle": "oracle", "fixed": "fixed"}.get(policy)
        time_s, steps, tokens, changes, shares, rows = _dcp.time_to_loss(
            self._numbers,
            self._control | {"policy": "static" if simulated else policy},
            ERRORS,
            seed=self.seed,
            network_seed=self.seed,
            policy=simulated,
            fixed=arm,
            trace=trace,
        )
        best = max(
            (
                (share, q, a)
                for q in shares
                for a, share in zip(self.multiples, shares[q], strict=True)
            ),
            key=lambda item: item[0],
        )
        return Result(
            base=self.base,
            congestion=self.congestion,
            dwell_s=self.dwell_s,
            policy=policy,
            seed=self.seed,
            time_to_target_s=time_s,
            steps=steps,
            tokens=tokens,
            changes=changes,
            arm=f"{best[1]} x {best[2]}",
            trace=rows,
            settings=None if simulated else self._control | {"policy": policy},
            inputs=self._inputs,
        )


def time_to_loss(
    policy: str = "joint",
    *,
    base: str = "fp32",
    congestion: int = 2,
    dwell_s: float = 100.0,
    precisions: Sequence[str] | None = None,
    batch_multiples: Sequence[int] = (1, 2, 4, 8, 16, 32),
    target: float | None = None,
    seed: int = 0,
    setup: Setup | None = None,
    trace: bool = False,
) -> Result:
    """Simulate one run to a target loss.

    Parameters
    ----------
    policy : str
        One of `dcp.time_to_loss.POLICIES`.
    base : str
        Precision of gradients where nothing is tuned.
    congestion : int
        Jobs behind, >= 0.
    dwell_s : float
        Mean seconds that one is there, and is away; 0: always there.
    precisions : sequence of str, optional
        The grid; default: the base and those with fewer bits of fp32, bf16, int8, int4.
    batch_multiples : sequence of int
        Ascending, from 1.
    target : float, optional
        Loss; default that of `setup`.
    seed : int
        Of when jobs come and go, and of the scatter of measurements.
    setup : Setup, optional
    trace : bool
        Keep what the controller saw and decided after every step: `Result.trace`, tuples
        (seconds, loss, jobs there, observation, decision).

    Returns
    -------
    Result

    Raises
    ------
    dcp.ArgumentError
        An unknown policy or precision, an impossible grid, or a target that the loss model does not
        reach: its floor is named.

    Examples
    --------
    >>> import dcp
    >>> joint = dcp.simulate.time_to_loss("joint", congestion=3, target=4.0)
    >>> static = dcp.simulate.time_to_loss("static", congestion=3, target=4.0)
    >>> static.time_to_target_s > 1.5 * joint.time_to_target_s
    True
    """
    if policy not in POLICIES:
        raise ArgumentError(f"policy = {policy!r} must be one of {', '.join(POLICIES)}")
    if not 0 <= dwell_s < float("inf"):
        raise ArgumentError(f"dwell_s = {dwell_s!r} must be finite and >= 0")
    chosen = setup if setup is not None else Setup()
    if target is not None:
        chosen = dataclasses.replace(chosen, target_loss=float(target))
    case = _Case(
        chosen,
        base,
        _whole("congestion", congestion, 0),
        float(dwell_s),
        _whole("seed", seed, 0),
        grid_of(base, precisions),
        batch_multiples,
    )
    if policy == "best_fixed":
        runs = [case.run("fixed", fixed=(q, a)) for q in case.precisions for a in case.multiples]
        best = min(runs, key=lambda run: run.time_to_target_s)
        return dataclasses.replace(best, policy="best_fixed")
    return case.run(policy, trace=trace)


@dataclass(frozen=True)
class Sweep:
    """Results of `sweep`.

    Attributes
    ----------
    results : list of Result
    """

    results: list[Result]

    def mean(self) -> dict[tuple[str, int, float, str], float]:
        """Mean seconds over seeds by (base, congestion, dwell_s, policy).

        Examples
        --------
        >>> from dcp.time_to_loss import sweep
        >>> cell = {"congestion": [0], "base": ["fp32"], "dwell_s": [100]}
        >>> done = sweep(["static"], **cell, seeds=2, target=6)
        >>> list(done.mean())
        [('fp32', 0, 100.0, 'static')]
        """
        times: dict[tuple[str, int, float, str], list[float]] = {}
        for r in self.results:
            key = (r.base, r.congestion, r.dwell_s, r.policy)
            times.setdefault(key, []).append(r.time_to_target_s)
        return {key: statistics.fmean(values) for key, values in times.items()}

    def ratio(self, policy: str, to: str) -> dict[tuple[str, int, float], float]:
        """Mean time of a policy over that of another, by (base, congestion, dwell_s).

        Examples
        --------
        See `mean`.
        """
        mean = self.mean()
        return {
            key[:3]: mean[key] / mean[(*key[:3], to)]
            for key in mean
            if key[3] == policy and (*key[:3], to) in mean
        }

    def plot(self) -> Any:
        """Draw times over congestion, as `dcp.control_plot.draw_sweep` does.

        Returns
        -------
        matplotlib.figure.Figure

        Examples
        --------
        See `dcp.control_plot.draw_sweep`.
        """
        from dcp.control_plot import draw_sweep

        return draw_sweep(self)

    def to_json(self) -> list[dict[str, Any]]:
        """Rows of plain data, with `ratio_to_oracle` of the same seed (None without an oracle)."""
        oracle = {
            (r.base, r.congestion, r.dwell_s, r.seed): r.time_to_target_s
            for r in self.results
            if r.policy == "oracle"
        }
        rows = []
        for r in self.results:
            best = oracle.get((r.base, r.congestion, r.dwell_s, r.seed))
            row = dataclasses.asdict(dataclasses.replace(r, trace=None, settings=None, inputs=None))
            for name in ("trace", "settings", "inputs"):
                del row[name]
            rows.append(row | {"ratio_to_oracle": r.time_to_target_s / best if best else None})
        return rows


def sweep(
    policies: Iterable[str] = POLICIES,
    *,
    congestion: Iterable[int] = (0, 1, 2, 3, 4),
    base: Iterable[str] = ("fp32", "bf16"),
    dwell_s: Iterable[float] = (20.0, 100.0, 600.0),
    precisions: Sequence[str] | None = None,
    batch_multiples: Sequence[int] = (1, 2, 4, 8, 16, 32),
    target: float | None = None,
    seeds: int = 3,
    setup: Setup | None = None,
    on_done: Callable[[int, int], None] | None = None,
) -> Sweep:
    """Simulate every policy in every cell (base, congestion, dwell).

    Fixed arms are run once for all bases whose grid has them. Runs are spread over the cores.

    Parameters
    ----------
    policies, congestion, base, dwell_s : iterables
    precisions, batch_multiples, target, setup
        As `time_to_loss`.
    seeds : int
        Runs of each, seeds 0, 1, ...
    on_done : callable, optional
        Called with (runs done, runs in all).

    Returns
    -------
    Sweep

    Raises
    ------
    dcp.ArgumentError
        As `time_to_loss`; or a list is empty.

    Examples
    --------
    >>> from dcp.time_to_loss import sweep
    >>> cell = {"congestion": [1], "base": ["bf16"], "dwell_s": [100]}
    >>> done = sweep(["joint", "oracle"], **cell, seeds=1, target=4)
    >>> 0.99 < done.ratio("joint", "oracle")["bf16", 1, 100.0] < 1.1
    True
    """
    bases, counts, chosen = list(base), list(congestion), list(policies)
    dwells = [float(d) for d in dwell_s]
    named = (("policies", chosen), ("congestion", counts), ("base", bases), ("dwell_s", dwells))
    for name, values in named:
        if not values:
            raise ArgumentError(f"{name} is empty: name at least one")
    seeds = _whole("seeds", seeds, 1)
    common: dict[str, Any] = {"target": target, "setup": setup, "batch_multiples": batch_multiples}
    jobs: list[tuple[tuple[Any, ...], Callable[[], Result]]] = []
    fixed: dict[tuple[Any, ...], Callable[[], Result]] = {}

    def one(policy: str, b: str, c: int, d: float, seed: int) -> Callable[[], Result]:
        return lambda: time_to_loss(
            policy,
            base=b,
            congestion=c,
            dwell_s=d,
            precisions=precisions,
            seed=seed,
            **common,
        )

    def arm(b: str, c: int, d: float, seed: int, q: str, a: int) -> Callable[[], Result]:
        what = setup if setup is not None else Setup()
        if target is not None:
            what = dataclasses.replace(what, target_loss=float(target))
        case = _Case(what, b, c, d, seed, grid_of(b, precisions), batch_multiples)
        return lambda: case.run("fixed", fixed=(q, a))

    runs = list(itertools.product(bases, counts, dwells, chosen, range(seeds)))
    for b, c, d, policy, seed in runs:
        if policy != "best_fixed":
            jobs.append(((b, c, d, policy, seed), one(policy, b, c, d, seed)))
            continue
        for q, a in itertools.product(grid_of(b, precisions), batch_multiples):
            fixed.setdefault((c, d, seed, q, a), arm(b, c, d, seed, q, a))
    total, done = len(jobs) + len(fixed), 0
    found: dict[tuple[Any, ...], Result] = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        waiting = [(key, pool.submit(job)) for key, job in [*jobs, *fixed.items()]]
        try:
            for key, future in waiting:
                found[key] = future.result()
                done += 1
                if on_done is not None:
                    on_done(done, total)
        except BaseException:
            for _, future in waiting:
                future.cancel()
            raise
    results = []
    for b, c, d, policy, seed in runs:
        if policy != "best_fixed":
            results.append(found[b, c, d, policy, seed])
            continue
        arms = itertools.product(grid_of(b, precisions), batch_multiples)
        best = min((found[c, d, seed, q, a] for q, a in arms), key=lambda r: r.time_to_target_s)
        results.append(dataclasses.replace(best, base=b, policy="best_fixed"))
    return Sweep(results)


def decision_log(run: Result, setup: Setup | None = None) -> str:
    """The decisions of a traced run as lines of `metrics.jsonl`, which `DecisionLog` reads.

    Parameters
    ----------
    run : Result
        Of ``time_to_loss(..., trace=True)`` under a policy of the controller.
    setup : Setup, optional
        It ran with.

    Returns
    -------
    str

    Raises
    ------
    dcp.ArgumentError
        The run has no trace, or no controller decided in it.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> from dcp.controller import DecisionLog
    >>> from dcp.time_to_loss import decision_log, time_to_loss
    >>> run = time_to_loss(congestion=1, target=8.0, trace=True)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = pathlib.Path(folder, "metrics.jsonl")
    ...     _ = file.write_text(decision_log(run))
    ...     log = DecisionLog.read(file)
    >>> len(log.replay()) == len(log.rows()) == run.steps
    True
    """
    if run.trace is None or run.settings is None:
        raise ArgumentError("the run has no decisions: time_to_loss(policy, ..., trace=True)")
    lines = []
    for number, (seconds, loss, jobs, observation, decision) in enumerate(run.trace):
        line = {
            "kind": "control",
            "step": observation["step"],
            "seconds": seconds,
            "true_loss": loss,
            "jobs": jobs,
            "observation": observation,
            "decision": decision,
            "inputs": run.inputs,
        }
        if number == 0:
            line |= {"version": LOG_VERSION, "settings": run.settings}
        lines.append(json.dumps(line))
    return "\n".join(lines) + "\n"
