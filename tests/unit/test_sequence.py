"""Micro-batches whose rows a group of ranks shares: the gradient is that of one process.

Ranks are processes (dcp.launch). The judge is tests/ref.py in float64. A launch runs a list of
cases, each a model, sequences and a list of micro-batches with their groups, which may overlap and
lie side by side.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dcp

sys.path.insert(0, str(Path(__file__).parent.parent))
from ref import Reference

IGNORED = -100


class MicroBatch(NamedTuple):
    tokens: np.ndarray
    offsets: np.ndarray
    labels: np.ndarray
    weights: np.ndarray | None
    row_ids: np.ndarray
    group: tuple[int, int]
    recompute: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Case:
    """Sequences of a step and who computes them: (first rank, count, chosen sequences)."""

    config: dcp.Transformer1D
    sequences: list[np.ndarray]
    labels: list[np.ndarray]
    plan: list[tuple[int, int, list[int]]]
    weights: list[np.ndarray] | None = None
    kind: str = "auto"
    recompute: tuple[int, int] = (0, 0)
    device: str = "cpu"
    windows: bool = True
    reduce: str = "step"

    @property
    def scale(self) -> float:
        return 1 / max(sum(int((label >= 0).sum()) for label in self.labels), 1)

    @property
    def groups(self) -> list[tuple[int, int]]:
        return sorted({(first, count) for first, count, _ in self.plan if count > 1})

    def micro_batch(self, first: int, count: int, chosen: list[int]) -> MicroBatch:
        starts = np.cumsum([0, *map(len, self.sequences)])

        def join(parts, dtype):
            return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype)

        return MicroBatch(
            join([self.sequences[i] for i in chosen], np.int32),
            np.cumsum([0, *(len(self.sequences[i]) for i in chosen)]).astype(np.int64),
            join([self.labels[i] for i in chosen], np.int32),
            None if self.weights is None else join([self.weights[i] for i in chosen], np.float32),
            join([np.arange(starts[i], starts[i + 1]) for i in chosen], np.int64),
            (first, count),
            self.recompute,
        )

    def batches(self, rank: int) -> list[MicroBatch]:
        """Where ranks move together, each micro-batch is a round and others idle in it."""
        in_rounds = not self.windows or self.reduce == "layer"
        return [
            self.micro_batch(first, count, chosen)
            if first <= rank < first + count
            else self.micro_batch(rank, 1, [])
            for first, count, chosen in self.plan
            if in_rounds or first <= rank < first + count
        ]


def make_config(heads: int, kv_heads: int, **more) -> dcp.Transformer1D:
    fields = {
        "vocab_size": 37,
        "hidden_size": heads * -(-24 // heads),
        "intermediate_size": 20,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 6,
        "max_position_embeddings": 512,
        "initializer_range": 0.06,
    }
    return dcp.Transformer1D(**(fields | more))


def make_case(config, lengths, plan, *, seed=0, ignored=0.2, weighted=False, **more) -> Case:
    rng = np.random.default_rng(seed)
    sequences = [rng.integers(0, config.vocab_size, n).astype(np.int32) for n in lengths]
    labels = []
    for sequence in sequences:
        label = np.append(sequence[1:], IGNORED).astype(np.int32)
        label[rng.random(len(label)) < ignored] = IGNORED
        labels.append(label)
    weights = [rng.random(n).astype(np.float32) for n in lengths] if weighted else None
    return Case(config, sequences, labels, plan, weights, **more)


def random_case(seed: int, world: int, **more) -> Case:
    """Any lengths, any heads, any groups side by side and one after the other."""
    rng = np.random.default_rng([seed, world])
    kv_heads = int(rng.integers(1, 4))
    heads = kv_heads * int(rng.integers(1, 4))
    config = make_config(
        heads,
        kv_heads,
        num_hidden_layers=int(rng.integers(1, 4)),
        head_dim=2 * int(rng.integers(1, 6)),
        attention_bias=bool(rng.integers(2)),
        tie_word_embeddings=bool(rng.integers(2)),
    )
    lengths = rng.choice([1, 1, 2, 3, 7, 20, 33, 64, 200], int(rng.integers(1, 9)))
    plan = []
    for chosen in np.array_split(rng.permutation(len(lengths)), int(rng.integers(1, 5))):
        first = int(rng.integers(world))
        plan.append((first, int(rng.integers(1, world - first + 1)), chosen.tolist()))
    layers = int(rng.integers(config.num_hidden_layers + 1))
    more = {"recompute": (layers, int(rng.integers(config.num_hidden_layers - layers + 1)))} | more
    return make_case(
        config, lengths.tolist(), plan, seed=seed, weighted=bool(rng.integers(2)), **more
    )


def gradients_of(world, cases):
    out = []
    for case in cases:
        with dcp.ShardedModel(
            case.config,
            world,
            seed=3,
            sequence_parallel=case.kind,
            device=case.device,
            windows=case.windows,
            reduce=case.reduce,
        ) as model:
            tensors = {name: np.array(x) for name, x in model.parameters().items()}
            loss, grads = model.loss_and_gradients(
                case.batches(world.rank), scale=case.scale, dropout_seed=9, groups=case.groups
            )
            again = model.evaluate(case.batches(world.rank), scale=case.scale, groups=case.groups)
        out.append((tensors, loss, grads, again) if world.rank == 0 else (None, loss, None, again))
    return out


def worst_error(gradients, judge) -> float:
    """Largest ||g - g64|| / (||g64|| + slack), slack: half of fp32's last place of the largest."""
    slack = 2.0**-25 * max(float(np.linalg.norm(g)) for g in judge.values()) / 1e-5
    return max(
        float(np.linalg.norm(gradients[name] - g)) / max(float(np.linalg.norm(g)) + slack, 1e-30)
        for name, g in judge.items()
    )


def check(cases: list[Case], world: int) -> None:
    results = dcp.launch(gradients_of, world, (cases,))
    for i, case in enumerate(cases):
        tensors, loss, grads, evaluated = results[0][i]
        whole = case.micro_batch(0, 1, list(range(len(case.sequences))))
        judge_loss, judge = Reference(case.config, tensors).loss_and_gradients(
            whole.tokens, whole.offsets, whole.labels, weights=whole.weights, scale=case.scale
        )
        assert all(rank[i][1] == loss for rank in results), "ranks disagree on the loss"
        assert abs(loss - judge_loss) <= 1e-6 * max(abs(judge_loss), 1e-3), case
        assert abs(evaluated - loss) <= 1e-6 * max(abs(loss), 1e-3)
        assert worst_error(grads, judge) <= 1e-5, case


@pytest.mark.parametrize("world", [2, 3, 4])
@given(seed=st.integers(0, 2**20))
@settings(max_examples=2, deadline=None)
def test_any_groups_give_the_gradient_of_one_process(world, seed):
    """Promise 1 with groups of any size. Case S-06: sums over ranks, never too large by sp."""
    check([random_case(seed + i, world) for i in range(12)], world)
