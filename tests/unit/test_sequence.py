"""Micro-batches whose rows a group of ranks shares: the gradient is that of one process.

Ranks are processes (dcp.launch). The judge is tests/ref.py in float64. A launch runs a list of
cases, each a model, sequences and a list of micro-batches with their groups, which may overlap and
lie side by side.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dcp
from dcp import _dcp, analytic

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


@pytest.mark.parametrize("world", [2, 3, 4, 6])
@given(seed=st.integers(0, 2**20))
@settings(max_examples=2, deadline=None)
def test_any_groups_give_the_gradient_of_one_process(world, seed):
    """Promise 1 with groups of any size, side by side and one after the other, and recompute.

    Case S-06: sums over ranks, never too large by sp. Case S-10: ranks hold different numbers of
    rows, some none.
    """
    check([random_case(seed + i, world) for i in range(8)], world)


@pytest.mark.parametrize("kind", ["ulysses", "ring"])
@given(seed=st.integers(0, 2**20))
@settings(max_examples=2, deadline=None)
def test_each_way_to_share_attention(kind, seed):
    """Case S-05: heads that do not divide, fewer heads than ranks; a ring of any size."""
    devices = ("cpu", "cpu", "late", "late")
    cases = [random_case(seed + i, 5, kind=kind, device=name) for i, name in enumerate(devices)]
    check(cases, 5)


@pytest.mark.parametrize(
    ("world", "heads"),
    [
        (2, [(5, 5), (28, 7)]),
        (3, [(7, 1), (4, 1)]),
        (4, [(7, 7), (3, 1), (40, 8)]),
        (8, [(20, 4), (1, 1)]),
    ],
)
def test_heads(world, heads):
    """Cases S-03, S-04, S-05: any number of query and key-value heads on any number of ranks."""
    cases = []
    for count, kv_count in heads:
        config = make_config(count, kv_count, head_dim=4, num_hidden_layers=1)
        for kind in ("auto", "ulysses", "ring"):
            plan = [(0, world, [0, 1, 2, 3])]
            cases.append(make_case(config, [1, 40, 7, 160], plan, seed=count, kind=kind))
    check(cases, world)


def test_a_head_on_each_rank():
    """Case S-03: more ranks than key-value heads; rank r reads head r // 5, replicas are added.

    Labels are wanted of few tokens: most ranks train on none. The 40 ranks of the case are in
    tests/c/test_sequence.c.
    """
    config = make_config(10, 2, head_dim=2, hidden_size=40, num_hidden_layers=1)
    check([make_case(config, [30, 70], [(0, 10, [0, 1])], ignored=0.9, kind="ulysses")], 10)


def test_a_head_count_without_a_ratio_is_refused():
    """Case S-04: 12 query heads on 8 key-value heads."""
    with pytest.raises(dcp.ArgumentError, match="num_key_value_heads"):
        make_config(12, 8)


def test_targets_at_the_edges_of_shards():
    """Case S-01: tokens 1..8 on two ranks have 7 targets; whole shards without labels; 1 token."""
    config = make_config(2, 1, num_hidden_layers=1)
    whole = make_case(config, [8], [(0, 2, [0])], ignored=0)
    halves = []
    for first, last in ((0, 4), (4, 8)):
        labels = np.full(8, IGNORED, np.int32)
        labels[first:last] = whole.labels[0][first:last]
        halves.append(dataclasses.replace(whole, labels=[labels]))
    nothing = dataclasses.replace(whole, labels=[np.full(8, IGNORED, np.int32)])
    single = make_case(config, [2], [(0, 4, [0])], ignored=0)
    tiny = make_case(config, [1, 1], [(0, 4, [0, 1])], ignored=0)
    assert int((whole.labels[0] >= 0).sum()) == 7
    kinds = ("ulysses", "ring")
    for world, cases in ((2, (whole, *halves, nothing)), (4, (single, tiny, whole))):
        check([dataclasses.replace(x, kind=kind) for kind in kinds for x in cases], world)


def test_large_scores():
    """Cases S-08, S-09: scores of hundreds on a ring of eight are neither merged nor overflow."""
    config = make_config(2, 1, num_hidden_layers=1, initializer_range=0.8)
    lengths = [3, 400, 5]
    cases = [
        make_case(config, lengths, [(0, 8, [0, 1, 2])], kind=kind) for kind in ("ring", "auto")
    ]
    results = dcp.launch(gradients_of, 8, (cases,))[0]
    one = dcp.launch(gradients_of, 1, ([dataclasses.replace(cases[0], plan=[(0, 1, [0, 1, 2])])],))
    whole = cases[0].micro_batch(0, 1, [0, 1, 2])
    _, judge = Reference(config, results[0][0]).loss_and_gradients(
        whole.tokens, whole.offsets, whole.labels, scale=cases[0].scale
    )
    floor = worst_error(one[0][0][2], judge)
    for _, loss, grads, _ in results:
        assert np.isfinite(loss) and all(np.isfinite(g).all() for g in grads.values())
        assert worst_error(grads, judge) <= 3 * floor + 1e-6


def test_dropout_masks_do_not_depend_on_groups():
    """Promise 1 with dropout: masks belong to tokens, wherever these lie."""
    config = make_config(3, 1, dropout=0.3)
    lengths, every = [60, 7, 100, 1], [0, 1, 2, 3]
    one = make_case(config, lengths, [(0, 1, every)])
    shared = [
        dataclasses.replace(one, plan=[(0, 3, every)], kind=kind, recompute=recompute)
        for kind, recompute in (("ring", (0, 0)), ("auto", (1, 1)), ("ulysses", (2, 0)))
    ]
    _, loss, grads, evaluated = dcp.launch(gradients_of, 1, ([one],))[0][0]
    assert loss != evaluated, "dropout must show"
    judge = {name: g.astype(np.float64) for name, g in grads.items()}
    for _, got, got_grads, _ in dcp.launch(gradients_of, 3, (shared,))[0]:
        assert abs(got - loss) <= 1e-5 * abs(loss)
        assert worst_error(got_grads, judge) <= 1e-4


def bits_of(world, cases):
    return [
        (loss, {k: g.tobytes() for k, g in grads.items()} if grads is not None else None)
        for _, loss, grads, _ in gradients_of(world, cases)
    ]


def test_runs_repeat_and_recompute_changes_nothing():
    """Promises 2 and 6: the same bits again, with recompute, with messages instead of windows."""
    config = make_config(6, 2, num_hidden_layers=3)
    plan = [(0, 3, [0, 1, 2]), (1, 2, [3]), (0, 2, [4])]
    plain = make_case(config, [70, 3, 160, 40, 9], plan)
    other = [
        plain,
        *(dataclasses.replace(plain, recompute=counts) for counts in ((1, 1), (0, 3), (3, 0))),
        dataclasses.replace(plain, windows=False),
    ]
    results = dcp.launch(bits_of, 3, ([plain, *other],))[0]
    assert all(result == results[0] for result in results)


def train_layouts(world, cases, steps):
    return [train_layout(world, case, steps) for case in cases]


def train_layout(world, case, steps):
    """Trains with the case's plan; returns parameters' hash, loss and busy times of every step."""
    out = []
    with dcp.ShardedModel(case.config, world, seed=3) as model:
        for step in range(steps):
            result = model.step(
                case.batches(world.rank),
                scale=case.scale,
                trainable=100,
                lr=1e-3,
                step=step,
                optimizer=dcp.optim.AdamW(lr=1e-3),
                groups=case.groups,
            )
            out.append((model.parameters_sha256(), result.loss, result.busy_s))
    return out


def test_layouts_of_four_ranks_train_alike():
    """Case S-06: world 4 as sp 4, sp 2 x 2, sp 1 x 4; parameters bitwise equal across ranks."""
    config = make_config(4, 2)
    base = make_case(config, [50, 60, 30, 20], [])
    plans = (
        [(0, 4, [0, 1, 2, 3])],
        [(0, 2, [0, 3]), (2, 2, [1, 2])],
        [(rank, 1, [rank]) for rank in range(4)],
        [(0, 3, [0, 1]), (3, 1, [2]), (1, 3, [3])],
    )
    cases = [dataclasses.replace(base, plan=plan) for plan in plans]
    ranks = dcp.launch(train_layouts, 4, (cases, 3))
    assert all(rank == ranks[0] for rank in ranks)
    losses = [[loss for _, loss, _ in layout] for layout in ranks[0]]
    assert all(len(busy) == 4 and min(busy) > 0 for layout in ranks[0] for _, _, busy in layout)
    assert np.allclose(losses, losses[0], rtol=1e-5)


def fail(world, case, what):
    """Every rank's error where one of three does something wrong."""
    batches, groups = case.batches(world.rank), case.groups
    if what == "memory" and world.rank == 1:
        _dcp.set_memory_cap(_dcp.memory()["held"] + 200_000)
    if what == "tokens" and world.rank == 1:
        batches = [batches[0]._replace(tokens=(batches[0].tokens + 1) % case.config.vocab_size)]
    if what == "label" and world.rank == 2:
        batches = [batches[0]._replace(labels=batches[0].labels + 1000)]
    if what == "recompute":
        batches = [batches[0]._replace(recompute=(2, 1))]
    if what == "groups":
        groups = []
    if what == "beyond":
        groups = [(1, 3)]
    try:
        with dcp.ShardedModel(case.config, world, seed=3, windows=case.windows) as model:
            model.loss_and_gradients(batches, scale=1.0, groups=groups)
    except _dcp.Error as error:
        return type(error).__name__, str(error)
    finally:
        _dcp.set_memory_cap(0)
    return None


