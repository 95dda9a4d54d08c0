"""Sharded tensors that are asked for what cannot be: agreement, state, memory, wrong arguments."""

from __future__ import annotations

import doctest
import gc

import numpy as np
import pytest
from tensor_values import dense, values_of

import dcp
from dcp import _dcp, sharded_tensors, tensor_list
from dcp.layout import Tile
from dcp.optim import OPTIMIZERS, AdamW
from dcp.sharded_tensors import ShardedTensors

PLAIN = AdamW(lr=0.05, warmup_steps=0, weight_decay=0.1, clip=1.0)


def test_a_step_needs_the_state_of_its_optimizer() -> None:
    """case F-04: state that is missing, or another optimizer's, is an error, never silently new."""
    adamw8bit, muon = (OPTIMIZERS[name](lr=0.01) for name in ("adamw8bit", "muon"))
    with dcp.init("self") as world, dcp.fully_shard({"w": (64, 80), "b": (9,)}, world) as model:
        model.update_count = 2
        with pytest.raises(dcp.StateError, match="no state was loaded"):
            model.step(adamw8bit)
        model.update_count = 0
        model.add_gradient("w", np.ones((64, 80), np.float32))
        assert (model.full_tensor("w", kind="gradients") == 1).all()  # reduced on the way
        model.step(adamw8bit)
        codes = model.full_tensor("w", kind="adamw8bit.m")
        assert codes.shape == (64, 80) and codes.dtype == np.uint8 and codes.all()
        assert model.full_tensor("w", kind="adamw8bit.m_scale").shape == (64, 1)
        assert (model.full_tensor("b", kind="adamw.m") == 0).all()
        with pytest.raises(dcp.ArgumentError, match=r"'w' has no 'adamw.m', only weights"):
            model.full_tensor("w", kind="adamw.m")
        with pytest.raises(dcp.ArgumentError, match="'muon' needs another state than 'adamw8bit'"):
            model.step(muon)
        assert model.update_count == 1
        model.set_optimizer(muon)
        assert model.update_count == 0
        model.step(muon)
        assert "muon.momentum" in model.shards() and "adamw8bit.m" not in model.shards()


def states_of_two(world):
    with dcp.fully_shard({"w": (64, 80), "one": (1, 80)}, world) as model:
        if world.rank == 0:
            for name, shape in model.shapes.items():
                model.add_gradient(name, values_of(name, shape))
        model.step(OPTIMIZERS["adamw8bit"](lr=0.01))
        of = {"w": ("adamw8bit.v", "adamw8bit.v_scale"), "one": ("adamw.v",)}
        found = {k: model.full_tensor(name, kind=k).tobytes() for name in of for k in of[name]}
        messages = []
        for options in (
            {"lr": 0.1 * (1 + world.rank)},
            {"nonfinite": ("stop", "skip")[world.rank]},
        ):
            with pytest.raises(dcp.MismatchError, match="ranks disagree before an update") as error:
                model.step(model._settings, **options)
            messages.append(str(error.value))
        assert "1, 0.1 and 1 on rank 0, 1, 0.2 and 1 on rank 1" in messages[0]
        return found, messages


def test_ranks_that_would_update_differently_are_told() -> None:
    """Promise 4; and the whole state of a tensor, also where a rank holds none of it."""
    first, second = dcp.launch(states_of_two, 2)
    assert first == second
    with dcp.init("self") as world, dcp.fully_shard({"w": (64, 80), "one": (1, 80)}, world) as m:
        for name, shape in m.shapes.items():
            m.add_gradient(name, values_of(name, shape))
        m.step(OPTIMIZERS["adamw8bit"](lr=0.01))
        for name, kind in (("w", "adamw8bit.v"), ("w", "adamw8bit.v_scale"), ("one", "adamw.v")):
            assert m.full_tensor(name, kind=kind).tobytes() == first[0][kind]


def too_little_memory(world, windows):
    if world.rank == 1:
        _dcp.set_memory_cap(_dcp.memory()["held"] + 100_000)
    with pytest.raises(dcp.Error) as error:
        dcp.fully_shard({"a": (512, 512)}, world, windows=windows)
    return type(error.value).__name__, str(error.value)


@pytest.mark.parametrize("windows", [True, False])
def test_a_rank_without_memory_ends_all(windows) -> None:
    """Promise 4: the others get its message, and do not wait for it."""
    (other, message), (own, reason) = dcp.launch(too_little_memory, 2, (windows,))
    assert (other, own) == ("AbortedError", "OutOfMemoryError")
    assert "rank 1" in message and reason in message


def test_not_finite_gradients() -> None:
    with dcp.init("self") as world, dcp.fully_shard(dense({"w": (4, 4)}), world) as model:
        model.gradients("w")[1, 1] = np.inf
        with pytest.raises(dcp.NumericError, match="norm"):
            model.clip(1.0)
        assert not model.gradients_finite()
        assert model.step(PLAIN, nonfinite="skip").skipped and model.update_count == 0
        assert np.array_equal(model.full_tensor("w"), values_of("w", (4, 4)))
        model.gradients("w")[0, 0] = np.nan
        with pytest.raises(dcp.NumericError, match="update 0"):
            model.step(PLAIN)


