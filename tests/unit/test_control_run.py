"""Training under a controller for real: gradients in few bits, residuals, statistics, whole runs.

A small model on two or three ranks of this machine; what depends on the clock is replayed.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ref

import dcp
from dcp.controller import DecisionLog
from dcp.link import Link

SMALL = {
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "intermediate_size": 64,
    "vocab_size": 256,
    "max_position_embeddings": 256,
}
PRECISIONS = ("fp32", "bf16", "fp8_e4m3", "fp8_e5m2", "int8", "int4")


def config_of() -> Any:
    return dcp.Transformer1D.preset("tiny", **SMALL)


def documents() -> Any:
    """Documents of very different lengths, the same everywhere."""
    draw = np.random.default_rng(5)
    lengths = np.minimum(256, 2 + draw.pareto(1.2, 400) * 20).astype(np.int64)
    tokens = draw.integers(0, 256, int(lengths.sum()))
    return dcp.data.Packed(tokens, np.concatenate([[0], np.cumsum(lengths)]), max_length=256)


def loader_of(world: Any, tokens_per_step: int = 1024, **options: Any) -> Any:
    cost = dcp.CostModel.for_model(config_of())
    return dcp.Loader(documents(), world, cost, tokens_per_step=tokens_per_step, **options)


def step_of(model: Any, data: Any, number: int, **options: Any) -> Any:
    options = {"lr": 1e-3, "optimizer": dcp.optim.AdamW(lr=1e-3), **options}
    return model.step(
        data.micro_batches,
        scale=data.scale,
        trainable=data.trainable,
        step=number,
        groups=data.plan.groups,
        **options,
    )


def conserve(world: Any) -> list[float]:
    """Sums handed out + residuals = sum of all gradients, through every precision."""
    data = next(iter(loader_of(world)))
    errors = []
    with dcp.fully_shard(config_of(), world) as model:
        args = {"scale": data.scale, "groups": data.plan.groups}
        _, wanted = model.loss_and_gradients(data.micro_batches, **args)
        handed = {name: np.zeros(array.shape) for name, array in wanted.items()}
        for number, precision in enumerate([*PRECISIONS, "int4", "int8", "fp32", "fp32"]):
            result = step_of(model, data, number, lr=0.0, precision=precision)
            assert result.reduce_count == 1 and result.observation is None
            for name, array in model._gather(1).items():
                handed[name] += array
            left = {run.name: world.allreduce(run.array) for run in model.residual()}
            worst = 0.0
            for name, array in wanted.items():
                rest = left.get(name, np.zeros(array.size)).reshape(array.shape)
                total = (number + 1) * array
                worst = max(worst, float(np.abs(handed[name] + rest - total).max()))
            errors.append(worst / max(float(np.abs(array).max()) for array in wanted.values()))
        zero = all(not run.array.any() for run in model.residual())
    assert zero, "in fp32 all of it is sent"
    return errors


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_nothing_of_a_gradient_is_lost(ranks: int) -> None:
    """Case C-02: per element, whatever the precisions: sent + residual = sum of gradients."""
    for errors in dcp.launch(conserve, ranks):
        assert max(errors) < 1e-5


def without_windows(world: Any) -> list[tuple[str, str, float]]:
    """Parameters after five steps of each way to hold them, and the loss."""
    out = []
    for windows, gather in ((True, "layer"), (False, "layer"), (False, "step")):
        steps = iter(loader_of(world, rounds=True))
        with dcp.fully_shard(config_of(), world, windows=windows, gather=gather) as model:
            for number, precision in enumerate(("fp32", "int8", "int4", "bf16", "fp32")):
                data = next(steps)
                result = step_of(model, data, number, precision=precision, quantise_seed=7)
            out.append((f"{windows} {gather}", model.parameters_sha256(), result.loss))
    return out


def test_codes_give_the_same_bits_however_weights_are_held() -> None:
    rows = dcp.launch(without_windows, 2)
    assert rows[0] == rows[1]
    assert len({sha for _, sha, _ in rows[0]}) == 1, rows[0]


def with_nan(world: Any) -> list[Any]:
    """Rank 1's gradient has a NaN at step 2; what all ranks do about it."""
    steps, out = iter(loader_of(world)), []
    settings = dcp.Controller("precision", precisions=["int8", "int4"], base="int8")
    controller = settings.bind(1024, world.size, None)
    arm = controller.start()["arm"]
    with dcp.fully_shard(config_of(), world) as model:
        for number in range(4):
            data = next(steps)
            if number == 2 and world.rank == 1:
                batch = data.micro_batches[0]
                weights = np.ones(len(batch.tokens), np.float32)
                weights[3] = np.nan
                data.micro_batches[0] = SimpleNamespace(**{**vars(batch), "weights": weights})
            before = [run.array.copy() for run in model.residual()]
            options = {"precision": arm["precision"], "statistics": True, "nonfinite": "skip"}
            result = step_of(model, data, number, **options)
            after = [run.array.copy() for run in model.residual()]
            same = number > 0 and all(map(np.array_equal, before, after))
            finite = all(np.isfinite(array).all() for array in after)
            model.note_step(arm["precision"], 1, 0.1 + world.rank)
            seen, decision, _ = controller.step(model.core)
            arm = decision["arm"]
            out.append((result.skipped, same, finite, model.parameters_sha256(), decision))
            assert seen["step_s"] == 0.1 + world.size - 1, "the slowest rank's"
        with pytest.raises(dcp.NumericError, match="not finite"):
            data.micro_batches[0] = SimpleNamespace(
                **{
                    **vars(data.micro_batches[0]),
                    "weights": np.full(len(data.micro_batches[0].tokens), np.nan, np.float32),
                }
            )
            step_of(model, data, 4, precision="int4")
    return out


