"""Steps in few bits: what is sent, what is left, what is measured, through every change.

Small models on ranks of this machine; gradients, parameters and observations are compared with
whole gradients, with each other bit for bit, or, where bits are random, with their own spread.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_control_run import PRECISIONS, config_of, documents, loader_of, step_of

import dcp
from dcp.cli import run as run_command
from dcp.link import Link

ADAMW = dcp.optim.AdamW(lr=1e-3)


def part_of(data: Any, batches: Any) -> Any:
    """The step `data` with other micro-batches of this rank."""
    return SimpleNamespace(
        scale=data.scale, trainable=data.trainable, plan=data.plan, micro_batches=batches
    )


def split(data: Any) -> tuple[Any, Any]:
    half = len(data.micro_batches) // 2
    return data.micro_batches[:half], data.micro_batches[half:]


def sums_of(model: Any) -> dict[str, Any]:
    return {name: array.astype(np.float64) for name, array in model._gather(1).items()}


def left_of(model: Any, world: Any) -> dict[str, Any]:
    return {run.name: world.allreduce(run.array) for run in model.residual()}


def worst(wanted: dict[str, Any], handed: dict[str, Any], left: dict[str, Any]) -> float:
    """Greatest |sent + left - wanted| of any element, over the greatest element."""
    top = max(float(np.abs(array).max()) for array in wanted.values())
    off = (
        np.abs(handed[name] + left[name].reshape(array.shape) - array).max()
        for name, array in wanted.items()
    )
    return float(max(off)) / top


# ---- the same bits everywhere and every time ----


def in_every_precision(world: Any) -> list[Any]:
    out: list[Any] = []
    settings: list[dict[str, Any]] = [{"windows": True}, {"windows": False, "gather": "step"}]
    if world.size == 4:
        settings = [{"machine_ranks": 2}, {"machine_ranks": 2, "windows": False}]
    for precision in PRECISIONS:
        for way in settings:
            steps = iter(loader_of(world, rounds=True))
            with dcp.fully_shard(config_of(), world, **way) as model:
                for number in range(3):
                    options = {"precision": precision, "quantise_seed": 4, "statistics": True}
                    result = step_of(model, next(steps), number, **options)
                    assert result.observation is not None and result.reduce_count == 1
                    timed = ("codec_s", "reduce_s", "latency_s", "compute_s")
                    timed += ("gather_s", "gather_bytes", "gather_calls")  # windows: none
                    seen = {k: v for k, v in result.observation.items() if k not in timed}
                    out.append((precision, result.loss, result.grad_norm, seen))
                out.append(model.parameters_sha256())
    return out


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_ranks_agree_and_runs_repeat_bit_for_bit(ranks: int) -> None:
    first, second = (dcp.launch(in_every_precision, ranks) for _ in range(2))
    assert all(str(rank) == str(first[0]) for rank in first), "the same on all ranks"
    assert str(first) == str(second), "the same again"
    shas = [row for row in first[0] if isinstance(row, str)]
    assert shas[::2] == shas[1::2], "however weights are held"
    assert len(set(shas)) == (1 if ranks == 1 else len(PRECISIONS)), "precisions differ"


def losses_of(
    world: Any, precision: str, max_tokens: int, seed: int, optimizer: Any = ADAMW
) -> list[float]:
    steps, out = iter(loader_of(world, 2048, max_tokens=max_tokens)), []
    with dcp.fully_shard(config_of(), world) as model:
        for number in range(12):
            options = {"lr": 5e-3, "precision": precision, "quantise_seed": seed}
            options["optimizer"] = optimizer
            out.append(step_of(model, next(steps), number, **options).loss)
    return out


def of_two_plans(world: Any) -> Any:
    exact = [losses_of(world, "fp32", most, 0) for most in (2048, 256)]
    int8 = [[losses_of(world, "int8", most, seed) for seed in range(4)] for most in (2048, 256)]
    return exact, int8


def test_other_plans_are_the_same_training_within_the_noise() -> None:
    exact, int8 = (np.array(part) for part in dcp.launch(of_two_plans, 2)[0])
    np.testing.assert_allclose(exact[0], exact[1], rtol=1e-4)
    last = int8[:, :, -1]
    spread = float(last.std(ddof=1, axis=1).max())
    assert 0 < spread < 0.02 * (exact[0][0] - exact[0][-1]), "rounding is no training"
    assert abs(last[0].mean() - last[1].mean()) < 4 * spread
    assert abs(last.mean() - exact[:, -1].mean()) < 4 * spread


def of_an_optimizer(world: Any, optimizer: Any) -> list[list[float]]:
    return [
        losses_of(world, precision, 2048, 0, optimizer) for precision in ("fp32", "int8", "int4")
    ]


@pytest.mark.parametrize("name", ["AdamW", "AdamW8bit", "Muon", "Shampoo"])
def test_few_bits_train_with_every_optimizer(name: str) -> None:
    """As deepspeed #4886, #5046 ask: the losses of fp32, step after step, and no special case."""
    optimizer = getattr(dcp.optim, name)(lr=5e-3)
    exact, int8, int4 = np.array(dcp.launch(of_an_optimizer, 2, (optimizer,))[0])
    learnt = exact[0] - exact[-1]
    assert learnt > 0.1, exact
    assert np.abs(int8 - exact).max() < 0.03 * learnt, int8 - exact
    assert np.abs(int4 - exact).max() < 0.15 * learnt, int4 - exact
    assert not np.array_equal(int8, exact) and not np.array_equal(int4, int8)


