"""Tensors, kinds and worlds of the tests of checkpoints."""

import threading
from math import prod

import numpy as np

import dcp
from dcp import checkpoint
from dcp.checkpoint import Run

SHAPES = {
    "embed": (37, 6),
    "scalar": (),
    "norm": (11,),
    "three rows": (3, 8),
    "empty": (0, 4),
    "down_proj.weight": (5, 2, 9),
    "bias/odd [name]": (1,),
}
TRAINED = [name for name in SHAPES if name != "norm"]  # norm is frozen
MATRICES = ["embed", "three rows", "empty"]
KINDS = {
    "weights": list(SHAPES),
    "adamw.m": TRAINED,
    "adamw.v": TRAINED,
    "adamw8bit.m": TRAINED,
    "adamw8bit.m_scale": TRAINED,
    "shampoo.left": MATRICES,
    "shampoo.age": MATRICES,
    "counts": ["norm"],
    "copy": ["embed", "norm"],
}
DTYPES = {
    "adamw8bit.m": np.uint8,
    "shampoo.left": np.float64,
    "shampoo.age": np.int32,
    "counts": np.int64,
    "copy": np.uint16,  # bfloat16
}
KIND_SHAPES = {
    "adamw8bit.m_scale": {name: (-(-prod(SHAPES[name]) // 16),) for name in TRAINED},
    "shampoo.left": {name: (SHAPES[name][0],) * 2 for name in MATRICES},
    "shampoo.age": dict.fromkeys(MATRICES, ()),
    "counts": {"norm": (2, 3)},
}
CONFIG = {"hidden_size": 6, "rope_theta": 1e4, "tie_word_embeddings": True}
STATE = {"step": 12, "loader": {"epoch": 2, "seen": [1, 2, 3]}, "ratio": 0.1, "none": None}


class ThreadWorld:
    """A rank of a world of threads."""

    def __init__(self, rank, size, meet):
        self.rank, self.size, self._meet = rank, size, meet

    def barrier(self):
        try:
            self._meet.wait()
        except threading.BrokenBarrierError:
            raise dcp.AbortedError("aborted") from None

    def abort(self, text):
        self._meet.abort()


def together(size, call):
    """The outcomes of call(world) on all ranks: results or exceptions."""
    meet, outcomes = threading.Barrier(size), [None] * size

    def run(rank):
        try:
            outcomes[rank] = call(ThreadWorld(rank, size, meet))
        except Exception as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


ALONE = ThreadWorld(0, 1, threading.Barrier(1))


def shape_of(kind, name):
    return KIND_SHAPES.get(kind, {}).get(name, SHAPES[name])


def new_values(fill):
    """All tensors of all kinds, flat; `fill(dtype, count)` makes their bytes."""
    return {
        kind: {
            name: fill(np.dtype(DTYPES.get(kind, np.float32)), prod(shape_of(kind, name)))
            for name in names
        }
        for kind, names in KINDS.items()
    }


def random_values(seed=0):
    """Random bits, NaNs among them."""
    rng = np.random.default_rng(seed)
    return new_values(
        lambda dtype, n: np.frombuffer(bytearray(rng.bytes(n * dtype.itemsize)), dtype)
    )


def shards_of(values, rank, size, block_rows=2):
    """The runs of one rank, as views: the layout's, and cuts of their own where a kind has other
    shapes - some ranks hold nothing of it."""
    layout = dcp.plan_layout(SHAPES, ranks=size, block_rows=block_rows)
    shards = {kind: [] for kind in values}
    for kind, tensors in values.items():
        if kind not in KIND_SHAPES:
            runs = [run for run in layout.runs(rank) if run[0] in tensors]
        else:
            runs = []
            for name, array in tensors.items():
                cuts = np.random.default_rng(array.size).integers(0, array.size + 1, size - 1)
                cuts = [0, *sorted(cuts.tolist()), array.size]
                runs.append((name, cuts[rank], cuts[rank + 1] - cuts[rank]))
        for name, first, count in runs:
            shards[kind].append(Run(name, first, tensors[name][first : first + count]))
    return shards


def arguments(**changes):
    return {"shapes": SHAPES, "kind_shapes": KIND_SHAPES, "config": CONFIG} | changes


def save(folder, values, *, size=1, step=12, **changes):
    changes = arguments(state=STATE) | changes
    outcomes = together(
        size,
        lambda world: checkpoint.save(
            folder, step=step, world=world, shards=shards_of(values, world.rank, size), **changes
        ),
    )
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return outcomes[0]


def load(path, *, size=1, **changes):
    """What all ranks of a world of this size load, put together."""
    values = new_values(lambda dtype, count: np.full(count, 7, dtype))
    for rank in range(size):
        state = checkpoint.load(path, shards=shards_of(values, rank, size), **arguments(**changes))
        assert state == STATE
    return values


def same(left, right):
    return left.keys() == right.keys() and all(
        left[kind].keys() == right[kind].keys()
        and all(left[kind][name].tobytes() == right[kind][name].tobytes() for name in left[kind])
        for kind in left
    )
