"""The step planner: properties of every plan, the cases from the field, the proof, the hash."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dcp
from dcp import planning

STRATEGIES = planning.strategies()
COST = dcp.CostModel(
    latency_s=1e-3,
    token_s=1e-5,
    square_s=1e-8,
    fixed_bytes=1000,
    sharded_bytes=6000,
    scratch_bytes=500,
    token_bytes=10,
    logit_bytes=40,
    logit_chunk_tokens=64,
)

lengths_lists = st.lists(
    st.one_of(st.integers(1, 40), st.integers(1, 5000), st.just(64)), max_size=60
)


def check_plan(plan: dcp.Plan) -> None:
    """Every rule, worked out here from the cost model's own words."""
    lengths, world, cost = plan.lengths.tolist(), plan.world_size, plan.cost
    seen: list[int] = []
    busy_until = [0.0] * world
    for batch in plan.micro_batches:
        assert len(batch.ranks) == 1 and 0 <= batch.ranks[0] < world
        mine = [lengths[i] for i in batch.sequences]
        assert mine
        seconds = (
            cost.latency_s + cost.token_s * sum(mine) + cost.square_s * sum(x * x for x in mine)
        )
        held = cost.fixed_bytes + cost.sharded_bytes / world + cost.scratch_bytes
        held += cost.token_bytes * sum(mine) + cost.logit_bytes * min(sum(mine), 64)
        assert batch.end_s - batch.start_s == pytest.approx(seconds)
        assert held <= batch.bytes < held + 1
        assert plan.memory_bytes is None or batch.bytes <= plan.memory_bytes
        assert sum(mine) <= (plan.max_tokens or max(4096, *lengths))
        rank = batch.ranks[0]
        assert batch.start_s == pytest.approx(busy_until[rank])
        busy_until[rank] = batch.end_s
        seen += batch.sequences
    assert sorted(seen) == list(range(len(lengths)))
    assert plan.makespan == max(busy_until)
    assert plan.makespan >= plan.bound >= 0


@settings(max_examples=50, deadline=None)
@given(
    lengths=lengths_lists,
    world=st.integers(1, 9),
    strategy=st.sampled_from(STRATEGIES),
    cap=st.one_of(st.none(), st.integers(0, 3000)),
    by_bytes=st.booleans(),
    seed=st.integers(0, 2**64 - 1),
)
def test_every_plan(
    lengths: list[int], world: int, strategy: str, cap: int | None, by_bytes: bool, seed: int
) -> None:
    """Any lengths, worlds with more ranks than work, caps that bind: all rules hold."""
    options: dict[str, Any] = {}
    if cap is not None:
        tokens = max([1, *lengths]) + cap
        if by_bytes:
            options["memory_bytes"] = COST.memory([tokens], world_size=world)
        else:
            options["max_tokens"] = tokens
    make = lambda: dcp.plan(  # noqa: E731
        lengths, COST, world_size=world, strategy=strategy, seed=seed, **options
    )
    plan, again = make(), make()
    check_plan(plan)
    assert plan.hash == again.hash and plan.micro_batches == again.micro_batches
    text = json.dumps(plan.to_json())
    read = dcp.Plan.from_json(text)
    assert read.hash == plan.hash and read.micro_batches == plan.micro_batches
    assert [m for r in range(world) for m in plan.for_rank(r)] == sorted(
        plan.micro_batches, key=lambda m: (m.ranks, m.start_s)
    )


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=30), world=st.integers(1, 6))
def test_the_hash_follows_everything_that_matters(lengths: list[int], world: int) -> None:
    plain: dict[str, Any] = {"world_size": world, "strategy": "packed", "seed": 1}
    plain |= {"memory_bytes": 10**9, "max_tokens": 4096}
    variants: list[tuple[list[int], dcp.CostModel, dict[str, Any]]] = [
        (lengths, COST, plain),
        ([*lengths, 1], COST, plain),
        ([lengths[0] + 1, *lengths[1:]], COST, plain),
        (lengths, dcp.CostModel(**{**_fields(COST), "square_s": 2e-8}), plain),
        (lengths, dcp.CostModel(**{**_fields(COST), "token_bytes": 11}), plain),
        (lengths, COST, {**plain, "world_size": world + 1}),
        (lengths, COST, {**plain, "strategy": "bucket"}),
        (lengths, COST, {**plain, "seed": 2}),
        (lengths, COST, {**plain, "memory_bytes": 10**9 + 1}),
        (lengths, COST, {**plain, "max_tokens": 4097}),
    ]
    hashes = [dcp.plan(n, cost, **options).hash for n, cost, options in variants]
    assert len(set(hashes)) == len(hashes)
    assert all(len(h) == 32 for h in hashes)


