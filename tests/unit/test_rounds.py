"""Ranks that move together: weights gathered layer by layer, gradients reduced layer by layer.

The promises of tests/unit/test_promises.py for every combination of windows and reduce. Each
launch runs all four on the same cases: they must agree with the float64 reference and, where sums
are taken in the same order, bitwise with each other.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dcp
from dcp import checkpoint
from dcp.sharded import ShardedModel

sys.path.insert(0, str(Path(__file__).parent))
from test_promises import Case, MicroBatch, expected, make_case, worst_error

MODES = [(True, "step"), (True, "layer"), (False, "step"), (False, "layer")]


def rounds_of(case: Case, world: int, salt: int = 0) -> list[list[MicroBatch]]:
    """A random plan whose ranks have equally many micro-batches, some without tokens, some of
    them in the middle; all ranks idle in one round now and then."""
    rng = np.random.default_rng([case.seed, world, salt, 7])
    ranks = case.plan(world, salt)
    rounds = max(map(len, ranks)) + int(rng.integers(2))
    for rank in ranks:
        while len(rank) < rounds:
            rank.insert(int(rng.integers(len(rank) + 1)), case.micro_batch([]))
    return ranks


def shard(case, world, mode, **settings):
    windows, reduce = mode
    rows = 1 + case.seed % 3
    return ShardedModel(
        case.config,
        world,
        seed=case.seed,
        block_rows=rows,
        windows=windows,
        reduce=reduce,
        **settings,
    )


def gradients_of(world, cases, device):
    out = []
    for case in cases:
        batches = rounds_of(case, world.size)[world.rank]
        results = []
        for mode in MODES:
            with shard(case, world, mode, device=device) as model:
                tensors = {name: np.array(x) for name, x in model.parameters().items()}
                for _ in range(2):  # the second call finds buffers in use
                    loss, grads = model.loss_and_gradients(
                        batches, scale=case.scale, dropout_seed=9
                    )
                uneven = batches[: world.rank]
                judged = model.evaluate(uneven, scale=case.scale)
            results.append((loss, judged, grads if world.rank == 0 else None))
        out.append((tensors if world.rank == 0 else None, results))
    return out


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6])
@given(seed=st.integers(0, 2**20))
@settings(max_examples=1, deadline=None)
def test_every_mode_gives_the_gradient_of_one_process(world, seed):
    """Promise 1, and bitwise equal sums with and without windows."""
    cases = [make_case(seed + i, all_ignored=i == 3) for i in range(6)]
    ranks = dcp.launch(gradients_of, world, (cases, "late" if world % 2 else "cpu"))
    for i, case in enumerate(cases):
        tensors, results = ranks[0][i]
        judge_loss, judge = expected(case, tensors)
        for (windows, reduce), (loss, judged, grads) in zip(MODES, results, strict=True):
            assert abs(loss - judge_loss) <= 1e-6 * max(abs(judge_loss), 1e-3)
            assert worst_error(grads, judge) <= 1e-5, (windows, reduce, case.config)
            assert judged == results[0][1]
        for mode in range(4):
            assert all(rank[i][1][mode][:2] == results[mode][:2] for rank in ranks)
        for with_windows, without in ((0, 2), (1, 3)):
            assert results[with_windows][0] == results[without][0]
            for name, x in results[with_windows][2].items():
                assert x.tobytes() == results[without][2][name].tobytes(), name