# ---- nothing is lost ----


def through_changes(world: Any) -> list[float]:
    """Precision, levels, blocks of rows and the way weights are held change; the sum stays."""
    data = next(iter(loader_of(world, rounds=True)))
    with dcp.fully_shard(config_of(), world) as model:
        args = {"scale": data.scale, "groups": data.plan.groups}
        _, wanted = model.loss_and_gradients(data.micro_batches, **args)
    total = {name: np.zeros(array.shape) for name, array in wanted.items()}
    handed = {name: np.zeros(array.shape) for name, array in wanted.items()}
    kept: dict[str, Any] = {}
    errors, number = [], 0
    ways: list[dict[str, Any]] = [
        {},
        {"machine_ranks": 2},
        {"block_rows": 8, "windows": False},
        {"block_rows": 4, "machine_ranks": 2, "windows": False, "gather": "step"},
        {"block_rows": 16},
    ]
    for way in ways:
        with dcp.fully_shard(config_of(), world, **way) as model:
            for run in model.residual(make=True):
                run.array[:] = kept.get(run.name, 0.0)
            del run
            for precision in ("int4", "fp8_e5m2", "bf16"):
                step_of(model, data, number, lr=0.0, precision=precision, hadamard=number % 2 == 1)
                number += 1
                for name, array in sums_of(model).items():
                    handed[name] += array
                    total[name] += wanted[name]
                errors.append(worst(total, handed, left_of(model, world)))
            kept = {run.name: run.array.copy() for run in model.residual()}
    return errors


def test_residuals_go_from_layout_to_layout() -> None:
    """Case C-02: sent + residual = sum of gradients, before and after each change."""
    for errors in dcp.launch(through_changes, 4):
        assert len(errors) == 15 and max(errors) < 1e-5


def without_update(world: Any) -> Any:
    """Steps without any token, and gradients for a look, between steps that are quantised."""
    data = next(iter(loader_of(world)))
    with dcp.fully_shard(config_of(), world) as model:
        step_of(model, data, 0, lr=0.0, precision="int4")
        before = {run.name: run.array.copy() for run in model.residual()}
        rows = []
        for number, precision in enumerate(PRECISIONS):
            empty = SimpleNamespace(
                scale=1.0, trainable=0, micro_batches=[], plan=SimpleNamespace(groups=())
            )
            result = step_of(model, empty, 1 + number, precision=precision)
            model.loss_and_gradients(data.micro_batches, scale=data.scale, groups=data.plan.groups)
            same = all(np.array_equal(before[run.name], run.array) for run in model.residual())
            rows.append((result.skipped, same))
        nonzero = any(array.any() for array in before.values())
    return rows, nonzero


def test_what_is_left_survives_steps_without_tokens() -> None:
    rows, nonzero = dcp.launch(without_update, 3)[0]
    assert nonzero and rows == [(True, True)] * len(PRECISIONS)