def test_one_rank_that_is_not_finite() -> None:
    """Case C-06: all skip alike, the residual is clean, decisions and parameters agree."""
    ranks = dcp.launch(with_nan, 2)
    assert ranks[0] == ranks[1]
    assert [row[0] for row in ranks[0]] == [False, False, True, False]
    assert ranks[0][2][1], "the residual did not change in the step that was skipped"
    assert all(row[2] for row in ranks[0])
    assert ranks[0][2][3] == ranks[0][1][3] != ranks[0][3][3]
    assert ranks[0][2][4]["reasons"] & 64 and ranks[0][2][4]["changed"] == 0


def observe(world: Any) -> tuple[dict[str, Any], dict[str, float], float]:
    """An observation, and the same numbers from whole gradients of every micro-batch."""
    data = next(iter(loader_of(world, 2048, max_tokens=256)))
    tokens = np.array([(b.labels >= 0).sum() for b in data.micro_batches], np.float64)
    squares, count = 0.0, 0
    with dcp.fully_shard(config_of(), world) as model:
        most = int(world.allreduce(np.array([len(tokens)]), "max")[0])
        for i in range(most):
            for rank in range(world.size):  # one micro-batch of one rank at a time
                mine = data.micro_batches[i : i + 1] if rank == world.rank else []
                part = float(tokens[i]) if len(mine) else 0.0
                n = float(world.allreduce(np.array([part]))[0])
                _, grads = model.loss_and_gradients(mine, scale=data.scale)
                if n > 0:
                    length = sum(float((g.astype(np.float64) ** 2).sum()) for g in grads.values())
                    squares += length * data.trainable**2 / n
                    count += 1
        result = step_of(model, data, 0, lr=0.0, precision="int8", statistics=True)
        assert result.observation is not None and result.statistics_s > 0
        seen = result.observation
        exact = {"micro_squares": squares, "count": count, "norm": result.grad_norm**2}
        again = step_of(model, data, 1, lr=0.0, precision="int4", statistics=True).observation
        other = dcp.Transformer1D.preset("tiny", **SMALL)
        assert again is not None and other is not None
        return seen, exact, again["step_difference"]


