"""Sampler and loader: every sequence once an epoch, exact resume on any world, weights, labels."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dcp
from dcp import data, planning
from dcp.loader import Sampler, Step

COST = dcp.CostModel(latency_s=1e-3, token_s=1e-5, square_s=1e-8, token_bytes=100)


def corpus(lengths: list[int], **options: Any) -> data.Packed:
    """Documents of distinct tokens: token t of the whole is t."""
    options = {"max_length": 64, **options}
    return data.Packed(np.arange(sum(lengths)), np.cumsum([0, *lengths]), **options)


def loader(dataset: data.Documents, rank: int = 0, size: int = 1, **options: Any) -> dcp.Loader:
    options = {"tokens_per_step": 64, "eval_share": 0.0, **options}
    return dcp.Loader(dataset, SimpleNamespace(rank=rank, size=size), COST, **options)


def take(loader: dcp.Loader, count: int) -> list[Step]:
    return list(itertools.islice(loader, count))


def once(steps: Sequence[Any]) -> list[Any]:
    """The micro-batches of a step on all ranks, those of a group once; its ranks hold the same."""
    out: list[Any] = []
    groups: dict[tuple[int, int], list[list[Any]]] = {}
    for rank, step in enumerate(steps):
        for group in {b.group for b in step.micro_batches}:
            assert group[0] <= rank < group[0] + group[1]
            mine = [b for b in step.micro_batches if b.group == group]
            groups.setdefault(group, []).append(mine)
    for (_, count), copies in groups.items():
        assert len(copies) == count
        for batches in zip(*copies, strict=True):
            for other in batches[1:]:
                assert other.recompute == batches[0].recompute
                assert np.array_equal(other.row_ids, batches[0].row_ids)
                assert np.array_equal(other.tokens, batches[0].tokens)
        out += copies[0]
    return out


def one_epoch(sampler: Sampler, epoch: int = 0) -> list[np.ndarray]:
    steps, place = [], (epoch, 0)
    while place[0] == epoch:
        picked, *following = sampler.step(*place)
        place = (following[0], following[1])
        steps.append(picked)
    assert place == (epoch + 1, 0)
    return steps


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=40),
    budget=st.integers(30, 90),
    seed=st.integers(0, 2**64 - 1),
    epoch=st.integers(0, 5),
)
def test_an_epoch_is_every_sequence_once(
    lengths: list[int], budget: int, seed: int, epoch: int
) -> None:
    """Cases L-03, D-06: the tail is a step of its own; nothing is lost, repeated or left over."""
    sampler = Sampler(lengths, tokens_per_step=budget, seed=seed)
    steps = one_epoch(sampler, epoch)
    assert sorted(np.concatenate(steps).tolist()) == list(range(len(lengths)))
    totals = [int(sampler.lengths[s].sum()) for s in steps]
    assert max(totals) <= budget
    for step, following, total in zip(steps, steps[1:], totals, strict=False):
        assert total + lengths[following[0]] > budget, (step, following)


def test_epochs_and_seeds_differ_and_repeat() -> None:
    sampler = Sampler([1] * 64, tokens_per_step=8, seed=5)
    orders = [tuple(sampler.order(e)) for e in range(4)]
    orders += [tuple(Sampler([1] * 64, tokens_per_step=8, seed=6).order(0))]
    assert len(set(orders)) == 5
    assert orders[2] == tuple(Sampler([9] * 64, tokens_per_step=9, seed=5).order(2))
    # fixed for good: a run must resume under another NumPy
    assert Sampler([1] * 8, tokens_per_step=8, seed=1).order(0).tolist() == FIXED_ORDER


FIXED_ORDER = [3, 5, 2, 7, 0, 6, 1, 4]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("strategy", planning.strategies())
def test_ranks_share_a_step_without_loss(size: int, strategy: str) -> None:
    """Case D-08: over the ranks, every token of the step once, with the right label and number."""
    lengths = [1, 30, 2, 17, 8, 8, 8, 25, 3, 40, 1, 5]
    dataset = corpus(lengths)
    ranks = [loader(dataset, r, size, strategy=strategy) for r in range(size)]
    for steps in zip(*(take(x, 7) for x in ranks), strict=True):
        first = steps[0]
        assert len({s.plan.hash for s in steps}) == 1
        assert first.sequence_count == len(first.sequences) == len(first.lengths)
        assert first.trainable == int((first.lengths - 1).sum())
        assert first.scale == (1 / first.trainable if first.trainable else 0)
        starts = np.cumsum(first.lengths) - first.lengths
        at = {int(s): int(r) for s, r in zip(first.sequences, starts, strict=True)}
        seen = []
        for batch in once(steps):
            assert batch.tokens.dtype == batch.labels.dtype == np.int32
            assert batch.offsets.dtype == batch.row_ids.dtype == np.int64
            assert batch.offsets[0] == 0 and batch.offsets[-1] == len(batch.tokens)
            assert batch.weights is None
            for a, b in itertools.pairwise(batch.offsets.tolist()):
                piece = int(np.searchsorted(dataset._start, batch.tokens[a], side="right")) - 1
                run = np.arange(dataset._start[piece], dataset._start[piece] + lengths[piece])
                assert np.array_equal(batch.tokens[a:b], run)
                assert np.array_equal(batch.labels[a:b], [*run[1:], -100])
                assert np.array_equal(batch.row_ids[a:b], at[piece] + np.arange(b - a))
                seen.append(piece)
        assert sorted(seen) == sorted(first.sequences.tolist())


def test_steps_do_not_depend_on_world_or_strategy() -> None:
    dataset = corpus([5, 9, 14, 30, 2, 2, 8] * 5)
    runs = [
        [s.sequences.tolist() for s in take(loader(dataset, 0, size, strategy=strategy), 12)]
        for size, strategy in ((1, "packed"), (4, "packed"), (3, "bucket"))
    ]
    assert runs[0] == runs[1] == runs[2]


@settings(max_examples=15, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=20),
    done=st.integers(0, 12),
    size=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_resume_is_exact_on_any_world(lengths: list[int], done: int, size: int, seed: int) -> None:
    """Cases D-03, D-05: the order goes on as if uninterrupted, in any epoch, on any world size."""
    dataset = corpus(lengths, max_length=20)
    whole = take(loader(dataset, seed=seed, tokens_per_step=25), done + 6)
    first = loader(dataset, 0, 4, seed=seed, tokens_per_step=25)
    take(first, done)
    state = first.state_dict()
    assert state["step"] == done
    second = loader(dataset, size - 1, size, seed=seed, tokens_per_step=25)
    second.load_state_dict(state)
    rest = take(second, 6)
    assert [s.index for s in rest] == list(range(done, done + 6))
    for got, wanted in zip(rest, whole[done:], strict=True):
        assert got.sequences.tolist() == wanted.sequences.tolist()
        assert (got.epoch, got.scale) == (wanted.epoch, wanted.scale)


def test_resume_at_the_end_of_an_epoch() -> None:
    """Case D-04: 64 items, saved exactly at the end of epoch 1 of 3: the others run in full."""
    dataset = corpus([4] * 64, max_length=32)
    first = loader(dataset, tokens_per_step=32)
    done = take(first, 8)
    assert {s.epoch for s in done} == {0}
    state = first.state_dict()
    assert (state["epoch"], state["position"], state["step"]) == (1, 0, 8)
    second = loader(dataset, 0, 2, tokens_per_step=32)
    second.load_state_dict(state)
    rest = take(second, 16)
    for epoch in (1, 2):
        seen = np.concatenate([s.sequences for s in rest if s.epoch == epoch])
        assert sorted(seen.tolist()) == list(range(64))


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"seed": 1}, "seed"),
        ({"tokens_per_step": 65}, "tokens_per_step"),
        ({"eval_share": 0.3}, "eval_share"),
    ],
)
def test_a_state_of_other_settings_is_refused(changed: dict[str, Any], word: str) -> None:
    dataset = corpus([8] * 30)
    state = loader(dataset).state_dict()
    with pytest.raises(dcp.ArgumentError, match=word):
        loader(dataset, **changed).load_state_dict(state)
    with pytest.raises(dcp.ArgumentError, match="data"):
        loader(corpus([8] * 31)).load_state_dict(state)
    with pytest.raises(dcp.ArgumentError, match="position"):
        loader(dataset).load_state_dict({**state, "position": 30})
    with pytest.raises(dcp.ArgumentError, match="epoch"):
        loader(dataset).load_state_dict({k: v for k, v in state.items() if k != "epoch"})


def test_loading_a_state_moves_a_running_iterator() -> None:
    running = loader(corpus([8] * 30))
    steps = iter(running)
    first = [next(steps) for _ in range(3)]
    start = loader(corpus([8] * 30)).state_dict()
    running.load_state_dict(start)
    again = [next(steps) for _ in range(3)]
    assert [s.index for s in again] == [0, 1, 2]
    assert [s.plan.hash for s in again] == [s.plan.hash for s in first]
    assert next(iter(running)).index == 3  # a new iterator goes on


def test_nothing_is_left_running() -> None:
    before = set(threading.enumerate())
    steps = iter(loader(corpus([8] * 30)))
    next(steps)
    assert set(threading.enumerate()) > before  # it plans ahead
    steps.close()  # type: ignore[attr-defined]
    assert set(threading.enumerate()) == before


def test_evaluation_repeats_and_touches_nothing() -> None:
    """Case D-01: the same order each time and for every seed; the training order goes on."""
    lengths = [3 + i % 17 for i in range(200)]
    dataset = corpus(lengths)
    one = loader(dataset, 0, 2, eval_share=0.2)
    other = loader(dataset, 1, 2, eval_share=0.2, seed=3)
    plain = take(loader(dataset, 0, 2, eval_share=0.2), 6)
    steps = iter(one)
    got = []
    for _ in range(3):
        got += [next(steps), next(steps)]
        evaluations = [list(x.evaluation(tokens=150)) for x in (one, one, other)]
        orders = [[s.sequences.tolist() for s in e] for e in evaluations]
        assert orders[0] == orders[1] == orders[2]
        assert len(orders[0]) >= 2 and sum(int(s.lengths.sum()) for s in evaluations[0]) <= 150
        trainable = sum(s.trainable for s in evaluations[0])
        assert all(s.scale == 1 / trainable for s in evaluations[0])
        both = zip(evaluations[0], evaluations[2], strict=True)
        shares = [sum(len(b.tokens) for b in once(pair)) for pair in both]
        assert shares == [int(s.lengths.sum()) for s in evaluations[0]]
    assert [s.plan.hash for s in got] == [s.plan.hash for s in plain]
    trained = {int(i) for s in got for i in s.sequences}
    held = {i for order in orders[0] for i in order}
    assert not trained & held
    assert list(loader(dataset).evaluation(tokens=100)) == []


def test_weights_by_sequence() -> None:
    """Case L-07: targets 8, 2, 2 with losses 8, 4, 6: 2.0 by sequence, 1.5 by token."""
    lengths, sums = [9, 3, 3], {9: 8.0, 3: 5.0}  # 4 and 6: 5 on average
    dataset = corpus(lengths, max_length=9)
    results = {}
    for weighting in ("token", "sequence"):
        total = 0.0
        options = {"tokens_per_step": 15, "weighting": weighting}
        steps = [take(loader(dataset, rank, 2, **options), 1)[0] for rank in range(2)]
        assert all(step.trainable == 12 and step.sequence_count == 3 for step in steps)
        for batch in once(steps):
            weights = np.ones(len(batch.tokens)) if batch.weights is None else batch.weights
            for a, b in itertools.pairwise(batch.offsets.tolist()):
                loss = np.where(batch.labels[a:b] >= 0, sums[b - a] / (b - a - 1), 0.0)
                total += steps[0].scale * float((loss * weights[a:b]).sum())
        results[weighting] = total
    assert results["token"] == pytest.approx(1.5)
    assert results["sequence"] == pytest.approx(2.0, rel=1e-6)


def test_nothing_to_learn_is_scale_zero_and_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Case L-06: all labels ignored, or documents of one token: no 0/0, one warning."""
    labels = np.full(40, -100)
    for weighting in ("token", "sequence"):
        caplog.clear()
        dataset = corpus([10] * 4, labels=labels, max_length=16)
        with caplog.at_level(logging.WARNING, logger="dcp"):
            steps = take(loader(dataset, tokens_per_step=20, weighting=weighting), 4)
        assert [s.scale for s in steps] == [0.0] * 4
        assert [s.trainable for s in steps] == [0] * 4
        assert len(caplog.records) == 1 and "nothing to learn" in caplog.text
    # one rank without a target, the other with: N is of both
    labels[:10] = 1
    steps = take(loader(corpus([10] * 4, labels=labels, max_length=16), 0, 2), 1)
    assert steps[0].trainable == 10 and steps[0].scale == 0.1