def without_feedback(world: Any) -> Any:
    data = next(iter(loader_of(world)))
    out = []
    for precision in ("fp32", "bf16", "int8"):
        with dcp.fully_shard(config_of(), world) as model:
            args = {"scale": data.scale, "groups": data.plan.groups}
            _, wanted = model.loss_and_gradients(data.micro_batches, **args)
            step_of(model, data, 0, lr=0.0, precision="int4")
            handed = sums_of(model)
            step_of(model, data, 1, lr=0.0, precision=precision, feedback=False)
            for name, array in sums_of(model).items():
                handed[name] += array
            left = left_of(model, world)
            empty = all(not array.any() for array in left.values())
            twice = {name: 2.0 * array for name, array in wanted.items()}
            step_of(model, data, 2, lr=0.0, precision=precision, feedback=False)
            once = worst(wanted, sums_of(model), left)
            out.append((worst(twice, handed, left), once, empty))
    return out


def test_without_feedback_what_is_left_is_added_once() -> None:
    """A run that goes on without feedback owes nothing of what codes left out before."""
    limits = {"fp32": 1e-5, "bf16": 1e-2, "int8": 2e-2}
    for rows in dcp.launch(without_feedback, 2):
        for (both, once, empty), limit in zip(rows, limits.values(), strict=True):
            assert empty and both < limit and once < limit, rows


# ---- one reduction a step ----


def in_parts(world: Any) -> Any:
    """The same step in one call and in two, and a k-fold batch, with and without clipping."""
    data = next(iter(loader_of(world, 2048, max_tokens=256)))
    coarse = next(iter(loader_of(world, 2048, max_tokens=2048)))
    first, rest = split(data)
    out = {}
    for clip in (None, 0.05):
        optimizer = dcp.optim.AdamW(lr=1e-2, clip=clip)
        for precision in ("fp32", "int4"):
            rows = []
            for parts in ("whole", "two", "coarse"):
                with dcp.fully_shard(config_of(), world) as model:
                    chosen = coarse if parts == "coarse" else data
                    if parts == "two":
                        model.accumulate(first, scale=data.scale, groups=data.plan.groups)
                        chosen = part_of(data, rest)
                    options = {"lr": 1e-2, "optimizer": optimizer, "precision": precision}
                    result = step_of(model, chosen, 0, **options)
                    weights = np.concatenate([a.ravel() for a in model.parameters().values()])
                    counts = (result.reduce_count, result.reduced_bytes)
                    rows.append((result.loss, result.grad_norm, counts, weights))
            out[clip, precision] = rows
    return out, len(data.micro_batches), len(coarse.micro_batches)


def test_accumulation_is_the_batch_of_all_its_parts() -> None:
    """clip(A = k) is the clip of the k-fold batch, and gradients travel once a step."""
    found, many, few = dcp.launch(in_parts, 2)[0]
    assert many >= 4 > few
    for (clip, precision), (whole, two, coarse) in found.items():
        assert whole[:3] == two[:3] and np.array_equal(whole[3], two[3]), "the same bits"
        assert whole[2][0] == 1 and whole[2] == coarse[2], "one reduction, as many bytes"
        if clip is not None:
            assert whole[1] > clip, "there is something to clip"
        if precision == "fp32":
            assert coarse[0] == pytest.approx(whole[0], rel=1e-5)
            assert coarse[1] == pytest.approx(whole[1], rel=1e-5)


def clipped_by_hand(world: Any) -> tuple[float, float]:
    """SGD without momentum shows the gradient: lr * clip / norm * g of the k-fold batch."""
    data = next(iter(loader_of(world, 2048, max_tokens=256)))
    first, rest = split(data)
    optimizer = dcp.optim.AdamW(lr=1.0, clip=0.05, betas=(0.0, 0.0), eps=1e3, weight_decay=0.0)
    with dcp.fully_shard(config_of(), world) as model:
        args = {"scale": data.scale, "groups": data.plan.groups}
        _, wanted = model.loss_and_gradients(data.micro_batches, **args)
        before = {name: array.copy() for name, array in model.parameters().items()}
        model.accumulate(first, **args)
        result = step_of(model, part_of(data, rest), 0, lr=1e3, optimizer=optimizer)
        moved = {name: before[name] - array for name, array in model.parameters().items()}
        norm = np.sqrt(sum(float((a.astype(np.float64) ** 2).sum()) for a in wanted.values()))
        off = max(float(np.abs(moved[n] - wanted[n] * (0.05 / norm)).max()) for n in wanted) / max(
            float(np.abs(a).max()) * 0.05 / norm for a in wanted.values()
        )
    return off, abs(result.grad_norm / norm - 1)


