"""The named strategies: what defines each of them, on random steps and on steps done by hand."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dcp
from dcp import planning

NAMED = [name for name in planning.strategies() if name not in ("dcp", "fixed")]
COST = dcp.CostModel(
    latency_s=1e-3,
    token_s=1e-5,
    square_s=1e-8,
    group_s=(2e-4, 9e-4),
    hop_s=(1e-5, 8e-5),
    gather_s=(1e-7, 9e-7),
    exchange_s=(2e-7, 9e-7),
    layer_token_s=5e-7,
    layer_square_s=5e-10,
    layer_comm_share=0.1,
    mlp_token_s=2e-7,
    fixed_bytes=1000,
    sharded_bytes=6000,
    scratch_bytes=500,
    token_bytes=100,
    layer_token_bytes=20,
    mlp_token_bytes=8,
    group_token_bytes=2,
    logit_bytes=40,
    logit_chunk_tokens=64,
    layer_count=4,
    node_ranks=4,
)
FULL = {"layer": 4}

lengths_lists = st.one_of(
    st.lists(st.one_of(st.integers(1, 40), st.integers(1, 5000)), min_size=1, max_size=60),
    st.builds(lambda n, count: [n] * count, st.integers(1, 3000), st.integers(1, 30)),
    st.builds(lambda n, count: [n] + [1] * count, st.integers(1, 60000), st.integers(0, 30)),
)
worlds = st.sampled_from([1, 2, 3, 4, 5, 6, 12])


def plan(strategy: str, lengths: list[int], cost: dcp.CostModel, world: int, **more: Any) -> Any:
    return dcp.plan(lengths, cost, world_size=world, strategy=strategy, **more)


def placed(made: dcp.Plan) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(ranks, sequences) of every micro-batch, in the plan's order."""
    return [(m.ranks, m.sequences) for m in made.micro_batches]


def settings_of(made: dcp.Plan) -> set[tuple[int, tuple[tuple[str, int], ...]]]:
    """The (group size, recompute) that a plan uses."""
    return {(len(m.ranks), tuple(sorted(m.recompute.items()))) for m in made.micro_batches}


