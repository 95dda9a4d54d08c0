"""Sums in few bits against float64: bounds by block, conservation, formulas of the error.

Ranks are threads of this process. Bounds hold element by element: an element's error is at most
the sum over the ranks that quantised it of one step of their block.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ref import round_bf16
from test_comm import run, well

import dcp
from dcp import _dcp
from dcp.world import World

CODES = ("bf16", "fp8_e4m3", "fp8_e5m2", "int8", "int4")
BLOCK, RUN = 128, 16384
LIMIT = {"int8": 127, "int4": 7, "fp8_e4m3": 448, "fp8_e5m2": 57344}
BITS = {"fp32": 32, "bf16": 16, "fp8_e4m3": 8, "fp8_e5m2": 8, "int8": 8, "int4": 4}


@pytest.fixture(autouse=True, scope="module")
def quick_switches() -> Iterator[None]:
    """Ranks wait for each other all the time: the GIL must change hands quickly."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


def message_bytes(precision: str, count: int) -> int:
    scales = 0 if precision in ("fp32", "bf16") else 4 * -(-count // BLOCK)
    return scales + (count * BITS[precision] + 7) // 8


def step_of(x: np.ndarray, precision: str) -> np.ndarray:
    """The largest error of each element of a slice that is quantised from x[0] on."""
    if precision == "fp32":
        return np.zeros(len(x))
    if precision == "bf16":
        return np.abs(x) * 2.0**-8
    largest = np.array(
        [np.abs(x[i : i + BLOCK]).max() for i in range(0, len(x), BLOCK)]
    )  # of each block
    scale = np.repeat(largest / LIMIT[precision], BLOCK)[: len(x)]
    if precision.startswith("int"):
        return scale
    mantissa, unit = (3, 2.0**-9) if precision == "fp8_e4m3" else (2, 2.0**-16)
    return np.maximum(np.abs(x) * 2.0**-mantissa, scale * unit)


def slices(counts: Any) -> list[slice]:
    ends = np.cumsum(counts)
    return [slice(int(e - n), int(e)) for e, n in zip(ends, counts, strict=True)]


def even(count: int, size: int) -> np.ndarray:
    """How an allreduce cuts its elements: even numbers of blocks."""
    blocks = -(-count // BLOCK)
    ends = [min(blocks * (r + 1) // size * BLOCK, count) for r in range(size)]
    return np.diff([0, *ends])


def exact(inputs: list[np.ndarray]) -> np.ndarray:
    return np.sum([x.astype(np.float64) for x in inputs], axis=0)


def allowed(inputs: list[np.ndarray], counts: Any, each: int, precision: str) -> np.ndarray:
    """Error that the sums may have, element by element."""
    size = len(inputs)
    room = 4 * size * 2.0**-24 * np.sum([np.abs(x) for x in inputs], axis=0, dtype=np.float64)
    each = 1 if each == size else each
    for machine in range(0, size, each):
        part = exact(inputs[machine : machine + each])
        for owner, here in enumerate(slices(counts)):
            if not machine <= owner < machine + each:
                room[here] += 1.001 * step_of(part[here], precision)
    return room


worlds = st.integers(1, 8).flatmap(
    lambda size: st.tuples(
        st.just(size), st.sampled_from([e for e in range(1, size + 1) if size % e == 0])
    )
)


@settings(max_examples=40, deadline=None)
@given(
    worlds,
    st.sampled_from(("fp32", *CODES)),
    st.data(),
    st.integers(0, 2**32),
    st.booleans(),
)
def test_sums_stay_within_a_step_of_each_rank(
    world_of: tuple[int, int], precision: str, data: st.DataObject, seed: int, nearest: bool
) -> None:
    """Ragged slices, also of nothing and of more than a run; one level and two."""
    size, each = world_of
    counts = data.draw(
        st.lists(
            st.sampled_from([0, 0, 1, 3, 127, 128, 129, 1000, RUN + 77]),
            min_size=size,
            max_size=size,
        )
    )
    rng = np.random.default_rng(seed)
    spread = np.exp(rng.normal(0, 2, sum(counts)))
    inputs = [(rng.normal(size=sum(counts)) * spread).astype(np.float32) for _ in range(size)]

    def body(world: World) -> tuple[np.ndarray, dict[str, float]]:
        own = inputs[world.rank].copy()
        arguments = (precision, False, nearest, None, seed, 7, each)
        result, figures = world._quantised_reduce(own, np.array(counts), *arguments, None)
        np.testing.assert_array_equal(own, inputs[world.rank])
        return result, figures

    results = well(run(size, body))
    error = np.abs(np.concatenate([r[0] for r in results]) - exact(inputs))
    assert np.all(error <= allowed(inputs, counts, each, precision))
    one_level = each in (1, size)
    for rank, (_, figures) in enumerate(results):
        peers = [r for r in range(size) if r != rank and (one_level or (r - rank) % each == 0)]
        assert figures["sent_bytes"] == sum(message_bytes(precision, counts[r]) for r in peers)
        assert figures["received_bytes"] == len(peers) * message_bytes(precision, counts[rank])


@settings(max_examples=25, deadline=None)
@given(worlds, st.data(), st.integers(0, 2**32))
def test_what_is_handed_out_and_kept_is_what_came_in(
    world_of: tuple[int, int], data: st.DataObject, seed: int
) -> None:
    """Case C-02: per element, sums + residuals = inputs, through any sequence of settings.

    Cuts into slices, precisions, levels, rotation, rounding and the collective change from call to
    call; then the world shrinks to one rank that adds all residuals up, and nothing is left out.
    """
    size, _ = world_of
    total = data.draw(st.sampled_from([1, 5, 130, 900]))
    levels = [e for e in range(1, size + 1) if size % e == 0]
    settings_of = st.tuples(
        st.sampled_from(("fp32", *CODES)),
        st.booleans(),
        st.booleans(),
        st.sampled_from(levels),
        st.booleans(),
        st.lists(st.integers(0, total), min_size=size - 1, max_size=size - 1).map(sorted),
    )
    calls = data.draw(st.lists(settings_of, min_size=1, max_size=6))
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(len(calls), size, total)).astype(np.float32)

    def body(world: World) -> tuple[np.ndarray, np.ndarray]:
        residual, handed = np.zeros(total, np.float32), np.zeros(total)
        for step, (precision, hadamard, nearest, each, everywhere, cuts) in enumerate(calls):
            counts = np.diff([0, *cuts, total])
            options: dict[str, Any] = {
                "precision": precision,
                "hadamard": hadamard,
                "nearest": nearest,
                "machine_ranks": each,
                "residual": residual,
                "seed": seed,
                "step": step,
            }
            x = inputs[step, world.rank]
            if everywhere:
                sums = world.allreduce(x, **options)
                handed += sums if world.rank == 0 else 0
            else:
                handed[slices(counts)[world.rank]] += world.reduce_scatterv(x, counts, **options)
        return handed, residual

    results = well(run(size, body))
    handed = np.sum([r[0] for r in results], axis=0)
    kept = np.sum([r[1] for r in results], axis=0, dtype=np.float64)
    came = inputs.sum(axis=(0, 1), dtype=np.float64)
    most = np.abs(inputs).sum(axis=(0, 1)).max()
    assert np.abs(handed + kept - came).max() <= 2.0**-21 * most
    # another world: residuals are added up, and flushed by an exact sum
    residual = kept.astype(np.float32)
    rest = dcp.init().allreduce(np.zeros(total, np.float32), precision="fp32", residual=residual)
    assert np.abs(handed + rest - came).max() <= 2.0**-21 * most
    assert not residual.any()


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize(("precision", "w"), [("int4", 0.027), ("int8", 8.5e-5)])
def test_error_follows_the_formula(size: int, precision: str, w: float) -> None:
    """One quantisation a contribution, whatever the world (facts of the reduction, w/W).

    E|mean - exact|^2 / |G|^2 = w (W - 1) / W^2: each element is quantised on the W - 1 ranks that
    do not own it. A ring that quantises its partial sums at every hop has about
    w (W - 1) (2 W - 1) / 6 times |G|^2 / W here: (W - 1) (2 W - 1) / 6 > 17 times more at W = 8.
    """
    count = 64 * BLOCK * size
    g = np.random.default_rng(5).normal(size=count).astype(np.float32)
    counts = [count // size] * size

    def body(world: World) -> list[tuple[np.ndarray, dict[str, float]]]:
        return [
            world._quantised_reduce(
                g, np.array(counts), precision, False, False, None, 11, step, 1, None
            )
            for step in range(4)
        ]

    results = well(run(size, body))
    squares = float((g.astype(np.float64) ** 2).sum())
    for step in range(4):
        figures = [r[step][1] for r in results]
        w_found = sum(f["error_squares"] for f in figures) / sum(f["squares"] for f in figures)
        assert w_found == pytest.approx(w, rel=0.1)
        mean = np.concatenate([r[step][0] for r in results]).astype(np.float64) / size
        error = float(((mean - g) ** 2).sum()) / squares
        assert error == pytest.approx(w_found * (size - 1) / size**2, rel=0.1)


@pytest.mark.parametrize("size", [2, 8])
def test_stochastic_rounding_is_unbiased(size: int) -> None:
    """The mean over steps of a sum comes nearer to the sum as steps grow; nearest does not."""
    x = np.random.default_rng(2).normal(size=256).astype(np.float32)
    steps = 400

    def body(world: World) -> np.ndarray:
        sums = np.zeros(256)
        for step in range(steps):
            sums += world.allreduce(x, precision="int4", step=step)
        return sums / steps

    for mean in well(run(size, body)):
        # the owner's second quantisation has the step of the sum
        room = size * np.abs(x).max() / 7
        assert np.abs(mean - size * x.astype(np.float64)).max() < 5 * room / np.sqrt(steps)


@pytest.mark.parametrize("size", range(1, 9))
def test_allreduce_is_reduce_scatter_and_gather(size: int) -> None:
    """Case C-08: bitwise, for worlds 1 to 8, and the error of fp32 does not grow with the world."""
    rng = np.random.default_rng(size)
    count = 5000
    inputs = [round_bf16(rng.normal(size=count).astype(np.float32)) for _ in range(size)]
    counts = even(count, size)

    def body(world: World) -> tuple[np.ndarray, ...]:
        x = inputs[world.rank]
        plain = world.allreduce(x)
        exact = world.allreduce(x, precision="fp32", residual=np.zeros_like(x))
        part = world.reduce_scatterv(x, counts)
        int8 = world.allreduce(x, precision="int8", nearest=True)
        int8_part = world.reduce_scatterv(x, counts, precision="int8", nearest=True)
        return plain, exact, world.allgatherv(part), int8, world.allgatherv(int8_part)

    results = well(run(size, body))
    sums = exact(inputs)
    magnitude = np.sum([np.abs(x) for x in inputs], axis=0)
    for plain, again, gathered, int8, parts in results:
        np.testing.assert_array_equal(plain, again)
        np.testing.assert_array_equal(plain, gathered)
        assert np.all(np.abs(plain - sums) <= (size - 1) * 2.0**-24 * magnitude)
        np.testing.assert_array_equal(int8, results[0][3])
        step = np.concatenate([step_of(parts[s], "int8") for s in slices(counts)])
        assert np.all(np.abs(int8 - parts) <= (0.5001 * step if size > 1 else 0))


@pytest.mark.parametrize("precision", CODES)
def test_large_and_small_sums(precision: str) -> None:
    """Case C-04: 80,000 and contributions of 1e-5 / 1024 neither overflow nor underflow."""

    def body(world: World) -> tuple[np.ndarray, np.ndarray]:
        large = world.allreduce(np.full(300, 10_000, np.float32), precision=precision)
        small = np.zeros(300, np.float32)
        for step in range(1024 // world.size):
            x = np.full(300, 1e-5 / 1024, np.float32)
            small += world.allreduce(x, precision=precision, step=step)
        return large / world.size, small

    for large, small in well(run(8, body)):
        # one value a block is the block's largest: a code says it exactly, bf16 to 2^-9
        tolerance = 2.0**-8 if precision == "bf16" else 1e-5
        np.testing.assert_allclose(large, 10_000, rtol=tolerance)
        np.testing.assert_allclose(small, 1e-5, rtol=tolerance)


@pytest.mark.parametrize("precision", CODES)
@pytest.mark.parametrize("hadamard", [False, True])
def test_blocks_of_zeros_and_denormals(precision: str, hadamard: bool) -> None:
    """Case C-05: zeros stay zeros, neighbours are not touched, denormals are no NaN."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=4 * BLOCK).astype(np.float32)
    x[BLOCK : 2 * BLOCK] = 0
    x[2 * BLOCK : 3 * BLOCK] = 1e-41
    options: dict[str, Any] = {"precision": precision, "hadamard": hadamard, "nearest": True}

    def body(world: World) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        residual = np.zeros_like(x)
        sums = world.reduce_scatterv(x, [0, x.size], residual=residual, **options)
        first = world.reduce_scatterv(x[:BLOCK], [0, BLOCK], **options)
        return sums, residual, first

    (_, residual, _), (sums, _, first) = well(run(2, body))
    np.testing.assert_array_equal(sums[BLOCK : 2 * BLOCK], 0)
    np.testing.assert_array_equal(residual[BLOCK : 2 * BLOCK], 0)
    np.testing.assert_array_equal(sums[:BLOCK], first)
    denormal = slice(2 * BLOCK, 3 * BLOCK)
    np.testing.assert_allclose(sums[denormal] + residual[denormal], 2e-41, atol=1e-44)


@pytest.mark.parametrize("precision", ("fp32", *CODES))
@pytest.mark.parametrize("owner", [0, 2])
def test_a_nan_of_one_rank_reaches_the_owner_and_no_residual(precision: str, owner: int) -> None:
    """Case C-06: rank 1 alone has a NaN; its owner sees one, residuals stay as they were there."""
    count = 3 * BLOCK

    def body(world: World) -> tuple[np.ndarray, np.ndarray]:
        x = np.ones(count, np.float32) * 0.3
        residual = np.full(count, 0.01, np.float32)
        if world.rank == 1:
            x[BLOCK + 5] = np.nan
        counts = np.zeros(3, np.int64)
        counts[owner] = count
        return world.reduce_scatterv(x, counts, precision=precision, residual=residual), residual

    results = well(run(3, body))
    sums = results[owner][0]
    assert np.isnan(sums[BLOCK + 5])
    assert np.isfinite(sums[:BLOCK]).all() and np.isfinite(sums[2 * BLOCK :]).all()
    for rank, (_, residual) in enumerate(results):
        assert np.isfinite(residual).all()
        assert rank != 1 or residual[BLOCK + 5] == np.float32(0.01)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_the_owners_own_nan(size: int) -> None:
    """A NaN in a rank's own part of its own slice: the sum is one, the residual stays."""

    def body(world: World) -> tuple[np.ndarray, np.ndarray]:
        x, residual = np.ones(size, np.float32), np.full(size, 0.5, np.float32)
        x[world.rank] = np.nan if world.rank == 0 else 1
        sums = world.reduce_scatterv(x, [1] * size, precision="int8", residual=residual)
        return sums, residual

    results = well(run(size, body))
    assert np.isnan(results[0][0]).all() and results[0][1][0] == 0.5
    for rank in range(1, size):
        assert np.isfinite(results[rank][0]).all() and results[rank][1][rank] == 0


def test_bits_follow_seed_step_and_rank() -> None:
    """Random bits: the same for the same call, others for another seed, step or rank."""
    x = np.random.default_rng(0).normal(size=600).astype(np.float32)

    def body(world: World) -> list[np.ndarray]:
        keys = [(0, 0), (0, 0), (1, 0), (0, 1)]
        return [
            world.reduce_scatterv(x, [0, 300, 300], precision="int4", seed=seed, step=step)
            for seed, step in keys
        ]

    for rank, results in enumerate(well(run(3, body))):
        if rank > 0:
            np.testing.assert_array_equal(results[0], results[1])
            for a, b in itertools.combinations(results[1:], 2):
                assert np.any(a != b)
            # two ranks sent the same values: equal random bits would double the error of one
            own = x[300 * (rank - 1) : 300 * rank]
            halves = (results[0] - own) / 2
            scale = np.repeat([np.abs(own[i : i + 128]).max() / 7 for i in (0, 128, 256)], 128)
            assert np.any(np.abs(halves / scale[:300] - np.rint(halves / scale[:300])) > 0.4)


def test_inputs_of_other_shapes_and_out() -> None:
    def body(world: World) -> None:
        x = np.ones((6, 3), np.float32)
        out = np.empty((3, 3), np.float32)
        part = world.reduce_scatterv(x, [4, 2], precision="int8")
        assert part.shape == ([4, 2][world.rank], 3)
        same = world.reduce_scatterv(x, [3, 3], precision="bf16", out=out)
        assert np.shares_memory(same, out) and np.all(out == 2)
        whole = world.allreduce(x, precision="int4", out=x)
        assert whole.shape == x.shape and np.all(x == 2) and np.shares_memory(whole, x)
        assert world.allreduce(np.ones((0, 3), np.float32), precision="int8").shape == (0, 3)

    well(run(2, body))


def test_wrong_arguments_name_themselves() -> None:
    def body(world: World) -> None:
        x = np.ones(4, np.float32)
        with pytest.raises(dcp.DTypeError, match=r"x .*float32.*float64"):
            world.allreduce(np.ones(4), precision="int8")
        with pytest.raises(dcp.ArgumentError, match=r"int3.*int8"):
            world.allreduce(x, precision="int3")
        with pytest.raises(dcp.ArgumentError, match=r"precision=8"):
            world.allreduce(x, precision=8)
        with pytest.raises(dcp.ArgumentError, match=r"op='max'"):
            world.allreduce(x, "max", precision="int8")
        with pytest.raises(dcp.ArgumentError, match=r"machine_ranks 3.*divide the 4"):
            world.allreduce(x, precision="int8", machine_ranks=3)
        with pytest.raises(dcp.ArgumentError, match=r"machine_ranks=0|machine_ranks 0"):
            world.allreduce(x, precision="int8", machine_ranks=0)
        with pytest.raises(dcp.ArgumentError, match=r"step=-1"):
            world.allreduce(x, precision="int8", step=-1)
        with pytest.raises(dcp.ArgumentError, match=r"seed=0.5"):
            world.allreduce(x, precision="int8", seed=0.5)
        with pytest.raises(dcp.ArgumentError, match=r"residual has 3 elements"):
            world.allreduce(x, precision="int8", residual=np.zeros(3, np.float32))
        with pytest.raises(dcp.DTypeError, match=r"residual"):
            world.allreduce(x, precision="int8", residual=np.zeros(4))
        frozen = np.zeros(4, np.float32)
        frozen.setflags(write=False)
        with pytest.raises(dcp.ArgumentError, match=r"residual"):
            world.allreduce(x, precision="int8", residual=frozen)
        with pytest.raises(dcp.ArgumentError, match=r"overlaps"):
            world.allreduce(x, precision="int8", residual=x)
        with pytest.raises(dcp.ArgumentError, match=r"x has 4 elements"):
            world.reduce_scatterv(x, [1, 1, 1, 0], precision="int8")
        world.barrier()  # no peer was told
        np.testing.assert_array_equal(world.allreduce(x, precision="int8"), 4)

    well(run(4, body))


@pytest.mark.parametrize(
    ("name", "one", "other", "shown"),
    [
        ("precision", "int8", "int4", ("int8", "int4")),
        ("step", 3, 4, ("step 3", "step 4")),
        ("seed", 5, 6, ("seed 5", "seed 6")),
        ("nearest", True, False, ("to nearest",)),
        ("hadamard", True, False, ("rotated",)),
        ("counts", [2, 2], [1, 3], ("counts 2, 2", "counts 1, 3")),
        ("machine_ranks", 1, 2, ()),
    ],
)
def test_ranks_that_disagree(name: str, one: Any, other: Any, shown: tuple[str, ...]) -> None:
    """All ranks get the error, with both sides; residuals stay, and the world can go on."""

    def body(world: World) -> None:
        options: dict[str, Any] = {"precision": "int8", "counts": [2, 2]}
        options[name] = one if world.rank == 0 else other
        residual = np.full(4, 0.25, np.float32)
        counts = options.pop("counts")
        x = np.ones(4, np.float32)
        if name == "machine_ranks":  # two ranks of a machine of two: one level
            world.reduce_scatterv(x, counts, residual=residual, **options)
            return
        with pytest.raises(dcp.MismatchError, match=r"rank 0 called reduce.*rank 1") as error:
            world.reduce_scatterv(x, counts, residual=residual, **options)
        for text in shown:
            assert text in str(error.value)
        np.testing.assert_array_equal(residual, np.float32(0.25))
        world.reduce_scatterv(x, [2, 2], precision="int8", residual=residual)

    well(run(2, body))


def test_two_levels_send_less_across() -> None:
    """Across machines of two ranks half as much travels, and what others kept is handed over."""
    count = 4 * 1000
    x = np.random.default_rng(3).normal(size=count).astype(np.float32)

    def body(world: World) -> tuple[float, float, np.ndarray]:
        residual = np.zeros(count, np.float32)
        counts = np.array([1000] * 4)

        def once(each: int, step: int) -> float:
            arguments = ("int4", False, False, residual, 0, step, each)
            return float(world._quantised_reduce(x, counts, *arguments, None)[1]["sent_bytes"])

        flat = once(1, 0)
        assert residual.any()
        levels = once(2, 1)
        return flat, levels, residual

    for rank, (flat, levels, residual) in enumerate(well(run(4, body))):
        assert (flat, levels) == (3 * message_bytes("int4", 1000), message_bytes("int4", 1000))
        held = residual.reshape(4, 1000).any(axis=1)
        # only slices of the rank's place in the other machine
        assert held.tolist() == [r % 2 == rank % 2 and r != rank for r in range(4)]


def test_memory_is_two_messages_and_kept() -> None:
    """What a reduction holds beside the caller's arrays: what it sends and what it gets."""
    count = 1 << 20
    x = np.ones(count, np.float32)

    def body(world: World) -> list[int]:
        held = []
        for step in range(2):
            world.reduce_scatterv(x, [count // 2] * 2, precision="int8", step=step)
            world.barrier()
            held.append(_dcp.memory()["held"])
            world.barrier()
        return held

    before = _dcp.memory()["held"]
    first, second = well(run(2, body))[0]
    messages = 2 * 2 * message_bytes("int8", count // 2)  # two ranks in this process
    assert first == second
    assert messages <= first - before <= messages + (16 << 20)  # communicators, runs
    assert _dcp.memory()["held"] == before
