"""Optimizers on shards: AdamW and its 8-bit form, groups, state, any number of ranks.

Gradients are given by rank 0 alone, so that every world has identical ones.
"""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dcp
from dcp import _dcp, checkpoint, cli
from dcp.optim import AdamW, AdamW8bit, Group

sys.path.insert(0, str(Path(__file__).parent.parent))
from ref import adamw_ref, decode_8bit, encode_8bit

SHAPES = {
    "0.scalar": (),
    "0.empty": (0,),
    "0.one": (1,),
    "0.bias": (37,),
    "0.long": (4096,),
    "0.longer": (5003,),
    "1.wide": (33, 130),
    "1.rows": (21, 300),
    "1.cube": (7, 3, 200),
    "2.small": (12, 9),
    "2.column": (4200, 1),
    "2.norm": (64,),
}
PLAIN = AdamW(lr=0.01, weight_decay=0.1, clip=None)
EIGHT = AdamW8bit(lr=0.01, weight_decay=0.1, clip=None)
MIXED = AdamW8bit(
    lr=0.01,
    clip=0.5,
    groups=[
        Group(match="1.rows", optimizer="adamw", lr_scale=0.5),
        Group(match="*norm", weight_decay=0.2),
        Group(match="2.small", optimizer="none"),
        Group(match="2.*", lr_scale=2.0),
    ],
)
OPTIMIZERS = {"adamw": PLAIN, "adamw8bit": EIGHT, "mixed": MIXED}


def values(seed: int, name: str, spread: float = 0.0) -> np.ndarray:
    """Normal numbers of a tensor's shape, their magnitude over some decades."""
    rng = np.random.default_rng([seed, *name.encode()])
    shape = SHAPES[name]
    size = np.exp(spread * rng.standard_normal(shape))
    return np.asarray(rng.standard_normal(shape) * size, np.float32)


def shard(world, windows=True, **options):
    tensors = {name: values(1, name) for name in SHAPES}
    return dcp.fully_shard(tensors, world, windows=windows, **options)


def run(world, model, optimizer, first, last):
    for step in range(first, last):
        if world.rank == 0:
            for name in SHAPES:
                model.add_gradient(name, values(100 + step, name, spread=2.0))
        model.step(optimizer)


def whole(world, model):
    """{(kind, tensor): dtype, bytes} of everything, and that each element is held once."""
    out = {}
    shapes = model.shapes
    for kind, runs in sorted(model.shards().items()):
        names = names_of(world, runs)
        for name in names:
            shape = model.kind_shapes().get(kind, {}).get(name, shapes[name])
            size = int(np.prod(shape, dtype=int))
            found = np.zeros(size, np.float64)
            held = np.zeros(size, np.float32)
            for part in (run for run in runs if run.name == name):
                found[part.first : part.first + part.array.size] = part.array
                held[part.first : part.first + part.array.size] = 1
            assert (world.allreduce(held) == 1).all(), (kind, name)
            out[kind, name] = world.allreduce(found).tobytes()
    return out


def names_of(world, runs):
    """Tensors of which any rank has a run, sorted."""
    text = "".join(f"{run.name}\n" for run in runs)
    every = world.allgatherv(np.frombuffer(text.encode(), np.uint8))
    return sorted(set(every.tobytes().decode().split()))


def train(world, which, windows=True, steps=3):
    with shard(world, windows) as model:
        run(world, model, OPTIMIZERS[which], 0, steps)
        return whole(world, model)


@pytest.fixture(scope="module")
def alone():
    with dcp.init("self") as world:
        return {which: train(world, which) for which in OPTIMIZERS}


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 6])
def test_any_world_gives_the_bits_of_one_process(alone, ranks):
    """Promise 3, weights and state; kinds mixed in one model, one of them frozen by a group."""

    def every(world):
        return {which: train(world, which, windows=world.size % 2 == 0) for which in OPTIMIZERS}

    for result in dcp.launch(every, ranks):
        assert result == alone


