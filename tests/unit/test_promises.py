"""The promises of the design on whole steps: any plan on any number of ranks is one process.

Ranks are processes (dcp.launch). To keep launches few, each runs a list of random cases; a case is
a model, documents, labels and a random plan: which rank computes which documents in which
micro-batches, empty ranks included. The judge is tests/ref.py in float64.
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
from dcp import checkpoint

sys.path.insert(0, str(Path(__file__).parent.parent))
from ref import Reference

WORLDS = (1, 2, 3, 4)


class MicroBatch(NamedTuple):
    tokens: np.ndarray
    offsets: np.ndarray
    labels: np.ndarray
    weights: np.ndarray | None
    row_ids: np.ndarray


@dataclass(frozen=True)
class Case:
    config: dcp.Transformer1D
    documents: list[np.ndarray]
    labels: list[np.ndarray]
    weights: list[np.ndarray] | None
    seed: int

    @property
    def trainable(self) -> int:
        return int(sum((label >= 0).sum() for label in self.labels))

    @property
    def scale(self) -> float:
        return 1 / max(self.trainable, 1)

    def micro_batch(self, chosen: list[int]) -> MicroBatch:
        starts = np.cumsum([0, *map(len, self.documents)])
        join = lambda parts, dtype: np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype)  # noqa: E731
        return MicroBatch(
            join([self.documents[i] for i in chosen], np.int32),
            np.cumsum([0, *(len(self.documents[i]) for i in chosen)]).astype(np.int64),
            join([self.labels[i] for i in chosen], np.int32),
            None if self.weights is None else join([self.weights[i] for i in chosen], np.float32),
            join([np.arange(starts[i], starts[i + 1]) for i in chosen], np.int64),
        )

    def plan(self, world: int, salt: int = 0) -> list[list[MicroBatch]]:
        """A random plan: micro-batches per rank, some ranks without any."""
        rng = np.random.default_rng([self.seed, world, salt])
        busy = int(rng.integers(1, world + 1))
        slots = [[[] for _ in range(int(rng.integers(1, 4)))] for _ in range(busy)]
        for i in rng.permutation(len(self.documents)):
            rank = slots[int(rng.integers(busy))]
            rank[int(rng.integers(len(rank)))].append(int(i))
        ranks = [[self.micro_batch(mb) for mb in rank] for rank in slots]
        return ranks + [[] for _ in range(world - busy)]


def make_case(seed: int, *, dropout: float = 0.0, all_ignored: bool = False) -> Case:
    rng = np.random.default_rng(seed)
    kv_heads = int(rng.integers(1, 3))
    heads = kv_heads * int(rng.integers(1, 3))
    config = dcp.Transformer1D(
        vocab_size=int(rng.integers(5, 40)),
        hidden_size=heads
        * int(rng.integers(-(-12 // heads), 24)),  # a norm of few is ill conditioned
        intermediate_size=int(rng.integers(1, 30)),
        num_hidden_layers=int(rng.integers(1, 3)),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=2 * int(rng.integers(1, 6)),
        max_position_embeddings=64,
        tie_word_embeddings=bool(rng.integers(2)),
        attention_bias=bool(rng.integers(2)),
        mlp_bias=bool(rng.integers(2)),
        dropout=dropout,
        initializer_range=0.06,
    )
    sizes = [int(n) for n in rng.choice([1, 1, 2, 3, 7, 20, 33], int(rng.integers(1, 9)))]
    documents = [rng.integers(0, config.vocab_size, n).astype(np.int32) for n in sizes]
    labels = []
    for document in documents:
        label = np.append(document[1:], -100).astype(np.int32)
        label[rng.random(len(label)) < (1.0 if all_ignored else 0.2)] = -100
        labels.append(label)
    weights = None
    if rng.integers(2):
        weights = [rng.random(n).astype(np.float32) for n in sizes]
    return Case(config, documents, labels, weights, seed)


def expected(case: Case, tensors: dict[str, np.ndarray]) -> tuple[float, dict[str, np.ndarray]]:
    whole = case.micro_batch(list(range(len(case.documents))))
    return Reference(case.config, tensors).loss_and_gradients(
        whole.tokens, whole.offsets, whole.labels, weights=whole.weights, scale=case.scale
    )


def worst_error(gradients: dict[str, np.ndarray], judge: dict[str, np.ndarray]) -> float:
    """Largest ||g - g64|| / (||g64|| + slack) of any tensor, slack such that 1e-5 of it is
    2^-25 of the largest gradient.

    That much, half a unit of fp32's last place, is lost wherever large parts cancel: the exact
    gradient of a key's bias is 0, since it moves all scores of a row alike.
    """
    largest = max(float(np.linalg.norm(g)) for g in judge.values())
    slack = 2.0**-25 * largest / 1e-5
    errors = [
        float(np.linalg.norm(gradients[name] - g)) / max(float(np.linalg.norm(g)) + slack, 1e-30)
        for name, g in judge.items()
    ]
    return max(errors)


def gradients_of(world, cases, salt=0):
    out = []
    for case in cases:
        rows = 1 + case.seed % 3
        with dcp.fully_shard(case.config, world, seed=case.seed, block_rows=rows) as model:
            tensors = {name: np.array(x) for name, x in model.parameters().items()}
            batches = case.plan(world.size, salt)[world.rank]
            loss, grads = model.loss_and_gradients(batches, scale=case.scale, dropout_seed=9)
        out.append((tensors, loss, grads) if world.rank == 0 else (None, loss, None))
    return out


@pytest.mark.parametrize("world", WORLDS)
@given(seed=st.integers(0, 2**20))
@settings(max_examples=2, deadline=None)
def test_any_plan_gives_the_gradient_of_one_process(world, seed):
    """Promise 1. Cases L-01 L-02 L-05 L-06 L-07 F-08: token weights, idle ranks, uneven counts."""
    cases = [make_case(seed + i, all_ignored=i == 3) for i in range(8)]
    results = dcp.launch(gradients_of, world, (cases,))
    for i, case in enumerate(cases):
        tensors, loss, grads = results[0][i]
        judge_loss, judge = expected(case, tensors)
        assert all(rank[i][1] == loss for rank in results), "ranks disagree on the loss"
        assert abs(loss - judge_loss) <= 1e-6 * max(abs(judge_loss), 1e-3)
        assert worst_error(grads, judge) <= 1e-5, case.config
        if case.trainable == 0:
            assert loss == 0 and not any(g.any() for g in grads.values())


def test_dropout_draws_the_same_masks_under_any_plan():
    """Promise 1 with dropout: masks depend on the token's number in the step, not on the plan."""
    cases = [make_case(100 + i, dropout=0.3) for i in range(4)]
    one = dcp.launch(gradients_of, 1, (cases,))[0]
    two = dcp.launch(gradients_of, 2, (cases, 5))[0]
    plain = dcp.launch(gradients_of, 1, ([make_case(100 + i) for i in range(4)],))[0]
    for (_, loss1, grads1), (_, loss2, grads2), (_, loss0, _) in zip(one, two, plain, strict=True):
        assert abs(loss1 - loss2) <= 1e-5 * abs(loss1)
        assert worst_error(grads2, {k: v.astype(np.float64) for k, v in grads1.items()}) <= 1e-4
        assert loss1 != loss0