def test_the_average_is_clipped_not_its_parts() -> None:
    off, norm_off = dcp.launch(clipped_by_hand, 2)[0]
    assert norm_off < 1e-5 and off < 1e-2  # Adam's denominator is eps + |g|, weights are fp32


def small_parts(world: Any) -> tuple[float, float]:
    data = next(iter(loader_of(world)))
    args = {"groups": data.plan.groups}
    with dcp.fully_shard(config_of(), world) as model:
        _, one = model.loss_and_gradients(data.micro_batches, scale=data.scale, **args)
        one = {name: array.copy() for name, array in one.items()}
        top = max(float(np.abs(array).max()) for array in one.values())

        def off(times: float, got: dict[str, Any]) -> float:
            return max(float(np.abs(got[n] - times * one[n]).max()) for n in one) / (times * top)

        model.accumulate(data.micro_batches, scale=256 * data.scale, **args)
        _, large = model.loss_and_gradients(data.micro_batches, scale=data.scale, **args)
        first = off(257, large)
        for _ in range(99):
            model.accumulate(data.micro_batches, scale=data.scale, **args)
        _, many = model.loss_and_gradients(data.micro_batches, scale=data.scale, **args)
        return first, off(100, many)


def test_small_parts_are_not_lost() -> None:
    """Case C-07: gradients accumulate in fp32: 256 + 1 of them, and many times one."""
    for first, many in dcp.launch(small_parts, 2):
        assert first < 1e-6 and many < 1e-5  # bf16 loses 1 of 257


def test_sums_of_integers_are_exact() -> None:
    """Case C-07, the buffer itself: 256 + 1 is 257, a thousand ones are 1,000."""
    with dcp.init("self") as world, dcp.fully_shard({"x": np.zeros(8, np.float32)}, world) as made:
        view = made.gradients("x")
        view += 256
        view += 1
        assert view.tolist() == [257] * 8
        view[:] = 0
        for _ in range(1000):
            view += 1
        made.reduce()
        assert view.tolist() == [1000] * 8
        del view


# ---- frozen tensors, machines ----


def sent_bytes(world: Any) -> Any:
    steps = loader_of(world)
    out: dict[str, Any] = {}
    for frozen in ((), ("model.embed*", "model.layers*")):
        for machine_ranks in (1, 2):
            with dcp.fully_shard(
                config_of(), world, frozen=frozen, machine_ranks=machine_ranks
            ) as model:
                rows = []
                for number, precision in enumerate(("fp32", "int8", "int4")):
                    controller = dcp.Controller(
                        "static", precisions=[precision], base=precision, batch_multiples=[1]
                    ).bind(1024, world.size, None)
                    data = next(iter(steps))
                    options = {"precision": precision, "statistics": True}
                    result = step_of(model, data, number, **options)
                    model.note_step(precision, 1, 0.1)
                    _, _, inputs = controller.step(model.core)
                    rows.append((result.reduced_bytes, inputs["reduce_bytes"][precision]))
                out[bool(frozen), machine_ranks] = rows
    return out


def test_a_controller_knows_what_travels() -> None:
    """Groups that nobody trains are not sent; machines of two ranks exchange a third."""
    found = dcp.launch(sent_bytes, 4)[0]
    for rows in found.values():
        assert [measured for measured, _ in rows] == [said for _, said in rows]
    for frozen in (False, True):
        one, two = found[frozen, 1], found[frozen, 2]
        assert one[0] == two[0], "fp32 is summed as it lies"
        assert one[1][0] == 3 * two[1][0] and one[2][0] == 3 * two[2][0]
    for all_, some in zip(found[False, 1], found[True, 1], strict=True):
        assert 0 < some[0] < 0.5 * all_[0]


def disagree_on_machines(world: Any) -> str:
    with pytest.raises(dcp.MismatchError) as error:
        dcp.fully_shard(config_of(), world, machine_ranks=1 + world.rank % 2)
    return str(error.value)