def test_more_ranks_than_sequences() -> None:
    """Case D-06: 3 items on 4 ranks: one rank has nothing to compute, all 3 are seen."""
    options = {"strategy": "fixed"}  # one rank a sequence
    steps = [take(loader(corpus([10] * 3, max_length=16), r, 4, **options), 1)[0] for r in range(4)]
    assert [len(s.micro_batches) for s in steps] == [1, 1, 1, 0]


def test_ranks_that_share_more_than_they_compute() -> None:
    """Case D-06: 10 items on 4 ranks: all 10 come, none twice."""
    dataset = corpus([10] * 10, max_length=16)
    ranks = [take(loader(dataset, r, 4, tokens_per_step=100), 1)[0] for r in range(4)]
    tokens = np.concatenate([batch.tokens for batch in once(ranks)])
    assert sorted(tokens.tolist()) == list(range(100))


@pytest.mark.parametrize("strategy", planning.strategies())
@pytest.mark.parametrize("size", [1, 3, 5])
def test_rounds_give_every_rank_as_many_micro_batches(strategy: str, size: int) -> None:
    """A rank without work in a round gets an empty micro-batch of its own, without weight."""
    lengths = [1, 30, 2, 17, 8, 8, 8, 25, 3, 40, 1, 5]
    options = {"strategy": strategy, "rounds": True, "max_tokens": 40, "tokens_per_step": 100}
    ranks = [loader(corpus(lengths), r, size, **options) for r in range(size)]
    for steps in zip(*(take(x, 3) for x in ranks), strict=True):
        counts = {len(step.micro_batches) for step in steps}
        assert len(counts) == 1
        batches = once(steps)
        seen = sorted(x for b in batches for x in b.row_ids.tolist())
        assert seen == list(range(int(steps[0].lengths.sum())))
        for batch in batches:
            if len(batch.tokens) == 0:
                assert batch.group[1] == 1 and batch.offsets.tolist() == [0]
                assert len(batch.labels) == 0 and batch.recompute == (0, 0)
        by_round = zip(*(step.micro_batches for step in steps), strict=True)
        for together in by_round:  # ranks of a group are in the same round
            for rank, batch in enumerate(together):
                first, count = batch.group
                assert all(together[r].group == batch.group for r in range(first, first + count))
                assert first <= rank < first + count