def train_few(world, case, on_rank_zero, optimizer):
    with dcp.fully_shard(case.config, world, seed=1) as model:
        hashes, losses = [], []
        for step in range(3):
            if on_rank_zero:
                whole = [case.micro_batch(list(range(len(case.documents))))]
                batches = whole if world.rank == 0 else []
            else:
                batches = case.plan(world.size, step)[world.rank]
            result = model.step(
                batches,
                scale=case.scale,
                trainable=case.trainable,
                lr=optimizer.lr,
                step=step,
                optimizer=optimizer,
            )
            losses.append((result.loss, result.grad_norm))
            hashes.append(model.parameters_sha256())
        return hashes, losses


def test_ranks_agree_and_runs_repeat_bitwise():
    """Promises 2 and 3: bitwise equal parameters on all ranks after a step, and in a second run."""
    optimizer = dcp.optim.AdamW(lr=0.05, clip=0.5)
    for world in (2, 3):
        case = make_case(41)
        first = dcp.launch(train_few, world, (case, False, optimizer))
        again = dcp.launch(train_few, world, (case, False, optimizer))
        assert all(rank == first[0] for rank in first)
        assert first == again
        assert len(set(first[0][0])) == 3, "the parameters must move"


def test_the_optimizer_does_not_depend_on_the_world():
    """Promise 3: with the gradient made by one rank, updates are the same bits in every world."""
    optimizer = dcp.optim.AdamW(lr=0.05, clip=0.1)
    case = make_case(7)
    results = {w: dcp.launch(train_few, w, (case, True, optimizer))[0] for w in WORLDS}
    assert all(result == results[1] for result in results.values())