@pytest.mark.parametrize(
    ("what", "text", "windows"),
    [
        ("memory", "bytes", True),
        ("memory", "bytes", False),
        ("tokens", "share a micro-batch", True),
        ("tokens", "share a micro-batch", False),
        ("label", "vocab_size", True),
        ("label", "vocab_size", False),
        ("recompute", "recompute", True),
        ("groups", "do not name them", True),
        ("beyond", "of the 3 ranks", True),
    ],
)
def test_a_failure_on_one_rank_ends_all(what, text, windows):
    """Case S-10: a true mismatch is an error on all ranks; nobody hangs."""
    case = make_case(make_config(2, 2), [300, 200], [(0, 3, [0, 1])], windows=windows)
    errors = dcp.launch(fail, 3, (case, what))
    assert all(error is not None for error in errors), errors
    assert any(text in message for _, message in errors), errors


def run_capped(world, cases, estimates):
    """Steps under a cap of what the model holds before and the estimate; None where it held."""
    out = []
    for case, most in zip(cases, estimates, strict=True):
        with dcp.ShardedModel(
            case.config, world, seed=3, sequence_parallel=case.kind, windows=case.windows
        ) as model:
            _dcp.set_memory_cap(_dcp.memory()["held"] + most)
            try:
                model.loss_and_gradients(case.batches(world.rank), scale=1.0, groups=case.groups)
                out.append(None)
            except _dcp.Error as error:
                return [*out, str(error)]
            finally:
                _dcp.set_memory_cap(0)
    return out


def test_memory_stays_under_the_estimate():
    """Promise 5: what a rank holds for a micro-batch of a group is no more than was planned.

    Many one-token sequences, which need the largest tables, and long ones.
    """
    cases, estimates = [], []
    for seed in range(6):
        rng = np.random.default_rng(seed)
        kv_heads = int(rng.integers(1, 3))
        config = make_config(kv_heads * int(rng.integers(1, 5)), kv_heads, head_dim=8)
        lengths = [1] * 700 if seed == 0 else rng.integers(1, 500, 5).tolist()
        every = list(range(len(lengths)))
        for kind, windows in itertools.product(("auto", "ring", "ulysses"), (True, False)):
            plan = [(0, 3, every)]
            cases.append(make_case(config, lengths, plan, seed=seed, kind=kind, windows=windows))
            cost = dcp.CostModel.for_model(config, threads=1, windows=windows)
            fixed = cost.fixed_bytes + cost.sharded_bytes / 3
            fixed -= analytic.host_rotary_bytes(config, config.max_position_embeddings)
            estimates.append(int(cost.memory(lengths, ranks=3, world_size=3) - fixed))
    for rank in dcp.launch(run_capped, 3, (cases, estimates)):
        assert rank == [None] * len(cases)
