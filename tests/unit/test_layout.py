"""dcp.plan_layout: properties of every layout, the least shard on small cases, published shapes."""

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
        ({"ranks": 2, "tensors": [("a", (2**40, 2**40))]}, dcp.ArgumentError, "64 bits"),
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