BAD = [
    ({}, {}, "there are none"),
    ([("a", (2,)), ("a", (2,))], {}, "twice"),
    ([("a", (2,), 3)], {}, "must be .name, value."),
    ({"": (2,)}, {}, "not empty"),
    ({"a": (2, -1)}, {}, "negative"),
    ({"a": (2**40, 2**40)}, {}, "64 bits"),
    ({"a": (2**62,)}, {}, "64 bits"),
    ({"a": (4, 2)}, {"block_rows": 0}, "block_rows = 0"),
    ({"a": (4, 2)}, {"block_rows": {"b": 2}}, "names no tensor"),
    ({"a": (4, 2)}, {"block_rows": {"a": "all"}}, 'or "whole"'),
    ({"a": (4,)}, {"frozen": ["b*"]}, "frozen: 'b.'"),
    ({"a": (4,)}, {"frozen": "a"}, "must be a list"),
    ({"a": (4,)}, {"groups": "x"}, "groups"),
    ({"a": (4,), "b": (4,)}, {"groups": [["a"]]}, "'b' is in none"),
    ({"a": (4,)}, {"groups": [["a"], ["*"]]}, "two groups"),
    ({"a": (4,)}, {"groups": 0}, "at least 1"),
    ({"a": (4,), "b": (5,)}, {"tied": {"b": "a"}}, r"shape \(5,\), 'a' \(4,\)"),
    ({"a": (4,), "b": (4,)}, {"tied": {"b": "a", "a": "b"}}, "circle"),
    ({"a": (4,)}, {"tied": {"a": "a"}}, "circle|itself"),
    ({"a": (4,)}, {"tied": {"b": "a"}}, "'b' names no tensor"),
    ({"a": (4,)}, {"replicas": 2}, "divide"),
    ({"a": (4,)}, {"compute_dtype": "float16"}, "float16"),
    ({"a": (4,)}, {"reduce": "never"}, "never"),
    ({"a": (4,)}, {"order": "random"}, "random"),
    ({"a": np.zeros((4, 4), np.float32).T[1:]}, {}, "contiguous"),
]


@pytest.mark.parametrize("tensors, options, message", BAD)
def test_bad_arguments_are_named(tensors, options, message) -> None:
    with dcp.init("self") as world, pytest.raises(dcp.ArgumentError, match=message):
        dcp.fully_shard(tensors, world, **options)


def test_other_errors() -> None:
    ones = np.ones(4, np.float32)
    with dcp.init("self") as world:
        with pytest.raises(dcp.DTypeError, match="float64"):
            dcp.fully_shard({"a": np.ones(4)}, world)
        tiles = {"w": (6, 4)}
        with dcp.fully_shard(tiles, world, block_rows=Tile(4, 2)) as model:
            assert model.local_range("w") == (0, 24)
        with pytest.raises(dcp.UnsupportedError, match="tile by tile"):
            dcp.fully_shard(tiles, world, block_rows=Tile(4, 2, order="block"))
        with pytest.raises(dcp.UnsupportedError, match="bfloat16"):
            dcp.fully_shard({"a": (4,)}, world, reduce_dtype="bfloat16")
        with pytest.raises(dcp.ArgumentError, match="differ"):  # case F-06: copies that diverged
            dcp.fully_shard({"a": ones, "b": 2 * ones}, world, tied={"b": "a"})
        with pytest.raises(dcp.ArgumentError, match="gave 3 elements"):
            dcp.fully_shard({"a": (4,)}, world, init=lambda *_: ones[:3])
        with pytest.raises(TypeError, match="groups"):
            dcp.fully_shard(dcp.Transformer1D.preset("tiny"), world, groups="layer")
        model = dcp.fully_shard({"a": ones}, world)
        assert isinstance(model, ShardedTensors)
        for call, match in (
            (lambda: model.gather("x"), "must be one of"),
            (lambda: model.gather(1), "must lie in"),
            (lambda: model.gradients("x"), "no tensor"),
            (lambda: model.add_gradient("a", ones[:2]), "shape"),
            (lambda: model.grad_norm(ord=1), "ord = 1"),
            (lambda: model.clip(0), "max_norm"),
            (lambda: model.full_tensor("a", kind="x"), "kind"),
            (lambda: model.prefetch([0], depth=-1), "depth"),
        ):
            with pytest.raises(dcp.ArgumentError, match=match):
                call()
        model.reduce()
        for call, match in (
            (model.reduce, "already"),
            (lambda: model.gradients("a"), "zero_gradients"),
            (lambda: model.reduce(0), "layer"),
        ):
            with pytest.raises(dcp.StateError, match=match):
                call()
        model.zero_gradients()
        view = model.gradients("a")
        with pytest.raises(dcp.StateError, match="arrays still look"):
            model.close()
        del view
        model.close()
        for call in (model.parameters, lambda: model.gradients("a"), model.reduce):
            with pytest.raises(dcp.StateError, match="closed"):
                call()
        other = dcp.fully_shard({"a": ones}, world)
    with pytest.raises(dcp.StateError, match="world is closed"):
        other.step(PLAIN)


def test_a_world_that_is_closed_first() -> None:
    with dcp.init("self") as world:
        model = dcp.fully_shard({"a": (4,)}, world, windows=False)
        model.prefetch([0])
    del model
    gc.collect()


@pytest.mark.parametrize("module", [sharded_tensors, tensor_list])
def test_examples(module) -> None:
    assert doctest.testmod(module).failed == 0