def _fields(cost: dcp.CostModel) -> dict[str, Any]:
    return {k: v for k, v in cost.to_json().items() if k not in ("schema", "kind")}


@pytest.mark.parametrize(
    ("count", "wanted"), [(9, [3, 2, 2, 2]), (206, [52, 52, 51, 51]), (3, [1, 1, 1, 0])]
)
def test_counts_are_even(count: int, wanted: list[int]) -> None:
    """Case P-05: what does not divide starves no rank; a rank without work is legal."""
    plan = dcp.plan([100] * count, COST, world_size=4)
    counts = [sum(len(m.sequences) for m in plan.for_rank(r)) for r in range(4)]
    assert counts == wanted


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_token_cap_beats_balance(world: int) -> None:
    """Case P-06: {90} and {7 x 15 = 105} would balance squares, and pass a cap of 100."""
    plan = dcp.plan([90, *[15] * 7], COST, world_size=world, max_tokens=100)
    check_plan(plan)
    assert len(plan.micro_batches) >= 3
    with pytest.raises(dcp.InfeasibleError, match=r"lengths\[0\] = 90 .* max_tokens .* 89"):
        dcp.plan([90, *[15] * 7], COST, world_size=world, max_tokens=89)


def test_the_cap_counts_tokens_without_padding() -> None:
    """Case P-08: 35 clips of 7.3 to 11.4 s, 299 in all: under 300 laid end to end."""
    clips = np.linspace(73, 114, 35).astype(int)
    clips[-1] = 114
    clips[:7] -= (clips.sum() - 2990) // 7
    assert clips.sum() <= 3000 < 114 * 35
    assert len(dcp.plan(clips, COST, world_size=1, max_tokens=3000).micro_batches) == 1


def test_what_fits_nowhere_is_named_before_anything_runs() -> None:
    """Case P-11 on one rank a micro-batch: the error names sequence, length, need and cap."""
    lengths = [100] * 1000
    lengths[321] = 50_000
    cap = COST.memory([20_000], world_size=4)
    with pytest.raises(dcp.InfeasibleError) as error:
        dcp.plan(lengths, COST, world_size=4, memory_bytes=cap)
    need = COST.memory([50_000], world_size=4)
    for part in ("lengths[321]", "50000", str(need), str(cap)):
        assert part in str(error.value)
    with pytest.raises(dcp.InfeasibleError, match="whatever the rank computes"):
        dcp.plan([1], COST, world_size=4, memory_bytes=2000)


@pytest.mark.parametrize(
    ("lengths", "options", "error", "words"),
    [
        ([5, 0, 2], {}, dcp.ArgumentError, [r"lengths\[1\] = 0"]),
        ([5, -3], {}, dcp.ArgumentError, [r"lengths\[1\] = -3"]),
        ([1.5], {}, dcp.DTypeError, ["lengths"]),
        ([[1, 2]], {}, dcp.ArgumentError, ["lengths"]),
        ([2**53, 2**53], {}, dcp.ArgumentError, ["2.53"]),
        ([1], {"world_size": 0}, dcp.ArgumentError, ["world_size = 0"]),
        ([1], {"world_size": 1.5}, dcp.DTypeError, ["world_size"]),
        ([1], {"strategy": "paked"}, dcp.ArgumentError, ["paked", "packed"]),
        ([1], {"strategy": "buckets"}, dcp.ArgumentError, ["mean 'bucket'"]),
        ([1], {"memory_bytes": 0}, dcp.ArgumentError, ["memory_bytes = 0"]),
        ([1], {"max_tokens": -1}, dcp.ArgumentError, ["max_tokens = -1"]),
        ([1], {"seed": -1}, dcp.ArgumentError, ["seed = -1"]),
        ([6, 6], {"tokens_per_step": 10}, dcp.ArgumentError, ["12", "tokens_per_step = 10"]),
    ],
)
def test_bad_requests(
    lengths: Any, options: dict[str, Any], error: type[Exception], words: list[str]
) -> None:
    with pytest.raises(error) as found:
        dcp.plan(lengths, COST, **{"world_size": 2, **options})
    for word in words:
        assert found.match(word)