def test_machines_that_cannot_be() -> None:
    for text in dcp.launch(disagree_on_machines, 4):
        assert "machine_ranks: rank 0 has 1, rank 1 has 2" in text
    with dcp.init("self") as world, pytest.raises(dcp.ArgumentError, match="machine_ranks 2"):
        dcp.fully_shard(config_of(), world, machine_ranks=2)


# ---- statistics ----


def after_many(world: Any, feedback: bool) -> tuple[float, float]:
    """|g|^2 of int4 sums less what codes add, over the true one; and that share."""
    data = next(iter(loader_of(world)))
    with dcp.fully_shard(config_of(), world) as model:
        exact = step_of(model, data, 0, lr=0.0).grad_norm ** 2
        rows = []
        for number in range(1, 100):
            options = {"precision": "int4", "quantise_seed": 3, "statistics": True}
            result = step_of(model, data, number, lr=0.0, feedback=feedback, **options)
            seen = result.observation
            assert seen is not None
            rows.append((seen["mean_squares"] - seen["reduce_error"], seen["reduce_error"]))
        mean = np.mean(rows[5:], axis=0) / exact
    return float(mean[0]), float(mean[1])


def test_what_codes_add_to_a_gradient_is_known() -> None:
    """With feedback both this step's errors and those of the step before are in the sum."""
    alone, error = dcp.launch(after_many, 3, (False,))[0]
    fed, fed_error = dcp.launch(after_many, 3, (True,))[0]
    assert error > 0.01, "without its correction the noise scale would be off by so much"
    assert alone == pytest.approx(1, abs=0.3 * error)
    assert fed == pytest.approx(1, abs=0.3 * error)
    assert fed_error == pytest.approx(2 * error, rel=0.2)


def measured_in_parts(world: Any) -> Any:
    data = next(iter(loader_of(world, 2048, max_tokens=256)))
    first, rest = split(data)
    out = []
    for measure in (None, True, False):
        with dcp.fully_shard(config_of(), world) as model:
            chosen = data
            if measure is not None:
                args = {"scale": data.scale, "groups": data.plan.groups, "statistics": measure}
                model.accumulate(first, **args)
                chosen = part_of(data, rest)
            seen = step_of(model, chosen, 0, lr=0.0, statistics=True).observation
            assert seen is not None
            out.append((seen["micro_squares"], seen["micro_batch_count"], seen["mean_squares"]))
    return out


def test_accumulated_passes_are_measured_or_said_not_to_be() -> None:
    whole, measured, not_measured = dcp.launch(measured_in_parts, 2)[0]
    assert whole == measured, "the same bits"
    assert not_measured[0] is None and not_measured[2] == whole[2]


def by_sequence(world: Any) -> tuple[float, float, int]:
    data = next(iter(loader_of(world, 2048, max_tokens=256, weighting="sequence")))
    squares = 0.0
    with dcp.fully_shard(config_of(), world) as model:
        counts = world.allgatherv(np.array([len(data.micro_batches)]))
        for rank, count in enumerate(counts.tolist()):
            for i in range(count):
                mine = data.micro_batches[i : i + 1] if world.rank == rank else []
                parts = [float(b.weights[b.labels >= 0].sum()) for b in mine]
                share = data.scale * sum(parts, 0.0)
                share = float(world.allreduce(np.array([share]))[0])
                _, grads = model.loss_and_gradients(mine, scale=data.scale)
                length = sum(float((g.astype(np.float64) ** 2).sum()) for g in grads.values())
                squares += data.trainable * length / share
        seen = step_of(model, data, 0, lr=0.0, statistics=True).observation
        assert seen is not None
    return seen["micro_squares"], squares, int(counts.sum()) - seen["micro_batch_count"]


def test_weighted_tokens_count_by_their_share() -> None:
    """With one weight a sequence, micro-batch i has share s_i: sum N s_i |g_i|^2."""
    measured, exact, difference = dcp.launch(by_sequence, 2)[0]
    assert difference == 0
    # one sketch's relative error is 4.4%, and micro-batches have one each
    assert measured == pytest.approx(exact, rel=0.1)


