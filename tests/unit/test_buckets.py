"""Buckets, clips and their loader: shares, batches of one shape, nothing lost uncounted, resume."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dcp
from dcp.buckets import (
    BucketLoader,
    Buckets,
    BucketSampler,
    BucketStep,
    ClipBatch,
    Clips,
    Latent,
)

COST = dcp.CostModel(latency_s=1e-3, token_s=1e-5, square_s=1e-9, token_bytes=100)
OPEN_SORA = {
    "144p": {1: (1.0, 475), 51: (1.0, 51), 102: (1.0, 27)},
    "256": {51: (1.0, 20), 102: (1.0, 10)},
    "240p": {51: (1.0, 20), 102: (1.0, 10)},
}


def clips_of(*shapes: tuple[str, int, int], name: str = "clips") -> Clips:
    """`count` clips of (resolution, frames, count) each."""
    from dcp.buckets import SIZES

    rows = [(*SIZES[r], frames) for r, frames, count in shapes for _ in range(count)]
    return Clips(*np.array(rows, np.int64).reshape(-1, 3).T, name=name)


def make(
    clips: Clips, buckets: Buckets, rank: int = 0, size: int = 1, **options: Any
) -> BucketLoader:
    options = {"tokens_per_step": 100_000, **options}
    return BucketLoader(clips, buckets, SimpleNamespace(rank=rank, size=size), COST, **options)


def take(loader: BucketLoader, count: int) -> list[BucketStep]:
    return list(itertools.islice(loader, count))


def test_tokens_of_the_published_buckets() -> None:
    """Tokens as 28 layers of STDiT3 see them: 144 for an image of 144p, 432,000 at 720p x 408."""
    latent = Latent()
    spatial = {"144p": 144, "240p": 405, "360p": 920, "480p": 1590, "720p": 3600}
    temporal = {1: 1, 51: 15, 102: 30, 204: 60, 408: 120}
    table = {r: dict.fromkeys(temporal, (1.0, 1)) for r in spatial}
    for bucket in Buckets(table):
        assert bucket.tokens == spatial[bucket.resolution] * temporal[bucket.frames]
        assert bucket.tokens == latent.tokens(bucket.frames, bucket.height, bucket.width)
    with_text = Latent(frames=(1, 4), size=(16, 16), patch=(2, 1, 1), extra_tokens=300)
    assert with_text.tokens(16, 64, 32) == 2 * 4 * 2 + 300


def test_keep_probabilities_cascade() -> None:
    """Case P-02: a 2K clip in 480p (1.0), 720p (0.5), 1080p (0.2), 4K (0.1): 0.4, 0.4, 0.2, 0."""
    table = {
        "480p": {16: (1.0, 8)},
        "720p": {16: (0.5, 4)},
        "1080p": {16: (0.2, 2)},
        "4K": {16: (0.1, 1)},
    }
    buckets = Buckets(table)
    count = 100_000
    clips = Clips([1440] * count, [2560] * count, [30] * count)
    found = buckets.assign(clips, seed=3, epoch=1)
    names = [bucket.resolution for bucket in buckets]
    shares = {n: float(np.mean(found == i)) for i, n in enumerate(names)}
    for name, share in {"480p": 0.4, "720p": 0.4, "1080p": 0.2, "4K": 0.0}.items():
        tolerance = 5 * np.sqrt(share * (1 - share) / count)
        assert abs(shares[name] - share) <= tolerance, shares
    assert not np.any(found < 0)
    # the same on every rank: no state, no order of calls
    again = Buckets(dict(reversed(table.items())))
    assert np.array_equal(again.assign(clips, seed=3, epoch=1), found)
    for other in ({"seed": 4, "epoch": 1}, {"seed": 3, "epoch": 2}):
        assert 0.3 < np.mean(buckets.assign(clips, **other) == found) < 0.4
    # a clip's bucket does not depend on the clips after it
    few = Clips([1440] * 50, [2560] * 50, [30] * 50)
    assert np.array_equal(buckets.assign(few, seed=3, epoch=1), found[:50])


def test_which_bucket_a_clip_fits() -> None:
    buckets = Buckets({"144p": {1: (1.0, 1), 16: (1.0, 1)}, "480p": {1: (1.0, 1), 51: (1.0, 1)}})
    at = {bucket.name: i for i, bucket in enumerate(buckets)} | {None: -1}
    for (height, width, frames), name in {
        (480, 854, 1): "480p x 1",
        (854, 480, 1): "480p x 1",  # upright
        (479, 854, 1): "144p x 1",
        (480, 854, 60): "480p x 51",
        (480, 854, 50): "144p x 16",  # too short for the higher resolution
        (480, 854, 15): None,  # a video is no image
        (10, 10, 1): None,
        (144, 256, 400): "144p x 16",
    }.items():
        clip = Clips([height], [width], [frames])
        assert buckets.assign(clip, seed=0, epoch=0).tolist() == [at[name]], (height, width, frames)


def test_an_epoch_without_a_batch_is_refused() -> None:
    """Case P-01: 16 clips in five buckets that hold less than a batch each: named, not 0 steps."""
    shapes = [("240p", 51, 1), ("256", 102, 1), ("256", 51, 8), ("144p", 102, 2), ("144p", 51, 4)]
    clips = clips_of(*shapes, name="few.csv")
    buckets = Buckets(OPEN_SORA)
    with pytest.raises(dcp.ArgumentError, match="no batch") as found:
        BucketSampler(clips, buckets)
    message = str(found.value)
    for name in (
        "few.csv",
        *("240p x 51 (1 of 20)", "256 x 102 (1 of 10)", "256 x 51 (8 of 20)"),
        *("144p x 102 (2 of 27)", "144p x 51 (4 of 51)"),
    ):
        assert name in message
    with pytest.raises(dcp.ArgumentError, match="no batch"):
        make(clips, buckets)
    sampler = BucketSampler(clips, buckets, short_batches=True)
    batches = sampler.batches(0)
    assert len(batches) == 5 and sum(len(part) for _, part in batches) == 16
    report = sampler.report(0)
    assert sum(report.unused.values()) == 0 and report.never_full == []


def test_unused_clips_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    """Case P-01: 160 clips, batch 51: 3 batches and 7 unused; a bucket never filled is named."""
    clips = clips_of(("144p", 51, 160), ("144p", 102, 3))
    sampler = BucketSampler(clips, Buckets(OPEN_SORA))
    report = sampler.report(0)
    assert (report.batches["144p x 51"], report.unused["144p x 51"]) == (3, 7)
    assert report.never_full == ["144p x 102"]
    assert "144p x 102 (3 of 27)" in sampler.never_filled()
    with caplog.at_level(logging.WARNING, logger="dcp"):
        for rank in (1, 0):
            make(clips, Buckets(OPEN_SORA), rank, 2, tokens_per_step=200_000)
    assert len(caplog.records) == 2, "rank 0 alone"
    assert "never fill" in caplog.text and "144p x 102 (3 of 27)" in caplog.text
    assert "10 of 163 clips are unused in epoch 0" in caplog.text


def test_clips_that_fit_no_bucket() -> None:
    with pytest.raises(dcp.ArgumentError, match=r"none of 5 clips fits .* 240p x 102"):
        BucketSampler(Clips([9] * 5, [9] * 5, [9] * 5), Buckets(OPEN_SORA))
    with pytest.raises(dcp.ArgumentError, match="none of 0 clips"):
        BucketSampler(Clips([], [], []), Buckets(OPEN_SORA))


@pytest.mark.parametrize(("short", "total"), [(True, 22), (False, 16)])
def test_leftovers_of_buckets_are_never_merged(short: bool, total: int) -> None:
    """Case D-07: buckets of 10, 7 and 5 clips, batch 4: one shape and at most 4 in each."""
    buckets = Buckets({"144p": {1: (1.0, 4), 16: (1.0, 4), 51: (1.0, 4)}})
    clips = clips_of(("144p", 1, 10), ("144p", 16, 7), ("144p", 51, 5))
    sampler = BucketSampler(clips, buckets, short_batches=short)
    batches = sampler.batches(0)
    assert sum(len(part) for _, part in batches) == total
    for number, part in batches:
        assert 0 < len(part) <= 4
        assert set(clips.frames[part].tolist()) == {buckets[number].frames}
    # and in what ranks compute, whatever the planner put together
    for rank in range(3):
        loader = make(clips, buckets, rank, 3, tokens_per_step=50_000, short_batches=short)
        for step in take(loader, 6):
            for batch in step.micro_batches:
                assert batch.bucket is not None and 0 < len(batch.clips) <= 4
                assert set(clips.frames[batch.clips].tolist()) == {batch.bucket.frames}


@settings(max_examples=20, deadline=None)
@given(
    counts=st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any),
    batch=st.integers(1, 5),
    keep=st.sampled_from([0.3, 1.0]),
    size=st.integers(1, 4),
    seed=st.integers(0, 2**64 - 1),
    rounds=st.booleans(),
)
def test_every_clip_once_over_the_ranks(
    counts: list[int], batch: int, keep: float, size: int, seed: int, rounds: bool
) -> None:
    """Case D-08: over the ranks each clip of a step once; an epoch has each at most once."""
    buckets = Buckets(
        {"144p": {1: (1.0, batch), 16: (1.0, batch), 51: (1.0, 2)}, "240p": {16: (keep, 1)}}
    )
    clips = clips_of(("144p", 1, counts[0]), ("240p", 16, counts[1]), ("144p", 51, counts[2]))
    options: dict[str, Any] = {"seed": seed, "rounds": rounds, "short_batches": True}
    runs = [
        take(make(clips, buckets, r, size, tokens_per_step=5000, **options), 8) for r in range(size)
    ]
    epochs: dict[int, Counter[int]] = {}
    for steps in zip(*runs, strict=True):
        first = steps[0]
        assert len({s.plan.hash for s in steps}) == 1
        seen: list[int] = []
        weight = 0.0
        for rank, step in enumerate(steps):
            for part in step.micro_batches:
                assert part.group[0] <= rank < part.group[0] + part.group[1]
                if part.group[0] == rank:
                    seen += part.clips.tolist()
                    weight += part.weight * len(part.clips)
        assert sorted(seen) == sorted(first.clips.tolist())
        assert weight == pytest.approx(1.0)
        assert int(first.lengths.sum()) <= 5000
        if rounds:
            assert len({len(s.micro_batches) for s in steps}) == 1
        epochs.setdefault(first.epoch, Counter()).update(seen)
    for epoch, seen_once in epochs.items():
        assert max(seen_once.values()) == 1
        if epoch < max(epochs):
            wanted = BucketSampler(clips, buckets, seed=seed, short_batches=True).report(epoch)
            assert sum(seen_once.values()) == sum(wanted.clips.values())


def test_ranks_on_different_buckets_weigh_by_their_clips() -> None:
    """Case P-03: 6 clips on one rank, 2 on the other weigh 6/8 and 2/8, or by tokens."""
    buckets = Buckets({"144p": {1: (1.0, 6), 16: (1.0, 2)}})
    clips = clips_of(("144p", 1, 6), ("144p", 16, 2))
    tokens = {bucket.frames: bucket.tokens for bucket in buckets}
    total = 6 * tokens[1] + 2 * tokens[16]

    def shares(weighting: Any) -> dict[int, float]:
        found: Counter[int] = Counter()
        for rank in range(2):
            options = {"weighting": weighting, "strategy": "fixed"}  # no clip is shared
            step = take(make(clips, buckets, rank, 2, **options), 1)[0]
            assert step.sequence_count == 8 and step.scale == 1 / total
            for batch in step.micro_batches:
                assert batch.bucket is not None
                found[batch.bucket.frames] += batch.weight * len(batch.clips)  # type: ignore
        return dict(found)

    assert shares("sequence") == pytest.approx({1: 6 / 8, 16: 2 / 8})
    assert shares("token") == pytest.approx({1: 6 * tokens[1] / total, 16: 2 * tokens[16] / total})


@settings(max_examples=15, deadline=None)
@given(done=st.integers(0, 9), size=st.integers(1, 5), seed=st.integers(0, 99))
def test_resume_is_exact_on_any_world(done: int, size: int, seed: int) -> None:
    """Cases D-03, D-04, D-05: in any epoch, at its end, on another number of ranks."""
    buckets = Buckets({"144p": {1: (0.7, 3), 16: (0.7, 2)}})
    clips = clips_of(("144p", 1, 20), ("144p", 16, 9))
    options: dict[str, Any] = {"seed": seed, "tokens_per_step": 2000}
    whole = take(make(clips, buckets, **options), done + 5)
    first = make(clips, buckets, 0, 4, **options)
    take(first, done)
    second = make(clips, buckets, size - 1, size, **options)
    second.load_state_dict(first.state_dict())
    rest = take(second, 5)
    assert [s.index for s in rest] == list(range(done, done + 5))
    for got, wanted in zip(rest, whole[done:], strict=True):
        assert got.clips.tolist() == wanted.clips.tolist() and got.epoch == wanted.epoch


def test_a_state_of_other_settings_is_refused() -> None:
    buckets, clips = Buckets({"144p": {1: (1.0, 3)}}), clips_of(("144p", 1, 20))
    state = make(clips, buckets).state_dict()
    others = [
        (make(clips, buckets, seed=1), "seed"),
        (make(clips, buckets, tokens_per_step=50_000), "tokens_per_step"),
        (make(clips, buckets, short_batches=True), "short_batches"),
        (make(clips, Buckets({"144p": {1: (1.0, 4)}})), "buckets"),
        (make(clips_of(("144p", 1, 21)), buckets), "data"),
    ]
    for loader, word in others:
        with pytest.raises(dcp.ArgumentError, match=word):
            loader.load_state_dict(state)
    with pytest.raises(dcp.ArgumentError, match="position"):
        make(clips, buckets).load_state_dict({**state, "position": 6})


def test_groups_and_recompute_of_the_plan_reach_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planned micro-batch that is cut by bucket keeps its group on all of its ranks."""
    from dcp import loader as loader_module

    buckets = Buckets({"144p": {1: (1.0, 2), 16: (1.0, 2)}})
    clips = clips_of(("144p", 1, 4), ("144p", 16, 2))
    planned = dcp.planning.MicroBatchPlan((0, 1), tuple(range(6)), 0.0, 1.0, 0, {"layer": 2})
    plan = SimpleNamespace(
        options=SimpleNamespace(rounds=False), micro_batches=[planned], for_rank=lambda r: [planned]
    )
    monkeypatch.setattr(loader_module, "plan", lambda *_, **__: plan)
    ranks = [take(make(clips, buckets, r, 2), 1)[0].micro_batches for r in (0, 1)]
    shapes = [[(b.bucket.name, len(b.clips)) for b in m if b.bucket] for m in ranks]
    assert shapes[0] == shapes[1]
    assert shapes[0] == [("144p x 16", 2), ("144p x 1", 2), ("144p x 1", 2)]
    batch: ClipBatch
    for batch in ranks[0] + ranks[1]:
        assert batch.group == (0, 2) and batch.recompute == (2, 0)
        assert batch.bucket is not None and len(batch.offsets) == len(batch.clips) + 1
        assert set(np.diff(batch.offsets)) == {batch.bucket.tokens}