def test_which_tensors_have_which_state(alone):
    """Row 6 of published faults: 8 bits from 4,096 elements on, by the size over all ranks; AdamW's
    state for the rest."""
    large = {name for name, shape in SHAPES.items() if np.prod(shape, dtype=int) >= 4096}
    small = {name for name, shape in SHAPES.items() if 0 < np.prod(shape, dtype=int) < 4096}
    got: dict[str, set[str]] = {}
    for kind, name in alone["adamw8bit"]:
        got.setdefault(kind, set()).add(name)
    names = ("m", "m_scale", "v", "v_scale")
    assert {kind: got[kind] for kind in got if kind != "weights"} == {
        "adamw.m": small,
        "adamw.v": small,
    } | {f"adamw8bit.{name}": large for name in names}
    mixed = {name for kind, name in alone["mixed"] if kind == "adamw8bit.m"}
    assert mixed == large - {"1.rows"}
    assert not any(name == "2.small" for kind, name in alone["mixed"] if kind != "weights")


def test_scales_have_shapes_of_their_own():
    with dcp.init("self") as world, shard(world) as model:
        model.set_optimizer(EIGHT)
        shapes = model.kind_shapes()
        assert set(shapes) == {"adamw8bit.m_scale", "adamw8bit.v_scale"}
        assert shapes["adamw8bit.m_scale"] == {
            "0.long": (16,), "0.longer": (20,), "1.wide": (33, 1), "1.rows": (21, 2),
            "1.cube": (7, 3, 1), "2.column": (17,),
        }  # fmt: skip
        dtypes = {kind: {r.array.dtype.name for r in runs} for kind, runs in model.shards().items()}
        assert dtypes["adamw8bit.v"] == {"uint8"} and dtypes["adamw8bit.v_scale"] == {"float32"}


@pytest.mark.parametrize("windows", [True, False])
def test_adamw_against_float64(windows):
    with dcp.init("self") as world, shard(world, windows) as model:
        optimizer = AdamW(lr=0.02, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3, clip=None)
        rates = [optimizer.lr_at(step) for step in range(4)]
        assert rates == [0.002, 0.004, 0.006, 0.008]
        for step in range(4):
            for name in SHAPES:
                model.add_gradient(name, values(100 + step, name, spread=2.0))
            model.step(optimizer, lr=0.02)
        for name in SHAPES:
            gradients = [values(100 + s, name, spread=2.0).astype(np.float64) for s in range(4)]
            exact, _, _ = adamw_ref(
                values(1, name).astype(np.float64),
                gradients,
                lr=0.02,
                betas=(0.8, 0.9),
                eps=1e-6,
                weight_decay=0.3 if len(SHAPES[name]) >= 2 else 0.0,
            )
            np.testing.assert_allclose(model.full_tensor(name), exact, rtol=2e-6, atol=1e-6)


HYPER = {"lr": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "decay": 0.1, "grad_scale": 0.5}