def test_packing_keeps_what_is_longer_than_the_pack() -> None:
    """Case A-11: lengths 5, 2, 3, 1 in packs of 4: all 11 tokens; fragments are sequences."""
    dataset = corpus([5, 2, 3, 1], max_length=4)
    assert sorted(dataset.lengths.tolist()) == [1, 1, 2, 3, 4]
    options = {"tokens_per_step": 11, "max_tokens": 4, "strategy": "fixed"}
    for size in (1, 2, 3):
        steps = [take(loader(dataset, r, size, **options), 1)[0] for r in range(size)]
        batches = once(steps)
        assert all(len(batch.tokens) <= 4 for batch in batches)
        tokens = np.concatenate([batch.tokens for batch in batches])
        assert sorted(tokens.tolist()) == list(range(11))
        # a fragment is a sequence of its own: the last token of each has no target
        for batch in batches:
            assert batch.labels[batch.offsets[1:] - 1].tolist() == [-100] * (len(batch.offsets) - 1)
            assert np.count_nonzero(batch.labels == -100) == len(batch.offsets) - 1


def test_bad_settings() -> None:
    dataset = corpus([10, 20], max_length=32)
    with pytest.raises(ValueError, match=r"tokens_per_step = 31 .* data\.max_length = 32"):
        loader(dataset, tokens_per_step=31)
    with pytest.raises(dcp.ArgumentError, match="packed"):
        loader(dataset, strategy="paked")
    with pytest.raises(dcp.ArgumentError, match="weighting"):
        loader(dataset, weighting="tokens")
    with pytest.raises(dcp.InfeasibleError, match="sequence 1 of 20 tokens fits nowhere"):
        loader(dataset, memory_bytes=1500)
    fixed = dataclasses.replace(COST, fixed_bytes=5000)  # more than the cap: no sequence's fault
    with pytest.raises(dcp.InfeasibleError, match=r"memory_bytes = 1500 is less .* 5000") as error:
        dcp.Loader(
            dataset, SimpleNamespace(rank=0, size=1), fixed, tokens_per_step=64, memory_bytes=1500
        )
    assert "sequence" not in str(error.value)
    with pytest.raises(dcp.ArgumentError, match="tokens_per_step"):
        Sampler([5], tokens_per_step=4)
    with pytest.raises(dcp.ArgumentError, match="no sequence"):
        Sampler([], tokens_per_step=4)