def shared_batches(world: Any) -> Any:
    """Four micro-batches: two of ranks 0 and 1, one of rank 2, one of all three."""
    draw = np.random.default_rng(7)
    groups = [(0, 2), (0, 2), (2, 1), (0, 3)]
    lengths = [[40, 24], [64], [30, 30], [90, 6]]
    batches = []
    for group, of in zip(groups, lengths, strict=True):
        count = sum(of)
        tokens = draw.integers(0, 256, count).astype(np.int32)
        labels = np.roll(tokens, -1)
        offsets = np.cumsum([0, *of]).astype(np.int64)
        labels[offsets[1:] - 1] = -100
        batches.append(
            SimpleNamespace(
                tokens=tokens,
                offsets=offsets,
                labels=labels,
                weights=None,
                row_ids=np.arange(count, dtype=np.int64),
                group=group,
                recompute=(0, 0),
            )
        )
    trainable = sum(int((b.labels >= 0).sum()) for b in batches)
    args = {"scale": 1.0 / trainable, "groups": [(0, 2), (0, 3)]}

    def of_rank(chosen: Any) -> Any:
        return [b for b in chosen if b.group[0] <= world.rank < sum(b.group)]

    out = []
    with dcp.fully_shard(config_of(), world) as model:
        squares = 0.0
        for batch in batches:
            _, grads = model.loss_and_gradients(of_rank([batch]), **args)
            length = sum(float((g.astype(np.float64) ** 2).sum()) for g in grads.values())
            squares += length * trainable**2 / int((batch.labels >= 0).sum())
        for number, precision in enumerate(("fp32", "int8")):
            result = model.step(
                of_rank(batches),
                trainable=trainable,
                lr=0.0,
                step=number,
                optimizer=ADAMW,
                precision=precision,
                statistics=True,
                **args,
            )
            seen = result.observation
            assert seen is not None
            out.append((seen["micro_batch_count"], seen["micro_squares"] / squares))
        left = worst_of_shared(model, world, of_rank(batches), args)
    return out, left


def worst_of_shared(model: Any, world: Any, batches: Any, args: Any) -> float:
    """After step 1 in int8: what it handed out and what is left are the gradient."""
    handed, left = sums_of(model), left_of(model, world)
    _, wanted = model.loss_and_gradients(batches, **args)
    return worst(wanted, handed, left)


def test_micro_batches_of_several_ranks_count_once() -> None:
    for rows, left in dcp.launch(shared_batches, 3):
        for count, ratio in rows:
            assert count == 4 and ratio == pytest.approx(1, abs=0.1)
        assert rows[0] == rows[1], "micro-gradients are not quantised"
        assert left < 1e-5


def tokens_on_one_rank(world: Any) -> Any:
    data = next(iter(loader_of(world, 512, max_tokens=256)))
    out = []
    with dcp.fully_shard(config_of(), world) as model:
        mine = data.micro_batches if world.rank == 0 else []
        trainable = sum(int((b.labels >= 0).sum()) for b in mine)
        trainable = int(world.allreduce(np.array([trainable]))[0])
        for number, precision in enumerate(("int4", "int8", "fp32")):
            result = model.step(
                mine,
                scale=1.0 / trainable,
                trainable=trainable,
                lr=1e-3,
                step=number,
                optimizer=ADAMW,
                precision=precision,
                statistics=True,
            )
            seen = result.observation
            assert seen is not None
            out.append((result.loss, seen["micro_batch_count"], seen["error"]["int4"]))
        own = any(run.array.any() for run in model.residual())
    return out, own


def test_ranks_without_tokens() -> None:
    ranks = dcp.launch(tokens_on_one_rank, 3)
    assert len({str(rows) for rows, _ in ranks}) == 1
    losses = [loss for loss, _, _ in ranks[0][0]]
    assert losses == sorted(losses, reverse=True) and not any(own for _, own in ranks)


# ---- what is not finite ----


