"""dcp.layout: properties of every layout, the least shard on small cases, groups, published shapes.

"Row n" is a row of a table of faults that users of other sharding libraries reported.
"""

import doctest
import itertools
import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dcp
import dcp.layout
from dcp import layout_peers
from dcp.layout import Tile, group_tensors, plan_groups
from dcp.layout_models import model_tensors

DEEPSEEK_V3 = [  # one MoE layer
    ("norm", (7168,)),
    ("q_a", (1536, 7168)),
    ("q_a_norm", (1536,)),
    ("q_b", (24576, 1536)),
    ("kv_a", (576, 7168)),
    ("kv_a_norm", (512,)),
    ("kv_b", (32768, 512)),
    ("o", (7168, 16384)),
    ("norm2", (7168,)),
    ("router", (256, 7168)),
    ("router_bias", (256,)),
]
for expert in range(257):
    DEEPSEEK_V3 += [(f"{expert}.gate", (2048, 7168)), (f"{expert}.up", (2048, 7168))]
    DEEPSEEK_V3 += [(f"{expert}.down", (7168, 2048))]
GPT_OSS_120B = [
    ("norm", (2880,)),
    ("q", (4096, 2880)),
    ("q_bias", (4096,)),
    ("k", (512, 2880)),
    ("k_bias", (512,)),
    ("v", (512, 2880)),
    ("v_bias", (512,)),
    ("o", (2880, 4096)),
    ("o_bias", (2880,)),
    ("sinks", (64,)),
    ("norm2", (2880,)),
    ("router", (128, 2880)),
    ("router_bias", (128,)),
    ("gate_up", (128, 2880, 5760)),
    ("gate_up_bias", (128, 5760)),
    ("down", (128, 2880, 2880)),
    ("down_bias", (128, 2880)),
]
LLAMA_70B = [
    ("norm", (8192,)),
    ("q", (8192, 8192)),
    ("k", (1024, 8192)),
    ("v", (1024, 8192)),
    ("o", (8192, 8192)),
    ("norm2", (8192,)),
    ("gate", (28672, 8192)),
    ("up", (28672, 8192)),
    ("down", (8192, 28672)),
]

shapes = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 9), st.sampled_from([1, 2, 3, 4, 6, 8])),
        st.tuples(st.integers(0, 12)),
        st.tuples(st.integers(1, 3), st.integers(0, 3), st.integers(1, 5)),
        st.just(()),
    ),
    max_size=7,
)


def named(shape_list):
    return [(f"t{i}", shape) for i, shape in enumerate(shape_list)]


def block_of(shape, rows):
    """The rule of the interface, written again."""
    if len(shape) < 2:
        return 1
    return max(1, min(rows, math.prod(shape[:-1])) * shape[-1])


