"""Ranks that move together: weights gathered layer by layer, gradients reduced layer by layer.

The promises of tests/unit/test_promises.py for every combination of windows and reduce. Each
launch runs all four on the same cases: they must agree with the float64 reference and, where sums
are taken in the same order, bitwise with each other.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dcp
from dcp import checkpoint, config
from dcp.cli.train import planned_for
from dcp.loader import in_rounds, setting_of
from dcp.planning import strategies
from dcp.reduction import choose_reduce
from dcp.sharded import ShardedModel

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))
import test_sequence
from ref import Reference
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


def test_dropout_frozen_and_tied_in_every_mode():
    """Promise 1 with dropout masks, Case F-07, and the embedding that two groups share."""
    for tied in (False, True):
        case = make_case(51, dropout=0.3)
        config = dataclasses.replace(case.config, tie_word_embeddings=tied, num_hidden_layers=3)
        case = dataclasses.replace(case, config=config)
        ranks = dcp.launch(frozen_few, 3, (case, ["*layers.0*", "*norm*"]))
        for mode in range(4):
            assert all(rank[mode] == ranks[0][mode] for rank in ranks)
        assert ranks[0][0] == ranks[0][2] and ranks[0][1] == ranks[0][3]
        losses, moved, kept, _ = ranks[0][0]
        assert len(set(losses)) == 3
        assert not any(".0." in n or "norm" in n for n in moved | kept)
        assert moved == kept >= {"model.embed_tokens.weight"}
        for step_wise, layer_wise in zip(losses, ranks[0][1][0], strict=True):
            assert abs(step_wise[0] - layer_wise[0]) <= 1e-5 * abs(step_wise[0])


def frozen_few(world, case, frozen):
    out = []
    for mode in MODES:
        with shard(case, world, mode, frozen=frozen, device="late") as model:
            before = model.parameters()
            before = {name: np.array(x) for name, x in before.items()}
            losses, sha256 = train_few(model, case, world, 3)
            moved = {n for n, x in model.parameters().items() if not np.array_equal(x, before[n])}
            kept = {run.name for run in model.shards()["adamw.m"]}
            kept = set().union(*(gather_text(world, sorted(kept))))
        out.append((losses, moved, kept, sha256))
    return out


def gather_text(world, names):
    """Names that each rank knows, to all."""
    text = np.frombuffer("\n".join(names).encode(), np.uint8)
    sizes = world.allgatherv(np.array([text.size], np.int64))
    joined = world.allgatherv(text).tobytes().decode()
    ends = np.cumsum(sizes).tolist()
    return [
        set(joined[end - size : end].split("\n")) - {""}
        for end, size in zip(ends, sizes, strict=True)
    ]


def train_few(model, case, world, steps, first=0):
    optimizer = dcp.optim.AdamW(lr=0.05, clip=0.5, weight_decay=0.1)
    losses = []
    for step in range(first, first + steps):
        result = model.step(
            rounds_of(case, world.size, step)[world.rank],
            scale=case.scale,
            trainable=case.trainable,
            lr=0.05,
            step=step,
            optimizer=optimizer,
            dropout_seed=step,
        )
        losses.append((result.loss, result.grad_norm))
    return losses, model.parameters_sha256()


def train_modes(world, case):
    out = []
    for mode in MODES:
        with shard(case, world, mode) as model:
            losses, sha256 = train_few(model, case, world, 3)
            own = [
                (kind, run.name, run.first, run.array.tobytes())
                for kind, runs in model.shards().items()
                for run in runs
            ]
        out.append((losses, sha256, own))
    return out


@pytest.mark.parametrize("world", [2, 5])
def test_ranks_agree_and_runs_repeat_bitwise(world):
    """Promises 2 and 3; more ranks than work; windows change no bit of weights and moments."""
    case = make_case(41)
    first = dcp.launch(train_modes, world, (case,))
    assert first == dcp.launch(train_modes, world, (case,))
    for rank in first:
        assert rank[0] == rank[2] and rank[1] == rank[3]
        for mode in range(4):
            assert rank[mode][:2] == first[0][mode][:2]
    assert first[0][0][1] != first[0][1][1] or first[0][0][0] == first[0][1][0]


def nothing_trainable(world, case):
    out = []
    for mode in MODES:
        with shard(case, world, mode) as model:
            before = model.parameters_sha256()
            results = [
                model.step(
                    batches,
                    scale=0.0,
                    trainable=0,
                    lr=0.1,
                    step=step,
                    optimizer=dcp.optim.AdamW(lr=0.1),
                )
                for step, batches in enumerate((rounds_of(case, world.size)[world.rank], []))
            ]
            same = before == model.parameters_sha256()
        out.append(([(r.loss, r.skipped) for r in results], same, model.update_count))
    return out


def test_a_step_without_trainable_tokens_or_rounds_changes_nothing():
    """Case L-06, and a step in which no rank has a micro-batch at all."""
    case = make_case(13, all_ignored=True)
    for rank in dcp.launch(nothing_trainable, 2, (case,)):
        assert rank == [([(0.0, True), (0.0, True)], True, 0)] * 4


def disagree(world, case, mode, what):
    batches = rounds_of(case, world.size)[world.rank]
    if what == "count":
        batches = batches + [case.micro_batch([])] * (world.rank == 1)
    elif what == "group":  # ranks 0 and 1 share one, but not in the same round
        shared = WithGroup(*case.micro_batch([0]), (0, 2))
        alone = WithGroup(*case.micro_batch([]), (world.rank, 1))
        batches = [shared, alone] if world.rank == 0 else [alone, shared]
        batches = [alone, alone] if world.rank == 2 else batches
    else:
        batches = [WithGroup(*case.micro_batch([]), (world.rank + 1, 2))]
    with shard(case, world, mode) as model, pytest.raises(dcp.Error) as caught:
        model.step(
            batches,
            scale=1.0,
            trainable=1,
            lr=0.1,
            step=4,
            optimizer=dcp.optim.AdamW(lr=0.1),
            groups=[(0, 2)] if what == "group" else [],
        )
    return type(caught.value).__name__, str(caught.value)


class WithGroup(NamedTuple):
    tokens: np.ndarray
    offsets: np.ndarray
    labels: np.ndarray
    weights: np.ndarray | None
    row_ids: np.ndarray
    group: tuple[int, int]


@pytest.mark.parametrize("mode", MODES[1:])
def test_disagreeing_rounds_are_an_error_on_every_rank(mode):
    """Promise 4: counts and groups are compared before anything runs."""
    case = make_case(3)
    for name, text in dcp.launch(disagree, 3, (case, mode, "count")):
        assert name == "MismatchError"
        assert "step 4" in text and "rank 0 has" in text and "rank 1 has" in text
    for name, text in dcp.launch(disagree, 3, (case, mode, "group")):
        assert name == "MismatchError"
        assert "micro-batch 0" in text and "rank 1 among 1 from 1" in text
    for name, text in dcp.launch(disagree, 3, (case, mode, "other")):
        assert name == "ArgumentError" and "must hold this rank" in text


@pytest.mark.parametrize(("mode", "prefetch"), [*((mode, 0) for mode in MODES[1:]), (MODES[3], 1)])
def test_a_rank_killed_between_layers_is_an_error_on_all(mode, prefetch, tmp_path):
    """Promise 4, case X-06: while others wait in a layer's collective, or for one ahead."""
    case = make_case(41)

    def work(world: dcp.World) -> None:
        started = threading.Event()
        if world.rank == 1:
            threading.Thread(
                target=lambda: (started.wait(), os.kill(os.getpid(), signal.SIGKILL))
            ).start()
        model = shard(case, world, mode, prefetch=prefetch)
        try:
            for step in range(10**6):
                batches = rounds_of(case, world.size)[world.rank]
                model.loss_and_gradients(batches, scale=case.scale)
                if step == 2:
                    started.set()
        except dcp.Error as error:
            (tmp_path / str(world.rank)).write_text(str(error))
            raise

    with pytest.raises(dcp.RankError, match=r"rank 1 \(process \d+\) was killed by SIGKILL"):
        dcp.launch(work, 3)
    for rank in (0, 2):
        assert "rank 1" in (tmp_path / str(rank)).read_text()