@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512"])
@settings(max_examples=15, deadline=None)
@given(
    rows=st.integers(0, 4),
    width=st.sampled_from([1, 2, 15, 16, 17, 255, 256, 257, 300, 512, 700]),
    seed=st.integers(0, 1000),
    t=st.sampled_from([1, 2, 50]),
)
def test_one_8bit_step_from_any_state_against_float64(isa, rows, width, seed, t):
    """Any codes and scales, zeros among them: weights, the nearest codes, exact scales."""
    if isa not in _dcp.cpu_info()["isas"]:
        pytest.skip(f"no {isa}")
    rng = np.random.default_rng(seed)
    blocks = -(-width // 256)
    w = rng.standard_normal((rows, width)).astype(np.float32)
    g = rng.standard_normal((rows, width)) * np.exp(3 * rng.standard_normal((rows, width)))
    g = (g * (rng.random((rows, width)) < 0.8)).astype(np.float32)
    codes = rng.integers(0, 256, (2, rows, width)).astype(np.uint8)
    scales = np.exp(rng.standard_normal((2, rows, blocks))).astype(np.float32)
    scales *= rng.random((2, rows, blocks)) < 0.8
    m0, v0 = decode_8bit(codes[0], scales[0].astype(float), codes[1], scales[1].astype(float))
    got = {"w": w.copy(), "m": codes[0].copy(), "v": codes[1].copy()}
    got |= {"m_scale": scales[0].copy(), "v_scale": scales[1].copy()}
    bias = {"bias1": 1 - 0.9**t, "bias2": 1 - 0.95**t}
    before = _dcp.cpu_info()["isa"]
    _dcp.set_isa(isa)
    try:
        _dcp.kernel_run("adamw8bit", {"rows": rows, "width": width, "g": g, **got, **HYPER, **bias})
    finally:
        _dcp.set_isa(before)
    grad = 0.5 * g.astype(float)
    m1, v1 = 0.9 * m0 + 0.1 * grad, 0.95 * v0 + 0.05 * grad * grad
    step = (m1 / bias["bias1"]) / (np.sqrt(v1 / bias["bias2"]) + 1e-8)
    exact = w - 0.01 * (step + 0.1 * w)
    np.testing.assert_allclose(got["w"], exact, rtol=1e-5, atol=1e-5)
    m, m_scale, v, v_scale = encode_8bit(m1, v1)
    np.testing.assert_allclose(got["m_scale"], m_scale, rtol=1e-5)
    np.testing.assert_allclose(got["v_scale"], v_scale, rtol=1e-5)
    for mine, theirs, mask in ((got["m"], m, 127), (got["v"], v, 255)):
        off = (mine & mask).astype(int) - (theirs & mask)
        assert np.abs(off).max(initial=0) <= 1  # a tie, decided by the last bit
        assert np.count_nonzero(off) <= 2
        assert ((mine | mask) == (theirs | mask))[off == 0].all()


def test_a_coordinate_without_gradient_does_not_move():
    """Case O-03: by 8-bit moments 500 steps at 1e-3; also in blocks of mixed signs."""
    optimizer = AdamW8bit(lr=1e-3, weight_decay=0.0, clip=None)
    gradients = np.zeros(4096, np.float32)
    gradients[[0, 2, 3, 300, 301, 600]] = [1, -1, 1e-3, 1, -1e-2, -1]
    with dcp.init("self") as world, dcp.fully_shard({"w": (4096,)}, world) as model:
        for _ in range(500):
            model.add_gradient("w", gradients)
            model.step(optimizer, lr=1e-3)
        moved = model.full_tensor("w")
        assert set(model.shards()) > {"adamw8bit.m"}
    assert (moved[gradients == 0] == 0).all()
    np.testing.assert_allclose(moved[[0, 2, 300, 600]], [-0.5, 0.5, -0.5, 0.5], rtol=1e-4)
    # what lies low in its block has coarse codes
    np.testing.assert_allclose(moved[[3, 301]], [-0.5, 0.5], rtol=0.1)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), quiet=st.integers(1, 30))
def test_a_gradient_that_ends_does_not_leave_a_large_step(seed, quiet):
    """Case O-03, further: no m outlives its v, so steps stay of the order of lr."""
    rng = np.random.default_rng(seed)
    width = 256
    state = {name: np.zeros((1, width), np.uint8) for name in ("m", "v")}
    state |= {name: np.zeros((1, 1), np.float32) for name in ("m_scale", "v_scale")}
    w = np.zeros((1, width), np.float32)
    size = 10.0 ** rng.uniform(-8, 1, width)
    ends = rng.integers(1, 20, width)
    for t in range(1, 20 + quiet):
        g = np.where(t < ends, size * rng.standard_normal(width), 0).astype(np.float32)[None]
        g[0, 0] = 10.0
        before = w.copy()
        _dcp.kernel_run(
            "adamw8bit",
            {"rows": 1, "width": width, "w": w, "g": g, **state, **HYPER, "decay": 0.0}
            | {"bias1": 1 - 0.9**t, "bias2": 1 - 0.95**t},
        )
        assert np.abs(w - before).max() <= 10 * HYPER["lr"]


@pytest.mark.parametrize("optimizer", [AdamW, AdamW8bit])
@pytest.mark.parametrize("eps", [1e-8, 1e-30])
def test_zero_gradients_from_zero_state_change_nothing(optimizer, eps):
    """Case O-04: the update is exactly 0."""
    with dcp.init("self") as world, shard(world) as model:
        for _ in range(3):
            model.step(optimizer(eps=eps, weight_decay=0.0))
        for name in SHAPES:
            assert model.full_tensor(name).tobytes() == values(1, name).tobytes()