def test_limits_are_named_before_the_first_step() -> None:
    buckets, clips = Buckets({"144p": {51: (1.0, 10)}}), clips_of(("144p", 51, 20))
    with pytest.raises(dcp.ArgumentError, match=r"144p x 51: 10 clips of 2160 tokens"):
        make(clips, buckets, tokens_per_step=21_599)
    with pytest.raises(dcp.InfeasibleError, match="bucket 144p x 51 has 2160 tokens"):
        make(clips, buckets, memory_bytes=1000)
    with pytest.raises(dcp.ArgumentError, match="weighting"):
        make(clips, buckets, weighting="clip")


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({}, "there is none"),
        ({"145p": {1: (1.0, 1)}}, "145p: unknown resolution.*'144p'"),
        ({"x": {"size": [1], 1: (1.0, 1)}}, r"x.size = \[1\]"),
        ({"144p": {0: (1.0, 1)}}, "144p.0: the key"),
        ({"144p": {"one": (1.0, 1)}}, "144p.one: the key"),
        ({"144p": {1: 1.0}}, r"144p.1 = 1.0 must be \[keep"),
        ({"144p": {1: (1.5, 1)}}, "keep probability 1.5"),
        ({"144p": {1: (True, 1)}}, "keep probability True"),
        ({"144p": {1: (1.0, 0)}}, "144p.1: batch = 0"),
        ({"144p": [1.0, 1]}, "must be a table"),
        ({"144p": {1: (1.0, 1)}, "x": {"size": [144, 256], 1: (1.0, 1)}}, "are one shape"),
        ({"144p": {1: (1.0, 1), "1": (1.0, 2)}}, "are one shape"),
    ],
)
def test_bad_buckets(table: Any, words: str) -> None:
    with pytest.raises(dcp.ArgumentError, match=words):
        Buckets(table)