@pytest.mark.parametrize("dtype", ["i1", "u1", "<i2", ">i2", "<i4", ">i4", "<u4", "<i8", ">u8"])
def test_every_integer_type_gives_the_same_plan(dtype: str) -> None:
    """Case E-05: any width and byte order; sums are 64-bit."""
    lengths = [100, 3, 77, 1, 120]
    plain = dcp.plan(lengths, COST, world_size=2)
    assert dcp.plan(np.array(lengths, dtype), COST, world_size=2).hash == plain.hash
    big = dcp.plan([2**31 - 1] * 3, dcp.CostModel(token_s=1.0), world_size=1)
    assert big.makespan == 3 * (2**31 - 1)
    with pytest.raises(dcp.ArgumentError, match="does not fit"):
        dcp.plan(np.array([2**64 - 1], np.uint64), COST, world_size=1)


def test_read_only_lengths_are_read(tmp_path: Any) -> None:
    """Case E-04: a read-only memory map is as good as an array."""
    np.save(tmp_path / "l.npy", np.array([5, 6, 7], np.int32))
    mapped = np.load(tmp_path / "l.npy", mmap_mode="r")
    assert dcp.plan(mapped, COST, world_size=2).hash == dcp.plan([5, 6, 7], COST, world_size=2).hash


@pytest.mark.parametrize(("mean", "spread"), [(5.5, 0.8), (7.0, 1.0), (7.5, 1.6)])
@pytest.mark.parametrize("world", [2, 8, 32])
def test_packed_is_balanced(mean: float, spread: float, world: int) -> None:
    """Long-tailed lengths, from 8 sequences a rank: near the bound, and not behind `bucket`."""
    rng = np.random.default_rng(7)
    gaps = []
    for a_rank in (8, 16, 64):
        sizes = np.exp(rng.normal(mean, spread, a_rank * world)).clip(1, 4096).astype(int)
        packed = dcp.plan(sizes, COST, world_size=world)
        bucket = dcp.plan(sizes, COST, world_size=world, strategy="bucket")
        check_plan(packed)
        check_plan(bucket)
        assert packed.makespan <= bucket.makespan
        gaps.append(packed.gap)
    assert max(gaps) < 0.03 and np.mean(gaps) < 0.015


