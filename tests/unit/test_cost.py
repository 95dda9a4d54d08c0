"""The cost model: formulas, analytic devices, bytes by recompute, fits, files."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dcp
from dcp import cli
from dcp.analytic import DEVICES, Device, Shape
from dcp.cost import KINDS, Measured, Residual
from dcp.fitting import fit_memory, memory_probes, nnls
from dcp.profiling import errors, fit_times
from dcp.refit import Refit, replay

TINY = dcp.Transformer1D(64, 16, 32, 2, 2, max_position_embeddings=512)
NAMED = ("none", "selective", "full")


def best_by_subsets(rows: np.ndarray, values: np.ndarray) -> float:
    """Least square sum over all x >= 0: some subset of columns, solved without a sign."""
    best = float(values @ values)
    n = rows.shape[1]
    for size in range(1, n + 1):
        for chosen in itertools.combinations(range(n), size):
            x = np.linalg.lstsq(rows[:, chosen], values, rcond=None)[0]
            if (x >= 0).all():
                rest = rows[:, chosen] @ x - values
                best = min(best, float(rest @ rest))
    return best


@settings(max_examples=50, deadline=None)
@given(
    rows=st.integers(1, 8),
    columns=st.integers(1, 5),
    seed=st.integers(0, 10**6),
    positive=st.booleans(),
    copies=st.booleans(),
)
def test_nnls_against_all_subsets(
    rows: int, columns: int, seed: int, positive: bool, copies: bool
) -> None:
    """Also with fewer rows than columns, with equal columns, and with columns of zeros."""
    rng = np.random.default_rng(seed)
    a = rng.uniform(0 if positive else -1, 1, (rows, columns)) * 10.0 ** rng.integers(
        -6, 6, columns
    )
    if copies and columns > 1:
        a[:, 1] = 3 * a[:, 0]
    if copies and columns > 2:
        a[:, 2] = 0
    b = rng.uniform(-1, 1, rows)
    x = nnls(a, b)
    rest = a @ x - b
    assert (x >= 0).all()
    assert float(rest @ rest) <= best_by_subsets(a, b) * (1 + 1e-6) + 1e-9


def test_nnls_refuses_what_it_cannot_solve() -> None:
    with pytest.raises(dcp.ArgumentError, match=r"rows \[2, 1\] and values \[3\]"):
        nnls([[1.0], [2.0]], [1.0, 2.0, 3.0])
    with pytest.raises(dcp.ArgumentError, match="finite"):
        nnls([[1.0]], [math.nan])


# ---- the formulas


def reference_time(
    c: dcp.CostModel, lengths: list[int], p: int, again: tuple[int, int], tier: int
) -> float:
    """The docstring of `CostModel`, written out."""
    tokens, squares = sum(lengths), sum(n * n for n in lengths)
    n, m = (max(a - 1, 0) for a in again)
    work = c.token_s * tokens + c.square_s * squares
    work += n * (c.layer_token_s * tokens + c.layer_square_s * squares)
    work += m * c.mlp_token_s * tokens
    seconds = c.latency_s + work / p
    if p > 1:
        moved = tokens * (p - 1) / p * (c.gather_s[tier] + c.exchange_s[tier] / p)
        seconds += c.group_s[tier] + c.hop_s[tier] * (p - 1)
        seconds += moved * (1 + n * c.layer_comm_share)
    return seconds


def reference_memory(
    c: dcp.CostModel, lengths: list[int], p: int, again: tuple[int, int], world: int
) -> float:
    tokens = sum(lengths)
    rows = -(-tokens // p)
    n, m = (max(a - 1, 0) for a in again)
    return (
        c.fixed_bytes
        + c.sharded_bytes / world
        + (c.scratch_bytes if tokens else 0)
        + rows * (c.token_bytes - n * c.layer_token_bytes - m * c.mlp_token_bytes)
        + (tokens * c.group_token_bytes if p > 1 else 0)
        + c.logit_bytes * min(rows, c.logit_chunk_tokens)
    )


SECONDS = st.floats(0, 1e-3)
PAIR = st.tuples(SECONDS, SECONDS).map(lambda pair: (min(pair), max(pair)))


@st.composite
def cost_models(draw: st.DrawFn) -> dcp.CostModel:
    """Any coefficients that the core takes: layers drop no more than a token has."""
    layers = draw(st.integers(0, 12))
    layer, mlp = draw(st.floats(0, 1e4)), draw(st.floats(0, 1e4))
    fields: dict[str, Any] = {
        name: draw(SECONDS)
        for name in ("latency_s", "token_s", "square_s", "layer_token_s", "layer_square_s")
    }
    fields |= {name: draw(PAIR) for name in ("group_s", "hop_s", "gather_s", "exchange_s")}
    fields |= {
        name: draw(st.floats(0, 1e9)) for name in ("fixed_bytes", "sharded_bytes", "scratch_bytes")
    }
    return dcp.CostModel(
        **fields,
        mlp_token_s=draw(SECONDS),
        layer_comm_share=draw(st.floats(0, 1)),
        layer_token_bytes=layer,
        mlp_token_bytes=mlp,
        token_bytes=layers * max(layer, mlp) + draw(st.floats(0, 1e4)),
        group_token_bytes=draw(st.floats(0, 1e3)),
        logit_bytes=draw(st.floats(0, 1e5)),
        logit_chunk_tokens=draw(st.integers(0, 4096)),
        layer_count=layers,
        node_ranks=draw(st.integers(0, 9)),
    )


@settings(max_examples=50, deadline=None)
@given(data=st.data(), cost=cost_models())
def test_formulas_against_a_reference(data: st.DataObject, cost: dcp.CostModel) -> None:
    """Random coefficients, groups of 1 to 16 ranks inside and across nodes, recompute counts."""
    lengths = data.draw(st.lists(st.integers(0, 5000), max_size=8), "lengths")
    p = data.draw(st.integers(1, 16), "ranks")
    first = data.draw(st.integers(0, 20), "first")
    layers = data.draw(st.integers(0, cost.layer_count), "layers")
    mlps = data.draw(st.integers(0, cost.layer_count - layers), "mlps")
    world = data.draw(st.integers(p, 64), "world")
    node = cost.node_ranks
    tier = int(node > 0 and first // node != (first + p - 1) // node)
    again = {"layer": layers, "mlp": mlps}
    ranks = range(first, first + p)
    assert cost.time(lengths, ranks, again) == pytest.approx(
        reference_time(cost, lengths, p, (layers, mlps), tier), rel=1e-12, abs=1e-300
    )
    wanted = reference_memory(cost, lengths, p, (layers, mlps), world)
    held = cost.memory(lengths, ranks, again, world_size=world)
    assert wanted * (1 - 1e-12) <= held <= wanted * (1 + 1e-12) + 1


@settings(max_examples=30, deadline=None)
@given(cost=cost_models(), ranks=st.integers(1, 16), lengths=st.lists(st.integers(0, 4000)))
def test_more_never_costs_less(cost: dcp.CostModel, ranks: int, lengths: list[int]) -> None:
    """Caps and the bound rely on it: in every length, and with whatever is dropped."""
    longer = [n + 1 for n in lengths] + [1]
    every = list(NAMED) if cost.layer_count else ["none"]
    for recompute in every:
        assert cost.time(longer, ranks, recompute) >= cost.time(lengths, ranks, recompute)
        held = [cost.memory(x, ranks, recompute, world_size=16) for x in (lengths, longer)]
        assert held == sorted(held)
    for kind in ("layer", "mlp"):
        counts = [{kind: n} for n in range(cost.layer_count + 1)]
        times = [cost.time(lengths, ranks, c) for c in counts]
        bytes_ = [cost.memory(lengths, ranks, c, world_size=16) for c in counts]
        assert times == sorted(times)
        assert bytes_ == sorted(bytes_, reverse=True)


def test_an_empty_micro_batch_costs_the_latency() -> None:
    """time([], n) = a(n), least for one rank, and a zero-length sequence is no token."""
    cost = dcp.CostModel.for_model(dcp.Transformer1D.preset("tiny"))
    assert cost.time([]) == cost.time([0, 0]) == cost.latency_s
    for n in range(2, 9):
        a = cost.latency_s + cost.group_s[0] + (n - 1) * cost.hop_s[0]
        assert cost.time([], n) == pytest.approx(a, rel=1e-15)
        assert cost.time([], n) > cost.time([], n - 1)


@pytest.mark.parametrize("name", ["h200", "cpu"])
def test_bytes_by_recompute_and_by_rank(name: str) -> None:
    """Case P-09: the estimate follows recompute, and a rank of a group pays for its own rows.

    6,964 packed tokens on two ranks: the report's cut gave the busier rank 4,096 of them. dcp cuts
    rows evenly, ceil(T / p) at most whatever the sequences (csrc/train/sequence_cut.c), so that
    its estimate is of 3,482 rows beside what every token of the group costs.
    """
    cost = dcp.CostModel.analytic("llama-7b", device=name)
    for lengths in ([1], [32_710], [4096, 2868]):
        by_choice = [cost.memory(lengths, recompute=r, world_size=8) for r in NAMED]
        assert by_choice == sorted(by_choice, reverse=True)
    none, _, full = (cost.memory([32_710], recompute=r, world_size=8) for r in NAMED)
    assert none - full > 0.9 * 31 * 32_710 * cost.layer_token_bytes
    share = cost.memory([4096, 2868], 2, world_size=8)
    alone = cost.memory([3482], 1, world_size=8)
    assert share == pytest.approx(alone + 6964 * cost.group_token_bytes, abs=1)
    assert share < cost.memory([4096, 2868], 1, world_size=8)


def test_equal_tokens_unequal_attention() -> None:
    """Case P-07: one of 1,024 and two of 512: linear terms 1:1, attention 2:1."""
    assert dcp.CostModel(token_s=1.0).time([1024]) == dcp.CostModel(token_s=1.0).time([512] * 2)
    square = dcp.CostModel(square_s=1.0)
    assert square.time([1024]) == 2 * square.time([512, 512])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"token_s": -1.0}, "token_s"),
        ({"square_s": math.nan}, "square_s"),
        ({"step_s": math.inf}, "step_s"),
        ({"group_s": (2.0, 1.0)}, "across nodes"),
        ({"hop_s": (1.0, 2.0, 3.0)}, "two numbers"),
        ({"layer_count": -1}, "layer_count"),
        ({"layer_count": 4, "token_bytes": 10.0, "layer_token_bytes": 3.0}, "must cover"),
    ],
)
def test_coefficients_that_break_a_rule(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(dcp.ArgumentError, match=words):
        dcp.CostModel(**fields)


def test_lookups_that_break_a_rule() -> None:
    cost = dcp.CostModel(token_s=1.0, layer_count=2)
    for bad in (
        lambda: cost.time([-1]),
        lambda: cost.time([1], [0, 2]),
        lambda: cost.time([1], 0),
        lambda: cost.time([1], 1, {"layer": 2, "mlp": 1}),
        lambda: cost.time([1], 1, {"attention": 1}),
        lambda: cost.time([1], 1, "some"),
        lambda: cost.memory([1], world_size=0),
    ):
        with pytest.raises(dcp.ArgumentError):
            bad()
    for bad in (lambda: cost.time([1.5]), lambda: cost.time([[1]])):
        with pytest.raises(dcp.DTypeError):
            bad()


def test_lookups_beyond_what_was_measured_say_so() -> None:
    seen = Measured(tokens=(64, 4096), longest=2048, ranks=(1, 2), recompute=("layer",))
    cost = dcp.CostModel(token_s=1e-6, layer_count=4, measured=seen)
    assert cost.beyond([2048, 2048]) == cost.beyond([2048] * 4, 2, "full") == cost.beyond([]) == []
    assert "sequence of 2049 tokens" in cost.beyond([2049])[0]
    assert "4097 tokens on each rank: 64 to 4096" in cost.beyond([2000, 2000, 97])[0]
    assert "10 tokens on each rank" in cost.beyond([20], 2)[0]
    assert "group of 3 ranks: [1, 2]" in cost.beyond([300], 3)[0]
    assert cost.beyond([300], 1, "selective") == ["mlp recompute: not measured"]
    assert len(cost.beyond([30_000], 3, "selective")) == 4
    assert dcp.CostModel(token_s=1.0).beyond([10**9], 1000) == []


# ---- devices


def test_every_constant_of_a_device_can_be_another() -> None:
    """And each reaches the coefficients."""
    plain = dcp.CostModel.analytic("llama-3-70b", device="h200")
    names = [f.name for f in dataclasses.fields(Device) if f.name not in ("name", "host")]
    # says only whether weights fit whole: in neither, for this model; and this model's rates are
    # those of bf16 already
    idle = {"memory_bytes", "bf16_times"}
    for name in names:
        value = getattr(DEVICES["h200"], name)
        other: Any = tuple(2 * v for v in value) if isinstance(value, tuple) else 2 * value
        if name == "gather_exposed":
            other = 0.5
        cost = dcp.CostModel.analytic("llama-3-70b", device="h200", **{name: other})
        same = dataclasses.replace(cost, name=plain.name) == plain
        assert same == (name in idle), name


@pytest.mark.parametrize(
    ("args", "overrides", "words"),
    [
        (("llama-3-8b", "h20"), {}, "unknown device 'h20': did you mean 'h200'"),
        (("llama-3-8b", "abacus"), {}, "one of h200, h100, cpu"),
        (("llama-3-9b", "h200"), {}, "unknown model 'llama-3-9b': did you mean 'llama-3-"),
        (("gpt2-extra", "h200"), {}, "unknown model"),
        (("llama-3-8b", "h200"), {"byte_per_s": 1e12}, "did you mean 'bytes_per_s'"),
        (("llama-3-8b", "h200"), {"bytes_per_s": 0.0}, "device.bytes_per_s = 0.0 .* > 0"),
        (("llama-3-8b", "h200"), {"launch_s": -1.0}, "launch_s = -1.0 .* >= 0"),
        (("llama-3-8b", "h200"), {"node_ranks": 2.5}, "node_ranks = 2.5 must be whole"),
        (("llama-3-8b", "h200"), {"gather_exposed": 1.5}, "<= 1"),
    ],
)
def test_devices_and_models_that_are_refused(
    args: tuple[str, str], overrides: dict[str, Any], words: str
) -> None:
    with pytest.raises(dcp.ArgumentError, match=words):
        dcp.CostModel.analytic(*args, **overrides)


def test_reckoned_models_that_the_cpu_cannot_train() -> None:
    with pytest.raises(dcp.UnsupportedError, match="gpt2"):
        dcp.CostModel.analytic("gpt2", device="cpu")


def test_a_model_too_large_for_a_rank_gathers_layer_by_layer() -> None:
    """8B: weights and gradients whole on each. 70b: cut, with traffic in every micro-batch."""
    for name, cut in (("llama-3-8b", False), ("llama-3-70b", True)):
        cost = dcp.CostModel.analytic(name, device="h200")
        count = dcp.Transformer1D.preset(name).parameter_count()
        assert cost.sharded_bytes == (18 if cut else 12) * count
        assert (cost.fixed_bytes < 30e9) or not cut
        assert cost.memory([8192], 8, "full", world_size=64) < 141e9
        less = dcp.CostModel.analytic(name, device="h200", gather_exposed=0.0)
        traffic = 0.2 * 8 * count / 300e9 if cut else 0.0
        assert cost.latency_s - less.latency_s == pytest.approx(traffic, abs=1e-12)


def test_h100_and_h200_differ_in_memory_only() -> None:
    h100, h200 = (dcp.CostModel.analytic("llama-3-8b", device=d) for d in ("h100", "h200"))
    assert h100.time([32_768]) > h200.time([32_768]) > 0.9 * h100.time([32_768])
    assert (h100.square_s, h100.gather_s, h100.exchange_s) == (
        h200.square_s,
        h200.gather_s,
        h200.exchange_s,
    )
    assert DEVICES["h100"].memory_bytes < DEVICES["h200"].memory_bytes
    # 80 GB: twice 6 bytes for each of 8e9 parameters do not fit, so that they are cut
    assert h100.sharded_bytes == 1.5 * h200.sharded_bytes


@pytest.mark.parametrize("name", ["gpt2", "gpt2-xl", "llama-2-13b", "tiny"])
def test_flops_per_token_of_the_reckoned_models(name: str) -> None:
    """At an endless memory and no attention, 6 flops for every weight that multiplies."""
    cost = dcp.CostModel.analytic(name, device="h200", bytes_per_s=1e30, matmul_flops_per_s=6e12)
    from dcp.analytic import config_named

    config = config_named(name)
    shape = config if isinstance(config, Shape) else Shape.of(config)
    assert cost.token_s == pytest.approx(shape.matmul_weights / 1e12)
    assert 3 * shape.layers * cost.layer_token_s < cost.token_s


def test_recompute_on_the_cpu_stays_within_the_forward_pass() -> None:
    """Full recompute costs at most a third more; without the MLP's last product, less."""
    cost = dcp.CostModel.for_model(dcp.Transformer1D.preset("tiny"), threads=1)
    for lengths in ([64] * 16, [8192]):
        none, selective, full = (cost.time(lengths, recompute=r) for r in NAMED)
        assert 1 < selective / none < full / none < 1.25
    for p in (2, 4):
        assert 0.9 * p < cost.time([16_384]) / cost.time([16_384], p) < p