def test_the_planner_is_told_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options reach every plan of the run, and with them the longest sequence of the whole run."""
    asked: list[dict[str, Any]] = []
    real = planning.plan

    def plan(lengths: Any, cost: Any, **options: Any) -> Any:
        asked.append(options)
        return real(lengths, cost, **options)

    monkeypatch.setattr("dcp.loader.plan", plan)
    dataset = corpus([9, 30, 5, 9, 9, 9], max_length=32)
    given = {
        "memory_bytes": 10**6,
        "max_tokens": 40,
        "max_group": 2,
        "fixed_group": 1,
        "fixed_recompute": "none",
    }
    for part in (take(loader(dataset, 1, 3, seed=4, tokens_per_step=32, **given), 3), []):
        assert all(step.plan.options.longest == 30 for step in part)
    assert len(asked) >= 4
    for options in asked:
        assert options.items() >= given.items() and options["longest"] == 30
        assert options["world_size"] == 3 and options["seed"] == 4 and not options["rounds"]


def test_micro_batches_keep_the_memory_cap() -> None:
    dataset = corpus([5, 9, 14, 30, 2, 2, 8] * 5, max_length=32)
    cap = COST.memory([32], world_size=2)
    for step in take(loader(dataset, 0, 2, memory_bytes=cap), 5):
        for batch in step.micro_batches:
            count = batch.group[1]
            assert COST.memory(np.diff(batch.offsets), count, world_size=2) <= cap


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 64), min_size=1, max_size=40),
    multiples=st.lists(st.lists(st.integers(1, 5), max_size=3), min_size=1, max_size=12),
    size=st.integers(1, 3),
)
def test_multiples_change_only_where_steps_end(
    lengths: list[int], multiples: list[list[int]], size: int
) -> None:
    """Every sequence once an epoch in the same order; the last of several calls counts."""
    dataset = corpus(lengths)
    ranks = [loader(dataset, rank, size) for rank in range(size)]
    runs = [iter(one) for one in ranks]
    order, now = Sampler(dataset.lengths, tokens_per_step=64, seed=0), 1
    taken: list[int] = []
    for changes in multiples:
        for multiple in changes:
            for one in ranks:
                one.use_multiple(multiple)
            now = multiple
        place = ranks[0].state_dict()
        assert place["multiple"] == now == ranks[0].multiple
        steps = [next(run) for run in runs]
        wanted, *_ = order.step(place["epoch"], place["position"], multiple=now)
        assert len({step.plan.hash for step in steps}) == 1
        for step in steps:
            assert step.sequences.tolist() == wanted.tolist()
        assert int(steps[0].lengths.sum()) <= 64 * now
        taken += wanted.tolist()
    epochs, rest = divmod(len(taken), len(lengths))
    assert all(
        taken[e * len(lengths) : (e + 1) * len(lengths)] == order.order(e).tolist()
        for e in range(epochs)
    )
    assert taken[len(taken) - rest :] == order.order(epochs)[:rest].tolist()


def test_multiple_of_an_epoch_ends_with_it() -> None:
    """A budget beyond the epoch's end takes what is left of it, and nothing of the next one."""
    one = loader(corpus([30] * 5))
    steps = iter(one)
    next(steps)
    one.use_multiple(2**16)
    assert [len(next(steps).sequences) for _ in range(3)] == [3, 5, 5]
    assert one.state_dict()["epoch"] == 3