def test_near_the_best_on_small_cases() -> None:
    """Brute force over all ways to deal up to 8 sequences to 2 or 3 ranks."""
    rng = np.random.default_rng(3)
    cost = dcp.CostModel(token_s=1e-5, square_s=1e-8)
    ratios = []
    for _ in range(40):
        world, count = int(rng.integers(2, 4)), int(rng.integers(4, 9))
        sizes = np.exp(rng.normal(5, 1, count)).clip(1, 500).astype(int)
        work = np.array([cost.time([int(n)]) for n in sizes])
        best = min(
            max(
                float(work[(code // world ** np.arange(count)) % world == r].sum())
                for r in range(world)
            )
            for code in range(world**count)
        )
        made = dcp.plan(sizes, cost, world_size=world).makespan
        assert made >= best * (1 - 1e-9)
        ratios.append(made / best)
    assert max(ratios) < 1.1 and np.mean(ratios) < 1.01


def test_bucket_follows_the_published_rule() -> None:
    """One class a micro-batch; where a class takes longer than the median its batch shrinks."""
    lengths = [1000 if i % 10 == 0 else 100 for i in range(40)]
    cost = dcp.CostModel(token_s=1e-6, square_s=1e-8)
    plan = dcp.plan(lengths, cost, world_size=2, strategy="bucket", max_tokens=2000)
    # full batches: 20 x 100 takes 4 ms, 2 x 1000 takes 22 ms; median 13 ms; 2 * 13 / 22 -> 1
    sizes = [(lengths[m.sequences[0]], len(m.sequences)) for m in plan.micro_batches]
    assert sorted(sizes) == [(100, 16), (100, 20), *[(1000, 1)] * 4]
    for batch in plan.micro_batches:
        assert len({lengths[i] for i in batch.sequences}) == 1
    dealt = sorted(plan.micro_batches, key=lambda m: (m.start_s, m.ranks))
    assert [m.ranks[0] for m in dealt[:2]] == [0, 1]


def _edit(change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    document = copy.deepcopy(
        dcp.plan([40, 30, 20, 10, 5], COST, world_size=2, max_tokens=60).to_json()
    )
    change(document)
    return document


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda d: d["micro_batches"][0]["sequences"].append(1), "every sequence exactly once"),
        (lambda d: d["micro_batches"].pop(), "every sequence exactly once"),
        (lambda d: d["micro_batches"][0].update(ranks=[2]), "ranks exist"),
        (lambda d: d["micro_batches"][0].update(ranks=[0, 0]), "ranks are distinct"),
        (lambda d: d["micro_batches"][0].update(ranks=[]), "at least one rank"),
        (lambda d: d["micro_batches"][0].update(sequences=[5]), "sequences exist"),
        (lambda d: d["micro_batches"][0].update(sequences=[]), "at least one sequence"),
        (lambda d: d["micro_batches"][0].update(bytes=1), "bytes as the cost model says"),
        (lambda d: d["micro_batches"][0].update(end_s=1.0), "durations"),
        (lambda d: d["micro_batches"][-1].update(start_s=-1.0), "durations"),
        (lambda d: d.update(makespan_s=1.0), "makespan"),
        (lambda d: d.update(bound_s=1e-9), "bound"),
        (lambda d: d.update(max_tokens=39), "tokens under the cap"),
        (lambda d: d.update(memory_bytes=4000), "memory under the cap"),
        (lambda d: d.update(seed=9), "hash of what it says"),
        (lambda d: d["micro_batches"][0]["sequences"].reverse(), "hash of what it says"),
    ],
)
def test_a_plan_edited_by_hand_is_refused(
    change: Callable[[dict[str, Any]], Any], rule: str
) -> None:
    document = _edit(change)
    if document == _edit(lambda d: None):
        pytest.skip("the edit changes nothing in this plan")
    with pytest.raises(dcp.ArgumentError, match=rule):
        dcp.Plan.from_json(document)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.pop("lengths"), "lengths"),
        (lambda d: d.update(schema=7), "schema 7"),
        (lambda d: d.update(world="two"), "wrong kind"),
        (lambda d: d["micro_batches"][0].update(ranks=[2**40]), "does not fit"),
        (lambda d: d["cost"].update(token_s=-1.0), "token_s"),
        (lambda d: d["cost"].update(tokens_s=1.0), "tokens_s"),
        (lambda d: d["micro_batches"][0].update(recompute={"moe": 1}), "moe"),
    ],
)
def test_a_damaged_plan_file_is_refused(
    change: Callable[[dict[str, Any]], Any], words: str
) -> None:
    with pytest.raises(dcp.ArgumentError, match=words):
        dcp.Plan.from_json(_edit(change))
    with pytest.raises(dcp.ArgumentError, match="JSON"):
        dcp.Plan.from_json("{")