def test_statistics_are_those_of_the_gradients() -> None:
    """DESIGN 8: micro-gradients from sketches, errors of codes by shadow quantising."""
    ranks = dcp.launch(observe, 2)
    assert ranks[0][0] == ranks[1][0], "the same on all ranks"
    seen, exact, difference = ranks[0]
    assert seen["micro_batch_count"] == exact["count"] >= 8
    # a sketch of 1,024 sums: relative error sqrt(2 / 1024) = 4.4% of each square
    assert seen["micro_squares"] == pytest.approx(exact["micro_squares"], rel=0.15)
    assert seen["mean_squares"] == exact["norm"] and seen["skipped"] == 0
    assert seen["arm"] == {"precision": "int8", "multiple": 1}
    error = seen["error"]
    assert error["fp32"] == 0 and error["bf16"] < error["int8"] < error["int4"] < 0.3
    assert error["int8"] < 5e-3 < error["int4"]
    assert 0 < seen["reduce_error"] < seen["mean_squares"]
    assert seen["reduce_bytes"] > 0 and seen["reduce_s"] > 0 and seen["codec_s"] > 0
    # the same gradient again but for what codes changed: far below a gradient's length
    assert difference < 0.3 * exact["norm"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"precision": "int8"}, "int8 needs gradients that are reduced once a step"),
        ({"statistics": True}, "statistics need gradients that are reduced once a step"),
        ({"precision": "int7"}, "int7"),
    ],
)
def test_settings_that_cannot_be_in_a_step(options: Any, words: str) -> None:
    with dcp.init("self") as world:
        data = next(iter(loader_of(world, rounds=True)))
        model = dcp.fully_shard(config_of(), world, reduce="layer")
        with model, pytest.raises(dcp.ArgumentError, match=words):
            step_of(model, data, 0, **options)


def in_adams_metric(world: Any) -> tuple[Any, ...]:
    """Observations before the denominators are known, and with all of them nearly equal."""
    steps = iter(loader_of(world, 2048, max_tokens=256))
    optimizer = dcp.optim.AdamW(lr=1e-3)
    with dcp.fully_shard(config_of(), world) as model:
        model.set_optimizer(optimizer)
        for run in model.shards()["adamw.v"]:
            run.array[:] = 4.0
        del run
        seen = [
            step_of(
                model, next(steps), number, lr=0.0, precision="int4", statistics=True
            ).observation
            for number in range(4)
        ]
    return tuple(seen)


def test_statistics_in_adams_metric() -> None:
    first, second, third, fourth = dcp.launch(in_adams_metric, 2)[0]
    # differences are told of steps of the same denominators, which updates 1 and 2 refresh
    assert second["adam_step_difference"] is third["adam_step_difference"] is None
    assert fourth["adam_step_difference"] == pytest.approx(fourth["step_difference"], rel=0.02)
    assert first["adam_micro_squares"] is None and first["adam_error"]["int4"] is None
    for name in ("micro_squares", "mean_squares"):
        assert second[f"adam_{name}"] == pytest.approx(second[name], rel=1e-2), name
    for name in ("bf16", "int8", "int4"):
        assert second["adam_error"][name] == pytest.approx(second["error"][name], rel=0.03)
    assert second["adam_reduce_error"] == pytest.approx(second["reduce_error"], rel=0.5)


