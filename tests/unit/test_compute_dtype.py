"""`compute_dtype = "bfloat16"`: every weight and every factor of a product is read rounded.

Two judges. Where only the order of fp32 sums may differ (windows, recompute, threads) results are
bitwise the same, or the same to fp32's rounding. Against the float64 reference with the same
weights, rounded once, the error is held to twice that of the textbook version which rounds the
factors of its products as ours does: what bf16 itself costs, and no more.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ref import Reference, round_bf16

import dcp
from dcp import _dcp, checkpoint, huggingface
from dcp.sharded import ShardedModel

sys.path.insert(0, str(Path(__file__).parent))
import test_promises
import test_sequence
from test_model import LENGTHS, SMALL, accumulate, assert_same, configs, make_batch, make_model
from test_rounds import MODES, rounds_of

BF16 = "bfloat16"
FLOOR = 2.0**-12  # of the whole gradient: rounding of tensors whose true gradient is zero


def in_bf16(config: dcp.Transformer1D, **more: Any) -> dcp.Transformer1D:
    return dataclasses.replace(config, compute_dtype=BF16, **more)


def norm_of(x: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(x, np.float64)))


def assert_bf16_close(got: Any, exact: Any, plain: Any) -> None:
    """err(got) <= 2 err(plain) + floor, each tensor against its norm in float64."""
    whole = np.sqrt(sum(norm_of(x) ** 2 for x in exact.values()))
    for name, x in exact.items():
        limit = 2 * norm_of(plain[name] - x) + 2.0**-9 * norm_of(x) + FLOOR * whole
        assert norm_of(got[name] - x) <= limit, name


def judges(config: dcp.Transformer1D, tensors: Any, **batch: Any) -> tuple[Any, Any]:
    """(loss, gradients) in float64 from rounded weights: exact, and with rounded factors."""
    rounded = {name: round_bf16(x) for name, x in tensors.items()}
    exact = Reference(config, rounded).loss_and_gradients(**batch)
    plain = Reference(config, rounded, factor=round_bf16).loss_and_gradients(**batch)
    return exact, plain


def assert_bf16_loss(got: float, exact: float, plain: float) -> None:
    assert abs(got - exact) <= 2 * abs(plain - exact) + 2e-3 * abs(exact) + 1e-6


@pytest.fixture
def isa() -> Iterator[None]:
    before = _dcp.cpu_info()["isa"]
    yield
    _dcp.set_isa(before)


# ---- one process


def check_against_reference(config: dcp.Transformer1D, lengths: list[int], seed: int) -> None:
    model = make_model(config, seed)
    batch = make_batch(config, lengths, seed) | {"scale": 1 / max(sum(lengths), 1)}
    (exact_loss, exact), (plain_loss, plain) = judges(config, model.parameters(), **batch)
    loss, gradients = accumulate(model, [batch])
    assert_bf16_loss(loss, exact_loss, plain_loss)
    assert_bf16_close(gradients, exact, plain)


@settings(max_examples=40, deadline=None)
@given(config=configs(BF16), lengths=LENGTHS, seed=st.integers(0, 99))
@example(config=in_bf16(SMALL), lengths=[3, 0, 70, 1], seed=0)
def test_gradients_match_reference(
    config: dcp.Transformer1D, lengths: list[int], seed: int
) -> None:
    check_against_reference(config, lengths, seed)


@pytest.mark.parametrize("name", ["portable", "avx2", "avx512"])
def test_every_instruction_set_matches_reference(name: str, isa: None) -> None:
    """Also those that widen what was rounded instead of multiplying bf16."""
    if name not in _dcp.cpu_info()["isas"]:
        pytest.skip(f"this CPU has no {name}")
    _dcp.set_isa(name)
    check_against_reference(in_bf16(SMALL), [70, 1, 33], 1)
    tied = dcp.Transformer1D(300, 64, 96, 2, 4, num_key_value_heads=2, tie_word_embeddings=True)
    check_against_reference(in_bf16(tied), [150, 20], 2)


@settings(max_examples=20, deadline=None)
@given(config=configs(BF16), lengths=LENGTHS, seed=st.integers(0, 99))
def test_every_weight_is_read_rounded(
    config: dcp.Transformer1D, lengths: list[int], seed: int
) -> None:
    """Weights that were rounded before give the same bits: embedding, norms and biases too."""
    model, batch = make_model(config, seed), make_batch(config, lengths, seed)
    loss, gradients = accumulate(model, [batch])
    logits = model.logits(batch["tokens"], batch["offsets"])
    for x in model.parameters().values():
        assert np.any(round_bf16(x) != x) or x.size < 4
        x[:] = round_bf16(x)
    rounded_loss, rounded = accumulate(model, [batch])
    assert rounded_loss == loss
    assert_same(rounded, gradients)
    np.testing.assert_array_equal(model.logits(batch["tokens"], batch["offsets"]), logits)
    plain = make_model(dataclasses.replace(config, compute_dtype="float32"), seed)
    if sum(lengths) > 20 and config.vocab_size > 1:
        assert accumulate(plain, [batch])[0] != loss  # it does round


def test_loss_stays_near_float32() -> None:
    config = dcp.Transformer1D.preset("tiny")
    batch = make_batch(config, [300, 100])
    wide, narrow = dcp.Model(config, seed=3), dcp.Model(in_bf16(config), seed=3)
    loss, gradients = wide.loss_and_gradients(**batch)
    other, rounded = narrow.loss_and_gradients(**batch)
    assert loss != other and abs(other / loss - 1) < 1e-4
    for name, x in gradients.items():
        assert norm_of(rounded[name] - x) < 0.02 * norm_of(x), name


def test_a_choice_of_the_run_is_not_written_to_hugging_face(tmp_path: Path) -> None:
    model = dcp.Model(in_bf16(SMALL), seed=1)
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert "compute_dtype" not in written and written["torch_dtype"] == "float32"
    assert written == huggingface.config_json(SMALL.core())
    assert dcp.Model.from_pretrained(tmp_path).config == SMALL
    again = dcp.Model.from_pretrained(tmp_path, compute_dtype=BF16)
    assert again.config == model.config
    tokens, offsets = [1, 2, 3, 4], [0, 4]
    np.testing.assert_array_equal(again.logits(tokens, offsets), model.logits(tokens, offsets))


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        ("bf16", dcp.ArgumentError, "compute_dtype 'bf16' is unknown: did you mean 'bfloat16'?"),
        ("fp32", dcp.ArgumentError, "compute_dtype 'fp32' is unknown: did you mean 'float32'?"),
        ("int8", dcp.ArgumentError, "'int8' is unknown: one of float32, bfloat16"),
        (16, dcp.DTypeError, "compute_dtype 16 must be a name"),
    ],
)
def test_wrong_names_are_named(value: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error) as caught:
        dataclasses.replace(SMALL, compute_dtype=value)
    assert words in str(caught.value)


def test_settings_suggest() -> None:
    from dcp import config

    loaded = config.load(sets=["model.compute_dtype=bfloat16"])
    assert loaded.transformer().compute_dtype == BF16
    assert 'compute_dtype = "bfloat16"' in loaded.to_toml()
    with pytest.raises(dcp.ArgumentError, match=r"model: compute_dtype 'bf16'.*'bfloat16'"):
        config.load(sets=["model.compute_dtype=bf16"])
    with pytest.raises(dcp.ArgumentError, match=r"model\.compute_dtyp'.*model\.compute_dtype"):
        config.load(sets=["model.compute_dtyp=bfloat16"])


# ---- ranks


def case_of(seed: int, **more: Any) -> test_promises.Case:
    case = test_promises.make_case(seed, **more)
    return dataclasses.replace(case, config=in_bf16(case.config))


def judged(case: test_promises.Case, tensors: Any) -> tuple[Any, Any]:
    whole = case.micro_batch(list(range(len(case.documents))))
    return judges(
        case.config,
        tensors,
        tokens=whole.tokens,
        offsets=whole.offsets,
        labels=whole.labels,
        weights=whole.weights,
        scale=case.scale,
    )


def modes_of(world: Any, cases: list[test_promises.Case], device: str) -> list[Any]:
    out = []
    for case in cases:
        batches = rounds_of(case, world.size)[world.rank]
        results = []
        for windows, reduce in MODES:
            with ShardedModel(
                case.config, world, seed=case.seed, block_rows=1 + case.seed % 3,
                windows=windows, reduce=reduce, device=device,
            ) as model:  # fmt: skip
                tensors = {name: np.array(x) for name, x in model.parameters().items()}
                for recompute in ((0, 0), (1, 0)):
                    place = ((world.rank, 1), recompute)
                    dealt = [test_sequence.MicroBatch(*batch, *place) for batch in batches]
                    loss, grads = model.loss_and_gradients(dealt, scale=case.scale, dropout_seed=9)
                    results.append((loss, grads if world.rank == 0 else None))
        out.append((tensors if world.rank == 0 else None, results))
    return out


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_mode_reads_the_same_numbers(world: int) -> None:
    """Weights read in place and rounded, or gathered as bf16: the same bits; recompute too."""
    cases = [case_of(70 * world + i) for i in range(5)]
    ranks = dcp.launch(modes_of, world, (cases, "late" if world == 2 else "cpu"))
    for i, case in enumerate(cases):
        tensors, results = ranks[0][i]
        (exact_loss, exact), (plain_loss, plain) = judged(case, tensors)
        assert all(rank[i][1][0][0] == results[0][0] for rank in ranks)
        for number, (loss, grads) in enumerate(results):
            same = results[number // 2 % 2 * 2]  # of this reduce, with windows, no recompute
            assert loss == results[0][0]
            assert_same(grads, same[1])
            assert_bf16_loss(loss, exact_loss, plain_loss)
            assert_bf16_close(grads, exact, plain)


def test_any_plan_gives_the_gradient_of_one_process() -> None:
    """Rounding happens row by row, so plans differ in the order of fp32 sums alone."""
    cases = [case_of(i, dropout=0.2 * (i % 2)) for i in range(300, 308)]
    whole = dcp.launch(test_promises.gradients_of, 1, (cases,))[0]
    for world in (1, 2, 3):
        dealt = dcp.launch(test_promises.gradients_of, world, (cases, 5))[0]
        for (_, loss, want), (_, other, grads) in zip(whole, dealt, strict=True):
            assert abs(loss - other) <= 1e-6 * abs(loss)
            judge = {name: x.astype(np.float64) for name, x in want.items()}
            assert test_promises.worst_error(grads, judge) <= 1e-5


@pytest.mark.parametrize("world", [2, 3])
def test_groups_of_ranks_agree_within_bf16(world: int) -> None:
    """Sequence parallelism: attention of rows that lie with other ranks, in place or sent."""
    cases = []
    for i, windows in enumerate((True, False, True, False)):
        case = test_sequence.random_case(500 + i, world, windows=windows)
        cases.append(dataclasses.replace(case, config=in_bf16(case.config)))
    results = dcp.launch(test_sequence.gradients_of, world, (cases,))
    for i, case in enumerate(cases):
        tensors, loss, grads, _ = results[0][i]
        whole = case.micro_batch(0, 1, list(range(len(case.sequences))))
        (exact_loss, exact), (plain_loss, plain) = judges(
            case.config,
            tensors,
            tokens=whole.tokens,
            offsets=whole.offsets,
            labels=whole.labels,
            weights=whole.weights,
            scale=case.scale,
        )
        assert all(rank[i][1] == loss for rank in results)
        assert_bf16_loss(loss, exact_loss, plain_loss)
        assert_bf16_close(grads, exact, plain)


def frozen_steps(world: Any, case: test_promises.Case, patterns: list[str]) -> list[Any]:
    out = []
    for windows, reduce in MODES:
        with dcp.fully_shard(
            dataclasses.replace(case.config, compute_dtype="float32"), world, seed=1,
            frozen=patterns, windows=windows, reduce=reduce, compute_dtype=BF16,
        ) as model:  # fmt: skip
            assert model.config.compute_dtype == BF16
            before = {name: np.array(x) for name, x in model.parameters().items()}
            for step in range(2):
                model.step(
                    rounds_of(case, world.size, step)[world.rank],
                    scale=case.scale,
                    trainable=case.trainable,
                    lr=0.05,
                    step=step,
                    optimizer=dcp.optim.AdamW(lr=0.05),
                )
            after = {name: np.array(x) for name, x in model.parameters().items()}
            moved = {name for name, x in after.items() if not np.array_equal(x, before[name])}
            out.append((moved, model.parameters_sha256()))
    return out


@pytest.mark.parametrize("tied", [False, True])
def test_frozen_and_tied_in_every_mode(tied: bool) -> None:
    """Main weights stay fp32: small updates are not rounded away."""
    case = case_of(51)
    config = dataclasses.replace(case.config, tie_word_embeddings=tied, num_hidden_layers=3)
    case = dataclasses.replace(case, config=config)
    patterns = ["*layers.0*", "*norm*"]
    ranks = dcp.launch(frozen_steps, 2, (case, patterns))
    assert all(rank == ranks[0] for rank in ranks)
    shas = [sha for _, sha in ranks[0]]
    assert shas[0] == shas[2] and shas[1] == shas[3]
    for moved, _ in ranks[0]:
        assert moved and not any(".0." in name or "norm" in name for name in moved)


def held_bytes(world: Any, config: dcp.Transformer1D) -> list[Any]:
    """What the core holds after a step of each mode, what the cost model says, what moved."""
    count = 300
    batch = test_promises.MicroBatch(
        np.arange(count, dtype=np.int32) % config.vocab_size,
        np.array([0, count // 3, count]),
        np.arange(count, dtype=np.int32) % config.vocab_size,
        None,
        np.arange(count),
    )
    out = []
    for windows, reduce in MODES:
        cost = dcp.CostModel.for_model(config, windows=windows, reduce=reduce)
        estimate = cost.memory([count // 3, count - count // 3], world_size=world.size)
        _dcp.set_memory_cap(estimate)
        with dcp.fully_shard(config, world, windows=windows, reduce=reduce) as model:
            for step in range(2):
                result = model.step(
                    [batch] * 2, scale=1e-3, trainable=600, lr=0.1, step=step,
                    optimizer=dcp.optim.AdamW(lr=0.1),
                )  # fmt: skip
            peak = model.memory()["peak"]
        out.append((peak, estimate, result.gathered_bytes, result.reduced_bytes))
    return out


@pytest.mark.parametrize("tied", [False, True])
def test_memory_and_traffic_of_every_mode(tied: bool) -> None:
    """Never more than the estimate, which knows that panels and gathered groups halve."""
    config = dcp.Transformer1D(
        200, 96, 200, 6, 4, num_key_value_heads=2, max_position_embeddings=512,
        tie_word_embeddings=tied, attention_bias=True,
    )  # fmt: skip
    wide = dcp.launch(held_bytes, 3, (config,))
    narrow = dcp.launch(held_bytes, 3, (in_bf16(config),))
    for rank_wide, rank_narrow in zip(wide, narrow, strict=True):
        for mode in range(4):
            _, estimate, gathered, reduced = rank_wide[mode]
            peak, narrow_estimate, narrow_gathered, narrow_reduced = rank_narrow[mode]
            assert peak <= narrow_estimate
            assert (2 * narrow_gathered, narrow_reduced) == (gathered, reduced)
            assert narrow_estimate < 1.05 * estimate
            assert 0.7 * narrow_estimate < peak


def disagree(world: Any) -> str:
    try:
        dcp.fully_shard(SMALL, world, compute_dtype=BF16 if world.rank else "float32")
    except dcp.MismatchError as error:
        return str(error)
    return ""


def test_ranks_must_agree() -> None:
    assert all("model" in message for message in dcp.launch(disagree, 2))


# ---- whole runs


def train(*args: str) -> Any:
    run = subprocess.run(
        [sys.executable, "-m", "dcp", "train", "--json", "-", *args],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_losses_follow_float32(tmp_path: Path) -> None:
    """20 steps of "tiny" on the standard library: within 1e-3 of fp32 on average. A run may go on
    in the other: weights and moments of a checkpoint are fp32 either way.

    The first steps differ by what rounding costs, 2e-4; then AdamW, whose early updates are the
    signs of gradients, makes two runs part from each other now and then, for a step or two.
    """
    common = ["--data", "stdlib", "--ranks", "2", "--tokens-per-step", "4096", "--seed", "1"]
    common += ["--set", "data.max_length=1024", "--set", "train.eval_tokens=1"]
    common += ["--set", "optimizer.lr=0.001"]
    bf16 = ["--set", "model.compute_dtype=bfloat16"]
    wide = [s["loss"] for s in train(*common, "--steps", "20")["steps"]]
    document = train(*common, *bf16, "--steps", "20", "--checkpoint", str(tmp_path))
    narrow = [s["loss"] for s in document["steps"]]
    assert narrow != wide and len(narrow) == 20 and narrow[-1] < 0.9 * narrow[0]
    differences = np.abs(np.divide(narrow, wide) - 1)
    assert differences[0] < 1e-3 and differences.mean() < 1e-3 and differences.max() < 1e-2
    shown = checkpoint.show(checkpoint.latest(tmp_path))
    assert shown["config"]["compute_dtype"] == BF16
    more = train(*common, "--steps", "21", "--checkpoint", str(tmp_path), "--resume")
    assert abs(more["steps"][-1]["loss"] / narrow[-1] - 1) < 0.2


def test_profile_of_a_bf16_model() -> None:
    """Measures what will run, and refuses to plan the other with it."""
    config = dcp.Transformer1D(64, 32, 64, 2, 2)
    cost = dcp.profile(in_bf16(config), max_tokens=256, repeats=1, seconds=1.0)
    cost.check_model(in_bf16(config))
    with pytest.raises(dcp.ArgumentError, match="computing in float32"):
        cost.check_model(config)


def test_plans_with_a_profile_of_either(tmp_path: Path) -> None:
    """`dcp plan --model` names no dtype: a profile of the same shape will do."""
    from dcp.cli.clusters import cluster

    rest = {"device": None, "sets": (), "node_ranks": None, "memory": None}
    for dtype in ("float32", BF16):
        file = tmp_path / f"{dtype}.json"
        config = dcp.Transformer1D.preset("tiny", compute_dtype=dtype)
        dcp.CostModel.for_model(config).save(file)
        assert cluster(model="tiny", cost_file=str(file), **rest).cost.time([100]) > 0
        with pytest.raises(Exception, match="another model than small"):
            cluster(model="small", cost_file=str(file), **rest)


def test_cost_model_knows_the_rates() -> None:
    tiny = dcp.Transformer1D.preset("tiny")
    wide, narrow = (dcp.CostModel.for_model(c, threads=1) for c in (tiny, in_bf16(tiny)))
    assert 1.2 < wide.time([4096]) / narrow.time([4096]) < 2.5
    assert narrow.model != wide.model
    named = dcp.CostModel.for_model(in_bf16(tiny), flops_per_s=1e9)
    assert named.token_s == dcp.CostModel.for_model(tiny, flops_per_s=1e9).token_s