def save_and_load(world, case, folder):
    """Train three steps; save after one of them in one mode and go on from it in the next."""
    common = {"world": world, "config": case.config}
    out = []
    for number, mode in enumerate(MODES):
        with shard(case, world, mode) as model:
            train_few(model, case, world, 1)
            place = folder / str(number)
            checkpoint.save(
                place, step=1, shards=model.shards(), shapes=model.shapes, state={}, **common
            )
        after = []
        for other in MODES:
            if other[1] == mode[1]:  # the order of sums belongs to the run
                with shard(case, world, other) as model:
                    model.set_optimizer(dcp.optim.AdamW())
                    checkpoint.load(
                        checkpoint.latest(place),
                        shards=model.shards(),
                        shapes=model.shapes,
                        **common,
                    )
                    model.weights_changed()
                    model.update_count = 1
                    after.append(train_few(model, case, world, 2, first=1)[1])
        with shard(case, world, mode) as model:
            after.append(train_few(model, case, world, 3)[1])
        out.append(after)
    return out


def test_checkpoints_of_one_mode_load_in_another(tmp_path):
    """Promise 5: bitwise the run that was never interrupted."""
    for rank in dcp.launch(save_and_load, 2, (make_case(22), tmp_path)):
        for shas in rank:
            assert len(set(shas)) == 1