def disagree(world, case, what):
    with dcp.fully_shard(case.config, world, seed=1) as model:
        plan_hash = "ab" if what == "hash" and world.rank == 1 else "cd"
        step = world.rank if what == "step" else 0
        try:
            model.step(
                case.plan(world.size)[world.rank],
                scale=1.0,
                trainable=1,
                lr=0.1,
                step=step,
                optimizer=dcp.optim.AdamW(lr=0.1),
                plan_hash=plan_hash,
            )
        except dcp.MismatchError as error:
            return str(error)
        return None


@pytest.mark.parametrize("what", ["hash", "step"])
def test_another_plan_on_a_rank_is_an_error_on_all(what):
    """Promise 4: the message shows both sides, before any collective of the step."""
    messages = dcp.launch(disagree, 3, (make_case(3), what))
    assert all(message is not None for message in messages)
    assert all("rank 0" in m and "rank 1" in m for m in messages)
    if what == "hash":
        assert all("ab" in m and "cd" in m for m in messages)


def with_nan(world, case, nonfinite):
    with dcp.fully_shard(case.config, world, seed=1) as model:
        for run in model.shards()["weights"]:
            if run.name == "model.norm.weight" and run.first == 0:
                run.array[0] = np.nan
        run = None
        model.weights_changed()
        before = model.parameters_sha256()
        optimizer = dcp.optim.AdamW(lr=0.1)
        try:
            result = model.step(
                case.plan(world.size)[world.rank],
                scale=case.scale,
                trainable=case.trainable,
                lr=0.1,
                step=5,
                optimizer=optimizer,
                nonfinite=nonfinite,
            )
        except dcp.NumericError as error:
            return str(error)
        moments = [
            run.array.any() for kind in ("adamw.m", "adamw.v") for run in model.shards()[kind]
        ]
        return result.skipped, before == model.parameters_sha256(), model.update_count, any(moments)


def test_a_nan_stops_or_skips_on_all_ranks_alike():
    case = make_case(12)
    messages = dcp.launch(with_nan, 3, (case, "stop"))
    assert all(isinstance(m, str) and "step 5" in m for m in messages)
    assert dcp.launch(with_nan, 3, (case, "skip")) == [(True, True, 0, False)] * 3


def nothing_trainable(world, case):
    with dcp.fully_shard(case.config, world, seed=1) as model:
        before = model.parameters_sha256()
        result = model.step(
            case.plan(world.size)[world.rank],
            scale=0.0,
            trainable=0,
            lr=0.1,
            step=0,
            optimizer=dcp.optim.AdamW(lr=0.1),
        )
        return result.loss, result.skipped, before == model.parameters_sha256(), model.update_count


def test_a_step_without_trainable_tokens_changes_nothing():
    """Case L-06: all labels of all ranks ignored."""
    case = make_case(13, all_ignored=True)
    assert dcp.launch(nothing_trainable, 2, (case,)) == [(0.0, True, True, 0)] * 2