# ---- a cost model is of one model


def test_a_profile_of_another_model_is_refused_by_name() -> None:
    tiny, small = (dcp.Transformer1D.preset(n) for n in ("tiny", "small"))
    cost = dcp.CostModel.for_model(tiny)
    cost.check_model(tiny)
    dcp.CostModel(token_s=1.0).check_model(small)  # says nothing of its model
    with pytest.raises(dcp.ArgumentError) as error:
        cost.check_model(small)
    assert Shape.of(tiny).fingerprint in str(error.value)
    assert Shape.of(small).fingerprint in str(error.value)
    deeper = dataclasses.replace(tiny, num_hidden_layers=5)
    with pytest.raises(dcp.ArgumentError, match="5 layers"):
        cost.check_model(deeper)


# ---- files

FULL = dcp.CostModel(
    latency_s=1e-3,
    token_s=1 / 3,
    group_s=(0.1, 0.2),
    layer_count=2,
    name="measured",
    model="0123456789abcdef",
    step_s=0.25,
    measured=Measured(tokens=(1, 9), longest=9, ranks=(1, 2), recompute=("mlp",)),
    residuals=(Residual(1, 9, 81, 1, 2, (0, 2), 2, 0.5, 0.4, True),),
)


def test_files_round_trip(tmp_path: Path) -> None:
    """Every field, bit for bit; and what `--json` adds is no field."""
    path = tmp_path / "cost.json"
    for cost in (FULL, dcp.CostModel(), dcp.CostModel.for_model(TINY)):
        cost.save(path)
        assert dcp.CostModel.load(path) == cost
        document = json.loads(json.dumps({"command": "profile"} | cost.to_json()))
        assert dcp.CostModel.from_json(document) == cost