def test_resume_with_a_multiple_on_another_world() -> None:
    dataset = corpus([5, 9, 14, 30, 2, 2, 8] * 5)
    first = loader(dataset)
    steps = iter(first)
    next(steps)
    first.use_multiple(3)
    next(steps)
    second = loader(dataset, 1, 2)
    second.load_state_dict(first.state_dict())
    again = iter(second)
    for _ in range(4):
        assert next(steps).sequences.tolist() == next(again).sequences.tolist()
    before = {k: v for k, v in loader(dataset).state_dict().items() if k != "multiple"}
    second.load_state_dict(before)  # of a version that knew none
    assert second.multiple == 1 and next(again).index == 0


def test_multiple_is_planned_like_that_budget() -> None:
    """Accumulation k is a step of k times the tokens: the very plan, micro-batches and scale."""
    dataset = corpus([5, 9, 14, 30, 2, 2, 8, 61] * 5)
    one, whole = loader(dataset, 1, 2), loader(dataset, 1, 2, tokens_per_step=192)
    one.use_multiple(3)
    for a, b in zip(take(one, 5), take(whole, 5), strict=True):
        assert a.plan.hash == b.plan.hash and a.scale == b.scale and a.trainable == b.trainable
        for left, right in zip(a.micro_batches, b.micro_batches, strict=True):
            assert np.array_equal(left.tokens, right.tokens)


@pytest.mark.parametrize("multiple", [0, -1, 2**16 + 1, 1.5, "2"])
def test_multiples_that_cannot_be(multiple: Any) -> None:
    one = loader(corpus([5]))
    with pytest.raises((dcp.ArgumentError, dcp.DTypeError), match="multiple"):
        one.use_multiple(multiple)
    assert one.multiple == 1


def test_evaluation_does_not_follow_the_multiple() -> None:
    one = loader(corpus([20] * 60), eval_share=0.5)
    before = [step.plan.hash for step in one.evaluation(tokens=600)]
    one.use_multiple(4)
    assert [step.plan.hash for step in one.evaluation(tokens=600)] == before and len(before) > 1