def test_two_keep_probabilities_are_refused() -> None:
    with pytest.raises(dcp.UnsupportedError, match=r"144p\.102: .* two numbers"):
        Buckets({"144p": {102: ((1.0, 0.33), 27)}})


def test_toml(tmp_path: Path) -> None:
    file = tmp_path / "video.toml"
    file.write_text(
        '[buckets."144p"]\n1 = [1.0, 475]\n51 = [0.5, 51]\n[buckets.thumb]\nsize = [64, 32]\n'
        "16 = [1.0, 9]\n[latent]\nframes = [1, 1]\nsize = [4, 4]\npatch = [1, 1, 1]\n"
    )
    buckets = Buckets.load(file)
    assert [(b.name, b.keep, b.batch) for b in buckets] == [
        ("144p x 51", 0.5, 51),
        ("144p x 1", 1.0, 475),
        ("thumb x 16", 1.0, 9),
    ]
    assert buckets[2].tokens == 16 * 16 * 8
    for text, words in {
        "buckets = 1": "must be",
        "[bucket]": "did you mean 'buckets'",
        "[latent]\npatches = [1, 2, 2]": "did you mean 'patch'",
        "[latent]\npatch = [1, 2]": "3 integers",
        '[buckets."144p"]\n1 = [2.0, 1]': "keep probability",
    }.items():
        file.write_text(text)
        with pytest.raises(dcp.ArgumentError, match=words) as found:
            Buckets.load(file)
        assert "video.toml" in str(found.value)
    file.write_text("[")
    with pytest.raises(dcp.FileError, match=r"video\.toml is not TOML"):
        Buckets.load(file)
    with pytest.raises(dcp.FileError, match=r"none\.toml"):
        Buckets.load(tmp_path / "none.toml")