def nan_at_three(world: Any, precision: str, nonfinite: str) -> Any:
    steps, out = iter(loader_of(world)), []
    with dcp.fully_shard(config_of(), world) as model:
        for number in range(5):
            data = next(steps)
            if number == 3 and world.rank == 1:
                batch = data.micro_batches[0]
                weights = np.ones(len(batch.tokens), np.float32)
                weights[0] = np.nan
                data.micro_batches[0] = SimpleNamespace(**{**vars(batch), "weights": weights})
            before = [run.array.copy() for run in model.residual()]
            sha = model.parameters_sha256()
            options = {"precision": precision, "nonfinite": nonfinite}
            try:
                result = step_of(model, data, number, **options)
            except dcp.NumericError as error:
                return number, "not finite" in str(error), model.parameters_sha256() == sha
            after = [run.array for run in model.residual()]
            same = all(map(np.array_equal, before, after)) and len(before) == len(after)
            out.append((result.skipped, same, model.parameters_sha256() == sha))
            del after
    return out


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8_e4m3", "int4"])
def test_a_nan_on_one_rank(precision: str) -> None:
    """Case C-06: rank 1 alone has it, at step 3: all skip, or all stop, and nothing changes."""
    rows = dcp.launch(nan_at_three, 3, (precision, "skip"))
    assert rows[0] == rows[1] == rows[2]
    assert [skipped for skipped, _, _ in rows[0]] == [False, False, False, True, False]
    assert rows[0][3][1:] == (True, True) and not rows[0][4][2]
    assert dcp.launch(nan_at_three, 3, (precision, "stop")) == [(3, True, True)] * 3


# ---- one controller ----


def over_a_far_link(world: Any, precision: str, gather: str) -> Any:
    controller = dcp.Controller("static", precisions=[precision], base=precision)
    core, steps = controller.bind(1024, world.size, None), iter(loader_of(world, rounds=True))
    decision: dict[str, Any] = {}
    with dcp.fully_shard(config_of(), world, windows=False, gather=gather) as model:
        for number in range(5):
            options = {"precision": precision, "statistics": True}
            result = step_of(model, next(steps), number, **options)
            model.note_step(precision, 1, 1.0)
            seen, decision, inputs = core.step(model.core)
            moved_s = seen["reduce_s"] + seen["gather_s"]
            calls = seen["gather_calls"] + inputs["reduce_calls"][precision]
            far_s = calls * 0.02 + (result.reduced_bytes + result.gathered_bytes) / 1e6
            assert 0.99 * far_s < moved_s < 2 * far_s, (calls, moved_s, far_s)
    return seen["gather_calls"], inputs["reduce_calls"], decision


@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("gather", ["layer", "step"])
def test_latency_and_bandwidth_of_a_link_are_found(precision: str, gather: str) -> None:
    """8 Mbit/s with 20 ms a call: what few bytes wait for is not taken for a slow link."""
    link = Link.parse("8Mbit,latency=20ms")
    found = dcp.launch(over_a_far_link, 2, (precision, gather), link=link)
    gather_calls, reduce_calls, decision = found[0]
    assert gather_calls == (3 if gather == "step" else 4)  # embedding, layer, head, layer
    assert reduce_calls["fp32"] == 3 and reduce_calls["int8"] == 1
    assert decision["latency_s"] == pytest.approx(0.02, abs=0.01)
    assert decision["bandwidth"] == pytest.approx(1e6, rel=0.5)


def of_two_minds(world: Any) -> Any:
    """Rank 1's controller would leave int8 at once, rank 0's stays."""
    limit = 0.5 if world.rank == 0 else 1e-9
    controller = dcp.Controller(
        "precision",
        precisions=("fp32", "int8"),
        base="int8",
        batch_multiples=(1,),
        hysteresis=0.99,
        error_limit=limit,
    ).bind(1024, world.size, None)
    arm, arms, steps = controller.start()["arm"], [], iter(loader_of(world))
    with dcp.fully_shard(config_of(), world) as model:
        for number in range(4):
            step_of(model, next(steps), number, precision=arm["precision"], statistics=True)
            model.note_step(arm["precision"], 1, 0.1)
            _, decision, _ = controller.step(model.core)
            arm = decision["arm"]
            arms.append(decision)
    return arms, controller.start()["arm"]


def test_a_rank_that_would_decide_otherwise_takes_over() -> None:
    ranks = dcp.launch(of_two_minds, 2)
    assert ranks[0] == ranks[1]
    assert ranks[1][1] == {"precision": "int8", "multiple": 1}


# ---- checkpoints ----

SCHEDULE = ["int4", "int4", "int8", "fp32", "int4", "int4", "int4", "bf16", "int4", "int8"]