def test_grouping_changes_nothing():
    """Case O-02, row 7: four small parameters and one of 8,192, grouped finely and coarsely."""
    names = ["a", "b", "c", "d", "large"]
    rng = np.random.default_rng(5)
    tensors = {name: rng.standard_normal(60).astype(np.float32) for name in names[:4]}
    tensors["large"] = rng.standard_normal((32, 256)).astype(np.float32)
    gradients = [{n: rng.standard_normal(x.shape) for n, x in tensors.items()} for _ in range(4)]

    def work(world, groups):
        with dcp.fully_shard(tensors, world, groups=groups) as model:
            for each in gradients:
                if world.rank == 0:
                    for name, g in each.items():
                        model.add_gradient(name, g.astype(np.float32))
                model.step(EIGHT)
            kinds = {kind: names_of(world, runs) for kind, runs in model.shards().items()}
            return {name: model.full_tensor(name).tobytes() for name in names}, kinds

    fine, coarse = [[name] for name in names], [names]
    with dcp.init("self") as world:
        results = [work(world, fine), work(world, coarse)]
    results += dcp.launch(work, 3, (fine,))
    assert all(result == results[0] for result in results)
    assert results[0][1]["adamw8bit.m"] == ["large"]
    assert results[0][1]["adamw.m"] == names[:4]


@pytest.mark.parametrize(("saved", "loaded"), [(3, 2), (2, 5), (1, 6)])
def test_state_moves_to_another_number_of_ranks(alone, tmp_path, saved, loaded):
    """Cases F-03, F-04: three steps, saved after two, bitwise those of one process."""

    def save(world, folder):
        with shard(world) as model:
            run(world, model, MIXED, 0, 2)
            checkpoint.save(
                folder,
                step=2,
                world=world,
                shards=model.shards(),
                shapes=model.shapes,
                kind_shapes=model.kind_shapes(),
                state={"update_count": model.update_count},
                config={},
            )

    def load(world, folder):
        with shard(world) as model:
            model.set_optimizer(MIXED)
            state = checkpoint.load(
                checkpoint.latest(folder),
                world=world,
                shards=model.shards(),
                shapes=model.shapes,
                kind_shapes=model.kind_shapes(),
                config={},
            )
            model.weights_changed()
            model.update_count = state["update_count"]
            run(world, model, MIXED, 2, 3)
            return whole(world, model)

    dcp.launch(save, saved, (tmp_path,))
    assert all(result == alone["mixed"] for result in dcp.launch(load, loaded, (tmp_path,)))


# Settings


