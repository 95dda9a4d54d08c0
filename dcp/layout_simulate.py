"""Memory and traffic of one rank, reckoned from shapes: dcp, FSDP2, Megatron-FSDP and ZeRO-3.

All shard weights, gradients and optimizer state over all ranks, hold main weights in fp32 and
compute in `compute_bytes` (2: bf16). What is counted are the bytes that follow from shapes, at the
peak in the backward pass: not activations, the runtime, the allocator's slack, or an optimizer's
scratch. E: elements of a tensor or group, P: the same padded for all m ranks, S = P / m.

=================  ==============  ===================  ==================  ========================
bytes              dcp             FSDP2                Megatron-FSDP       ZeRO-3
=================  ==============  ===================  ==================  ========================
weights            4 S             4 S                  4 S + c S           4 S + c S
compute            c P of the      c E of the largest   c P of the largest  c times 1e9 elements, or
                   largest group   layer, c E outside   layer, c P outside  the largest one; small
                                   layers               layers              ones whole
gradients          4 S + 4 P       4 S + c E            4 S + r P           c S
communication      in place        c P ahead, r P       c P ahead, r P      c times 5e7 + 5e8
                                   behind               behind              elements
gathers of a step  embedding and   layers twice, the    layers twice, the   all twice, small ones
                   head once,      rest once            rest once           once
                   layers twice
=================  ==============  ===================  ==================  ========================

c: `compute_bytes`, r: `reduce_bytes`; ahead: the next layer's gather, behind: the last layer's
reduction. A gather or a reduction of P elements sends and receives P (m - 1) / m on every rank.

Sources. FSDP2: PyTorch's `_fsdp_collectives.py` (the gather's result is copied out into the
parameters, gradients are copied into the reduction's input), `_fully_shard.py` (the root is not
resharded after forward). Megatron-FSDP: `param_and_grad_buffer.py` (sharded copies in compute
precision stay, buckets are used in place). ZeRO-3: `deepspeed/runtime/zero/config.py`
(`max_live_parameters` 1e9, `prefetch_bucket_size` 5e7, `reduce_bucket_size` 5e8,
`param_persistence_threshold` 1e5). dcp: `csrc/train/gather.c` and `reduce_layer.c`, without
windows, ``reduce="layer"``; a test holds its traffic against the counters of real steps.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dcp._dcp import ArgumentError
from dcp.layout_blocks import whole_number
from dcp.layout_groups import Buffer, TensorGroup, is_layer
from dcp.layout_peers import fsdp2_elements, megatron_elements, zero3_elements

__all__ = ["COMPONENTS", "SYSTEMS", "Footprint", "dcp_traffic", "footprints", "optimizer_names"]

COMPONENTS = ("weights", "compute", "gradients", "optimizer", "communication", "padding")
SYSTEMS = ("dcp", "fsdp2", "megatron", "zero3")

_MAIN = 4  # bytes of a main weight and of a summed gradient
_LIVE, _PREFETCH, _BUCKET, _PERSISTENT = 10**9, 5 * 10**7, 5 * 10**8, 10**5  # ZeRO-3, elements
# matrices that are AdamW's even where Muon or Shampoo does matrices
_TOKENS = ("*embed*", "*lm_head*", "*wte*", "*wpe*", "output.weight")
_SHAMPOO_BLOCK = 128


def _adamw(name: str, shape: tuple[int, ...]) -> float:
    return 8.0 * math.prod(shape)


def _adamw8bit(name: str, shape: tuple[int, ...]) -> float:
    """Two codes an element, two fp32 scales a block of 256 of a row; small tensors as AdamW."""
    size = math.prod(shape)
    if size < 4096:
        return 8.0 * size
    return 2.0 * size + 8.0 * math.prod(shape[:-1]) * -(-shape[-1] // 256)


def _is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) > 1 and not any(fnmatch.fnmatchcase(name, p) for p in _TOKENS)


def _muon(name: str, shape: tuple[int, ...]) -> float:
    """Momentum of matrices, AdamW's two of the rest."""
    return (4.0 if _is_matrix(name, shape) else 8.0) * math.prod(shape)