def test_groups_and_recompute_are_refused_not_faked() -> None:
    for ranks, recompute in ((2, "none"), ([0, 1], "none"), (1, "full"), (1, {"mlp": 1})):
        with pytest.raises(dcp.UnsupportedError):
            COST.time([10], ranks, recompute)
        with pytest.raises(dcp.UnsupportedError):
            COST.memory([10], ranks, recompute, world_size=2)
    with pytest.raises(dcp.UnsupportedError):
        dcp.Plan.from_json(_edit(lambda d: d["micro_batches"][0].update(recompute={"mlp": 1})))


def test_cost_model_formulas() -> None:
    assert COST.time([]) == COST.latency_s
    assert COST.time([30, 40]) == pytest.approx(1e-3 + 1e-5 * 70 + 1e-8 * 2500)
    assert COST.memory([], world_size=3) == 1000 + 2000
    assert COST.memory([100], world_size=3) == 3000 + 500 + 1000 + 40 * 64
    # monotone: more tokens never take less
    sizes = [COST.memory([n], world_size=4) for n in range(200)]
    assert sizes == sorted(sizes)


def test_cost_model_file(tmp_path: Any) -> None:
    COST.save(tmp_path / "c.json")
    assert dcp.CostModel.load(tmp_path / "c.json") == COST
    with pytest.raises(dcp.FileError, match="nowhere"):
        dcp.CostModel.load(tmp_path / "nowhere.json")
    (tmp_path / "half.json").write_text('{"schema": 1')
    with pytest.raises(dcp.FileError, match="half"):
        dcp.CostModel.load(tmp_path / "half.json")
    for bad in ({"token_s": -1}, {"token_s": float("nan")}, {"logit_chunk_tokens": -1}):
        with pytest.raises(dcp.ArgumentError, match=next(iter(bad))):
            dcp.CostModel(**bad)


def test_cost_model_of_a_model() -> None:
    """Linear work by parameters, attention by width; estimates never below what is held."""
    config = dcp.Transformer1D.preset("tiny")
    cost = dcp.CostModel.for_model(config, flops_per_s=1e9)
    wide = dcp.CostModel.for_model(dcp.Transformer1D.preset("tiny", num_hidden_layers=8))
    narrow = dcp.CostModel.for_model(dcp.Transformer1D.preset("tiny", num_hidden_layers=4))
    assert wide.square_s == pytest.approx(2 * narrow.square_s)
    assert cost.fixed_bytes == pytest.approx(4 * config.parameter_count())
    assert cost.sharded_bytes == pytest.approx(12 * config.parameter_count())
    fixed = cost.memory([], world_size=1)
    for tokens in (1, 7, 100, 1000, 4096, 9999, 16384):
        held = config.activation_bytes(tokens)
        assert cost.memory([tokens], world_size=1) - fixed >= held * 0.999


def test_pictures() -> None:
    plan = dcp.plan([40, 30, 20, 10, 5], COST, world_size=2)
    assert plan._repr_html_().count("<rect") == len(plan.micro_batches)
    assert "2 ranks" in repr(plan) and plan.hash[:8] in repr(plan)
    assert 0 <= plan.idle_share < 1


def test_threads_plan_at_once() -> None:
    """The planner has no state: plans made by many threads are those made by one."""
    rng = np.random.default_rng(1)
    steps = [rng.integers(1, 3000, 60) for _ in range(24)]
    make = lambda lengths: dcp.plan(lengths, COST, world_size=5).hash  # noqa: E731
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(make, steps)) == [make(lengths) for lengths in steps]


def test_an_empty_step() -> None:
    plan = dcp.plan([], COST, world_size=3)
    assert plan.micro_batches == [] and plan.makespan == 0 and plan.gap == 0
    assert dcp.Plan.from_json(plan.to_json()).hash == plan.hash


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(1, 50)), budget=st.integers(1, 120))
def test_split_steps_covers_in_order(lengths: list[int], budget: int) -> None:
    steps = planning.split_steps(lengths, budget)
    assert [i for s in steps for i in range(s.start, s.stop)] == list(range(len(lengths)))
    for step, following in zip(steps, [*steps[1:], None], strict=False):
        total = sum(lengths[step])
        assert total <= budget or step.stop - step.start == 1
        if following is not None:
            assert total + lengths[following.start] > budget