def test_groups_by_name():
    """The first match holds; one dimension has no decay unless a group says so."""
    tensors = [("embed", (10, 4)), ("0.norm", (4,)), ("0.w", (4, 4)), ("1.norm", (4,))]
    optimizer = AdamW(
        weight_decay=0.3,
        groups=[
            {"match": "1.*", "optimizer": "adamw8bit", "weight_decay": 0.5},
            Group(match="*norm", lr_scale=0.25),
            Group(match="embed", optimizer="none"),
        ],
    )
    rules = optimizer.rules(tensors)
    assert [rule.kind for rule in rules] == ["none", "adamw", "adamw", "adamw8bit"]
    assert [rule.lr_scale for rule in rules] == [1.0, 0.25, 1.0, 1.0]
    assert [rule.weight_decay for rule in rules[1:]] == [0.0, 0.3, 0.5]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"groups": [{"match": "x*"}]}, r"'x\*' names no tensor"),
        ({"groups": [{"mach": "x"}]}, "unknown key 'mach'; did you mean 'match'"),
        ({"groups": [{"lr_scale": 1.0}]}, "needs match"),
        ({"groups": ["x"]}, "must be a Group or a table"),
        ({"groups": [{"match": "w", "optimizer": "adamw9bit"}]}, "did you mean 'adamw8bit'"),
        ({"groups": [{"match": "w", "lr_scale": -1.0}]}, "lr_scale of 'w' = -1.0 must be"),
        ({"groups": [{"match": "w", "weight_decay": float("nan")}]}, "weight_decay of 'w'"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"eps": 0.0}, "eps"),
        ({"lr": 0.0}, "lr"),
        ({"clip": -1.0}, "clip"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(dcp.ArgumentError, match=message):
        AdamW(**settings).rules([("w", (4, 4))])


# A model's optimizer

TINY = dcp.Transformer1D(31, 24, 52, 2, 3, head_dim=8, max_position_embeddings=64)
WIDE = dcp.Transformer1D(96, 64, 100, 1, 2, head_dim=32, max_position_embeddings=64)
TOKENS = np.random.default_rng(3).integers(0, 31, 40).astype(np.int32)


class MicroBatch:
    def __init__(self, tokens, first=0):
        self.tokens = tokens
        self.offsets = np.array([0, len(tokens)], np.int64)
        self.labels = np.append(tokens[1:], -100).astype(np.int32)[: len(tokens)]
        self.weights = None
        self.row_ids = np.arange(first, first + len(tokens), dtype=np.int64)


def model_step(model, optimizer, step, batches=None, lr=0.01):
    mine = batches if batches is not None else [MicroBatch(np.roll(TOKENS, step))]
    return model.step(mine, scale=0.02, trainable=80, lr=lr, step=step, optimizer=optimizer)


MODES = [(True, "step"), (True, "layer"), (False, "step"), (False, "layer")]


def test_accumulation_is_one_step_with_all_micro_batches():
    """Bitwise, in all modes, twice in a row; the loss is that of all."""

    def work(world, windows, reduce):
        batches = [MicroBatch(np.roll(TOKENS, 7 * i + world.rank), 100 * i) for i in range(4)]
        out = []
        for cuts in ([], [1], [1, 1, 3]):
            with dcp.fully_shard(TINY, world, seed=2, windows=windows, reduce=reduce) as model:
                results = []
                for step in range(2):
                    first = 0
                    for cut in cuts:
                        part = batches[first : max(first, cut)]
                        loss = model.accumulate(part, scale=0.02, step=step)
                        first = max(first, cut)
                    result = model_step(model, PLAIN, step, batches[first:])
                    results.append((result.loss, result.grad_norm))
                    assert not cuts or loss < result.loss
                out.append((results, model.parameters_sha256()))
        return out

    def every(world):
        return [work(world, *mode) for mode in MODES]

    for results in dcp.launch(every, 2):
        for result in results:
            assert result[1] == result[0] and result[2] == result[0]


def test_a_step_needs_the_state_of_its_optimizer():
    with dcp.init("self") as world, dcp.fully_shard(TINY, world) as model:
        assert model.optimizer is None and model.state_names() == {}
        assert list(model.shards()) == ["weights"]
        with pytest.raises(dcp.StateError, match="no optimizer is set"):
            model._core.step([MicroBatch(TOKENS)], scale=1.0, trainable_count=1)
    with dcp.init("self") as world, dcp.fully_shard(TINY, world) as model:
        model_step(model, PLAIN, 0)
        model_step(model, AdamW(lr=0.5, betas=(0.8, 0.99)), 1)  # other numbers
        assert model.update_count == 2
        other = AdamW(groups=[Group(match="*mlp*", optimizer="muon")])
        with pytest.raises(dcp.ArgumentError, match=r"has the state of 'adamw'.*set_optimizer"):
            model_step(model, other, 2)
        runs = model.shards()["adamw.m"]
        assert any(run.array.any() for run in runs)
        with pytest.raises(dcp.StateError, match="arrays still look into the optimizer's state"):
            model.set_optimizer(other)
        del runs
        model.set_optimizer(other)
        assert model.update_count == 0 and "muon.momentum" in model.state_names()
        model.set_optimizer(PLAIN)
        assert not any(run.array.any() for run in model.shards()["adamw.m"])
    with dcp.init("self") as world, dcp.fully_shard(TINY, world) as model:
        model.update_count = 3
        with pytest.raises(dcp.StateError, match="no state was loaded"):
            model_step(model, PLAIN, 3)


def test_ranks_must_have_the_same_optimizer():
    def work(world, what):
        with dcp.fully_shard(TINY, world) as model, pytest.raises(dcp.Error) as caught:
            first = AdamW(eps=1e-8 if what != "rules" or world.rank == 0 else 1e-7)
            model.set_optimizer(first)
            second = AdamW(eps=1e-8 if what != "numbers" or world.rank == 0 else 1e-7)
            lr = 0.1 if what != "lr" or world.rank == 1 else 0.2
            model.update_count = 1 if what == "update_count" and world.rank == 1 else 0
            model_step(model, second, 0, lr=lr)
        return type(caught.value).__name__, str(caught.value)

    for what in ("rules", "numbers", "lr", "update_count"):
        for name, message in dcp.launch(work, 3, (what,)):
            assert name == "MismatchError" and "ranks disagree" in message


def test_whole_tensors_and_ranges():
    def work(world):
        with dcp.fully_shard(WIDE, world, seed=1) as model:
            batches = [MicroBatch(TOKENS)]
            model_step(model, EIGHT, 0, batches)
            ranges = {name: model.local_range(name) for name in model.shapes}
            name = "model.embed_tokens.weight"
            same = np.array_equal(model.full_tensor(name), model.parameters()[name])
            scales = model.full_tensor(name, kind="adamw8bit.v_scale")
            codes = model.full_tensor(name, kind="adamw8bit.v")
            with pytest.raises(dcp.ArgumentError, match=r"no 'muon\.momentum', only weights"):
                model.full_tensor(name, kind="muon.momentum")
            with pytest.raises(dcp.ArgumentError, match="'x' is no tensor"):
                model.local_range("x")
            return ranges, same, (scales.shape, scales.dtype.name), (codes.shape, codes.dtype.name)

    results = dcp.launch(work, 3)
    shapes = dict(WIDE.tensors())
    for name, shape in shapes.items():
        parts = sorted(result[0][name] for result in results)
        at = 0
        for first, count in (part for part in parts if part[1]):
            assert first == at
            at += count
        assert at == np.prod(shape)
    assert all(result[1] for result in results)
    assert {result[2] for result in results} == {((96, 1), "float32")}
    assert {result[3] for result in results} == {((96, 64), "uint8")}


def test_state_frozen_later_is_kept_in_any_form(tmp_path):
    """Case F-07: 8-bit state and its scales, on another number of ranks, bitwise."""
    name = "model.embed_tokens.weight"

    def save(world, folder):
        with dcp.fully_shard(WIDE, world, seed=1) as model:
            model_step(model, EIGHT, 0)
            write(world, model, folder, 1)

    def write(world, model, folder, step):
        checkpoint.save(
            folder,
            step=step,
            world=world,
            shards=model.shards(),
            shapes=model.shapes,
            kind_shapes=model.kind_shapes(),
            state={},
            config=WIDE,
        )

    def freeze(world, folder):
        with dcp.fully_shard(WIDE, world, seed=2, frozen=["*embed*"]) as model:
            model.set_optimizer(EIGHT)
            model.keep_state(
                {
                    "adamw8bit.m": {name: (96, 64)},
                    "adamw8bit.v": {name: (96, 64)},
                    "adamw8bit.m_scale": {name: (96, 1)},
                    "adamw8bit.v_scale": {name: (96, 1)},
                },
                dtypes={"adamw8bit.m": "uint8", "adamw8bit.v": "uint8"},
            )
            checkpoint.load(
                checkpoint.latest(folder),
                world=world,
                shards=model.shards(),
                shapes=model.shapes,
                kind_shapes=model.kind_shapes(),
                config=WIDE,
            )
            model.weights_changed()
            model.update_count = 1
            model_step(model, EIGHT, 1)
            write(world, model, folder, 2)

    dcp.launch(save, 2, (tmp_path,))
    dcp.launch(freeze, 3, (tmp_path,))
    before, after = (
        {(kind, of): array.tobytes() for kind, of, array in checkpoint.gather(path)}
        for path in sorted(tmp_path.glob("step-*"))
    )
    kinds = [kind for kind, of in before if of == name]
    assert len(kinds) == 5 and after.keys() == before.keys()
    for kind in kinds:
        assert after[kind, name] == before[kind, name]
    assert after["weights", "lm_head.weight"] != before["weights", "lm_head.weight"]


def test_resuming_with_another_optimizer_is_an_error(tmp_path, capfd):
    """Case F-04: it names both before a rank starts; what a group changes, in the trainer."""

    def train(*more):
        common = ["train", "--preset", "tiny", "--ranks", "1", "--tokens-per-step", "256"]
        common += ["--set", "model.num_hidden_layers=1", "--set", "data.max_length=256"]
        code = cli.run([*common, "--checkpoint", str(tmp_path / "run"), *more])
        return code, capfd.readouterr().err

    assert train("--steps", "1", "--optimizer", "adamw8bit")[0] == 0
    code, message = train("--steps", "2", "--resume", "--optimizer", "adamw")
    assert code == 2 and "state of optimizer 'adamw8bit'" in message and "'adamw'" in message
    groups = 'optimizer.groups=[{match="*embed*", optimizer="none"}]'
    again = ["--steps", "2", "--resume", "--optimizer", "adamw8bit"]
    code, message = train(*again, "--set", groups)
    assert code != 0 and "the checkpoint has adamw8bit.m of model.embed_tokens.weight" in message
    assert train(*again)[0] == 0


@pytest.mark.parametrize("name", ["adamw8bit", "muon", "shampoo"])
def test_the_command_trains_with_every_optimizer(tmp_path, capfd, name):
    """Two ranks, groups from a file, in bf16: the loss falls, and the settings are printed."""
    rng = np.random.default_rng(0)
    words = [bytes(rng.integers(97, 123, rng.integers(2, 9)).tolist()) for _ in range(40)]
    for i in range(8):
        (tmp_path / f"{i}.txt").write_bytes(b" ".join(rng.choice(words, 400)))
    config = tmp_path / "run.toml"
    config.write_text(
        '[optimizer]\nlr = 0.01\nwarmup_steps = 2\n[[optimizer.groups]]\nmatch = "*norm*"\n'
        'lr_scale = 0.5\n[[optimizer.groups]]\nmatch = "*embed*"\noptimizer = "adamw"\n'
    )
    call = ["train", "--preset", "tiny", "--ranks", "2", "--steps", "6", "--data", str(tmp_path)]
    call += ["--tokens-per-step", "512", "--set", "data.max_length=256", "--optimizer", name]
    call += ["--set", "model.num_hidden_layers=1", "--set", "model.compute_dtype=bfloat16"]
    call += ["--config", str(config)]
    assert cli.run([*call, "--print-config"]) == 0
    printed = tomllib.loads(capfd.readouterr().out)
    assert printed["model"]["compute_dtype"] == "bfloat16"
    assert printed["optimizer"]["name"] == name and printed["optimizer"]["lr"] == 0.01
    assert printed["optimizer"]["groups"] == [
        {"match": "*norm*", "lr_scale": 0.5},
        {"match": "*embed*", "optimizer": "adamw"},
    ]
    assert cli.run([*call, "--json", str(tmp_path / "out.json")]) == 0
    losses = [step["loss"] for step in json.loads((tmp_path / "out.json").read_text())["steps"]]
    assert len(losses) == 6 and losses[-1] < losses[0] - 0.5


# Memory


@pytest.mark.parametrize(("windows", "reduce"), [(True, "step"), (False, "layer")])
def test_no_rank_holds_more_than_the_estimate(windows, reduce):
    """Counted <= estimate <= cap for every optimizer, the cap being the estimate itself."""

    def estimate_of(optimizer, ranks):
        cost = dcp.CostModel.for_model(
            WIDE, optimizer=optimizer, windows=windows, reduce=reduce, threads=1
        )
        return cost.memory([len(TOKENS)], 1, world_size=ranks)

    def train_under(world, optimizer):
        estimate = estimate_of(optimizer, world.size)
        _dcp.set_memory_cap(estimate)
        with dcp.fully_shard(WIDE, world, windows=windows, reduce=reduce) as model:
            for step in range(2):
                model_step(model, optimizer, step)
            peak = model.memory()["peak"]
            world.barrier()
        return estimate, peak

    def work(world):
        # the peak of one counts in the next: the smallest first
        made = [cls() for cls in dcp.optim.OPTIMIZERS.values()]
        made.sort(key=lambda optimizer: estimate_of(optimizer, world.size))
        return {optimizer.name: train_under(world, optimizer) for optimizer in made}

    for ranks in (1, 3):
        for result in dcp.launch(work, ranks):
            for name, (estimate, peak) in result.items():
                assert 0 < peak <= estimate, name