def held_bytes(world, config):
    """What the core holds after a step of each mode, which lets nothing go, and what moved."""
    case = Case(config, [np.arange(9, dtype=np.int32)], [np.arange(9, dtype=np.int32)], None, 0)
    out = []
    for windows, reduce in MODES:
        with shard(case, world, (windows, reduce)) as model:
            result = model.step(
                [case.micro_batch([0])] * 3,
                scale=1.0,
                trainable=9,
                lr=0.1,
                step=0,
                optimizer=dcp.optim.AdamW(lr=0.1),
            )
            held = model.memory()["held"]
        cost = dcp.CostModel.for_model(config, windows=windows, reduce=reduce)
        assert held <= cost.memory([9], 1, world_size=world.size)
        out.append((held, result.gathered_bytes, result.reduced_bytes))
    return out


@pytest.mark.parametrize("tied", [False, True])
def test_memory_and_traffic_of_every_mode(tied):
    """Reducing by layer holds a shard of the gradients and moves them once a micro-batch; without
    windows nothing of another rank is held but the group in use."""
    config = dcp.Transformer1D(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=12,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    world, count = 4, config.parameter_count()
    sizes = {}
    for name, shape in config.tensors():
        group = name.split(".")[2] if ".layers." in name else name.split(".")[-2]
        sizes[group] = sizes.get(group, 0) + int(np.prod(shape))
    embedding = sizes["embed_tokens"] if tied else 0
    whole = 4 * (max(sizes.values()) + embedding)  # bytes of the groups that a pass may hold
    saved = 4 * count * (world - 1) // world
    for rank in dcp.launch(held_bytes, world, (config,)):
        held, gathered, reduced = zip(*rank, strict=True)
        assert held[0] - held[1] >= saved - 2 * whole
        assert held[2] - held[3] >= saved - whole
        # windows hold both packed copies of every layer's weights, gathering one layer's
        assert held[0] - held[2] >= 8 * count * 10 // 12 - whole - 8 * embedding
        assert reduced == (reduced[0], 3 * reduced[0], reduced[0], 3 * reduced[0])
        once = 4 * count * (world - 1) / world
        assert once <= reduced[0] <= 1.02 * once
        layers = 4 * sizes["5"] * 12 * (world - 1) / world
        passes = 3 * (once + layers)
        if tied:  # gathered once a step, and not in the way of the first layer's second use
            passes -= 2 * 4 * (embedding + sizes["5"]) * (world - 1) / world
        assert gathered[:2] == (0, 0) and gathered[2] == gathered[3]
        assert passes <= gathered[2] <= 1.02 * passes


def whole_weights(world, case):
    with shard(case, world, (False, "step")) as model:
        core = model._core
        for run in model.shards()["weights"]:
            run.array[:] = np.arange(run.first, run.first + run.array.size)
        del run
        model.weights_changed()
        whole = model.parameters()
        with pytest.raises(dcp.StateError, match="whole tensor"):
            core.tensor_view(0, 0)
    return all(
        np.array_equal(x.ravel(), np.arange(x.size)) and not x.flags.writeable
        for x in whole.values()
    )


def test_whole_weights_are_gathered_where_no_rank_has_them():
    assert dcp.launch(whole_weights, 3, (make_case(8),)) == [True] * 3
    with dcp.init("self") as world, pytest.raises(dcp.ArgumentError, match="reduce = 'auto'"):
        dcp.fully_shard(make_case(8).config, world, reduce="auto")


def test_a_model_with_weights_is_taken_over():
    case = make_case(9)
    model = dcp.Model(case.config, seed=3)
    with dcp.init("self") as world:
        for windows, reduce in MODES:
            with dcp.fully_shard(model, world, windows=windows, reduce=reduce) as sharded:
                assert sharded.in_rounds == ((windows, reduce) != (True, "step"))
                for name, x in sharded.parameters().items():
                    assert np.array_equal(x, model.parameters()[name])
                del x


def test_reduce_is_chosen_by_the_plans():
    """Layer by layer only where freed memory shortens the steps by more than its rounds cost."""
    step = dcp.CostModel(latency_s=1.0, token_s=1.0, token_bytes=10, fixed_bytes=400)
    layer = dcp.CostModel(latency_s=1.0, token_s=1.0, token_bytes=10, sharded_bytes=400)
    choose = functools.partial(choose_reduce, [1] * 12, step, layer, world_size=4)
    assert choose(memory_bytes=None) == "step"
    assert choose(memory_bytes=415) == "layer"
    assert choose(memory_bytes=10**6) == "step", "ties"
    assert choose(memory_bytes=415, layer_s=10.0) == "step"
    assert choose(memory_bytes=415, layer_s=10.0, step_s=10.0) == "layer"
    assert choose(memory_bytes=409) == "layer", "fits only there"
    assert (
        choose_reduce(
            [1] * 12,
            step,
            dcp.CostModel(token_bytes=10, fixed_bytes=410),
            world_size=4,
            memory_bytes=415,
        )
        == "step"
    )
    assert choose(memory_bytes=415, tokens_per_step=3, windows=False) == "step"
    with pytest.raises(dcp.InfeasibleError):
        choose(memory_bytes=50)
    with pytest.raises(dcp.ArgumentError, match="step_s"):
        choose(memory_bytes=50, step_s=-1.0)


def group_rounds(case, world: int, rank: int) -> list[test_sequence.MicroBatch]:
    """The micro-batches of a case of test_sequence, each as early as all its ranks are free."""
    free, rounds = [0] * world, {}
    for first, count, chosen in case.plan:
        number = max(free[first : first + count])
        free[first : first + count] = [number + 1] * count
        if first <= rank < first + count:
            rounds[number] = case.micro_batch(first, count, chosen)
    empty = case.micro_batch(rank, 1, [])
    return [rounds.get(number, empty) for number in range(max(free))]


def group_gradients(world, cases):
    out = []
    for case in cases:
        results = []
        for windows, reduce in MODES:
            with ShardedModel(
                case.config,
                world,
                seed=3,
                sequence_parallel=case.kind,
                device=case.device,
                windows=windows,
                reduce=reduce,
            ) as model:
                tensors = {name: np.array(x) for name, x in model.parameters().items()}
                batches = group_rounds(case, world.size, world.rank)
                for _ in range(2):
                    loss, grads = model.loss_and_gradients(
                        batches, scale=case.scale, groups=case.groups
                    )
                judged = model.evaluate(batches, scale=case.scale, groups=case.groups)
            results.append((loss, judged, grads if world.rank == 0 else None))
        out.append((tensors if world.rank == 0 else None, results))
    return out


@pytest.mark.parametrize("world", [2, 3, 5])
@given(seed=st.integers(0, 2**20))
@settings(max_examples=1, deadline=None)
def test_groups_inside_rounds(world, seed):
    """Promise 1 where ranks share sequences, side by side with others that do not, in every mode,
    with recompute; groups with fewer rows than ranks, or none, too."""
    device = "late" if world == 3 else "cpu"
    cases = [test_sequence.random_case(seed + i, world, device=device) for i in range(6)]
    ranks = dcp.launch(group_gradients, world, (cases,))
    for i, case in enumerate(cases):
        tensors, results = ranks[0][i]
        whole = case.micro_batch(0, 1, list(range(len(case.sequences))))
        judge_loss, judge = Reference(case.config, tensors).loss_and_gradients(
            whole.tokens, whole.offsets, whole.labels, weights=whole.weights, scale=case.scale
        )
        for mode, (loss, judged, grads) in enumerate(results):
            assert abs(loss - judge_loss) <= 1e-6 * max(abs(judge_loss), 1e-3)
            assert abs(judged - judge_loss) <= 1e-6 * max(abs(judge_loss), 1e-3)
            assert worst_error(grads, judge) <= 1e-5, (MODES[mode], case.config)
            assert all(rank[i][1][mode][:2] == (loss, judged) for rank in ranks)
        for with_windows, without in ((0, 2), (1, 3)):
            for name, x in results[with_windows][2].items():
                assert x.tobytes() == results[without][2][name].tobytes(), name


def test_training_settles_when_gradients_are_reduced(tmp_path):
    """plan.reduce = "auto": without a cap once a step; layer by layer where only that fits."""
    (tmp_path / "text.txt").write_text("some words of a short document. " * 40)
    documents = dcp.data.TextFiles(tmp_path, max_length=256)

    def settled(**options):
        given = {"ranks": 4, "tokens_per_step": 512, "data.max_length": 256} | options
        cost, reduce, _ = planned_for(config.load(options=given), documents)
        return cost.memory([256], 1, "full", world_size=4), reduce

    at_least = {reduce: settled(**{"plan.reduce": reduce})[0] for reduce in ("step", "layer")}
    between = f"{(at_least['step'] + at_least['layer']) // 2}"
    assert at_least["layer"] < at_least["step"]
    assert settled()[1] == "step"
    assert settled(memory="2GB")[1] == "step"
    assert settled(memory=between, strategy="fixed", **{"plan.recompute": "full"})[1] == "layer"
    assert settled(memory="1MB")[1] == "layer", "the loader says that it fits nowhere"
    assert settled(memory=between, **{"plan.reduce": "step"})[1] == "step"


def planned_case(seed: int, world: int, strategy: str):
    """Random sequences and the planner's rounds for them, under a cap that binds where it can."""
    case = test_sequence.random_case(seed, world, recompute=(0, 0))
    cost = dcp.CostModel.for_model(case.config, threads=1)
    lengths = [len(sequence) for sequence in case.sequences]
    least = cost.memory([], 1, world_size=world)
    whole = cost.memory([max(lengths)], 1, world_size=world)
    options = {"world_size": world, "rounds": True, "strategy": strategy, "max_tokens": 96}
    try:
        cap = least + (whole - least) * 7 // 10
        return case, dcp.plan(lengths, cost, memory_bytes=cap, **options)
    except dcp.InfeasibleError:
        return case, dcp.plan(lengths, cost, **options | {"max_tokens": None})


def planned_gradients(world, cases):
    out = []
    for case, plan in cases:
        batches = []
        for planned in in_rounds(plan, world.rank):
            chosen = [] if planned is None else list(planned.sequences)
            batch = case.micro_batch(0, 1, chosen)
            batches.append(batch._replace(**setting_of(planned, world.rank)))
        results = []
        for windows, reduce in MODES[1:]:
            with ShardedModel(case.config, world, seed=3, windows=windows, reduce=reduce) as model:
                tensors = {name: np.array(x) for name, x in model.parameters().items()}
                loss, grads = model.loss_and_gradients(
                    batches, scale=case.scale, groups=plan.groups
                )
            results.append((loss, grads if world.rank == 0 else None))
        out.append((tensors if world.rank == 0 else None, results))
    return out


@pytest.mark.parametrize("world", [3, 4])
@given(seed=st.integers(0, 2**20))
@settings(max_examples=1, deadline=None)
def test_rounds_of_every_strategy(world, seed):
    """Promise 1 from the planner's rounds on: groups, recompute and empty micro-batches."""
    names = [name for name in strategies() if name != "fixed"]
    cases = [planned_case(seed + i, world, name) for i, name in enumerate(names)]
    ranks = dcp.launch(planned_gradients, world, (cases,))
    for i, (case, _) in enumerate(cases):
        tensors, results = ranks[0][i]
        whole = case.micro_batch(0, 1, list(range(len(case.sequences))))
        judge_loss, judge = Reference(case.config, tensors).loss_and_gradients(
            whole.tokens, whole.offsets, whole.labels, weights=whole.weights, scale=case.scale
        )
        for loss, grads in results:
            assert abs(loss - judge_loss) <= 1e-6 * max(abs(judge_loss), 1e-3), names[i]
            assert worst_error(grads, judge) <= 1e-5, names[i]


def make_differently(world, case, settings):
    with pytest.raises(dcp.MismatchError) as caught:
        ShardedModel(**{"config": case.config, "world": world} | settings[world.rank])
    return str(caught.value)


@pytest.mark.parametrize(
    ("words", "own", "other"),
    [
        ("reduce_layer: rank 0 has 0, rank 2 has 1", {}, {"reduce": "layer"}),
        ("no_windows: rank 0 has 1, rank 2 has 0", {"windows": False}, {}),
        ("block_rows: rank 0 has 1, rank 2 has 4", {}, {"block_rows": 4}),
        ("prefetch: rank 0 has 0, rank 2 has 1", {}, {"prefetch": 1}),
        ("what is frozen: rank 0 has", {}, {"frozen": ["*norm*"]}),
        ("the model: rank 0 has", {}, {"config": make_case(4).config}),
    ],
)
def test_ranks_that_make_another_model_are_an_error_on_all(words, own, other):
    """Promise 4: before a buffer is made."""
    for text in dcp.launch(make_differently, 3, (make_case(3), [own, own, other])):
        assert f"ranks disagree on {words}" in text


def evaluate_only(world, case):
    out = []
    for mode in MODES:
        with shard(case, world, mode, forward_only=True) as model:
            batches = case.plan(world.size)[world.rank]
            out.append(model.evaluate(batches, scale=case.scale))
    return out


def test_models_for_evaluation_in_every_mode():
    ranks = dcp.launch(evaluate_only, 2, (make_case(5),))
    assert len({loss for rank in ranks for loss in rank}) == 1 and ranks[0][0] > 0


def train_ahead(world, case, compute_dtype):
    """Steps, evaluations of uneven counts in between, gradients: gathering ahead or not."""
    out = []
    config = dataclasses.replace(case.config, compute_dtype=compute_dtype)
    case = dataclasses.replace(case, config=config)
    layers = config.num_hidden_layers
    for prefetch, reduce in itertools.product((0, 1), ("step", "layer")):
        device = "late" if prefetch else "cpu"
        with shard(case, world, (False, reduce), prefetch=prefetch, device=device) as model:
            results = []
            for step in range(3):
                batches = rounds_of(case, world.size, step)[world.rank]
                results.append(model.evaluate(batches[: world.rank], scale=case.scale))
                dropped = [
                    SimpleNamespace(**batch._asdict(), recompute=(step % 2, layers > 1))
                    for batch in batches
                ]
                step_result = model.step(
                    dropped,
                    scale=case.scale,
                    trainable=case.trainable,
                    lr=0.05,
                    step=step,
                    optimizer=dcp.optim.AdamW(lr=0.05, clip=0.5),
                    dropout_seed=step,
                )
                results += [step_result.loss, step_result.grad_norm]
            batches = rounds_of(case, world.size)[world.rank]
            loss, grads = model.loss_and_gradients(batches, scale=case.scale, dropout_seed=9)
            results += [loss, {name: x.tobytes() for name, x in grads.items()}]
            out.append((results, model.parameters_sha256(), step_result.gathered_bytes))
    return out


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_gathering_ahead_changes_no_bit(world, compute_dtype):
    """Promise 2: also with dropout, recompute, micro-batches without tokens, and evaluation in
    between; what lies in two places is gathered less often."""
    for tied, layers in ((False, 3), (True, 4), (True, 1), (False, 1)):
        case = make_case(61, dropout=0.2)
        config = dataclasses.replace(
            case.config, tie_word_embeddings=tied, num_hidden_layers=layers
        )
        ranks = dcp.launch(
            train_ahead, world, (dataclasses.replace(case, config=config), compute_dtype)
        )
        for by_step, by_layer, by_step_ahead, by_layer_ahead in ranks:
            for plain, ahead in ((by_step, by_step_ahead), (by_layer, by_layer_ahead)):
                assert plain[:2] == ahead[:2], (tied, layers)
                assert ahead[2] < plain[2] or world == 1
            assert by_step[:1] != by_layer[:1] or world == 1


def held_ahead(world, config):
    case = Case(config, [np.arange(9, dtype=np.int32)], [np.arange(9, dtype=np.int32)], None, 0)
    out = []
    for prefetch in (0, 1):
        with shard(case, world, (False, "layer"), prefetch=prefetch) as model:
            batches, optimizer = [case.micro_batch([0])] * 2, dcp.optim.AdamW(lr=0.1)
            model.step(batches, scale=1.0, trainable=9, lr=0.1, step=0, optimizer=optimizer)
            model.evaluate(batches, scale=1.0)
            held = model.memory()["held"]
        cost = dcp.CostModel.for_model(config, windows=False, reduce="layer", prefetch=prefetch)
        out.append((held, cost.memory([9], 1, world_size=world.size)))
    return out


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True])
def test_memory_of_gathering_ahead(tied, compute_dtype):
    """A second place, as large as the largest group that comes to lie there, and no more than the
    estimate says."""
    config = dcp.Transformer1D(
        vocab_size=300,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        compute_dtype=compute_dtype,
    )
    layer = sum(int(np.prod(shape)) for name, shape in config.tensors() if ".layers.1." in name)
    place = layer * (2 if compute_dtype == "bfloat16" else 4)
    for (plain, promised), (ahead, promised_ahead) in dcp.launch(held_ahead, 2, (config,)):
        assert plain <= promised and ahead <= promised_ahead
        assert place <= ahead - plain <= 1.05 * place + 8192
        assert place <= promised_ahead - promised


