"""What other systems pad, from shapes alone: elements of all ranks together, padding included.

FSDP2 (PyTorch): every parameter for itself, ``ceil(d0 / ranks)`` rows of its first dimension on
every rank, the missing ones filled with zeros (`_fsdp_param.py`, ``FSDPParam``). 128 experts in one
tensor over 256 ranks double.

Megatron-FSDP (Megatron-LM): a bucket is made of chunks; a chunk is a common multiple of the
tensors' ``shape[1:].numel()``, so that a border cuts no row of the first dimension, and a bucket is
a multiple of ranks chunks (``param_and_grad_buffer.py``). What is given here is that multiple
alone, hence a lower bound: gaps inside may add to it. Experts in one tensor make a chunk one
expert's matrix.

ZeRO-3 (DeepSpeed): every parameter flattened and filled up to a multiple of the ranks
(``partition_parameters.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

__all__ = ["PEERS", "fsdp2_elements", "megatron_elements", "padding_of", "zero3_elements"]

Shapes = Iterable[tuple[int, ...]]


def fsdp2_elements(shapes: Shapes, ranks: int) -> int:
    """FSDP2's even shards of the first dimension.

    Examples
    --------
    >>> fsdp2_elements([(5, 8), (3,)], 4)
    68
    """
    return sum(-(-s[0] // ranks) * ranks * math.prod(s[1:]) if s else ranks for s in shapes)


def megatron_elements(shapes: Shapes, ranks: int) -> int:
    """Megatron-FSDP's bucket of one group, at least.

    Examples
    --------
    >>> megatron_elements([(5, 8), (3,)], 4)
    64
    """
    shapes = [shape for shape in shapes if math.prod(shape) > 0]
    chunk = math.lcm(*(math.prod(shape[1:]) for shape in shapes)) * ranks
    used = sum(math.prod(shape) for shape in shapes)
    return -(-used // chunk) * chunk


def zero3_elements(shapes: Shapes, ranks: int) -> int:
    """ZeRO-3's flat shards of every parameter.

    Examples
    --------
    >>> zero3_elements([(5, 8), (3,)], 4)
    44
    """
    return sum(-(-math.prod(shape) // ranks) * ranks for shape in shapes)


PEERS: dict[str, Callable[[Shapes, int], int]] = {
    "fsdp2": fsdp2_elements,
    "megatron": megatron_elements,
}


def padding_of(elements: int, shapes: Shapes) -> float:
    """Padding of so many elements over what the tensors have; 0 where they have none.

    Examples
    --------
    >>> padding_of(fsdp2_elements([(128, 2880, 5760)], 256), [(128, 2880, 5760)])
    1.0
    """
    used = sum(math.prod(shape) for shape in shapes)
    return elements / used - 1 if used else 0.0
