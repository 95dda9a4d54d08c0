"""Training on bucketed shapes: batches of one bucket each, planned like any sequences.

`dcp.clips` says which bucket a clip goes to. Here an epoch's clips are cut into batches and steps,
and the planner deals them out, as sequences of so many latent tokens. A micro-batch holds clips of
one bucket only, at most as many as the bucket allows. Clips that do not fill a batch are counted.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dcp._dcp import ArgumentError, InfeasibleError
from dcp.clips import SIZES, Bucket, Buckets, Clips, Latent, words
from dcp.cost import CostModel, whole
from dcp.loader import PlannedSteps, WorldLike, in_rounds, setting_of
from dcp.planning import MicroBatchPlan, Plan

__all__ = [
    "SIZES",
    "Bucket",
    "BucketLoader",
    "BucketReport",
    "BucketSampler",
    "BucketStep",
    "Buckets",
    "ClipBatch",
    "Clips",
    "Latent",
]

_logger = logging.getLogger("dcp")
_STATE_VERSION = 1
_NAMED = 12  # buckets that a message names


@dataclass(frozen=True)
class BucketReport:
    """What became of the clips in one epoch.

    Attributes
    ----------
    epoch : int
    clips, batches, unused : dict
        By name of the bucket: clips that came to it, its batches, and clips left over because
        they did not fill one.
    without_bucket : int
        Clips that no bucket took: too small, too short, or not kept.

    Examples
    --------
    >>> from dcp.buckets import Buckets, BucketSampler, Clips
    >>> clips = Clips([144] * 160, [256] * 160, [51] * 160)
    >>> print(BucketSampler(clips, Buckets({"144p": {51: (1.0, 51)}})).report(0))
    epoch 0: 160 clips, 3 batches, 7 unused
    144p x 51: 160 clips, 3 batches, 7 unused
    """

    epoch: int
    clips: dict[str, int]
    batches: dict[str, int]
    unused: dict[str, int]
    without_bucket: int

    @property
    def never_full(self) -> list[str]:
        """Buckets that clips came to, and that filled no batch."""
        return [name for name, count in self.clips.items() if count and not self.batches[name]]

    def __str__(self) -> str:
        total = sum(self.clips.values()) + self.without_bucket
        rest = f", {self.without_bucket} in no bucket" if self.without_bucket else ""
        lines = [
            f"epoch {self.epoch}: {total} clips, {sum(self.batches.values())} batches, "
            f"{sum(self.unused.values())} unused{rest}"
        ]
        lines += [
            f"{name}: {count} clips, {self.batches[name]} batches, {self.unused[name]} unused"
            for name, count in self.clips.items()
        ]
        return "\n".join(lines)


@dataclass(frozen=True)
class _Epoch:
    """The batches of an epoch: clips[starts[i] : starts[i + 1]] are of bucket[i]."""

    bucket: NDArray[np.int64]
    starts: NDArray[np.int64]
    clips: NDArray[np.int64]
    ends_tokens: NDArray[np.int64] = field(repr=False)  # tokens up to each batch


class BucketSampler:
    """Batches of one bucket each: a pure function of (clips, buckets, seed, epoch).

    In every epoch clips go to their buckets, each bucket's clips are put in a random order and cut
    into batches, and the batches of all buckets are put in a random order.

    Parameters
    ----------
    clips : Clips
    buckets : Buckets
    seed : int
        0 to 2**64 - 1.
    short_batches : bool
        Whether a bucket's last clips, too few for a batch, make a short one; else they are unused
        in this epoch. `report` says how many.

    Raises
    ------
    dcp.ArgumentError
        The first epoch has no batch at all: names the buckets that are not filled.

    Examples
    --------
    >>> from dcp.buckets import Buckets, BucketSampler, Clips
    >>> clips = Clips([144] * 22, [256] * 22, [1] * 10 + [16] * 7 + [51] * 5)
    >>> buckets = Buckets({"144p": {1: (1.0, 4), 16: (1.0, 4), 51: (1.0, 4)}})
    >>> sum(len(clips) for _, clips in BucketSampler(clips, buckets).batches(0))
    16
    >>> short = BucketSampler(clips, buckets, short_batches=True)
    >>> sum(len(clips) for _, clips in short.batches(0))
    22
    """

    def __init__(
        self, clips: Clips, buckets: Buckets, *, seed: int = 0, short_batches: bool = False
    ) -> None:
        self.clips, self.buckets = clips, buckets
        self.seed = whole("seed", seed, 0, (1 << 64) - 1)
        self.short_batches = bool(short_batches)
        self._cached: tuple[int, _Epoch, BucketReport] | None = None
        self._made(0)

    def report(self, epoch: int) -> BucketReport:
        """What becomes of the clips in an epoch.

        Examples
        --------
        See `BucketReport`.
        """
        return self._made(epoch)[1]

    def never_filled(self) -> list[str]:
        """Buckets that no epoch can fill: fewer clips fit them than make a batch.

        Examples
        --------
        >>> from dcp.buckets import Buckets, BucketSampler, Clips
        >>> buckets = Buckets({"144p": {1: (1.0, 4), 16: (1.0, 4)}})
        >>> clips = Clips([144] * 6, [256] * 6, [1, 1, 1, 1, 16, 16])
        >>> BucketSampler(clips, buckets).never_filled()
        ['144p x 16 (2 of 4)']
        """
        fitting = self.buckets.fits(self.clips).sum(axis=1).tolist()
        out = []
        for bucket, count in zip(self.buckets, fitting, strict=True):
            least = 1 if self.short_batches else bucket.batch
            if count < least or bucket.keep == 0.0:
                out.append(f"{bucket.name} ({count} of {bucket.batch})")
        return out

    def batches(self, epoch: int) -> list[tuple[int, NDArray[np.int64]]]:
        """The batches of an epoch in their order.

        Returns
        -------
        list of (int, ndarray of int64)
            Index of the bucket, numbers of the clips.

        Examples
        --------
        See `BucketSampler`.
        """
        made = self._made(epoch)[0]
        parts = np.split(made.clips, made.starts[1:-1])
        return list(zip(made.bucket.tolist(), parts, strict=True))

    def _made(self, epoch: int) -> tuple[_Epoch, BucketReport]:
        cached = self._cached  # one read: another thread may be in another epoch
        if cached is None or cached[0] != epoch:
            cached = self._cached = (epoch, *self._make(epoch))
        return cached[1:]

    def _make(self, epoch: int) -> tuple[_Epoch, BucketReport]:
        assigned = self.buckets.assign(self.clips, seed=self.seed, epoch=epoch)
        order = np.argsort(words(self.seed, epoch, 0, len(assigned)), kind="stable")
        counts, batches, unused = {}, {}, {}
        of_batch: list[int] = []
        parts: list[NDArray[np.int64]] = []
        for i, bucket in enumerate(self.buckets):
            mine = order[assigned[order] == i]
            used = len(mine) if self.short_batches else len(mine) // bucket.batch * bucket.batch
            cuts = [mine[at : at + bucket.batch] for at in range(0, used, bucket.batch)]
            parts += cuts
            of_batch += [i] * len(cuts)
            counts[bucket.name], batches[bucket.name] = len(mine), len(cuts)
            unused[bucket.name] = len(mine) - used
        report = BucketReport(epoch, counts, batches, unused, int(np.count_nonzero(assigned < 0)))
        if not parts:
            raise ArgumentError(self._nothing(report))
        shuffled = np.argsort(words(self.seed, epoch, 2, len(parts)), kind="stable").tolist()
        parts = [parts[i] for i in shuffled]
        of = np.array([of_batch[i] for i in shuffled], np.int64)
        sizes = np.array([len(part) for part in parts], np.int64)
        tokens = np.array([bucket.tokens for bucket in self.buckets], np.int64)
        return (
            _Epoch(
                bucket=of,
                starts=np.concatenate([[0], np.cumsum(sizes)]),
                clips=np.concatenate(parts),
                ends_tokens=np.concatenate([[0], np.cumsum(sizes * tokens[of])]),
            ),
            report,
        )

    def _nothing(self, report: BucketReport) -> str:
        """The message of an epoch without a batch."""
        names = [
            f"{bucket.name} ({report.clips[bucket.name]} of {bucket.batch})"
            for bucket in self.buckets
            if report.clips[bucket.name]
        ]
        if not names:
            return (
                f"{self.clips.name}: none of {len(self.clips)} clips fits a bucket that keeps it: "
                f"{_join([bucket.name for bucket in self.buckets])}"
            )
        return (
            f"{self.clips.name}: epoch {report.epoch} has no batch, no bucket is filled: "
            f"{_join(names)}; lower their batches, add clips, or allow short_batches"
        )


def _join(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


@dataclass(frozen=True)
class ClipBatch:
    """What a rank computes at once: clips of one bucket.

    Attributes
    ----------
    bucket : Bucket or None
        Their shape; None where there are no clips: this rank only keeps step with others.
    clips : ndarray of int64, shape (clips,)
        Numbers in `Clips`.
    weight : float
        Of each clip's *mean* loss: the sum over all clips of a step is the loss of the step.
    group : tuple of two ints
        (first rank, count) of the ranks that share it.
    recompute : tuple of two ints
        (layers, MLPs) that drop their activations.

    Examples
    --------
    >>> import numpy as np
    >>> from dcp.buckets import Buckets, ClipBatch
    >>> bucket = Buckets({"144p": {1: (1.0, 8)}})[0]
    >>> batch = ClipBatch(bucket, np.array([5, 3]), 0.5, group=(0, 1), recompute=(0, 0))
    >>> batch.offsets.tolist()
    [0, 144, 288]
    """

    bucket: Bucket | None
    clips: NDArray[np.int64]
    weight: float
    group: tuple[int, int]
    recompute: tuple[int, int]

    @property
    def offsets(self) -> NDArray[np.int64]:
        """Borders of the clips' tokens, laid one after the other, shape (clips + 1,).

        Examples
        --------
        See `ClipBatch`.
        """
        tokens = self.bucket.tokens if self.bucket is not None else 0
        return np.arange(len(self.clips) + 1, dtype=np.int64) * tokens


def _empty(rank: int) -> ClipBatch:
    return ClipBatch(None, np.zeros(0, np.int64), 0.0, **setting_of(None, rank))


@dataclass(frozen=True)
class BucketStep:
    """One step as one rank sees it.

    Attributes
    ----------
    index, epoch : int
        Number of the step, from 0, and of the pass over the data.
    plan : dcp.Plan
        Of all ranks; its sequences are the step's clips.
    clips : ndarray of int64, shape (clips,)
        The step's clips.
    bucket : ndarray of int64, shape (clips,)
        Index of their bucket.
    lengths : ndarray of int64, shape (clips,)
        Their tokens.
    sequence_count : int
        Clips of all ranks.
    scale : float
        Factor of the sum of losses over tokens: one over the step's tokens.
    micro_batches : list of ClipBatch
        This rank's, in the order of time; may be empty.

    Examples
    --------
    >>> import dcp
    >>> from types import SimpleNamespace
    >>> from dcp.buckets import BucketLoader, Buckets, Clips
    >>> clips, buckets = Clips([144] * 9, [256] * 9, [1] * 9), Buckets({"144p": {1: (1.0, 3)}})
    >>> world, cost = SimpleNamespace(rank=0, size=1), dcp.CostModel(token_s=1.0)
    >>> step = next(iter(BucketLoader(clips, buckets, world, cost, tokens_per_step=900)))
    >>> len(step.clips), step.lengths.tolist() == [144] * 6, round(1 / step.scale)
    (6, True, 864)
    """

    index: int
    epoch: int
    plan: Plan
    clips: NDArray[np.int64]
    bucket: NDArray[np.int64]
    lengths: NDArray[np.int64]
    sequence_count: int
    scale: float
    micro_batches: list[ClipBatch]


class BucketLoader(PlannedSteps[BucketStep]):
    """Yields the steps of a run over bucketed clips, without end; equal arguments on every rank.

    A step takes batches until the next one would pass the token budget. The planner deals its
    clips out, long ones perhaps to several ranks; what it gives a group at once is cut where the
    bucket changes or its batch is full. Clips that an epoch leaves unused are logged by rank 0.

    Parameters
    ----------
    clips : Clips
    buckets : Buckets
    world : dcp.World
        Anything with `rank` and `size`.
    cost : dcp.CostModel
        What the planner balances.
    tokens_per_step : int
        Most tokens of a step of all ranks, at least those of the largest batch.
    strategy, memory_bytes, max_tokens, max_group, rounds, fixed_group, fixed_recompute
        As `dcp.plan`.
    seed : int
        Decides buckets and order.
    weighting : {"token", "sequence"}
        Whether all tokens of a step count alike, or all clips do.
    short_batches : bool
        As `BucketSampler`.

    Raises
    ------
    dcp.ArgumentError
        No bucket is ever filled, or a batch passes `tokens_per_step`: names the bucket.
    dcp.InfeasibleError
        A clip of a bucket fits nowhere.

    Examples
    --------
    >>> import dcp
    >>> from types import SimpleNamespace
    >>> from dcp.buckets import BucketLoader, Buckets, Clips
    >>> clips = Clips([144] * 40, [256] * 40, [1] * 20 + [51] * 20)
    >>> buckets = Buckets({"144p": {1: (1.0, 8), 51: (1.0, 2)}})
    >>> world = SimpleNamespace(rank=0, size=2)
    >>> loader = BucketLoader(
    ...     clips, buckets, world, dcp.CostModel(token_s=1e-6), tokens_per_step=20_000
    ... )
    >>> step = next(iter(loader))
    >>> {batch.bucket.name for batch in step.micro_batches} <= {"144p x 1", "144p x 51"}
    True
    """

    def __init__(
        self,
        clips: Clips,
        buckets: Buckets,
        world: WorldLike,
        cost: CostModel,
        *,
        tokens_per_step: int,
        strategy: str = "dcp",
        seed: int = 0,
        memory_bytes: int | None = None,
        weighting: Literal["token", "sequence"] = "token",
        short_batches: bool = False,
        max_tokens: int | None = None,
        max_group: int | None = None,
        rounds: bool = False,
        fixed_group: int = 1,
        fixed_recompute: str | Mapping[str, int] = "none",
    ) -> None:
        if weighting not in ("token", "sequence"):
            raise ArgumentError(f"weighting = {weighting!r} must be 'token' or 'sequence'")
        self.sampler = BucketSampler(clips, buckets, seed=seed, short_batches=short_batches)
        self.clips, self.buckets, self.weighting = clips, buckets, weighting
        self.tokens_per_step = whole("tokens_per_step", tokens_per_step, 1)
        possible = buckets.fits(clips).sum(axis=1).tolist()
        used = [
            (bucket, min(count, bucket.batch))
            for bucket, count in zip(buckets, possible, strict=True)
            if count >= (1 if short_batches else bucket.batch) and bucket.keep > 0.0
        ]
        for bucket, most in used:
            if most * bucket.tokens > self.tokens_per_step:
                raise ArgumentError(
                    f"tokens_per_step = {tokens_per_step} is less than a batch of bucket "
                    f"{bucket.name}: {most} clips of {bucket.tokens} tokens; raise it or lower "
                    "the bucket's batch"
                )
        longest = max((bucket for bucket, _ in used), key=lambda bucket: bucket.tokens)
        options = {
            "memory_bytes": memory_bytes,
            "strategy": strategy,
            "seed": seed,
            "max_tokens": max_tokens,
            "longest": longest.tokens,
            "max_group": max_group,
            "rounds": bool(rounds),
            "fixed_group": fixed_group,
            "fixed_recompute": fixed_recompute,
        }
        super().__init__(world, cost, options)
        try:
            self._plan(np.array([longest.tokens], np.int64))
        except InfeasibleError as error:
            raise InfeasibleError(
                f"a clip of bucket {longest.name} has {longest.tokens} tokens and fits nowhere: "
                f"leave the bucket out or raise the memory cap ({error})"
            ) from error
        self._warn()

    def _warn(self) -> None:
        if self.rank != 0:
            return
        if never := self.sampler.never_filled():
            _logger.warning(
                "%s: buckets that can never fill a batch: %s", self.clips.name, _join(never)
            )
        report = self.sampler.report(0)
        if lost := sum(report.unused.values()) + report.without_bucket:
            _logger.warning(
                "%s: %d of %d clips are unused in epoch 0, %d of them in no bucket",
                self.clips.name,
                lost,
                len(self.clips),
                report.without_bucket,
            )

    def _build(
        self, epoch: int, position: int, index: int, multiple: int
    ) -> tuple[BucketStep, tuple[int, int, int]]:
        made, _ = self.sampler._made(epoch)
        most = min(multiple * self.tokens_per_step, int(made.ends_tokens[-1]))
        budget = made.ends_tokens[position] + most
        last = int(np.searchsorted(made.ends_tokens, budget, side="right")) - 1
        place = (epoch, last, index + 1) if last < len(made.bucket) else (epoch + 1, 0, index + 1)
        first = int(made.starts[position])
        clips = made.clips[first : int(made.starts[last])]
        counts = np.diff(made.starts[position : last + 1])
        bucket = np.repeat(made.bucket[position:last], counts)
        tokens = np.array([b.tokens for b in self.buckets], np.int64)
        lengths = tokens[bucket]
        plan = self._plan(lengths, index)
        scale = 1.0 / int(lengths.sum())
        micro_batches: list[ClipBatch] = []
        for number, planned in enumerate(in_rounds(plan, self.rank)):
            mine = self._batches(clips, bucket, planned, scale) if planned is not None else []
            if plan.options.rounds:  # as many parts on every rank
                together = [m for m in plan.micro_batches if m.round == number]
                most = max(len(self._cuts(bucket, m)) for m in together)
                mine += [_empty(self.rank)] * (most - len(mine))
            micro_batches += mine
        step = BucketStep(
            index=index,
            epoch=epoch,
            plan=plan,
            clips=clips,
            bucket=bucket,
            lengths=lengths,
            sequence_count=len(clips),
            scale=scale,
            micro_batches=micro_batches,
        )
        return step, place

    def _cuts(self, bucket: NDArray[np.int64], planned: MicroBatchPlan) -> list[NDArray[np.int64]]:
        """A planned micro-batch, cut so that each part is of one bucket and not above its batch."""
        chosen = np.array(planned.sequences, np.int64)
        parts = []
        for number in np.unique(bucket[chosen]).tolist():
            mine = chosen[bucket[chosen] == number]
            most = self.buckets[number].batch
            count = -(-len(mine) // most)
            parts += np.array_split(mine, count)
        return parts

    def _batches(
        self,
        clips: NDArray[np.int64],
        bucket: NDArray[np.int64],
        planned: MicroBatchPlan,
        scale: float,
    ) -> list[ClipBatch]:
        setting = setting_of(planned, self.rank)
        out = []
        for part in self._cuts(bucket, planned):
            shape = self.buckets[int(bucket[part[0]])]
            weight = scale * shape.tokens if self.weighting == "token" else 1.0 / len(clips)
            out.append(ClipBatch(shape, clips[part], weight, **setting))
        return out

    def _same(self) -> dict[str, Any]:
        return {
            "version": _STATE_VERSION,
            "seed": self.sampler.seed,
            "tokens_per_step": self.tokens_per_step,
            "short_batches": self.sampler.short_batches,
            "buckets": self.buckets.fingerprint(),
            "data": self.clips.fingerprint(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken, on any number of ranks.

        Raises
        ------
        dcp.ArgumentError
            The state is of other clips, buckets or settings; names them.

        Examples
        --------
        >>> import dcp
        >>> from types import SimpleNamespace
        >>> from dcp.buckets import BucketLoader, Buckets, Clips
        >>> clips, buckets = Clips([144] * 9, [256] * 9, [1] * 9), Buckets({"144p": {1: (1.0, 3)}})
        >>> def loader(size):
        ...     world = SimpleNamespace(rank=0, size=size)
        ...     cost = dcp.CostModel(token_s=1.0)
        ...     return BucketLoader(clips, buckets, world, cost, tokens_per_step=432)
        >>> first, second = loader(4), loader(1)
        >>> steps = iter(first)
        >>> _ = next(steps)
        >>> second.load_state_dict(first.state_dict())
        >>> bool((next(steps).clips == next(iter(second)).clips).all())
        True
        """
        self._load_state(state, lambda epoch: len(self.sampler._made(epoch)[0].bucket) - 1)