def test_a_file_of_the_first_version_loads() -> None:
    """Schema 1 before groups, recompute and measurements: what it lacks costs nothing."""
    old = {"schema": 1, "kind": "cost_model", "latency_s": 1e-3, "token_s": 1e-6, "name": "old"}
    cost = dcp.CostModel.from_json(old)
    assert cost == dcp.CostModel(latency_s=1e-3, token_s=1e-6, name="old")
    assert cost.measured is None and cost.residuals == ()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": 2}, "schema 2, this version reads 1"),
        ({"schema": None}, "schema None"),
        ({"tokens_s": 1.0}, r"unknown fields \['tokens_s'\]"),
        ({"token_s": "much"}, "token_s"),
        ({"group_s": 3}, "wrong kind"),
        ({"measured": {"tokens": [1]}}, "wrong kind"),
        ({"residuals": [{"tokens": 1}]}, "wrong kind"),
        ({"token_s": -1.0}, "token_s"),
    ],
)
def test_documents_that_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises((dcp.ArgumentError, dcp.DTypeError), match=words):
        dcp.CostModel.from_json(FULL.to_json() | change)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    for text in (None, "{", "[]", "\xff"):
        if text is not None:
            path.write_text(text, encoding="latin-1")
        with pytest.raises(dcp.FileError, match=r"cost\.json"):
            dcp.CostModel.load(path)