def by_elements(world: Any) -> tuple[Any, Any]:
    """Errors over v as a step shows them, and from its gradient in float64."""
    steps, rng = iter(loader_of(world, 2048)), np.random.default_rng(3)
    optimizer = dcp.optim.AdamW(lr=1e-3, betas=(0.9, 0.95), clip=None)
    options = {"lr": 0.0, "optimizer": optimizer, "statistics": True}
    squares, errors = 0.0, dict.fromkeys(PRECISIONS[1:], 0.0)
    with dcp.fully_shard(config_of(), world) as model:
        step_of(model, next(steps), 0, **options)
        data = next(steps)
        _, gradient = model.loss_and_gradients(
            data.micro_batches, scale=data.scale, groups=data.plan.groups
        )
        for run in model.shards()["adamw.v"]:
            run.array[:] = np.exp(2 * rng.standard_normal(run.array.size) - 12)
            whole = run.array.size // 128 * 128
            x = gradient[run.name].ravel()[run.first :][:whole]
            weights = 1 / (0.95 * run.array[:whole].astype(float) + 0.05 * x.astype(float) ** 2)
            squares += float(np.sum(x.astype(float) ** 2 * weights))
            for name in errors:
                sent = dcp.ops.dequantise(dcp.ops.quantise(x, name), whole, name)
                errors[name] += float(np.sum((x - sent).astype(float) ** 2 * weights))
        del run
        seen = step_of(model, data, 1, **options).observation
    return seen, {name: error / squares for name, error in errors.items()}


def test_errors_count_by_elements_in_adams_metric() -> None:
    seen, expected = dcp.launch(by_elements, 1)[0]
    for name, error in expected.items():
        assert seen["adam_error"][name] == pytest.approx(error, rel=0.05), name
    assert expected["int4"] > 1.3 * seen["error"]["int4"], "small v suffer most"


def in_eight_bits(world: Any) -> tuple[Any, Any]:
    """The second of two steps with v in 8 bits, and with the same v in fp32."""
    kinds = ("adamw8bit.v", "adamw8bit.v_scale", "adamw.v")
    large = ("model.embed_tokens.weight", "lm_head.weight")  # the others' v is fp32
    betas = (0.9, 1 - 2.0**-20)  # v stays as it is but for 2^-20 of the gradients
    decoded: dict[str, Any] = {}
    seen = []
    for kind in (dcp.optim.AdamW8bit, dcp.optim.AdamW):
        steps = iter(loader_of(world, 2048, max_tokens=256))
        optimizer = kind(lr=1e-3, betas=betas)
        with dcp.fully_shard(config_of(), world) as model:
            model.set_optimizer(optimizer)
            for name in kinds:
                for run in model.shards().get(name, []):
                    rng = np.random.default_rng(len(run.name))
                    whole = decoded.get(run.name)
                    if whole is None and run.array.dtype == np.uint8:
                        whole = rng.integers(1, 256, 8192)
                        whole[::32] = 255  # in every block, or scales would change
                    elif whole is None:
                        whole = np.exp(rng.normal(2, 1, 8192))
                    run.array[:] = whole.ravel()[run.first : run.first + run.array.size]
            del run
            if kind is dcp.optim.AdamW8bit:
                for name in large:
                    codes, scale = (model.full_tensor(name, kind=k) for k in kinds[:2])
                    decoded[name] = ref.decode_8bit(codes, scale * 0, codes, scale)[1]
            for number in range(2):
                options = {"precision": "int4", "statistics": True, "optimizer": optimizer}
                result = step_of(model, next(steps), number, lr=0.0, **options)
            seen.append(result.observation)
    return seen[0], seen[1]


def test_statistics_in_the_metric_of_8_bit_moments() -> None:
    eight, plain = dcp.launch(in_eight_bits, 2)[0]
    for name in ("micro_squares", "mean_squares", "reduce_error"):
        assert eight[f"adam_{name}"] == pytest.approx(plain[f"adam_{name}"], rel=1e-3), name
        assert eight[f"adam_{name}"] != pytest.approx(eight[name], rel=0.05)
    assert eight["adam_error"]["int4"] == pytest.approx(plain["adam_error"]["int4"], rel=1e-3)


def disagree(world: Any) -> str:
    data = next(iter(loader_of(world)))
    with dcp.fully_shard(config_of(), world) as model:
        with pytest.raises(dcp.MismatchError) as error:
            step_of(model, data, 0, precision=("int8", "int4")[world.rank])
        return str(error.value)