def check(layout, tensors, ranks, rows, unit):
    """No overlap, nothing outside, alignment, no block cut."""
    shard, end = layout.shard_elements, 0
    assert shard % unit == 0
    for name, shape in sorted(tensors, key=lambda t: (layout.offsets[t[0]], math.prod(t[1]))):
        start, size, block = layout.offsets[name], math.prod(shape), block_of(shape, rows)
        assert layout.block_elements[name] == block
        assert start % unit == 0 and start >= 0 and start + size <= ranks * shard
        if size == 0:
            continue
        assert start >= end
        end = start + size
        for border in range((start // shard + 1) * shard, end, shard):
            assert (border - start) % block == 0


@given(
    shape_list=shapes,
    ranks=st.integers(1, 9),
    rows=st.integers(1, 4),
    order=st.sampled_from(["model", "shape", "size", "search"]),
    item=st.sampled_from([1, 2, 4]),
)
@settings(max_examples=50, deadline=None)
def test_every_layout_is_valid(shape_list, ranks, rows, order, item):
    """cases F-02: sizes that do not divide, scalars, empty tensors, more ranks than rows."""
    tensors = named(shape_list)
    layout = dcp.plan_layout(tensors, ranks=ranks, block_rows=rows, order=order, item_bytes=item)
    check(layout, tensors, ranks, rows, 16 // item)
    used = sum(math.prod(s) for s in shape_list)
    assert layout.padding == (ranks * layout.shard_elements / used - 1 if used else 0)
    # the runs of all ranks are the tensors, each element once
    seen = {name: np.zeros(math.prod(shape), int) for name, shape in tensors}
    for rank in range(ranks):
        for name, first, count in layout.runs(rank):
            at = layout.offsets[name] + first
            assert rank * layout.shard_elements <= at
            assert at + count <= (rank + 1) * layout.shard_elements
            seen[name][first : first + count] += 1
    assert all((counts == 1).all() for counts in seen.values())


@given(
    shape_list=st.lists(
        st.tuples(st.integers(1, 9), st.sampled_from([1, 2, 4, 6, 8])), min_size=1, max_size=4
    ),
    ranks=st.integers(1, 5),
    rows=st.integers(1, 3),
)
@settings(max_examples=30, deadline=None)
def test_least_over_all_orders(shape_list, ranks, rows):
    """No order and no smaller shard fits: every start is tried, element by element."""
    layout = dcp.plan_layout(named(shape_list), ranks=ranks, block_rows=rows, order="search")
    sizes = [math.prod(s) for s in shape_list]
    blocks = [block_of(s, rows) for s in shape_list]
    for shard in range(4, layout.shard_elements, 4):
        for order in itertools.permutations(range(len(sizes))):
            end = 0
            for i in order:
                end = next(
                    (
                        start + sizes[i]
                        for start in range(-(-end // 4) * 4, ranks * shard - sizes[i] + 1, 4)
                        if all(
                            (k * shard - start) % blocks[i] == 0
                            for k in range(1, ranks)
                            if start < k * shard < start + sizes[i]
                        )
                    ),
                    None,
                )
                if end is None:
                    break
            assert end is None, f"S = {shard} fits"


@pytest.mark.parametrize(
    ("tensors", "ranks", "rows", "most"),
    [
        (DEEPSEEK_V3, 64, 16, 0.0002),
        (DEEPSEEK_V3, 256, 1, 0.0002),
        (DEEPSEEK_V3, 256, 16, 0.0032),
        (DEEPSEEK_V3, 256, 128, 0.0265),
        (DEEPSEEK_V3, 1024, 16, 0.1198),
        (GPT_OSS_120B, 64, 128, 0.0134),
        (GPT_OSS_120B, 256, 1, 0.0005),
        (GPT_OSS_120B, 256, 16, 0.006),
        (GPT_OSS_120B, 256, 128, 0.0575),
        (GPT_OSS_120B, 1024, 1, 0.058),
        (LLAMA_70B, 64, 1, 0.0037),
        (LLAMA_70B, 256, 16, 0.0981),
        (LLAMA_70B, 1024, 16, 0.0981),
    ],
)
def test_published_shapes(tensors, ranks, rows, most):
    for order in ("model", "search"):
        layout = dcp.plan_layout(tensors, ranks=ranks, block_rows=rows, order=order)
        check(layout, tensors, ranks, rows, 4)
        assert layout.padding <= most


def test_block_above_an_even_share():
    layout = dcp.plan_layout(LLAMA_70B, ranks=256, block_rows=128)
    assert layout.padding > 1 and layout.shard_elements >= 128 * 28672
    assert "a block of 'down'" in layout.advice and "replicas" in layout.advice
    assert dcp.plan_layout(LLAMA_70B, ranks=64).advice is None


def test_one_row_more_than_the_ranks():
    """case F-02: 5 rows on 2 ranks, 96 on 5, 32,001 on 8, 3 on 8."""
    cases = [
        (5, 2, [3, 2]),
        (96, 5, [20, 20, 20, 20, 16]),
        (32001, 8, [4001] * 7 + [3994]),
        (3, 8, [1, 1, 1] + [0] * 5),
    ]
    for rows, ranks, wanted in cases:
        layout = dcp.plan_layout([("w", (rows, 8))], ranks=ranks)
        got = [sum(n for _, _, n in layout.runs(r)) // 8 for r in range(ranks)]
        assert got == wanted


def test_forms_of_input():
    wanted = dcp.plan_layout([("a", (4, 4)), ("b", (3,))], ranks=2)
    assert dcp.plan_layout({"a": [4, 4], "b": (3,)}, ranks=np.int32(2)) == wanted
    assert dcp.plan_layout([], ranks=3).shard_elements == 0
    assert dcp.plan_layout([("s", ()), ("e", (0, 5))], ranks=3).offsets == {"s": 0, "e": 0}
    assert repr(wanted) == "Layout(2 tensors, ranks=2, shard_elements=12, padding=26.32%)"


@pytest.mark.parametrize(
    ("settings", "error", "word"),
    [
        ({"ranks": 0}, dcp.ArgumentError, "ranks 0"),
        ({"ranks": 2.5}, dcp.DTypeError, "ranks 2.5"),
        ({"ranks": 2, "block_rows": 0}, dcp.ArgumentError, "block_rows 0"),
        ({"ranks": 2, "item_bytes": 0}, dcp.ArgumentError, "item_bytes 0"),
        ({"ranks": 2, "item_bytes": 3}, dcp.ArgumentError, "align_bytes 16"),
        ({"ranks": 2, "order": "best"}, dcp.ArgumentError, "search"),
        ({"ranks": 2**63}, dcp.ArgumentError, "64 bits"),
        ({"ranks": 2, "tensors": [("a", (1,)), ("a", (2,))]}, dcp.ArgumentError, "twice"),
        ({"ranks": 2, "tensors": [("a", (-1,))]}, dcp.ArgumentError, "'a'"),
        ({"ranks": 2, "tensors": [("a", (1.0,))]}, dcp.DTypeError, "'a'"),
        ({"ranks": 2, "tensors": [("a", (2**40, 2**40))]}, dcp.ArgumentError, "'a' .*64 bits"),
        ({"ranks": 2, "tensors": [("a", (2**61,)), ("b", (2**61,))]}, dcp.Error, "64 bits"),
        ({"ranks": 2**50, "tensors": [("a", (2**50,))], "block_rows": 9}, None, ""),
        ({"ranks": 2**50, "tensors": [("a", (2**30, 2**20))]}, dcp.ArgumentError, "64 bits"),
    ],
)
def test_bad_input(settings, error, word):
    settings = dict(settings)
    tensors = settings.pop("tensors", [("a", (4, 4))])
    if error is None:
        assert dcp.plan_layout(tensors, **settings).padding >= 0
        return
    with pytest.raises(error, match=word):
        dcp.plan_layout(tensors, **settings)


def test_runs_of_no_rank():
    with pytest.raises(dcp.ArgumentError, match="rank 2"):
        dcp.plan_layout([("a", (4,))], ranks=2).runs(2)


def test_plot():
    pytest.importorskip("matplotlib").use("Agg")
    ax = dcp.plan_layout([("a", (4, 8)), ("b", (8,))], ranks=2).plot()
    assert "padding" in ax.get_title(loc="left")


def test_plot_without_matplotlib():
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "import dcp\n"
        "try:\n    dcp.plan_layout([], ranks=1).plot()\n"
        "except dcp.UnsupportedError as e:\n    print(e)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "dcp[viz]" in out.stdout


def test_examples():
    result = doctest.testmod(dcp.layout)
    assert result.attempted > 3 and result.failed == 0


# Blocks of every kind


def rule_elements(shape, rule):
    """Elements of a block under a rule that fits the shape, written again."""
    if rule == "whole":
        return max(1, math.prod(shape))
    if isinstance(rule, Tile):
        if len(shape) < 2 or 0 in shape:
            return 1
        width = shape[-1] if rule.order == "row" else min(rule.columns, shape[-1])
        return min(rule.rows, shape[-2]) * width
    return block_of(shape, rule)


ruled = st.lists(
    st.one_of(
        st.tuples(
            st.tuples(st.integers(0, 6), st.sampled_from([1, 2, 3, 4, 6, 8])),
            st.one_of(st.integers(1, 3), st.just("whole")),
        ),
        st.tuples(
            st.tuples(st.sampled_from([2, 4, 6]), st.sampled_from([2, 4, 8])),
            st.builds(Tile, st.just(2), st.just(2), order=st.sampled_from(["row", "block"])),
        ),
        st.tuples(st.tuples(st.integers(0, 12)), st.sampled_from([1, "whole"])),
        st.tuples(st.just(()), st.sampled_from([1, "whole", Tile(2, 2)])),
    ),
    min_size=1,
    max_size=4,
)


def ruled_layout(entries, **settings):
    tensors = named([shape for shape, _ in entries])
    rules = {f"t{i}": rule for i, (_, rule) in enumerate(entries)}
    return tensors, dcp.plan_layout(tensors, block_rows=rules, **settings)


@given(
    entries=ruled,
    ranks=st.integers(1, 6),
    order=st.sampled_from(["model", "shape", "size", "search"]),
    item=st.sampled_from([1, 2, 4, 8]),
)
@settings(max_examples=50, deadline=None)
def test_blocks_of_every_kind(entries, ranks, order, item):
    """Rows, whole tensors and tiles in one buffer; the same layout every time."""
    _, layout = ruled_layout(entries, ranks=ranks, order=order, item_bytes=item)
    end, shard = 0, layout.shard_elements
    placed = sorted(enumerate(entries), key=lambda e: (layout.offsets[f"t{e[0]}"], e[0]))
    for i, (shape, rule) in placed:
        size, block, start = math.prod(shape), rule_elements(shape, rule), layout.offsets[f"t{i}"]
        assert layout.block_elements[f"t{i}"] == block
        assert start % (16 // item) == 0
        if size == 0:
            continue
        assert end <= start and start + size <= ranks * shard
        end = start + size
        cuts = range((start // shard + 1) * shard, end, shard)
        assert all((border - start) % block == 0 for border in cuts)
        if rule == "whole":
            assert sum(any(n == f"t{i}" for n, _, _ in layout.runs(r)) for r in range(ranks)) == 1
    assert layout.shard_elements % (16 // item) == 0
    assert ruled_layout(entries, ranks=ranks, order=order, item_bytes=item)[1] == layout


@given(entries=ruled, ranks=st.integers(1, 4))
@settings(max_examples=25, deadline=None)
def test_least_over_all_orders_with_blocks_of_every_kind(entries, ranks):
    """Brute force over every start of every order, with no greedy step."""
    _, layout = ruled_layout(entries, ranks=ranks, order="search")
    items = [(math.prod(s), rule_elements(s, rule)) for s, rule in entries if math.prod(s)]

    def fits(left, end, shard):
        if not left:
            return True
        for i in left:
            size, block = items[i]
            for start in range(-(-end // 4) * 4, ranks * shard - size + 1, 4):
                cuts = range((start // shard + 1) * shard, start + size, shard)
                valid = all((border - start) % block == 0 for border in cuts)
                if valid and fits(left - {i}, start + size, shard):
                    return True
        return False

    for shard in range(4, layout.shard_elements, 4):
        if sum(size for size, _ in items) <= ranks * shard:
            assert not fits(frozenset(range(len(items))), 0, shard), f"S = {shard} fits"


@pytest.mark.parametrize(
    ("shape", "tile", "words"),
    [
        ((30, 64), Tile(16, 16, order="block"), ["'w'", "(30, 64)", "14 of 30 rows"]),
        ((32, 60), Tile(16, 16, order="block"), ["'w'", "12 of 60 columns", "order='block'"]),
        ((4, 30, 64), Tile(16, 64, order="block"), ["14 of 30 rows"]),
        ((4, 30, 64), Tile(16, 16), ["14 of 30 rows", "divide"]),
    ],
)
def test_tiles_that_would_be_short_in_between(shape, tile, words):
    with pytest.raises(dcp.ArgumentError) as caught:
        dcp.plan_layout([("ok", (32, 64)), ("w", shape)], ranks=2, block_rows={"w": tile})
    assert all(word in str(caught.value) for word in words)


def test_tiles_that_may_be_short():
    cases = [
        ((30, 64), Tile(16, 16), 16 * 64),  # the bottom is the tensor's end
        ((30, 16), Tile(16, 16, order="block"), 16 * 16),  # one tile wide
        ((8, 64), Tile(16, 16, order="block"), 8 * 16),  # all tiles are lower
        ((3, 32, 64), Tile(16, 16, order="block"), 16 * 16),
        ((0, 64), Tile(16, 16, order="block"), 1),
    ]
    for shape, tile, block in cases:
        layout = dcp.plan_layout([("w", shape)], ranks=3, block_rows=tile)
        assert layout.block_elements["w"] == block
        assert ("w" in layout.tiles) == (tile.order == "block")


@given(
    high=st.integers(1, 3),
    wide=st.integers(1, 3),
    rows=st.integers(1, 4),
    columns=st.integers(1, 4),
    lead=st.sampled_from([(), (2,), (2, 3)]),
)
@settings(max_examples=40, deadline=None)
def test_a_block_in_storage_is_a_tile(high, wide, rows, columns, lead):
    tile = Tile(rows, columns, order="block")
    shape = (*lead, high * rows, wide * columns)
    array = np.arange(math.prod(shape)).reshape(shape)
    flat = tile.pack(array)
    assert (tile.unpack(flat, shape) == array).all()
    matrices = array.reshape(-1, *shape[-2:])
    blocks = flat.reshape(-1, tile.block_elements("w", shape))
    for number, block in enumerate(blocks):
        matrix, place = divmod(number, high * wide)
        y, x = place // wide * rows, place % wide * columns
        assert (block == matrices[matrix, y : y + rows, x : x + columns].reshape(-1)).all()


@pytest.mark.parametrize(
    ("rule", "error", "word"),
    [
        ("all", dcp.ArgumentError, "'whole'"),
        (2.0, dcp.DTypeError, "2.0"),
        (True, dcp.DTypeError, "True"),
        ({"*": 0}, dcp.ArgumentError, "at least 1"),
        ({"nothing*": 2}, dcp.ArgumentError, "'nothing\\*' matches no tensor"),
        ({"*": None}, dcp.DTypeError, "None"),
    ],
)
def test_rules_that_are_none(rule, error, word):
    with pytest.raises(error, match=word):
        dcp.plan_layout([("a", (4, 4))], ranks=2, block_rows=rule)


def test_the_first_pattern_counts():
    layout = dcp.plan_layout(
        {"a.w": (8, 4), "b.w": (8, 4), "c": (8, 4)}, ranks=2, block_rows={"a.*": 4, "*.w": 2}
    )
    assert layout.block_elements == {"a.w": 16, "b.w": 8, "c": 4}


@pytest.mark.parametrize("arguments", [(0, 1), (1, 0), (1.5, 2), (1, 1, "column")])
def test_tiles_that_are_none(arguments):
    with pytest.raises(dcp.Error):
        Tile(*arguments[:2], *arguments[2:])


def test_owners_of_whole_tensors_are_balanced():
    """As good as giving each tensor, largest first, to the rank that has least."""
    rng = np.random.default_rng(5)
    for count, ranks in ((9, 4), (30, 4), (60, 7), (200, 16), (300, 40)):
        tensors = [
            (f"t{i}", (int(rng.integers(10, 400)), int(rng.choice([64, 96, 128]))))
            for i in range(count)
        ]
        loads = [0] * ranks
        for size in sorted((math.prod(s) for _, s in tensors), reverse=True):
            loads[loads.index(min(loads))] += size
        small = [("norm", (96,)), ("norm2", (128,))]
        layout = dcp.plan_layout(
            [*tensors, *small], ranks=ranks, block_rows="whole", order="search"
        )
        assert layout.shard_elements <= max(loads) + 2 * 128
        for order in ("model", "shape", "size"):
            other = dcp.plan_layout(
                [*tensors, *small], ranks=ranks, block_rows="whole", order=order
            )
            assert layout.shard_elements <= other.shard_elements
        owners = [{name for name, _, _ in layout.runs(rank)} for rank in range(ranks)]
        assert sum(map(len, owners)) == count + 2  # one owner each
    # parcels beside tensors that may be cut
    mixed = dcp.plan_layout(
        [*tensors, ("embed", (5000, 64)), ("b", (77,))],
        ranks=40,
        block_rows={"t*": "whole"},
        order="search",
    )
    assert mixed.padding < 0.02


@given(shape_list=shapes, ranks=st.integers(1, 40), rows=st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_search_is_never_worse(shape_list, ranks, rows):
    tensors = named(shape_list * 3)
    tensors = [(f"{name}.{i}", shape) for i, (name, shape) in enumerate(tensors)]
    shards = {
        order: dcp.plan_layout(tensors, ranks=ranks, block_rows=rows, order=order).shard_elements
        for order in dcp.layout.ORDERS
    }
    assert shards["search"] == min(shards.values())


# Groups


def layers(tensors, count=1):
    return [(f"model.layers.{i}.{name}", shape) for i in range(count) for name, shape in tensors]


def padding_of(buffers):
    used = sum(b.count * b.layout.used_elements for b in buffers)
    held = sum(b.count * b.layout.ranks * b.layout.shard_elements for b in buffers)
    return held / used - 1


DENSE = [
    *(t for t in DEEPSEEK_V3 if not t[0][0].isdigit() and "router" not in t[0]),
    ("gate", (18432, 7168)),
    ("up", (18432, 7168)),
    ("down", (7168, 18432)),
]


@pytest.mark.parametrize(
    ("tensors", "rows", "alone", "most", "buffers"),
    [
        (DENSE, 1, 0.35, 0.003, 4),
        (DENSE, 16, 1.0, 0.09, 5),
        (LLAMA_70B, 16, 0.09, 0.03, 2),
        (GPT_OSS_120B, 128, 0.05, 0.058, 1),  # its rows go together: one buffer stays
        (DEEPSEEK_V3, 16, 0.003, 0.0032, 1),
    ],
)
def test_one_buffer_a_row_length_where_it_pays(tensors, rows, alone, most, buffers):
    """DeepSeek-V3's dense layers pad 36% at one row and 256 ranks in one buffer."""
    together = plan_groups(
        layers(tensors), ranks=256, block_rows=rows, split_above=math.inf, item_bytes=4
    )
    assert len(together) == 1 and padding_of(together) > alone
    apart = plan_groups(layers(tensors), ranks=256, block_rows=rows, item_bytes=4)
    assert padding_of(apart) <= most and len(apart) <= buffers
    names = [name for buffer in apart for name in buffer.layout.shapes]
    assert sorted(names) == sorted(name for name, _ in layers(tensors))
    for buffer in apart:
        check(buffer.layout, list(buffer.layout.shapes.items()), 256, rows, 4)
        if len(apart) > 1:
            assert buffer.row_elements and buffer.name.startswith("model.layers.0:")


def test_collectives_a_layer():
    """Row 21 of the peers' faults: many tiny gathers. 782 tensors are a buffer, at most a few."""
    for ranks in (64, 256, 1024):
        assert len(plan_groups(layers(DEEPSEEK_V3), ranks=ranks)) <= 5


def test_equal_groups_are_planned_once():
    model = [("model.embed_tokens.weight", (96, 8)), *layers([("a", (8, 8)), ("b", (8,))], 5)]
    model += [("model.norm.weight", (8,)), ("lm_head.weight", (96, 8))]
    seen = []
    buffers = plan_groups(model, ranks=3, on_progress=lambda done, of: seen.append((done, of)))
    assert [(b.group, b.count) for b in buffers] == [
        ("model.embed_tokens", 1),
        ("model.layers.0", 5),
        ("model.norm+lm_head", 1),
    ]
    assert buffers[1].groups[-1] == "model.layers.4" and seen[-1] == (3, 3)
    # another block makes another group
    rules = {"model.layers.3.a": "whole", "*": 1}
    assert [b.count for b in plan_groups(model, ranks=3, block_rows=rules)] == [1, 4, 1, 1]


def test_groups_as_dcp_trains_them():
    config = dcp.Transformer1D.preset("tiny")
    groups = group_tensors(config.tensors())
    wanted = [(group, names) for group, names in config.groups()]
    assert [list(g.shapes) for g in groups] == [names for _, names in wanted]
    assert group_tensors(config.tensors(), by=wanted)[1].name == "model.layers.0"


def test_groups_by_other_rules():
    tensors = [(f"t{i}", (10, 10)) for i in range(7)]
    by_bytes = group_tensors(tensors, by=1000)
    assert [len(g.shapes) for g in by_bytes] == [2, 2, 2, 1]
    assert [len(g.shapes) for g in group_tensors(tensors, by=1)] == [1] * 7
    assert [len(g.shapes) for g in group_tensors(tensors, by="model")] == [7]
    odd = group_tensors(tensors, by=lambda name: "odd" if int(name[1]) % 2 else "even")
    assert [(g.name, len(g.shapes)) for g in odd] == [("even", 4), ("odd", 3)]
    assert group_tensors([]) == [] and plan_groups([], ranks=3) == []


def test_dtypes_have_buffers_of_their_own():
    tensors = [
        ("layers.0.w", (64, 64), "bfloat16"),
        ("layers.0.norm", (64,), "float32"),
        ("layers.0.v", (64, 64), "bfloat16"),
    ]
    groups = group_tensors(tensors)
    assert [(g.name, g.dtype, g.elements) for g in groups] == [
        ("layers.0:bfloat16", "bfloat16", 8192),
        ("layers.0:float32", "float32", 64),
    ]
    assert [len(g.shapes) for g in group_tensors(tensors, by=2 * 64 * 64 + 4 * 64)] == [1, 1, 1]
    for buffer in plan_groups(groups, ranks=4):
        assert buffer.layout.shard_elements % 16 == 0


def test_tied_tensors():
    model = [("embed", (96, 8)), *layers([("a", (8, 8))]), ("head", (96, 8))]
    groups = group_tensors(model, tied={"head": "embed"})
    assert [g.name for g in groups] == ["embed", "model.layers.0"]
    with pytest.raises(dcp.ArgumentError, match=r"'head' is float32 of shape \(96, 8\), 'a'"):
        group_tensors([*model, ("a", (96, 9))], tied={"head": "a"})
    with pytest.raises(dcp.ArgumentError, match="no tensor 'x'"):
        group_tensors(model, tied={"head": "x"})
    with pytest.raises(dcp.ArgumentError, match="itself"):
        group_tensors(model, tied={"head": "head"})


@pytest.mark.parametrize(
    ("arguments", "error", "word"),
    [
        ({"tensors": [("a", (1,)), ("a", (1,))]}, dcp.ArgumentError, "twice"),
        ({"tensors": [("a", (1,), "float33")]}, dcp.ArgumentError, "float33"),
        ({"tensors": [("a", -1)]}, dcp.DTypeError, "'a'"),
        ({"tensors": [("a", (-1,))]}, dcp.ArgumentError, "'a'"),
        ({"tensors": ["a"]}, dcp.DTypeError, "'a'"),
        ({"tensors": [("a",)]}, dcp.DTypeError, "name, shape"),
        ({"by": "layers"}, dcp.ArgumentError, "'layers'"),
        ({"by": 0}, dcp.ArgumentError, "at least 1"),
        ({"by": [("g", ["a", "a"])]}, dcp.ArgumentError, "twice"),
        ({"by": [("g", ["b"])]}, dcp.ArgumentError, "no tensor"),
        ({"by": [("g", [])]}, dcp.ArgumentError, "'a' is in no group"),
        ({"ranks": 0}, dcp.ArgumentError, "ranks 0"),
        ({"block_rows": {"b": 2}}, dcp.ArgumentError, "'b' matches no tensor"),
        ({"order": "best"}, dcp.ArgumentError, "best"),
        ({"tensors": [("a", (2**40, 2**40))]}, dcp.ArgumentError, "64 bits"),
    ],
)
def test_bad_groups(arguments, error, word):
    settings = {"tensors": [("a", (4, 4))], "ranks": 2} | arguments
    with pytest.raises(error, match=word):
        plan_groups(settings.pop("tensors"), **settings)


# What is said where padding stays high, and peers' faults


def test_ways_out_are_planned():
    """128 rows of 28,672 elements over 256 ranks: more than a share."""
    layout = dcp.plan_layout(LLAMA_70B, ranks=256, block_rows=128)
    ways = {way.kind: way for way in layout.ways_out()}
    assert list(ways) == sorted(ways, key=lambda kind: ways[kind].padding)
    hybrid = ways["hybrid"]
    assert 256 % hybrid.value == 0 and f"{256 // hybrid.value} replicas" in hybrid.text
    fewer = dcp.plan_layout(LLAMA_70B, ranks=hybrid.value, block_rows=128)
    assert fewer.padding == pytest.approx(hybrid.padding) and fewer.padding <= 0.05
    tiles = dcp.plan_layout(LLAMA_70B, ranks=256, block_rows=Tile(128, 128, order="block"))
    assert tiles.padding == pytest.approx(ways["tiles"].padding) and tiles.padding < 0.006
    several = dcp.plan_layout(layers(LLAMA_70B, ways["layers"].value), ranks=256, block_rows=128)
    assert several.padding == pytest.approx(ways["layers"].padding)
    for way in ways.values():
        assert way.text in layout.advice and f"{way.padding:.1%}" in layout.advice
    assert dcp.plan_layout([("w", (8,))], ranks=2).ways_out() == []


def test_padding_is_in_no_run():
    """Row 13: what a bucket has behind its tensors must not reach a checkpoint."""
    layout = dcp.plan_layout([("a", (7, 6)), ("b", (5,))], ranks=4, block_rows=2)
    assert layout.ranks * layout.shard_elements > 47 and layout.largest_gap > 0
    runs = [run for rank in range(4) for run in layout.runs(rank)]
    for name, size in (("a", 42), ("b", 5)):
        mine = sorted((first, count) for n, first, count in runs if n == name)
        assert sum(count for _, count in mine) == size
        assert [first for first, _ in mine] == list(
            itertools.accumulate([count for _, count in mine[:-1]], initial=0)
        )


def test_fused_experts():
    """Row 14: [experts, 2f, h] and [experts, h, f] in one bucket pad a third elsewhere."""
    fused = [("gate_up", (128, 5760, 2880)), ("down", (128, 2880, 2880))]
    separate = [(f"{i}.gate_up", (5760, 2880)) for i in range(128)]
    separate += [(f"{i}.down", (2880, 2880)) for i in range(128)]
    for tensors in (fused, separate):
        assert dcp.plan_layout(tensors, ranks=256, block_rows=16).padding < 0.01
    shapes_of_fused = [shape for _, shape in fused]
    megatron = layout_peers.megatron_elements(shapes_of_fused, 256)
    assert layout_peers.padding_of(megatron, shapes_of_fused) == pytest.approx(1 / 3, abs=0.01)
    assert layout_peers.padding_of(megatron, shapes_of_fused) > 0.3


def test_more_ranks_than_experts():
    """Row 17: 4 experts on 8 ranks. Even shards of the first dimension gather twice the bytes."""
    shapes_of_experts = [(4, 64, 128), (4, 128, 64)]
    layout = dcp.plan_layout(named(shapes_of_experts), ranks=8)
    assert layout.padding == 0
    assert layout_peers.fsdp2_elements(shapes_of_experts, 8) == 2 * layout.used_elements


def test_shards_are_whole_16_bytes():
    """Row 2: bytes a rank that are no multiple of 16 slow collectives down."""
    for item in (1, 2, 4, 8):
        for rows in (1, 3, 5):
            layout = dcp.plan_layout([("w", (rows, 7)), ("b", (3,))], ranks=3, item_bytes=item)
            assert layout.shard_elements * item % 16 == 0
            assert all(start * item % 16 == 0 for start in layout.offsets.values())


def test_ten_thousand_ranks():
    layout = dcp.plan_layout(DEEPSEEK_V3, ranks=10_000, item_bytes=1)
    check(layout, DEEPSEEK_V3, 10_000, 1, 16)
    assert layout.padding < 0.21
    apart = plan_groups(layers(DEEPSEEK_V3), ranks=10_000)
    assert padding_of(apart) < 0.003


@pytest.mark.parametrize("ranks", [3, 60])
def test_picture(ranks):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    group = group_tensors(model_tensors("gpt-oss-120b"))[1]
    layout = dcp.plan_layout(group.shapes, ranks=ranks, block_rows=128)
    ax = layout.plot()
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert {"attention", "experts", "router", "padding"} <= set(labels)
    ticks = [tick.get_text() for tick in ax.get_yticklabels()]
    assert ("⋮" in ticks) == (ranks > 48) and str(0) in ticks
    assert layout.plot(ax=plt.subplots()[1]) is plt.gca()
    plt.close("all")