def _shampoo(name: str, shape: tuple[int, ...]) -> float:
    """AdamW's two; of matrices two statistics and their roots a block, left and right."""
    size = math.prod(shape)
    if not _is_matrix(name, shape) or size == 0:
        return 8.0 * size
    down, across = (-(-n // _SHAMPOO_BLOCK) for n in shape[-2:])
    left, right = -(-shape[-2] // down), -(-shape[-1] // across)
    blocks = math.prod(shape[:-2]) * down * across
    return 8.0 * size + 8.0 * blocks * (left * left + right * right)


_OPTIMIZERS: dict[str, Callable[[str, tuple[int, ...]], float]] = {
    "adamw": _adamw,
    "adamw8bit": _adamw8bit,
    "muon": _muon,
    "shampoo": _shampoo,
    "sgd": lambda name, shape: 4.0 * math.prod(shape),  # momentum
}


def optimizer_names() -> list[str]:
    """Optimizers whose state is known here.

    Examples
    --------
    >>> optimizer_names()[0]
    'adamw'
    """
    return list(_OPTIMIZERS)


def check_optimizer(name: str) -> None:
    """Raise dcp.ArgumentError where the state of an optimizer is not known."""
    if name not in _OPTIMIZERS:
        from dcp.config import suggest

        raise ArgumentError(f"no figures for optimizer {name!r}{suggest(name, _OPTIMIZERS)}")


@dataclass(frozen=True)
class Footprint:
    """Bytes of one rank under one system.

    Attributes
    ----------
    system : str
        One of `SYSTEMS`.
    memory : dict of str to float
        By `COMPONENTS`; padding is that of weights, gradients and optimizer state, which stay.
    gathered, reduced : float
        Received of other ranks in a step. As much is sent.

    Examples
    --------
    >>> from dcp.layout import group_tensors, plan_groups
    >>> from dcp.layout_simulate import footprints
    >>> groups = group_tensors([("w", (1000, 1000))])
    >>> ours = footprints(groups, plan_groups(groups, ranks=4), ranks=4)[0]
    >>> ours.system, ours.memory["optimizer"], ours.gathered
    ('dcp', 2000000.0, 1500000)
    """

    system: str
    memory: dict[str, float]
    gathered: float
    reduced: float

    @property
    def total(self) -> float:
        """All components."""
        return sum(self.memory.values())

    def to_json(self) -> dict[str, object]:
        """As `dcp layout --simulate --json` has it; bytes as integers."""
        traffic = round(self.gathered + self.reduced)
        memory = {name: round(self.memory[name]) for name in COMPONENTS}
        return {
            "system": self.system,
            "memory_bytes": memory | {"total": sum(memory.values())},
            "traffic_bytes": {
                "gathered": round(self.gathered),
                "reduced": round(self.reduced),
                "sent": traffic,
                "received": traffic,
            },
        }


@dataclass(frozen=True)
class _World:
    ranks: int
    compute: int  # bytes
    reduce: int
    micro_batches: int
    state: float  # bytes of optimizer state of all ranks

    def moved(self, elements: float, item_bytes: int) -> float:
        return elements * item_bytes * (self.ranks - 1) / self.ranks

    def memory(
        self,
        used: int,
        padded: int,
        weights: int,
        gradients: int,
        compute: float,
        gradient_places: float,
        communication: float,
    ) -> dict[str, float]:
        """`weights` and `gradients`: bytes an element that stay on some rank."""
        stays = weights + gradients + (self.state / used if used else 0.0)
        return {
            "weights": weights * used / self.ranks,
            "compute": compute,
            "gradients": gradients * used / self.ranks + gradient_places,
            "optimizer": self.state / self.ranks,
            "communication": communication,
            "padding": stays * (padded - used) / self.ranks,
        }


def footprints(
    groups: Sequence[TensorGroup],
    buffers: Sequence[Buffer],
    *,
    ranks: int,
    optimizer: str = "adamw",
    compute_bytes: int = 2,
    reduce_bytes: int = 4,
    micro_batches: int = 1,
    tied: bool = False,
) -> list[Footprint]:
    """Memory and traffic of one rank under every system of `SYSTEMS`.

    Parameters
    ----------
    groups : sequence of TensorGroup
        In the order of a pass: the first is gathered for the forward pass alone, the last serves
        both passes from one gather.
    buffers : sequence of Buffer
        dcp's layout of them: what `dcp.layout.plan_groups` returns.
    ranks : int
        That share all of it.
    optimizer : str
        One of `optimizer_names`.
    compute_bytes : int
        Of a weight that is gathered.
    reduce_bytes : int
        Of a gradient that the other systems sum; dcp sums fp32.
    micro_batches : int
        Of a rank in a step; every one gathers and reduces.
    tied : bool
        The first group, the embedding, is also the head's weight.

    Returns
    -------
    list of Footprint
        In the order of `SYSTEMS`.

    Raises
    ------
    dcp.ArgumentError
        An optimizer without figures, or buffers of other groups.

    Examples
    --------
    >>> from dcp.layout import group_tensors, plan_groups
    >>> from dcp.layout_models import model_tensors
    >>> groups = group_tensors(model_tensors("llama-3-8b"))
    >>> for one in footprints(groups, plan_groups(groups, ranks=64), ranks=64):
    ...     print(f"{one.system:<9} {one.total / 1e9:.1f} GB, {one.gathered / 1e9:.1f} GB gathered")
    dcp       5.2 GB, 29.6 GB gathered
    fsdp2     6.3 GB, 29.6 GB gathered
    megatron  7.0 GB, 29.6 GB gathered
    zero3     5.1 GB, 31.6 GB gathered
    """
    check_optimizer(optimizer)
    ranks = whole_number("ranks", ranks, 1)
    held = _held(groups, buffers)
    state_of = _OPTIMIZERS[optimizer]
    world = _World(
        ranks,
        whole_number("compute_bytes", compute_bytes, 1),
        whole_number("reduce_bytes", reduce_bytes, 1),
        whole_number("micro_batches", micro_batches, 1),
        sum(state_of(name, shape) for g in groups for name, shape in g.shapes.items()),
    )
    peers = [_peer(groups, world, system) for system in ("fsdp2", "megatron")]
    return [_dcp(groups, held, world, tied), *peers, _zero3(groups, world)]


def dcp_traffic(
    padded: Sequence[int],
    *,
    ranks: int,
    compute_bytes: int = 4,
    micro_batches: int = 1,
    tied: bool = False,
    reduce: str = "layer",
    prefetch: int = 0,
) -> tuple[int, int]:
    """Bytes that a rank of dcp receives in a step without windows: weights, and gradients.

    Parameters
    ----------
    padded : sequence of int
        Elements of every group in the order of a pass, padding included.
    tied : bool
        The first group is also the head's: gathered once a step, into a place of its own.
    reduce : {"layer", "step"}
        When gradients are summed.
    prefetch : int
        1: even and odd groups have a place each, and what still lies there is not gathered again.

    Examples
    --------
    >>> dcp_traffic([8, 16, 16, 8], ranks=2), dcp_traffic([8, 16, 16, 8], ranks=2, prefetch=1)
    ((160, 96), (128, 96))
    """
    last, gathers = len(padded) - 1, 0
    places: dict[int, int] = {}
    for group in micro_batches * [*range(last + 1), *range(last - 1, 0, -1)]:
        place = -1 if tied and group == 0 else group % (1 + prefetch)
        gathers += padded[group] if places.get(place) != group else 0
        places[place] = group
    reductions = sum(padded) * (micro_batches if reduce == "layer" else 1)
    share = [n // ranks * (ranks - 1) for n in (gathers, reductions)]
    return share[0] * compute_bytes, share[1] * _MAIN


def has_tied_head(groups: Sequence[TensorGroup]) -> bool:
    """Whether a model with an embedding has no weight of its own for the head.

    Examples
    --------
    >>> from dcp.layout import group_tensors
    >>> from dcp.layout_models import model_tensors
    >>> [has_tied_head(group_tensors(model_tensors(n))) for n in ("gpt2-large", "llama-3-8b")]
    [True, False]
    """
    names = [name for group in groups for name in group.shapes]
    heads = ("lm_head", "embed_out", "output.weight")
    embeddings = ("embed", "wte")
    return any(e in name for name in names for e in embeddings) and not any(
        h in name for name in names for h in heads
    )


def _held(groups: Sequence[TensorGroup], buffers: Sequence[Buffer]) -> list[int]:
    """Elements of every group, padding included."""
    padded = {group.name: 0 for group in groups}
    used = dict(padded)
    for buffer in buffers:
        for name in buffer.groups:
            if name not in padded:
                raise ArgumentError(f"buffers: there is no group {name!r}")
            padded[name] += buffer.layout.ranks * buffer.layout.shard_elements
            used[name] += buffer.layout.used_elements
    for group in groups:
        if used[group.name] != group.elements:
            raise ArgumentError(
                f"buffers: hold {used[group.name]} of {group.elements} elements of {group.name!r}"
            )
    return list(padded.values())


def _dcp(groups: Sequence[TensorGroup], held: list[int], world: _World, tied: bool) -> Footprint:
    """One place serves all groups, one after the other; a tied embedding has its own."""
    used = sum(group.elements for group in groups)
    places = max(held[1:], default=0) + held[0] if tied else max(held, default=0)
    compute, gradients = world.compute * places, _MAIN * places
    memory = world.memory(used, sum(held), _MAIN, _MAIN, compute, gradients, 0)
    gathered, reduced = dcp_traffic(
        held or [0],
        ranks=world.ranks,
        compute_bytes=world.compute,
        micro_batches=world.micro_batches,
        tied=tied,
    )
    return Footprint("dcp", memory, gathered, reduced)


def _peer(groups: Sequence[TensorGroup], world: _World, system: str) -> Footprint:
    """FSDP2 and Megatron-FSDP: layers are units, what is outside belongs to the root."""
    rule = fsdp2_elements if system == "fsdp2" else megatron_elements
    layers = [group for group in groups if is_layer(group.name)]
    root = [shape for g in groups if not is_layer(g.name) for shape in g.shapes.values()]
    padded = [rule(list(g.shapes.values()), world.ranks) for g in layers]
    outside = rule(root, world.ranks) if root else 0
    used = sum(group.elements for group in groups)
    largest = max(padded, default=outside)
    whole = max((g.elements for g in layers), default=sum(map(math.prod, root)))
    behind = (world.compute + world.reduce) * largest if len(layers) > 1 else 0
    total = outside + sum(padded)
    if system == "fsdp2":
        compute = world.compute * ((sum(map(math.prod, root)) if layers else 0) + whole)
        memory = world.memory(used, total, _MAIN, _MAIN, compute, world.compute * whole, behind)
    else:
        compute = world.compute * ((outside if layers else 0) + largest)
        weights = _MAIN + world.compute
        memory = world.memory(used, total, weights, _MAIN, compute, world.reduce * largest, behind)
    times = world.micro_batches
    gathered = times * world.moved(2 * sum(padded) + outside, world.compute)
    return Footprint(system, memory, gathered, times * world.moved(total, world.reduce))


def _zero3(groups: Sequence[TensorGroup], world: _World) -> Footprint:
    shapes = [shape for group in groups for shape in group.shapes.values()]
    small = [shape for shape in shapes if math.prod(shape) < _PERSISTENT]
    large = [shape for shape in shapes if math.prod(shape) >= _PERSISTENT]
    used, whole = sum(map(math.prod, shapes)), sum(map(math.prod, small))
    padded = zero3_elements(shapes, world.ranks)
    live = min(used - whole, max(_LIVE, max(map(math.prod, large), default=0)))
    compute = world.compute * (live + whole)
    buckets = world.compute * min(used, _PREFETCH + _BUCKET)
    weights = _MAIN + world.compute
    memory = world.memory(used, padded, weights, world.compute, compute, 0, buckets)
    times = world.micro_batches
    gathers = 2 * times * zero3_elements(large, world.ranks) + zero3_elements(small, world.ranks)
    return Footprint(
        "zero3",
        memory,
        world.moved(gathers, world.compute),
        times * world.moved(padded, world.compute),
    )