def test_clip_tables(tmp_path: Path) -> None:
    file = tmp_path / "clips.csv"
    file.write_text("path,Height, width ,num_frames\na,480,854,51\nb,144,256,1\n")
    clips = Clips.read_csv(file)
    rows = zip(clips.heights.tolist(), clips.widths.tolist(), clips.frames.tolist(), strict=True)
    assert list(rows) == [(480, 854, 51), (144, 256, 1)]
    for text, error, words in (
        ("height,width\n1,1\n", dcp.FileError, "lacks the column 'frames'"),
        ("", dcp.FileError, "lacks the column"),
        ("height,width,frames\n1,1,1\n1,-1,1\n", dcp.ArgumentError, "line 3: width = '-1'"),
        ("height,width,frames\n1,1\n", dcp.ArgumentError, "line 2: frames = ''"),
        ("height,width,frames\n1,1.5,1\n", dcp.ArgumentError, "width = '1.5'"),
    ):
        file.write_text(text)
        with pytest.raises(error, match=words) as found:
            Clips.read_csv(file)
        assert "clips.csv" in str(found.value)
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(dcp.FileError, match="cannot be read"):
        Clips.read_csv(file)
    with pytest.raises(dcp.FileError, match=r"none\.csv"):
        Clips.read_csv(tmp_path / "none.csv")
    with pytest.raises(dcp.DTypeError, match="widths must be integers"):
        Clips([1], [1.0], [1])
    with pytest.raises(dcp.ArgumentError, match=r"frames\[1\] = 0"):
        Clips([1, 1], [1, 1], [1, 0])
    with pytest.raises(dcp.ArgumentError, match="must agree, got 1, 2, 1"):
        Clips([1], [1, 1], [1])
    with pytest.raises(dcp.ArgumentError, match="1-D"):
        Clips([[1]], [1], [1])
    mapped = np.lib.format.open_memmap(tmp_path / "h.npy", mode="w+", dtype=np.uint16, shape=(3,))
    mapped[:] = 9
    again = np.load(tmp_path / "h.npy", mmap_mode="r")
    assert Clips(again, again, again).heights.tolist() == [9, 9, 9]
