"""dcp.fully_shard of any tensors: against dense float64 and float32 references, over worlds 1 to 4.

Each launch runs many cases, since a launch takes longer than they do. Case ids are those of the
reports that became tests; rows are those of veScale's table of faults of sharded training.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensor_values import dense, values_of

import dcp
from dcp import _dcp, checkpoint, sharded_part
from dcp.optim import OPTIMIZERS, AdamW
from dcp.sharded_part import rows_of

MODES = list(itertools.product((True, False), ("step", "layer"), ("float32", "bfloat16")))
PLAIN = AdamW(lr=0.05, warmup_steps=0, weight_decay=0.1, clip=1.0)

# case F-02: sizes that do not divide, scalars, empty tensors, fewer rows than ranks
ODD = {
    "a.0.five": (5,),
    "a.0.rows": (96, 3),
    "a.0.scalar": (),
    "a.1.few": (3, 7),
    "a.1.none": (0, 5),
    "a.1.wide": (1, 1000),
    "b.odd": (3201, 2),
    "b.one": (1,),
    "b.cube": (3, 4, 5),
}


def to_bf16(x: np.ndarray) -> np.ndarray:
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def reference_steps(weights, gradients_of_step, optimizer, steps):
    """AdamW of float64 on dense arrays; norms of every step."""
    w = {n: x.astype(np.float64) for n, x in weights.items()}
    m, v = ({n: np.zeros_like(x) for n, x in w.items()} for _ in range(2))
    norms = []
    for t in range(1, steps + 1):
        g = {n: x.astype(np.float64) for n, x in gradients_of_step(t - 1).items()}
        norm = math.sqrt(sum(float((x**2).sum()) for x in g.values()))
        scale = min(1.0, optimizer.clip / norm) if norm else 1.0
        for n in g:
            b1, b2 = optimizer.betas
            m[n] = b1 * m[n] + (1 - b1) * g[n] * scale
            v[n] = b2 * v[n] + (1 - b2) * (g[n] * scale) ** 2
            update = m[n] / (1 - b1**t) / (np.sqrt(v[n] / (1 - b2**t)) + optimizer.eps)
            decay = optimizer.weight_decay if w[n].ndim >= 2 else 0.0
            w[n] -= optimizer.lr * (update + decay * w[n])
        norms.append(norm)
    return w, norms


# What ranks run


def cycle(world, mode, folder):
    """Shard, gather, three steps, save: what every rank saw."""
    windows, reduce, compute = mode
    seen = {}
    model = dcp.fully_shard(
        dense(ODD),
        world,
        windows=windows,
        reduce=reduce,
        compute_dtype=compute,
        block_rows={"b.odd": 7, "*": 1},
    )
    with model:
        whole = model.parameters()
        for name, shape in ODD.items():
            expected = values_of(name, shape)
            got = whole[name]
            assert got.shape == shape and not got.flags.writeable
            wanted = to_bf16(expected) if compute == "bfloat16" else expected
            assert got.tobytes() == wanted.tobytes(), name
            assert model.full_tensor(name).tobytes() == expected.tobytes(), name
        addresses = {name: x.ctypes.data for name, x in whole.items()}
        del whole, got
        order = list(model.groups)
        model.prefetch(order, depth=1)
        held = []
        for step in range(3):
            for group in order:
                views = model.gather(group)
                for name in model.groups[group]:
                    assert views[name].ctypes.data == addresses[name]
                    if world.rank == world.size - 1:  # the same sum in every world
                        model.add_gradient(name, values_of(name, ODD[name], 100 + step))
                del views
                if reduce == "layer":
                    model.reduce(group)
                model.release(group)
            seen[step] = model.step(PLAIN).grad_norm
            held.append(_dcp.memory()["held"])
        assert held[1] == held[2], "rows 18 and 23: a step leaves nothing behind"
        for name in ODD:
            seen[name] = model.full_tensor(name)
        traffic = model.traffic()
        assert traffic["copied_bytes"] == 0
        groups = len(order)
        # row 21: one collective a group, however many tensors there are
        times = 4 if not windows else 3 if compute == "bfloat16" else 0
        assert traffic["gathers"] == times * groups
        assert traffic["reduces"] == 3 * groups
        if folder is None:
            return seen
        path = checkpoint.save(
            folder,
            step=3,
            world=world,
            shards=model.shards(saving=True),
            shapes=model.shapes,
            state={},
            config={},
        )
        assert path.exists()
        gc.collect()
    return seen


def cycles(world, folder):
    saving = {0, 5}
    return [
        cycle(world, mode, f"{folder}/{i}" if i in saving else None) for i, mode in enumerate(MODES)
    ]


def load_odd(world, folder):
    """The weights and moments of a checkpoint, on another world."""
    with dcp.fully_shard(dict(ODD), world) as model:
        model.set_optimizer(PLAIN)
        checkpoint.load(folder, shards=model.shards(), shapes=model.shapes, world=world)
        model.weights_changed()
        found = {name: model.full_tensor(name) for name in ODD}
        gc.collect()
    return found


def uneven(world, mode):
    """row 1: tied, uneven, every row trains; row 20: use that differs between ranks and passes."""
    windows, reduce, _ = mode
    shapes = {"embed": (10, 3), "late.weight": (7, 3), "never": (4,), "head": (10, 3)}
    start = dense({n: s for n, s in shapes.items() if n != "head"}) | {"head": (10, 3)}
    with dcp.fully_shard(
        start, world, tied={"head": "embed"}, windows=windows, reduce=reduce
    ) as model:
        assert model.gradients("head").ctypes.data == model.gradients("embed").ctypes.data
        for batch in range(3):
            model.add_gradient("embed", np.ones((10, 3), np.float32))
            model.add_gradient("head", np.full((10, 3), 2.0, np.float32))
            if batch == 2 and world.rank == 0:  # only here, only now
                model.add_gradient("late.weight", np.ones((7, 3), np.float32))
        norm = model.grad_norm()
        embed = model.full_tensor("head", kind="gradients")
        late = model.full_tensor("late.weight", kind="gradients")
        assert (embed == 9 * world.size).all() and (late == 1).all()
        assert norm == model.grad_norm() == math.sqrt(30 * (9 * world.size) ** 2 + 21)
        assert model.grad_norm(ord=math.inf) == 9 * world.size
        before = model.full_tensor("never")
        model.step(AdamW(lr=0.1, warmup_steps=0, weight_decay=0.0, clip=None))
        moved = model.full_tensor("embed") - start["embed"]
        assert (moved < 0).all(), "a row did not train"
        views = model.parameters()
        assert views["head"].ctypes.data == views["embed"].ctypes.data
        assert (model.full_tensor("head") == model.full_tensor("embed")).all()
        assert (model.full_tensor("never") == before).all()
        assert "head" not in model.shapes and "head" not in model.shards()
        assert sum(run.name == "head" for run in model.shards()["weights"]) == 0
        del views
        gc.collect()


def norms(world):
    """case F-05, rows 4 and 5: 5 of the shards, 13 with a replicated one, whatever the replicas."""
    out = {}
    for replicas in (r for r in (1, 2) if world.size % (2 * r) == 0):
        with dcp.fully_shard(
            {"w": (64, 4), "r": (1,)}, world, replicas=replicas, ignored=["r"]
        ) as m:
            first, count = m.local_range("w")
            assert count == 256 * replicas // world.size
            place = world.rank % (world.size // replicas)
            if world.size == 2 * replicas:
                gradient = m.gradients("w").reshape(-1)
                gradient[first] = (3.0, 4.0)[place] / replicas
                del gradient
            twelve = np.array([12.0], np.float32)
            out[replicas] = (
                m.grad_norm(),
                m.grad_norm(replicated=[twelve]),
                m.grad_norm(ord=math.inf, replicated=[twelve]),
                m.clip(6.5, replicated=[twelve]),
                m.grad_norm(),
                float(twelve[0]),
            )
            assert m.gradients_finite()
            gc.collect()
    return out


def replicated_update(world):
    """Hybrid sharding: 2 copies x 2 shards give what 4 shards give, the same on all ranks."""
    results = []
    for replicas in (1, 2, 4):
        for windows in (True, False):
            with dcp.fully_shard(dense(ODD), world, replicas=replicas, windows=windows) as model:
                for step in range(2):
                    for name, shape in ODD.items():
                        # exact in any order of sums
                        whole = np.round(8 * values_of(name, shape, step + world.rank))
                        model.add_gradient(name, whole.astype(np.float32))
                    model.step(PLAIN)
                full = {name: model.full_tensor(name) for name in ODD}
                gc.collect()
            mine = np.concatenate([x.reshape(-1) for x in full.values()])
            assert (world.allreduce(mine, "max") == world.allreduce(mine, "min")).all()
            results.append(mine)
    assert all((other == results[0]).all() for other in results)


def meta(world):
    """row 3: a rank without elements, and nothing whole: init is asked for own runs only."""
    asked = []

    def init(name, first, count):
        asked.append((name, first, count))
        return values_of(name, (1 << 18,) if name == "large" else (50,))[first : first + count]

    shapes = {"thin": (1, 50), "large": (1 << 9, 1 << 9)}
    before = _dcp.memory()["held"]
    with dcp.fully_shard(shapes, world, init=init, windows=False, reduce="layer") as model:
        held = _dcp.memory()["held"] - before
        # weights and sums of this rank's shard; the rest of the model has addresses only
        assert held < 2.2 * 4 * (1 << 18) / world.size + 350_000, held
        assert {(n, f, c) for n, f, c in asked} == {
            (n, *model.local_range(n)) for n in shapes if model.local_range(n)[1]
        }
        assert sum(c for n, _, c in asked if n == "large") < (1 << 18) or world.size == 1
        assert (model.full_tensor("large").reshape(-1) == values_of("large", (1 << 18,))).all()
        model.gather("thin")
        peak = _dcp.memory()["held"]
        model.release("thin")
        assert _dcp.memory()["held"] < peak
        gc.collect()


def frozen(world, folder):
    """case F-07, row 19: frozen and trained in one group; one is frozen later."""
    start = dense({"l.0.a": (40, 30), "l.0.b": (40, 30), "l.0.c": (9,)})

    def train(model, steps):
        for step in range(steps):
            for name in set(start) - model.frozen:
                model.add_gradient(name, values_of(name, start[name].shape, step))
            model.step(PLAIN)

    def save(model, folder, step):
        checkpoint.save(
            folder,
            step=step,
            world=world,
            shards=model.shards(saving=True),
            shapes=model.shapes,
            state={},
            config={},
        )

    with dcp.fully_shard(start, world, frozen=["*.a"]) as model:
        train(model, 3)
        assert model.full_tensor("l.0.a").tobytes() == start["l.0.a"].tobytes()
        names = {run.name for run in model.shards().get("adamw.m", [])}
        assert "l.0.a" not in names
        with pytest.raises(dcp.StateError, match="frozen"):
            model.gradients("l.0.a")
        before = {n: model.full_tensor(n) for n in start}
        save(model, folder, 3)
        gc.collect()
    with dcp.fully_shard(
        dict.fromkeys(start, ()) | _shapes(start), world, frozen=["*.a", "*.b"]
    ) as m:
        m.set_optimizer(PLAIN)
        m.keep_state({kind: {"l.0.b": (40, 30)} for kind in ("adamw.m", "adamw.v")})
        checkpoint.load(folder, shards=m.shards(), shapes=m.shapes, world=world)
        m.update_count = 3
        m.weights_changed()
        train(m, 2)
        assert m.full_tensor("l.0.b").tobytes() == before["l.0.b"].tobytes()
        assert m.full_tensor("l.0.c").tobytes() != before["l.0.c"].tobytes()
        save(m, folder, 5)
        gc.collect()


def _shapes(tensors):
    return {name: x.shape for name, x in tensors.items()}


def memory_of_frozen(world):
    """row 19: frozen tensors have no gradients and no state."""
    held = []
    for patterns in ([], ["big"]):
        before = _dcp.memory()["held"]
        with dcp.fully_shard({"big": (500, 100), "small": (5,)}, world, frozen=patterns) as model:
            model.step(PLAIN)
            held.append(_dcp.memory()["held"] - before)
            gc.collect()
    assert held[1] < held[0] - 4 * 50_000


def every_optimizer(world):
    """Weights and states after 3 steps, from gradients that are the same in every world."""
    shapes = {
        "m": (70, 65),
        "l.0.w": (64, 64),
        "l.0.b": (70,),
        "cube": (3, 20, 10),
        "s": (),
        "e": (0, 3),
    }
    out = {}
    for kind, optimizer in OPTIMIZERS.items():
        for windows in (True, False):
            settings = optimizer(lr=0.01, warmup_steps=0)
            with dcp.fully_shard(
                dense(shapes), world, windows=windows, block_rows={"m": 4}
            ) as model:
                for step in range(3):
                    if world.rank == 0:
                        for name, shape in shapes.items():
                            model.add_gradient(name, values_of(name, shape, 20 + step))
                    model.step(settings)
                for name in shapes:
                    out[kind, windows, name] = model.full_tensor(name).tobytes()
                gc.collect()
    return out


def resumed(world, folder, load):
    """Every optimizer: two steps and a save, or a load; then a third step."""
    shapes = {"m": (70, 65), "l.0.w": (64, 64), "l.0.b": (70,)}
    out = {}
    for kind, optimizer in OPTIMIZERS.items():
        settings = optimizer(lr=0.01, warmup_steps=0)
        with dcp.fully_shard(dense(shapes), world) as model:
            if load:
                model.set_optimizer(settings)
                checkpoint.load(
                    f"{folder}/{kind}",
                    shards=model.shards(),
                    shapes=model.shapes,
                    kind_shapes=model.kind_shapes(),
                    world=world,
                )
                model.update_count = 2
                model.weights_changed()
            for step in range(2 if load else 0, 3):
                if step == 2 and not load:
                    checkpoint.save(
                        f"{folder}/{kind}",
                        step=2,
                        world=world,
                        shards=model.shards(saving=True),
                        shapes=model.shapes,
                        kind_shapes=model.kind_shapes(),
                        state={},
                        config={},
                    )
                if world.rank == 0:
                    for name, shape in shapes.items():
                        model.add_gradient(name, values_of(name, shape, 20 + step))
                model.step(settings)
            for name in shapes:
                out[kind, name] = model.full_tensor(name).tobytes()
            gc.collect()
    return out


def disagreements(world):
    """Ranks that differ are told, before anything is made."""
    out = []
    for tensors, options in (
        ({"w": (4 + world.rank, 2)}, {}),
        ({"w": (4, 2)}, {"block_rows": 1 + world.rank}),
        ({"w": (4, 2)}, {"windows": world.rank == 0}),
    ):
        try:
            dcp.fully_shard(tensors, world, **options)
        except dcp.MismatchError as error:
            out.append(str(error))
    return out


def other_orders(world):
    with dcp.fully_shard({"l.0.w": (8,), "l.1.w": (8,)}, world, windows=False) as model:
        model.prefetch(["l.0", "l.1"])
        with pytest.raises(dcp.StateError, match="not the next"):
            model.gather("l.1")
        with pytest.raises(dcp.MismatchError, match="order"):
            model.prefetch(["l.0", "l.1"][:: 1 if world.rank == 0 else -1])
        gc.collect()


def everything_on_two(world, folder):
    for mode in MODES:
        uneven(world, mode)
    meta(world)
    frozen(world, folder)
    memory_of_frozen(world)
    states = resumed(world, f"{folder}-states", False)
    return norms(world), disagreements(world), every_optimizer(world), states


def two_meshes(world):
    """row 5: dense tensors over all ranks, experts over pairs; one norm."""
    pair = world.group([world.rank // 2 * 2, world.rank // 2 * 2 + 1])
    with (
        dcp.fully_shard({"w": (8, 8)}, world) as dense_part,
        dcp.fully_shard({"w": (64, 4)}, pair) as experts,
    ):
        if world.rank == 3:
            dense_part.gradients("w")[0, 0] = 3.0
        if pair.rank == 1:
            experts.gradients("w")[5, 1] = (4.0, 12.0)[world.rank // 2]
        own = experts.grad_norm()
        assert own == (4.0, 12.0)[world.rank // 2]
        # every pair's once
        squares = world.allreduce(np.array([own**2 / pair.size]))
        assert math.hypot(dense_part.grad_norm(), math.sqrt(float(squares[0]))) == 13.0
        gc.collect()
    pair.close()


def rows_apart(world, mode):
    """A group whose rows do not go together has a buffer a row length; the bits are the same."""
    windows, reduce, compute = mode
    shapes = {"0.a": (19, 480), "0.b": (19, 1120), "0.norm": (1120,), "1.w": (8, 16)}
    found = []
    for least in (1 << 40, 0):  # elements that a further buffer must be worth
        sharded_part.SPLIT_LEAST = least
        with dcp.fully_shard(
            dense(shapes), world, windows=windows, reduce=reduce, compute_dtype=compute
        ) as model:
            assert list(model.groups) == ["0", "1"]
            assert len(model._trained.groups[0]) == (1 if least else 2)
            model.prefetch(["0", "1"])
            for group, names in model.groups.items():
                views = model.gather(group)
                for name in names:
                    expected = values_of(name, shapes[name])
                    wanted = to_bf16(expected) if compute == "bfloat16" else expected
                    assert views[name].tobytes() == wanted.tobytes(), name
                    model.add_gradient(name, values_of(name, shapes[name], 1 + world.rank))
                del views
                if reduce == "layer":
                    model.reduce(group)
                model.release(group)
            norm = model.step(PLAIN).grad_norm
            held = sum(model._trained.layout.shards())  # of a rank, padding included
            found.append((norm, {name: model.full_tensor(name) for name in shapes}, held))
            gc.collect()
    (norm, weights, whole), (split_norm, split_weights, split) = found
    assert norm == split_norm and split < whole
    assert all(np.array_equal(weights[name], split_weights[name]) for name in shapes)


def everything_on_four(world):
    for mode in MODES:
        rows_apart(world, mode)
    two_meshes(world)
    replicated_update(world)
    return norms(world)


def everything_on_three(world, folder):
    for mode in MODES:
        uneven(world, mode)
    meta(world)
    return every_optimizer(world), resumed(world, folder, False)


# Tests


def test_odd_sizes_survive_the_cycle_in_every_world(tmp_path: Path) -> None:
    """case F-02, in all modes: bitwise equal over worlds and modes, and close to float64."""
    expected, reference_norms = reference_steps(
        dense(ODD), lambda step: dense(ODD, 100 + step), PLAIN, 3
    )
    first = None
    for world in (1, 2, 4):
        for rank in dcp.launch(cycles, world, (str(tmp_path / str(world)),)):
            for seen in rank:
                first = first or seen
                for key, value in first.items():
                    assert np.array_equal(seen[key], value), (world, key)
    assert first is not None
    for step, norm in enumerate(reference_norms):
        assert abs(first[step] / norm - 1) < 1e-6
    for name, value in expected.items():
        assert np.allclose(first[name], value, rtol=1e-5, atol=1e-6), name
    # what 4 ranks saved, others load
    with dcp.init("self") as world:
        loaded = load_odd(world, str(tmp_path / "4" / "0"))
    assert all(np.array_equal(loaded[name], first[name]) for name in ODD)
    assert all(
        np.array_equal(rank[name], first[name])
        for rank in dcp.launch(load_odd, 3, (str(tmp_path / "2" / "5"),))
        for name in ODD
    )


@functools.cache
def alone():
    with dcp.init("self") as world:
        updated = every_optimizer(world)
    assert len({updated[kind, True, "l.0.w"] for kind in OPTIMIZERS}) == len(OPTIMIZERS)
    return updated


def test_two_ranks(tmp_path: Path) -> None:
    results = dcp.launch(everything_on_two, 2, (str(tmp_path / "frozen"),))
    with dcp.init("self") as world:
        continued = resumed(world, f"{tmp_path}/frozen-states", True)
    for known, messages, updated, states in results:
        assert updated == alone() and states == continued
        assert known[1][:3] == (5.0, 13.0, 12.0)
        assert known[1][3] == 13.0 and known[1][4:] == (2.5, 6.0)
        assert len(messages) == 3 and all("disagree" in message for message in messages)
    # the state of what was frozen later is still what it was
    states = []
    for step in (3, 5):
        found = {}
        with dcp.init("self") as world, dcp.fully_shard({"l.0.b": (40, 30)}, world) as model:
            model.set_optimizer(PLAIN)
            shapes = {"l.0.a": (40, 30), "l.0.b": (40, 30), "l.0.c": (9,)}
            runs = {k: v for k, v in model.shards().items() if k != "weights"}
            checkpoint.load(tmp_path / f"frozen/step-{step:08d}", shards=runs, shapes=shapes)
            found = {kind: run[0].array.copy() for kind, run in runs.items()}
            del runs
            gc.collect()
        states.append(found)
    assert states[0].keys() == {"adamw.m", "adamw.v"}
    for kind, before in states[0].items():
        assert before.any() and np.array_equal(states[1][kind], before)


def test_three_ranks(tmp_path: Path) -> None:
    """case F-03: what three ranks saved goes on on two and on five, with every optimizer."""
    results = dcp.launch(everything_on_three, 3, (str(tmp_path),))
    assert all(updated == alone() for updated, _ in results)
    for ranks in (2, 5):
        assert all(s == results[0][1] for s in dcp.launch(resumed, ranks, (str(tmp_path), True)))


def test_four_ranks() -> None:
    for known in dcp.launch(everything_on_four, 4):
        assert known[2][:3] == (5.0, 13.0, 12.0), "replicas count once"


def test_orders_must_agree() -> None:
    dcp.launch(other_orders, 2)


@st.composite
def tensor_sets(draw: st.DrawFn) -> tuple[dict[str, tuple[int, ...]], dict[str, int | str]]:
    shapes = {}
    for i in range(draw(st.integers(1, 6))):
        layer = draw(st.sampled_from(["embed", "l.0.x", "l.1.x", "out"]))
        shapes[f"{layer}{i}.w"] = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    blocks = {name: draw(st.sampled_from([1, 2, 5, "whole"])) for name in shapes}
    return shapes, blocks


@given(tensor_sets(), st.sampled_from(["layer", 1, 200, 10_000]), st.integers(1, 5))
@settings(max_examples=50, deadline=None)
def test_any_shapes(sets, groups, ranks) -> None:
    """Alone: gathers, gradients, full tensors; for any number of ranks: who owns what."""
    shapes, blocks = sets
    with (
        dcp.init("self") as world,
        dcp.fully_shard(dense(shapes), world, groups=groups, block_rows=blocks) as model,
    ):
        assert sorted(itertools.chain(*model.groups.values())) == sorted(shapes)
        for group, names in model.groups.items():
            assert set(model.gather(group)) == set(names)
        for name, shape in shapes.items():
            model.gradients(name)[...] = values_of(name, shape, 1)
        norm = model.grad_norm()
        total = sum(float((x.astype(np.float64) ** 2).sum()) for x in dense(shapes, 1).values())
        assert math.isclose(norm, math.sqrt(total), rel_tol=1e-12)
        for name, shape in shapes.items():
            assert np.array_equal(model.full_tensor(name), values_of(name, shape))
            assert np.array_equal(
                model.full_tensor(name, kind="gradients"), values_of(name, shape, 1)
            )
        part = model._trained
        table = [(*rows_of(t.shape), part.buffer_of[t.name], t.block) for t in part.tensors]
    layout = _dcp.DBufferLayout(np.array(table, np.int64).reshape(-1, 4), ranks, 1, 0)
    owned = {i: [] for i in range(len(table))}
    for rank in range(ranks):
        for i, first, count in layout.runs(rank):
            owned[i].append((first, count))
    for i, (rows, width, _, block) in enumerate(table):
        end = 0
        for first, count in owned[i]:
            assert first == end and count > 0
            assert first % max(1, block or width) == 0, "a block was cut"
            end = first + count
        assert end == rows * width


@pytest.mark.parametrize(
    "shape, ranks", [((5,), 2), ((96,), 5), ((32001,), 8), ((), 4), ((3, 2), 8), ((0,), 3)]
)
def test_sizes_that_do_not_divide(shape, ranks) -> None:
    """case F-02: every element on one rank, also where some ranks have none."""
    rows, width = rows_of(shape)
    layout = _dcp.DBufferLayout(np.array([[rows, width, 0, 0]], np.int64), ranks, 1, 0)
    owned = [run for rank in range(ranks) for run in layout.runs(rank)]
    assert sum(count for _, _, count in owned) == math.prod(shape)
    ends = np.cumsum([0, *(count for _, _, count in owned)])
    assert [first for _, first, _ in owned] == ends[:-1].tolist()
    assert layout.shards()[0] % 16 == 0


def test_gathering_ahead_takes_and_gives_back_memory() -> None:
    shapes = {f"l.{i}.w": (64, 64) for i in range(6)}
    with (
        dcp.init("self") as world,
        dcp.fully_shard(dense(shapes), world, windows=False, compute_dtype="bfloat16") as model,
    ):
        start = _dcp.memory()["held"]
        order = list(model.groups)
        model.prefetch(order + order[::-1], depth=2)
        for _ in range(2):
            for group in order + order[::-1]:
                views = model.gather(group)
                name = f"{group}.w"
                assert np.array_equal(views[name], to_bf16(values_of(name, (64, 64))))
                held = _dcp.memory()["held"] - start
                assert 2 * 64 * 64 <= held <= 3 * (2 * 64 * 64 + 4096) + 20_000
                model.release(group)
                del views
            model.weights_changed()
        model.prefetch([])
        kept = model.gather("l.3")["l.3.w"]
        model.release("l.3")
        assert not kept.any(), "memory that was given back reads as zeros"
        model.gather("l.3")
        assert np.array_equal(kept, to_bf16(values_of("l.3.w", (64, 64)))), "the same address"
        del kept


def test_groups_and_names() -> None:
    shapes = {"embed": (4,), "h.0.w": (4, 4), "h.0.b": (4,), "h.1.w": (4, 4), "out": (4,)}
    with dcp.init("self") as world:
        with dcp.fully_shard(shapes, world) as model:
            assert list(model.groups) == ["embed", "h.0", "h.1", "out"]
            assert "5 tensors" in repr(model) and model.local_range("h.0.w") == (0, 16)
        with dcp.fully_shard(shapes, world, groups=[["h.*"], ["embed", "out"]]) as model:
            assert model.groups == {"embed": ["embed", "out"], "h.0.w": ["h.0.w", "h.0.b", "h.1.w"]}
            assert set(model.gather(0)) == {"embed", "out"}
        with dcp.fully_shard(list(shapes.items()), world, groups=80) as model:
            assert [len(names) for names in model.groups.values()] == [2, 2, 1]


def test_ignored_tensors_are_left_alone() -> None:
    mine = np.ones(3, np.float32)
    with (
        dcp.init("self") as world,
        dcp.fully_shard(
            {"w": (4,), "rope": mine, "meta": (2,)}, world, ignored=["rope", "meta"]
        ) as m,
    ):
        assert m.parameters()["rope"] is mine and "rope" not in m.shapes
        assert m.parameters()["meta"].tolist() == [0, 0]
        with pytest.raises(dcp.ArgumentError, match="ignored"):
            m.gradients("rope")


def test_values_by_functions_and_dlpack() -> None:
    class Foreign:
        def __init__(self, array):
            self.array = array

        def __dlpack__(self, **options):
            return self.array.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

    own = np.arange(6, dtype=np.float32).reshape(2, 3)
    tensors = {
        "own": ((2, 2), lambda name, first, count: np.arange(first, first + count, dtype="f4")),
        "shared": (3,),
        "foreign": Foreign(own),
    }
    with (
        dcp.init("self") as world,
        dcp.fully_shard(tensors, world, init=lambda name, a, n: np.full(n, 7, "f4")) as model,
    ):
        assert model.full_tensor("own").tolist() == [[0, 1], [2, 3]]
        assert model.full_tensor("shared").tolist() == [7, 7, 7]
        assert np.array_equal(model.full_tensor("foreign"), own)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_with_torch_without_a_copy() -> None:
    import torch

    weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    with dcp.init("self") as world, dcp.fully_shard([("w", weight)], world) as model:
        view, gradient = model.gather(0)["w"], model.gradients("w")
        leaf = torch.from_dlpack(view).requires_grad_()
        leaf.grad = torch.from_dlpack(gradient)
        (leaf * 3).sum().backward()
        assert leaf.data_ptr() == view.ctypes.data and (gradient == 3).all()
        del leaf, view, gradient
        gc.collect()
