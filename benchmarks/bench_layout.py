"""The layout planner: its time and its padding on published models, beside what others pad.

    pytest benchmarks/bench_layout.py

A round groups the tensors of a model by layer and plans all groups, as `dcp layout` and
`dcp.layout.plan_groups` do; names and shapes are made beforehand. Padding is of whole models and of
their largest layer, at 1, 16 and 128 rows a block. FSDP2 (even shards) and Megatron-FSDP (common
multiple, a lower bound) are reckoned from the same shapes by `dcp.layout_peers`; neither keeps
blocks of several rows. To reach: all tensors of deepseek-v3 on 10,000 ranks in 1 s.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

from dcp.layout import group_tensors, plan_groups, plan_layout
from dcp.layout_groups import is_layer
from dcp.layout_models import model_tensors
from dcp.layout_peers import PEERS, padding_of

MODELS = ("gpt2-large", "llama-3-70b", "llama-3.1-405b", "gpt-oss-120b", "deepseek-v3")
RANKS = (64, 128, 256, 512, 1024, 10_000)
ROWS = (1, 16, 128)
TO_REACH = {  # padding of the largest layer on 256 ranks
    ("gpt-oss-120b", 1): 0.0005,
    ("gpt-oss-120b", 16): 0.006,
    ("gpt-oss-120b", 128): 0.058,
    ("deepseek-v3", 1): 0.0002,
    ("deepseek-v3", 16): 0.0032,
    ("deepseek-v3", 128): 0.027,
}
TO_REACH_S = {("deepseek-v3", 10_000): 1.0}


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("model", MODELS)
def test_model(benchmark: Any, model: str, ranks: int) -> None:
    tensors = model_tensors(model)
    groups = group_tensors(tensors)
    largest = max((g for g in groups if is_layer(g.name)), key=lambda group: group.elements)
    whole, layer, cpu_s = {}, {}, {}

    def plan() -> None:
        for rows in ROWS:
            start = time.process_time()
            buffers = plan_groups(group_tensors(tensors), ranks=ranks, block_rows=rows)
            cpu_s[rows] = min(cpu_s.get(rows, 1e9), time.process_time() - start)
            used = sum(b.count * b.layout.used_elements for b in buffers)
            held = sum(b.count * ranks * b.layout.shard_elements for b in buffers)
            whole[rows] = held / used - 1
            mine = [b.layout for b in buffers if largest.name in b.groups]
            layer[rows] = ranks * sum(b.shard_elements for b in mine) / largest.elements - 1

    benchmark.pedantic(plan, rounds=3)
    used = sum(group.elements for group in groups)
    shapes = [list(group.shapes.values()) for group in groups]
    layer_shapes = list(largest.shapes.values())
    benchmark.extra_info.update(
        model=model,
        tensors=len(tensors),
        ranks=ranks,
        padding={str(rows): whole[rows] for rows in ROWS},
        layer_padding={str(rows): layer[rows] for rows in ROWS},
        layer_to_reach={
            str(rows): TO_REACH[model, rows]
            for rows in ROWS
            if ranks == 256 and (model, rows) in TO_REACH
        },
        peers={
            name: sum(rule(group, ranks) for group in shapes) / used - 1
            for name, rule in PEERS.items()
        },
        layer_peers={
            name: padding_of(rule(layer_shapes, ranks), layer_shapes)
            for name, rule in PEERS.items()
        },
        cpu_s={str(rows): cpu_s[rows] for rows in ROWS},  # on a shared machine the better figure
        to_reach_s=TO_REACH_S.get((model, ranks)),
    )


@pytest.mark.parametrize("order", ["model", "search"])
def test_one_buffer_of_all_tensors(benchmark: Any, order: str) -> None:
    """45,395 tensors in one buffer on 10,000 ranks: no model needs that, the planner bears it."""
    tensors = model_tensors("deepseek-v3")
    layouts, cpu_s = [], []

    def plan() -> None:
        start = time.process_time()
        layouts.append(plan_layout(tensors, ranks=10_000, order=order))
        cpu_s.append(time.process_time() - start)

    benchmark.pedantic(plan, rounds=3)
    benchmark.extra_info.update(
        tensors=len(tensors),
        ranks=10_000,
        order=order,
        padding=layouts[0].padding,
        cpu_s=min(cpu_s),
    )