def scheduled(world: Any, folder: str, steps: int, **options: Any) -> Any:
    """Trains up to `steps` by SCHEDULE; bits of parameters and of this rank's residual."""
    loader = loader_of(world, 512)
    with dcp.fully_shard(config_of(), world) as model:
        trainer = dcp.Trainer(
            model,
            dcp.optim.AdamW(lr=3e-3),
            loader,
            precision="int4",
            checkpoint=folder,
            seed=2,
            **options,
        )
        for step in range(trainer.step, steps):
            trainer.steering.arm["precision"] = SCHEDULE[step]
            trainer.fit(step + 1)
        residual = b"".join(run.array.tobytes() for run in model.residual())
        return model.parameters_sha256(), residual, trainer.step


@pytest.mark.parametrize("middle", [5, 7])
def test_a_run_that_is_resumed_has_the_same_bits(tmp_path: Path, middle: int) -> None:
    """Case C-01: 10 steps straight, or some, a new process and the rest; int4, then bf16 at 7."""
    whole = dcp.launch(scheduled, 3, (str(tmp_path / "whole"), 10))
    dcp.launch(scheduled, 3, (str(tmp_path / "part"), middle))
    rest = dcp.launch(_resumed, 3, (str(tmp_path / "part"), 10))
    assert rest == whole
    assert len({residual for _, residual, _ in whole}) == 3, "every rank has its own"
    assert any(np.frombuffer(whole[0][1], np.float32))


def _resumed(world: Any, folder: str, steps: int) -> Any:
    return scheduled(world, folder, steps, resume=True)


def look(world: Any, folder: str, **options: Any) -> Any:
    """What a resumed model has left, summed over ranks, and its weights."""
    block_rows = options.pop("block_rows", 1)
    feedback = options.pop("feedback", True)
    loader = loader_of(world, 512)
    with dcp.fully_shard(config_of(), world, block_rows=block_rows) as model:
        trainer = dcp.Trainer(
            model,
            dcp.optim.AdamW(lr=3e-3),
            loader,
            precision="int4",
            feedback=feedback,
            checkpoint=folder,
            resume=True,
        )
        left = left_of(model, world)
        own = [run.array.copy() for run in model.residual()]
        if not feedback:
            trainer.fit(trainer.step + 1)
            assert all(not run.array.any() for run in model.residual())
        return left, own


def look_in_blocks(world: Any, folder: str) -> Any:
    return look(world, folder, block_rows=8)


def look_without(world: Any, folder: str) -> Any:
    return look(world, folder, feedback=False)


def test_residuals_move_to_other_worlds_and_layouts(tmp_path: Path) -> None:
    dcp.launch(scheduled, 3, (str(tmp_path), 2))
    before, own = zip(*dcp.launch(look, 3, (str(tmp_path),)), strict=True)
    for ranks, how in ((2, look), (5, look), (1, look_in_blocks), (3, look_in_blocks)):
        after, theirs = zip(*dcp.launch(how, ranks, (str(tmp_path),)), strict=True)
        for name, array in before[0].items():
            np.testing.assert_allclose(after[0][name], array, rtol=1e-5, atol=1e-9)
        for new in range(ranks):  # rank r's residual is now rank r % ranks'
            for i, array in enumerate(theirs[new]):
                added = sum((own[r][i] for r in range(new, 3, ranks)), np.zeros_like(array))
                np.testing.assert_allclose(array, added, rtol=1e-5, atol=1e-9)
    dcp.launch(look_without, 2, (str(tmp_path),))


def test_checkpoints_with_residuals_are_shown_exported_and_converted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = str(tmp_path / "run"), tmp_path / "hf"
    dcp.launch(scheduled, 2, (run, 2))
    assert run_command(["checkpoint", "show", run, "--json", "-"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert {"residual.0", "residual.1"} <= set(shown["kinds"])
    assert run_command(["checkpoint", "verify", run]) == 0
    assert run_command(["checkpoint", "export", run, "--out", str(out)]) == 0
    weights = list(out.glob("*.safetensors"))
    assert weights and not any(b"residual." in path.read_bytes() for path in weights)
    other = str(tmp_path / "other")
    assert run_command(["checkpoint", "convert", run, "--out", other, "--ranks", "3"]) == 0
    before = dcp.launch(look, 2, (run,))[0][0]
    after = dcp.launch(look, 2, (other,))[0][0]
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_documents_are_what_the_other_tests_use() -> None:
    """The lengths that make uneven micro-batches: a few tokens to the longest."""
    lengths = documents().lengths
    assert lengths.min() < 30 and lengths.max() == 256