def test_ranks_that_disagree_on_the_precision() -> None:
    for text in dcp.launch(disagree, 2):
        assert "precision" in text


def run(world: Any, folder: str, steps: int, options: dict[str, Any]) -> dict[str, Any]:
    """A controlled run; what it ends with."""
    controller = dcp.Controller("joint", noise_steps=1, dwell_steps=1, batch_multiples=(1, 2, 3))
    cost = dcp.CostModel.for_model(config_of(), windows=False)
    loader = dcp.Loader(documents(), world, cost, tokens_per_step=512, rounds=True)
    with dcp.fully_shard(config_of(), world, windows=False, gather="step") as model:
        trainer = dcp.Trainer(
            model,
            dcp.optim.AdamW(lr=3e-3),
            loader,
            controller=controller,
            checkpoint=folder,
            eval_every=2,
            eval_tokens=256,
            **{"seed": 11, **options},
        )
        report = trainer.fit(steps)
        state = trainer.steering.state_dict()
        assert state is not None
        out = {
            "arms": [record.arm for record in report.steps],
            "losses": [record.loss for record in report.steps],
            "rates": [record.lr for record in report.steps],
            "state": state["state"],
            "sha256": model.parameters_sha256(),
            "residual": [float(np.abs(run.array).sum()) for run in model.residual()],
            "budgets": trainer.budgets,
        }
        world.barrier()
    return out


EQUAL = ("arms", "losses", "rates", "state", "sha256", "residual", "budgets")


def control_lines(folder: Path) -> list[Any]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "control"]


def test_resume_and_replay_are_bitwise(tmp_path: Path) -> None:
    """Case C-01: a run, its replay, and a replay that is resumed in the middle end alike."""
    link = Link.parse("40Mbit,background=1,dwell=1s,period=50ms")
    first = tmp_path / "first"
    whole = dcp.launch(run, 2, (str(first), 8, {"save_every": 4}), link=link)
    log = first / "metrics.jsonl"
    for key in ("arms", "losses", "rates", "state", "sha256", "budgets"):
        assert whole[0][key] == whole[1][key], f"ranks differ in {key}"
    assert len({str(arm) for arm in whole[0]["arms"]}) > 1, "the controller changed something"
    assert sum(whole[0]["residual"]) > 0
    assert len(DecisionLog.read(log).replay()) == 8

    again = dcp.launch(run, 2, (str(tmp_path / "again"), 8, {"replay": str(log)}))
    for key in EQUAL:
        assert [rank[key] for rank in again] == [rank[key] for rank in whole], key
    assert control_lines(tmp_path / "again") == control_lines(first)

    part = tmp_path / "part"
    dcp.launch(run, 2, (str(part), 4, {"replay": str(log)}))
    rest = dcp.launch(run, 2, (str(part), 8, {"replay": str(log), "resume": True}))
    for key in ("state", "sha256", "residual", "budgets"):
        assert [rank[key] for rank in rest] == [rank[key] for rank in whole], key
    assert rest[0]["arms"] == whole[0]["arms"][4:]
    assert len(DecisionLog.read(part / "metrics.jsonl").replay()) == 8

    with pytest.raises(dcp.MismatchError, match="replay of"):
        dcp.launch(run, 2, (str(tmp_path / "other"), 4, {"replay": str(log), "seed": 12}))


def in_multiples(world: Any, tokens_per_step: int, multiple: int) -> tuple[str, list[float]]:
    loader = loader_of(world, tokens_per_step)
    controller = dcp.Controller(
        "static", precisions=["int8"], base="int8", batch_multiples=[multiple]
    )
    with dcp.fully_shard(config_of(), world) as model:
        trainer = dcp.Trainer(model, dcp.optim.AdamW(lr=3e-3), loader, controller=controller)
        trainer.steering.lr_factor = 1.0
        report = trainer.fit(1)
        return model.parameters_sha256(), [report.steps[0].loss, report.steps[0].grad_norm]