def fail_in_the_middle(world, case):
    """Rank 1 brings a token that does not exist, in the second of its micro-batches."""
    batches = rounds_of(case, world.size)[world.rank] + [case.micro_batch([0])] * 2
    if world.rank == 1:
        last = batches[-1]
        batches[-1] = last._replace(tokens=last.tokens + case.config.vocab_size)
    with shard(case, world, (False, "layer"), prefetch=1) as model:
        with pytest.raises(dcp.Error) as caught:
            model.loss_and_gradients(batches, scale=case.scale)
        with pytest.raises(dcp.Error):
            model.evaluate(batches, scale=case.scale)
    return str(caught.value)


def test_an_error_on_one_rank_ends_gathers_ahead():
    """Promise 4: the others have begun a gather that never comes."""
    texts = dcp.launch(fail_in_the_middle, 3, (make_case(41),))
    assert "token" in texts[1]
    assert all("rank 1" in text for text in (texts[0], texts[2]))


def test_prefetch_is_of_models():
    with dcp.init("self") as world:
        with pytest.raises(dcp.ArgumentError, match="prefetch = 2 must be 0 or 1"):
            dcp.fully_shard(make_case(8).config, world, windows=False, prefetch=2)
        with pytest.raises(TypeError, match="method `prefetch`"):
            dcp.fully_shard({"a": (4,)}, world, windows=False, prefetch=1)