def check_plan(made: dcp.Plan) -> None:
    """Every rule, worked out here from the cost model's own words."""
    lengths, cost, world = made.lengths.tolist(), made.cost, made.world_size
    busy = [0.0] * world
    for m in made.micro_batches:
        mine = [lengths[i] for i in m.sequences]
        first, count = m.ranks[0], len(m.ranks)
        assert mine and m.ranks == tuple(range(first, first + count)) and m.ranks[-1] < world
        assert m.end_s - m.start_s == pytest.approx(cost.time(mine, m.ranks, m.recompute))
        assert all(m.start_s >= busy[r] - 1e-12 for r in m.ranks)
        for r in m.ranks:
            busy[r] = m.end_s
        need = cost.memory(mine, m.ranks, m.recompute, world_size=world)
        assert m.bytes == need
        assert made.memory_bytes is None or need <= made.memory_bytes
        rows = made.options.max_tokens
        assert rows is None or -(-sum(mine) // count) <= rows
    seen = sorted(i for m in made.micro_batches for i in m.sequences)
    assert seen == list(range(len(lengths)))
    assert made.makespan == pytest.approx(max(busy)) and made.makespan >= made.bound


def caps(lengths: list[int], world: int, kind: str) -> dict[str, Any]:
    """Caps under which the longest sequence fits only just, somewhere."""
    longest = max(lengths)
    if kind == "bytes":
        least = min(COST.memory([longest], p, "full", world_size=world) for p in (1, world))
        return {"memory_bytes": least}
    return {"max_tokens": -(-longest // world)} if kind == "rows" else {}


@settings(max_examples=50, deadline=None)
@given(
    lengths=lengths_lists,
    world=worlds,
    kind=st.sampled_from(["none", "bytes", "rows"]),
    longer=st.integers(0, 1000),
    rounds=st.booleans(),
)
def test_every_plan(lengths: list[int], world: int, kind: str, longer: int, rounds: bool) -> None:
    """A plan exists wherever the longest sequence fits, keeps all rules and comes out again."""
    options = caps(lengths, world, kind) | {"rounds": rounds}
    if kind == "none":
        options["longest"] = max(lengths) + longer
    for name in NAMED:
        made = plan(name, lengths, COST, world, **options)
        made.verify()
        if not rounds:
            check_plan(made)
        again = plan(name, lengths, COST, world, **options)
        assert again.hash == made.hash and placed(again) == placed(made)
        assert made.winner == name


@settings(max_examples=40, deadline=None)
@given(lengths=lengths_lists, world=worlds, kind=st.sampled_from(["none", "bytes", "rows"]))
def test_what_defines_them(lengths: list[int], world: int, kind: str) -> None:
    longest = max(lengths)
    options = caps(lengths, world, kind) | {"longest": longest}
    make = {name: plan(name, lengths, COST, world, **options) for name in NAMED}
    level = {i: (n - 1).bit_length() for i, n in enumerate(lengths)}
    for name in ("bucket", "bucket-published", "inter", "inter-published"):
        for m in make[name].micro_batches:
            assert len({level[i] for i in m.sequences}) == 1, "one class a micro-batch"
    for name in ("bucket", "packed", "bucket-published", "fixed-best"):
        assert len(settings_of(make[name])) == 1, "one setting"
        for m in make[name].micro_batches:
            assert m.ranks[0] % len(m.ranks) == 0, "aligned"
    # a later step of the run, of short sequences only: bucket keeps its setting
    later = plan("bucket", [1, min(2, longest), 1], COST, world, **options)
    assert settings_of(later) == settings_of(make["bucket"])
    for name in ("inter", "inter-published"):
        sizes = {(level[m.sequences[0]], len(m.ranks)) for m in make[name].micro_batches}
        assert len(sizes) == len({k for k, _ in sizes}), "one size a class"
    recompute = {r for _, r in settings_of(make["inter"])}
    assert recompute == {r for _, r in settings_of(make["bucket"])}
    for name in ("bucket-published", "inter-published"):
        assert {r for _, r in settings_of(make[name])} == {tuple(FULL.items())}
        usual = min(4, world)
        for size in {p for p, _ in settings_of(make[name])} - {usual}:
            rows = options.get("max_tokens")
            need = COST.memory([longest], usual, "full", world_size=world)
            assert (rows is not None and -(-longest // usual) > rows) or (
                need > options.get("memory_bytes", need)
            ), f"groups of {size} where {usual} would do"
    for name in ("flexsp", "megatron", "knapformer"):
        assert len({r for _, r in settings_of(make[name])}) == 1, "one recompute"
    for name in ("flexsp", "megatron"):
        sizes_used = {p for p, _ in settings_of(make[name])}
        assert all(p & (p - 1) == 0 or p == world for p in sizes_used), "powers of two"
    bags = {m.ranks for m in make["knapformer"].micro_batches}
    ranks = [r for bag in bags for r in bag]
    assert len(ranks) == len(set(ranks)), "a rank is in one bag"


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 3000), min_size=48, max_size=96),
    world=st.sampled_from([2, 3, 4, 6]),
    name=st.sampled_from(["packed", "fixed-best"]),
)
def test_balance(lengths: list[int], world: int, name: str) -> None:
    """Greedy's own promise: the last group ends at most one sequence after the mean."""
    made = plan(name, lengths, COST, world)
    ((group, _),) = settings_of(made)
    times = Counter[int]()
    for m in made.micro_batches:
        times[m.ranks[0]] += m.end_s - m.start_s
    firsts = range(0, world - group + 1, group)
    longest = max(COST.time([max(lengths)], range(f, f + group)) for f in firsts)
    mean = sum(times.values()) / (world // group)
    assert max(times.values()) <= mean + longest + 3 * COST.latency_s


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("recompute", ["none", "selective", "full", {"layer": 1, "mlp": 2}])
def test_fixed_takes_the_given_setting(world: int, recompute: Any) -> None:
    lengths = [900, 40, 7, 1, 2500, 333, 333, 12, 5, 77, 1, 1, 60]
    named = {"none": {}, "selective": {"mlp": 4}, "full": FULL}
    wanted = named[recompute] if isinstance(recompute, str) else recompute
    for group in range(1, world + 2):
        options = {"fixed_group": group, "fixed_recompute": recompute}
        if group > world or world % group:
            with pytest.raises(dcp.ArgumentError, match=f"{group} .*{world}"):
                plan("fixed", lengths, COST, world, **options)
            continue
        made = plan("fixed", lengths, COST, world, **options)
        check_plan(made)
        assert settings_of(made) == {(group, tuple(sorted(wanted.items())))}
        used = {m.ranks[0] for m in made.micro_batches}
        assert used == set(range(0, world, group)), "more sequences than groups: all work"


def test_what_does_not_fit_is_named() -> None:
    """`fixed` with too small a group; strategies that settle once a run, by the run's longest."""
    with pytest.raises(dcp.InfeasibleError, match=r"lengths\[1\] = 90 .*groups of 2.* 30"):
        plan("fixed", [5, 90], COST, 4, max_tokens=30, fixed_group=2)
    cap = COST.memory([50], 1, "full", world_size=4)
    with pytest.raises(dcp.InfeasibleError, match=rf"lengths\[0\] = 60 .* bytes .* {cap}"):
        plan("fixed", [60], COST, 4, memory_bytes=cap, fixed_recompute="full")
    for name in ("bucket", "packed", "bucket-published", "knapformer"):
        with pytest.raises(dcp.InfeasibleError, match="run = 121 tokens"):
            plan(name, [5, 90], COST, 4, max_tokens=30, longest=121)
        plan(name, [5, 90], COST, 4, max_tokens=30, longest=120).verify()


def linear(**more: Any) -> dcp.CostModel:
    """A token takes one second of one rank."""
    return dcp.CostModel(token_s=1.0, **more)


def test_bucket_deals_in_data_order() -> None:
    """Cap 8 tokens. Classes by hand: 8s, {3, 4}, {2}, {1}; batches of 8/8 = 1, 8/4 = 2, 8/2 = 4,
    8/1 = 8; all full ones take 8 s, so the median rule changes nothing. The order is that of
    first sequences: 0 alone, 1 takes the other 1 along, 2 the 3, then the 2 and the second 8."""
    made = plan("bucket", [8, 1, 4, 2, 8, 1, 3], linear(), 2, max_group=1, max_tokens=8)
    assert placed(made) == [
        ((0,), (0,)),
        ((1,), (1, 5)),
        ((0,), (2, 6)),
        ((1,), (3,)),
        ((0,), (4,)),
    ]


def test_bucket_median_rule() -> None:
    """Only squares cost, cap 8: full batches are 2 x 4 (32 s), 4 x 2 (16 s), 8 x 1 (8 s). The
    median is 16 s, so 4s come alone (2 x 16 / 32); cheaper classes are left as they are."""
    cost = dcp.CostModel(square_s=1.0)
    made = plan("bucket", [4, 4, 2, 2, 1, 1, 1, 1], cost, 1, max_tokens=8)
    assert [s for _, s in placed(made)] == [(0,), (1,), (2, 3), (4, 5, 6, 7)]


def test_bucket_takes_the_pair_of_most_tokens_a_second() -> None:
    """16 rows a rank, the run's longest 32: one rank does not hold it. Two ranks: 32 tokens of
    any class in 16 + 2 s, two groups: 64 tokens in 18 s. Four: 64 tokens in 16 + 2 x 3 s."""
    cost = linear(hop_s=(2.0, 2.0))
    made = plan("bucket", [3, 5, 1], cost, 4, max_tokens=16, longest=32)
    assert settings_of(made) == {(2, ())}
    # and three of four ranks are no better than two groups of two: 48 tokens in 16 + 4 s
    assert {m.ranks for m in made.micro_batches} == {(0, 1), (2, 3)}


def test_packed_takes_its_pair_anew_in_every_step() -> None:
    """One sequence of 100 on 2 ranks: 100 / 2 + 10 = 60 s together. Two: 100 s each alone,
    120 s together."""
    cost = linear(group_s=(10.0, 10.0))
    assert placed(plan("packed", [100], cost, 2)) == [((0, 1), (0,))]
    assert plan("packed", [100], cost, 2).makespan == 60
    two = plan("packed", [100, 100], cost, 2)
    assert two.makespan == 100 and settings_of(two) == {(1, ())}
    # but only pairs that hold the run's longest: 150 rows do not fit one rank of 100
    forced = plan("packed", [100, 100], cost, 2, max_tokens=100, longest=150)
    assert settings_of(forced) == {(2, ())} and forced.makespan == 110  # all 200 at once


def test_packed_differs_and_fixed_best_is_greedy() -> None:
    """{5, 4} and {3, 3, 3} take 9 s each. Greedy: 5 | 4, then 3 to the second (7), 3 to the
    first (8), 3 to the second: 10 s."""
    for name, makespan in (("packed", 9), ("fixed-best", 10)):
        made = plan(name, [5, 4, 3, 3, 3], linear(), 2, max_group=1)
        assert made.makespan == makespan


def test_inter_gives_every_class_its_size() -> None:
    """16 rows a rank, 8 s for being a group. 64 tokens need all four ranks: 64 / 4 + 8 = 24 s.
    16s: one rank 16 tokens in 16 s; two ranks 32 in 24 s, less a rank-second; so one. They
    follow on one rank each: 40 s. In bucket all go through groups of four: 24 + 24 s."""
    cost = linear(group_s=(8.0, 8.0))
    made = plan("inter", [64, 16, 16, 16, 16], cost, 4, max_tokens=16)
    assert placed(made)[0] == ((0, 1, 2, 3), (0,))
    assert sorted(placed(made)[1:]) == [((r,), (r + 1,)) for r in range(4)]
    assert made.makespan == 40
    assert plan("bucket", [64, 16, 16, 16, 16], cost, 4, max_tokens=16).makespan == 48


def test_inter_evens_out_by_accumulation() -> None:
    """6 tokens a micro-batch, two ranks: two of 6 s and two of three 2s, 24 s in all. A chunk is
    one of them; each rank gets one 6 and three 2s, 12 s."""
    made = plan("inter", [6, 6, 2, 2, 2, 2, 2, 2], linear(), 2, max_tokens=6, max_group=1)
    assert made.makespan == 12


@pytest.mark.parametrize(
    ("world", "longest", "group"), [(8, 64, 4), (8, 80, 5), (8, 128, 8), (2, 20, 2), (1, 9, 1)]
)
def test_published_sizes(world: int, longest: int, group: int) -> None:
    """16 rows a rank: 64 tokens fit 4 ranks, 80 need 5, 128 need 8; small worlds are one group."""
    cost = linear(layer_count=4, layer_token_s=0.1)
    made = plan("bucket-published", [3, 1, 9], cost, world, max_tokens=16, longest=longest)
    assert settings_of(made) == {(group, tuple(FULL.items()))}
    # inter's classes each have their own: short ones stay at 4
    mixed = plan("inter-published", [longest, 3], cost, world, max_tokens=16)
    sizes = {m.sequences: len(m.ranks) for m in mixed.micro_batches}
    assert sizes == {(0,): group, (1,): min(4, world)}


def test_megatron_waves() -> None:
    """16 rows a rank: 32 opens 2 ranks, 16 and 8 one each. No rank is free for the last 8: of
    loads 32^2 / 2, 16^2 and 8^2 the last is least and has room."""
    made = plan("megatron", [32, 8, 16, 8], linear(), 4, max_tokens=16)
    assert placed(made) == [((0, 1), (0,)), ((2,), (2,)), ((3,), (1, 3))]


def test_megatron_doubles_until_no_rank_idles() -> None:
    made = plan("megatron", [5], linear(), 4, max_tokens=16)
    assert placed(made) == [((0, 1, 2, 3), (0,))]
    # three ranks: one becomes two, four do not exist
    assert placed(plan("megatron", [5], linear(), 3, max_tokens=16)) == [((0, 1), (0,))]
    # the smallest are doubled first: 64 has four already, two 16s become two each
    made = plan("megatron", [16, 64, 16], linear(), 8, max_tokens=16)
    assert placed(made) == [((0, 1, 2, 3), (1,)), ((4, 5), (0,)), ((6, 7), (2,))]


def test_knapformer_bags() -> None:
    """6 ranks of 16 rows, 40 the longest: bags of 3. Longest first to the emptier bag: 40 | 30,
    20 to the second (50), 10 to the first (50). 50 tokens are more than 48 rows: two
    micro-batches each."""
    made = plan("knapformer", [10, 40, 20, 30], linear(), 6, max_tokens=16)
    bags = {
        bag: sorted(i for ranks, items in placed(made) if ranks == bag for i in items)
        for bag in {ranks for ranks, _ in placed(made)}
    }
    assert bags == {(0, 1, 2): [0, 1], (3, 4, 5): [2, 3]}
    assert len(made.micro_batches) == 4


def test_knapformer_has_a_small_bag_of_what_is_left() -> None:
    """5 ranks, groups of at most 3: no size that divides 5 holds 40. The 20s go to the bag of
    two: 0 and then 20 / 2 are less than 40 / 3."""
    made = plan("knapformer", [40, 20, 20], linear(), 5, max_tokens=16, max_group=3)
    assert {(ranks, i) for ranks, items in placed(made) for i in items} == {
        ((0, 1, 2), 0),
        ((3, 4), 1),
        ((3, 4), 2),
    }


def test_flexsp_waves() -> None:
    """16 rows a rank, 8 s for being a group. 64 tokens fill the world, so two waves: all ranks
    (24 s), then a rank for each 16 (16 s)."""
    cost = linear(group_s=(8.0, 8.0))
    made = plan("flexsp", [16, 16, 64, 16, 16], cost, 4, max_tokens=16)
    assert placed(made)[0] == ((0, 1, 2, 3), (2,))
    assert sorted(s for _, s in placed(made)[1:]) == [(0,), (1,), (3,), (4,)]
    assert made.makespan == 40


def test_flexsp_mixes_sizes_in_a_wave() -> None:
    """In one wave: 64 on two of four ranks takes 32 + 2 s, as do two ranks with 34 each."""
    cost = linear(group_s=(2.0, 2.0))
    made = plan("flexsp", [64, 34, 34], cost, 4, max_tokens=40)
    assert Counter(len(ranks) for ranks, _ in placed(made)) == {2: 1, 1: 2}
    assert made.makespan == 34


@pytest.mark.parametrize("name", NAMED)
def test_more_ranks_than_sequences(name: str) -> None:
    for count, world in itertools.product((1, 2, 3), (4, 5, 6, 12)):
        made = plan(name, [700] * count, COST, world)
        check_plan(made)


@pytest.mark.parametrize("name", NAMED)
def test_an_empty_step_and_free_costs(name: str) -> None:
    assert plan(name, [], COST, 4).micro_batches == []
    made = plan(name, [3, 1, 4, 1, 5], dcp.CostModel(), 3)
    made.verify()
    assert made.makespan == 0


def test_dcp_lives_on_the_others_where_its_own_search_places_nothing() -> None:
    """To the byte the least memory that holds 3 tokens on two ranks."""
    cost = dcp.CostModel(
        fixed_bytes=40.251747510994306,
        sharded_bytes=11741.49661317304,
        scratch_bytes=2283.8459288057165,
        token_bytes=10.997013796767272,
        layer_token_bytes=0.09987260876930626,
        mlp_token_bytes=0.092664185231528,
        logit_bytes=127.20782786108289,
        logit_chunk_tokens=984,
        layer_count=29,
    )
    cap = cost.memory([3], 2, "full", world_size=2)
    made = plan("dcp", [3], cost, 2, memory_bytes=cap)
    assert [ranks for ranks, _ in placed(made)] == [(0, 1)]