def test_accumulation_is_a_batch_of_so_many_tokens() -> None:
    """Multiple 3 of 512 tokens is a step of 1,536: the same bits, clipped by the same norm."""
    three = dcp.launch(in_multiples, 2, (512, 3))
    one = dcp.launch(in_multiples, 2, (1536, 1))
    assert three == one


def test_one_rank_with_one_micro_batch_a_step_learns_its_noise(tmp_path: Path) -> None:
    with dcp.init("self") as world, dcp.fully_shard(config_of(), world) as model:
        trainer = dcp.Trainer(
            model,
            dcp.optim.AdamW(lr=1e-3),
            loader_of(world, 512),
            controller=dcp.Controller("static", precisions=["int8"], base="int8"),
            metrics=tmp_path,
        )
        trainer.fit(8)
    lines = DecisionLog.read(tmp_path / "metrics.jsonl").lines
    assert all(line["observation"]["micro_batch_count"] == 1 for line in lines)
    # updates 1, 2, 4 refresh the denominators: steps 3, 5, 6, 7 are told from those before
    told = [line["observation"]["adam_step_difference"] is not None for line in lines]
    assert told == [False, False, False, True, False, True, True, True]
    assert lines[-1]["decision"]["noise_tokens"] > 0


def test_residuals_of_another_world_are_added_up(tmp_path: Path) -> None:
    """Three ranks' residuals on two and on four: the sum per element stays."""

    def start(world: Any, folder: str) -> list[Any]:
        loader = loader_of(world)
        with dcp.fully_shard(config_of(), world) as model:
            trainer = dcp.Trainer(
                model, dcp.optim.AdamW(lr=3e-3), loader, precision="int4", checkpoint=folder
            )
            trainer.fit(3)
            return [world.allreduce(run.array) for run in model.residual()]

    def go_on(world: Any, folder: str) -> list[Any]:
        loader = loader_of(world)
        with dcp.fully_shard(config_of(), world) as model:
            dcp.Trainer(
                model,
                dcp.optim.AdamW(lr=3e-3),
                loader,
                precision="int4",
                checkpoint=folder,
                resume=True,
            )
            return [world.allreduce(run.array) for run in model.residual()]

    before = dcp.launch(start, 3, (str(tmp_path),))[0]
    for ranks in (2, 4) if (os.cpu_count() or 1) > 0 else ():
        after = dcp.launch(go_on, ranks, (str(tmp_path),))[0]
        assert len(after) == len(before)
        for a, b in zip(before, after, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize(
    ("reduce", "precision", "passes"),
    [("step", "fp32", 1), ("step", "int8", 1), ("layer", "fp32", 2)],
)
def test_reductions_are_counted(reduce: Any, precision: str, passes: int) -> None:
    """Two micro-batches a rank: summed once a step, or once a micro-batch."""
    config = dcp.Transformer1D.preset("tiny", num_hidden_layers=1)

    def work(world: Any) -> tuple[int, int]:
        text = dcp.data.TextFiles("stdlib", max_length=256)
        cost = dcp.CostModel.for_model(config)
        options: dict[str, Any] = {"tokens_per_step": 2048, "rounds": True, "max_tokens": 512}
        data = next(iter(dcp.Loader(text, world, cost, **options)))
        with dcp.fully_shard(config, world, reduce=reduce) as model:
            result = model.step(
                data.micro_batches,
                scale=data.scale,
                trainable=data.trainable,
                lr=0.01,
                step=0,
                optimizer=dcp.optim.AdamW(lr=0.01),
                plan_hash=data.plan.hash,
                groups=data.plan.groups,
                precision=precision,
            )
        return len(data.micro_batches), result.reduce_count

    assert dcp.launch(work, 2) == [(2, passes)] * 2