# ---- fits


def planted(ranks: tuple[int, ...], seed: int) -> tuple[dcp.Transformer1D, list[Residual], Any]:
    """Steps as a known cost model of 4 layers would take them, and those of 2 layers."""
    random = np.random.default_rng(seed)
    config = dataclasses.replace(TINY, num_hidden_layers=4)

    def coefficient(low: float) -> float:
        return float(low * random.uniform(1, 3))

    each: dict[str, float] = {  # by layer
        "latency_s": coefficient(1e-4),
        "token_s": coefficient(1e-6),
        "square_s": coefficient(1e-9),
        "group_s": coefficient(1e-5),
        "hop_s": coefficient(1e-6),
        "gather_s": coefficient(1e-7),
        "exchange_s": coefficient(1e-7),
    }
    again = {"layer_token_s": 4e-7, "layer_square_s": 3e-10, "mlp_token_s": 2e-7}

    def model(layers: int) -> dcp.CostModel:
        fields: dict[str, Any] = {
            k: (v * layers,) * 2
            if k in ("group_s", "hop_s", "gather_s", "exchange_s")
            else v * layers
            for k, v in each.items()
        }
        share = 1 / 3 / layers
        return dcp.CostModel(**fields, **again, layer_comm_share=share, layer_count=layers)

    rows = []
    for layers in (2, 4):
        cost = model(layers)
        for p in ranks:
            for lengths in ([4096], [512] * 8, [512], [64] * 8, [64]):
                for counts in ((0, 0), (layers, 0), (0, layers)):
                    for batches in (1, 3):
                        took = batches * cost.time(
                            lengths, p, dict(zip(KINDS, counts, strict=True))
                        )
                        rows.append(
                            Residual(
                                len(lengths),
                                sum(lengths),
                                sum(n * n for n in lengths),
                                batches,
                                p,
                                counts,
                                layers,
                                took + 1e-3 + 2e-4 * layers,
                                0.0,
                                held_out=batches == 3 and p == ranks[-1] and len(lengths) == 8,
                            )
                        )
    return config, rows, model(4)