def freeze(world, case, frozen):
    with dcp.fully_shard(case.config, world, seed=1, frozen=frozen) as model:
        before = {name: np.array(x) for name, x in model.parameters().items()}
        for step in range(2):
            model.step(
                case.plan(world.size, step)[world.rank],
                scale=case.scale,
                trainable=case.trainable,
                lr=0.1,
                step=step,
                optimizer=dcp.optim.AdamW(lr=0.1, weight_decay=0.5),
            )
        moved = {
            name for name, x in model.parameters().items() if not np.array_equal(x, before[name])
        }
        kept = {run.name for run in model.shards()["adamw.m"]}
        return moved, kept, set(before)


def test_frozen_parameters_do_not_move_and_have_no_state():
    """Case F-07: weight decay included; others move."""
    case = make_case(21)
    moved, _, names = zip(
        *dcp.launch(freeze, 2, (case, ["*.mlp.*", "model.norm.weight"])), strict=True
    )
    frozen = {n for n in names[0] if ".mlp." in n or n == "model.norm.weight"}
    assert (
        moved[0] == moved[1] and not moved[0] & frozen and moved[0] >= {"model.embed_tokens.weight"}
    )
    results = dcp.launch(freeze, 2, (case, ["*.mlp.*"]))
    assert not any(".mlp." in name for _, kept, _ in results for name in kept)
    with dcp.init("self") as world, pytest.raises(dcp.ArgumentError, match="names no tensor"):
        dcp.fully_shard(case.config, world, frozen=["nothing"])


def freeze_later(world, case, folder):
    """Train with one part frozen, save; load with another frozen too, train, save."""
    optimizer = dcp.optim.AdamW(lr=0.1, weight_decay=0.5)

    def steps(model, first, last):
        for step in range(first, last):
            model.step(
                case.plan(world.size, step)[world.rank],
                scale=case.scale,
                trainable=case.trainable,
                lr=0.1,
                step=step,
                optimizer=optimizer,
            )

    def state(model):
        names = {"model.norm.weight", "model.layers.0.mlp.up_proj.weight"}
        return [
            (kind, run.name, run.first, run.array.tobytes())
            for kind, runs in model.shards().items()
            for run in runs
            if run.name in names
        ]

    common = {"world": world, "config": case.config}
    with dcp.fully_shard(case.config, world, seed=1, frozen=["*.mlp.*"]) as model:
        steps(model, 0, 3)
        checkpoint.save(
            folder, step=3, shards=model.shards(), shapes=model.shapes, state={}, **common
        )
        before = state(model)
    with dcp.fully_shard(
        case.config, world, seed=2, frozen=["*.mlp.*", "model.norm.weight"]
    ) as model:
        shape = model.shapes["model.norm.weight"]
        model.keep_state({k: {"model.norm.weight": shape} for k in ("adamw.m", "adamw.v")})
        checkpoint.load(
            checkpoint.latest(folder), shards=model.shards(), shapes=model.shapes, **common
        )
        model.weights_changed()
        steps(model, 3, 5)
        checkpoint.save(
            folder, step=5, shards=model.shards(), shapes=model.shapes, state={}, **common
        )
        after = state(model)
    return before == after, len(before)


def test_state_of_a_tensor_frozen_later_is_kept(tmp_path):
    """Case F-07: frozen after three steps, weights and moments stay in checkpoints, bitwise."""
    results = dcp.launch(freeze_later, 2, (make_case(22), tmp_path))
    assert all(same for same, _ in results) and sum(count for _, count in results) >= 4
    saved = checkpoint.show(checkpoint.latest(tmp_path))
    kinds = {tensor["name"]: tensor["kinds"] for tensor in saved["tensors"]}
    assert saved["step"] == 5 and "adamw.m" in kinds["model.norm.weight"]
    assert "adamw.m" not in kinds["model.layers.0.mlp.up_proj.weight"]


def test_closed_models_and_views():
    case = make_case(2)
    with dcp.init("self") as world:
        model = dcp.fully_shard(case.config, world)
        view = model.parameters()["model.norm.weight"]
        with pytest.raises(dcp.StateError, match="look into"):
            model.close()
        del view
        model.close()
        with pytest.raises(dcp.StateError, match="closed"):
            model.parameters()
