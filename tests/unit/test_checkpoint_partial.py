"""dcp.checkpoint.load: a part of a checkpoint, under other names, for a model that differs."""

from math import prod

import numpy as np
import pytest
from checkpoint_cases import ALONE, CONFIG, STATE, random_values
from checkpoint_cases import load as load_all
from checkpoint_cases import save as save_all

import dcp
from dcp import checkpoint
from dcp.checkpoint import Run

SHAPES = {"a": (3,), "b": (2, 2), "new": (5,)}


def saved(folder, **shapes):
    shapes = shapes or {"a": (3,), "b": (2, 2), "old": (5,)}
    weights = {name: np.arange(prod(shape), dtype=np.float32) + 1 for name, shape in shapes.items()}
    shards = {
        "weights": [Run(name, 0, array) for name, array in weights.items()],
        "adamw.m": [Run("a", 0, weights["a"] + 10)],
    }
    return checkpoint.save(
        folder, step=1, world=ALONE, shards=shards, shapes=shapes, state=STATE, config=CONFIG
    )


def load(path, kinds=("weights",), shapes=None, **changes):
    shapes = shapes or SHAPES
    values = {k: {n: np.zeros(prod(s), np.float32) for n, s in shapes.items()} for k in kinds}
    shards = {k: [Run(n, 0, a) for n, a in v.items()] for k, v in values.items()}
    result = checkpoint.load(path, shards=shards, shapes=shapes, **changes)
    filled = {k: [n for n, a in v.items() if a.any()] for k, v in values.items()}
    assert {k: v for k, v in filled.items() if v} == {k: v for k, v in result.loaded.items() if v}
    assert result == STATE
    return result


def test_strict_by_default(tmp_path):
    path = saved(tmp_path)
    with pytest.raises(dcp.ArgumentError, match="new is missing there"):
        load(path)
    result = load(path, shapes={"a": (3,), "b": (2, 2), "old": (5,)})
    assert result.loaded == {"weights": ["a", "b", "old"]}
    assert not result.missing and not result.unexpected


def test_rename(tmp_path):
    path = saved(tmp_path)
    for rename in ({"old": "new"}, lambda name: "new" if name == "old" else name):
        assert load(path, rename=rename).loaded["weights"] == ["a", "b", "new"]
    with pytest.raises(dcp.ArgumentError, match="'a' and 'old' both become 'a'"):
        load(path, rename={"old": "a"})
    with pytest.raises(dcp.ArgumentError, match="holds no 'odl'"):
        load(path, rename={"odl": "new"})
    # swapped: each name is looked up as it is in the checkpoint
    got = {name: np.zeros(5, np.float32) for name in "xy"}
    both = saved(tmp_path / "both", a=(5,), y=(5,))
    shards = {"weights": [Run(name, 0, array) for name, array in got.items()]}
    checkpoint.load(both, shards=shards, shapes={"x": (5,), "y": (5,)}, rename={"a": "x"})
    assert (got["x"] == got["y"]).all() and got["x"][4] == 5


def test_partial(tmp_path):
    path = saved(tmp_path)
    result = load(path, ("weights", "adamw.m", "muon"), partial=True)
    assert result.loaded == {"weights": ["a", "b"], "adamw.m": ["a"], "muon": []}
    assert result.missing == {
        "weights": ["new"], "adamw.m": ["b", "new"], "muon": ["a", "b", "new"],
    }  # fmt: skip
    assert result.unexpected == {"weights": ["old"]}
    with pytest.raises(dcp.ArgumentError, match=r"b has shape \(2, 2\) there and \(4,\) here"):
        load(path, shapes={"b": (4,)}, partial=True)
    dropped = load(path, partial=True, rename=lambda name: None if name == "a" else name)
    assert dropped.missing == {"weights": ["a", "new"]}


def test_patterns(tmp_path):
    """What does not match may have another shape: a head of another size."""
    path = saved(tmp_path)
    shapes = {"a": (3,), "b": (9, 9), "old": (5,)}
    result = load(path, shapes=shapes, partial=["[ac]*", "o*"])
    assert result.loaded == {"weights": ["a", "old"]}
    assert (result.missing, result.unexpected) == ({"weights": ["b"]},) * 2
    with pytest.raises(dcp.ArgumentError, match=r"'x\*' names no tensor"):
        load(path, partial=["x*"])
    with pytest.raises(dcp.ArgumentError, match="list of patterns"):
        load(path, partial="a")


def test_settings_that_may_differ(tmp_path, caplog):
    """dropout and its like are noticed once; what decides the result is an error by name."""
    config = CONFIG | {"dropout": 0.1, "initializer_range": 0.02}
    path = save_all(tmp_path, random_values(), config=config)
    load_all(path, config=config | {"compute_dtype": "bfloat16"})  # which is new
    assert not caplog.records
    load_all(path, config=config | {"dropout": 0.0})
    assert [record.getMessage() for record in caplog.records] == [
        f"{path}: dropout is 0.1 there and 0.0 here"
    ]
    with pytest.raises(dcp.ArgumentError, match=r"rope_theta is 10000\.0 there and 5\.0 here"):
        load_all(path, config=config | {"rope_theta": 5.0})
    load_all(path, config=config | {"rope_theta": 5.0}, partial=True)
    assert "rope_theta is 10000.0 there" in caplog.text