@pytest.mark.parametrize("ranks", [(1,), (1, 2), (1, 2, 4)])
def test_planted_coefficients_are_found(ranks: tuple[int, ...]) -> None:
    config, rows, truth = planted(ranks, seed=len(ranks))
    cost = fit_times(rows, config, ranks=ranks[-1])
    names = ["latency_s", "token_s", "square_s", "layer_token_s", "layer_square_s", "mlp_token_s"]
    for name in names:
        assert getattr(cost, name) == pytest.approx(getattr(truth, name), rel=1e-4), name
    assert cost.step_s == pytest.approx(1.8e-3, rel=1e-4)
    if len(ranks) > 2:  # one size of groups cannot tell these apart, and need not
        for name in ("group_s", "hop_s", "gather_s", "exchange_s"):
            assert getattr(cost, name) == pytest.approx(getattr(truth, name), rel=1e-3), name
    for p in ranks:
        for recompute in NAMED:
            lengths = [3000, 17, 900]
            wanted = truth.time(lengths, p, recompute)
            assert cost.time(lengths, p, recompute) == pytest.approx(wanted, rel=1e-4)
    found = errors(cost)
    assert found["held_out_worst"] is not None and found["held_out_worst"] < 1e-4
    assert [dataclasses.replace(r, predicted_s=0.0) for r in cost.residuals] == rows
    assert cost.measured == Measured(
        tokens=(64 // ranks[-1], 4096), longest=4096, ranks=ranks, recompute=("layer", "mlp")
    )


def test_fits_of_nothing_are_refused() -> None:
    row = Residual(1, 10, 100, 1, 1, (0, 0), 2, measured_s=1.0, predicted_s=0.0)
    with pytest.raises(dcp.ArgumentError, match="none to fit"):
        fit_times([dataclasses.replace(row, held_out=True)], TINY)
    with pytest.raises(dcp.ArgumentError, match=r"measured_s = 0\.0"):
        fit_times([row, dataclasses.replace(row, measured_s=0.0)], TINY)


def test_fitted_bytes_lie_nowhere_below() -> None:
    """At every probe and choice, with jumps at sequences' and segments' ends; and not far above."""

    def held(tokens: int, again: tuple[int, int]) -> int:
        n, m = (max(a - 1, 0) for a in again)
        return 10_000 + 5000 * -(-tokens // 512) + tokens * (900 - 70 * n - 30 * m)

    fit = fit_memory(held, 6, memory_probes(512))
    cost = dcp.CostModel(**fit, layer_count=6)
    for tokens in memory_probes(512):
        for again in ((0, 0), (6, 0), (0, 6), (2, 0), (3, 3)):
            counts = dict(zip(KINDS, again, strict=True))
            got = cost.memory([tokens], 1, counts, world_size=1)
            wanted = held(tokens, again)
            assert wanted <= got
            if tokens >= 4096:
                assert got <= 1.02 * wanted


@pytest.mark.parametrize("ranks", [1, 2])
def test_profile_of_a_small_model(ranks: int) -> None:
    """Runs, fits, and says what was measured; how well it predicts is for a benchmark."""
    seen: list[tuple[int, int]] = []
    cost = dcp.profile(
        TINY,
        ranks=ranks,
        max_tokens=128,
        repeats=1,
        seconds=0.01,
        on_progress=lambda done, of: seen.append((done, of)),
    )
    cost.check_model(TINY)
    for field in dataclasses.fields(cost):
        value = getattr(cost, field.name)
        if field.name.endswith("_s"):
            assert min(value if isinstance(value, tuple) else (value,)) >= 0, field.name
    assert cost.layer_count == 2
    assert cost.token_s > 0
    assert cost.measured is not None and cost.measured.ranks == tuple(range(1, ranks + 1))
    assert cost.measured.recompute == ("layer", "mlp")
    assert seen[-1] == (2 * len(cost.residuals), 2 * len(cost.residuals))
    assert all(row.measured_s > 0 and row.predicted_s > 0 for row in cost.residuals)
    assert {row.held_out for row in cost.residuals} == {False, True}
    assert {row.layers for row in cost.residuals} == {1, 2}
    assert dcp.CostModel.from_json(json.loads(json.dumps(cost.to_json()))) == cost
    assert cost.fixed_bytes == dcp.CostModel.for_model(TINY).fixed_bytes  # bytes are the core's


def test_profile_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file plans; `--json -` leaves standard output to the document, the table goes aside."""
    out = tmp_path / "cost.json"
    args = ["profile", "--preset", "tiny", "--ranks", "1", "--max-tokens", "64"]
    assert cli.run([*args, "--seconds", "0.1", "--out", str(out), "--json", "-"]) == 0
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    cost = dcp.CostModel.load(out)
    assert document["command"] == "profile" and document["kind"] == "cost_model"
    assert dcp.CostModel.from_json(document) == cost
    assert len(document["residuals"]) == len(cost.residuals) > 20
    table = [line for line in printed.err.splitlines() if line.rstrip().endswith("%")]
    assert len(table) == len(cost.residuals)
    assert "held out of the fit" in printed.err
    cost.check_model(dcp.Transformer1D.preset("tiny"))
    assert len(dcp.plan([40, 30, 20], cost, world_size=2).micro_batches) >= 1


def test_profile_refuses() -> None:
    for settings_, words in (
        ({"depths": (1, 1)}, "depths"),
        ({"depths": (1, 3)}, r"1\.\.2"),
        ({"max_tokens": 4}, "max_tokens"),
        ({"repeats": 0}, "repeats"),
        ({"seconds": 0}, "seconds"),
        ({"ranks": 0}, "ranks"),
    ):
        keywords: dict[str, Any] = settings_
        with pytest.raises(dcp.ArgumentError, match=words):
            dcp.profile(TINY, **keywords)


# ---- refit

BASE = dcp.CostModel(
    latency_s=1e-4, token_s=1e-6, square_s=1e-9, group_s=(1e-4, 1e-4), layer_count=2
)
TRUE = dataclasses.replace(BASE, latency_s=2e-4, token_s=3e-6, square_s=0.5e-9)


def busy(plan: dcp.Plan, cost: dcp.CostModel) -> list[float]:
    """Seconds of each rank were `cost` what happens."""
    out = [0.0] * plan.world_size
    for batch in plan.micro_batches:
        seconds = cost.time(plan.lengths[list(batch.sequences)], batch.ranks, batch.recompute)
        for rank in batch.ranks:
            out[rank] += seconds
    return out


def run_refit(refit: Refit, steps: range) -> list[dcp.CostModel]:
    found = []
    for step in steps:
        high = (200, 1000, 20_000)[step % 3]  # else tokens and attention look alike
        lengths = np.random.default_rng(step).integers(1, high, 24)
        plan = dcp.plan(lengths, refit.cost, world_size=3)
        found.append(refit.update(step, plan, busy(plan, TRUE)))
    return found


def test_refit_learns_what_steps_took() -> None:
    refit = Refit(BASE)
    assert refit.cost is BASE and set(refit.scales.values()) == {1.0}
    last = run_refit(refit, range(30))[-1]
    assert last.token_s == pytest.approx(TRUE.token_s, rel=0.02)
    assert last.square_s == pytest.approx(TRUE.square_s, rel=0.02)
    assert last.layer_count == BASE.layer_count and last.token_bytes == BASE.token_bytes
    for lengths in ([5000, 300, 20], [18_000], [500] * 8):
        assert last.time(lengths) == pytest.approx(TRUE.time(lengths), rel=0.02)


def test_refit_replays_from_its_log_bit_for_bit() -> None:
    """Through JSON, with a window that forgets; and a checkpoint in the middle goes on alike."""
    log: list[dict[str, Any]] = []
    refit = Refit(BASE, window=4, log=log.append)
    models = run_refit(refit, range(10))
    again = json.loads(json.dumps(log))
    assert replay(BASE, again, window=4) == models
    half = Refit(BASE, window=4)
    run_refit(half, range(6))
    state = json.loads(json.dumps(half.state_dict()))
    resumed = Refit(dcp.CostModel()).load_state_dict(state)
    assert resumed.cost == models[5] and resumed.base == BASE and resumed.window == 4
    assert run_refit(resumed, range(6, 10)) == models[6:]
    assert resumed.scales == refit.scales


def test_refit_refuses() -> None:
    refit = Refit(BASE)
    plan = dcp.plan([100, 200], BASE, world_size=2)
    for times, words in (
        ([1.0], "1 times for 2 ranks"),
        ([1.0, -1.0], r"busy_s\[1\]"),
        ([math.nan, 1.0], r"busy_s\[0\]"),
    ):
        with pytest.raises(dcp.ArgumentError, match=words):
            refit.update(0, plan, times)
    with pytest.raises(dcp.ArgumentError, match="step"):
        refit.update(-1, plan, [1.0, 1.0])
    with pytest.raises(dcp.ArgumentError, match="window"):
        Refit(BASE, window=0)
    assert refit.cost is BASE
    for record in ({"kind": "plan"}, {}, {"kind": "refit", "step": 0}):
        with pytest.raises(dcp.ArgumentError):
            replay(BASE, [record])
    state = refit.state_dict()
    for change, words in (({"schema": 9}, "schema 9"), ({"steps": [{}]}, "lacks")):
        with pytest.raises(dcp.ArgumentError, match=words):
            Refit(BASE).load_state_dict(state | change)
    with pytest.raises(dcp.ArgumentError, match="lacks the field 'cost'"):
        Refit(BASE).load_state_dict({k: v for k, v in state.items() if k != "cost"})
