"""The header of a safetensors file, read without trusting it.

A header that lies (ranges past the end, overlapping, of another size than dtype and shape say, a
length that cannot be) is a :class:`dcp.FileError` that names file and tensor: who reads only at
the places given here never reads what belongs to another tensor, or to nothing. No data is read,
so the tensor list of a file of any size costs its header.

The rules are those of the format's own library: 8 bytes of header length, little-endian; a JSON
object from tensor to dtype, shape and range; the ranges cover all bytes that follow, once.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from dcp._dcp import FileError

__all__ = ["DTYPE_BITS", "Header", "Tensor", "read_header"]

MAX_HEADER_BYTES = 100_000_000  # the library's own limit
_MAX_SIZE = 2**63 - 1

DTYPE_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
}


class Tensor(NamedTuple):
    """A tensor of a file: bytes ``[begin, end)`` of the file hold it."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """What a file says that it holds; checked.

    Attributes
    ----------
    path : Path
    tensors : dict of str to Tensor
        In the order of their bytes.
    metadata : dict of str to str
    bytes : int
        Size of the file.
    """

    path: Path
    tensors: dict[str, Tensor]
    metadata: dict[str, str] = field(default_factory=dict)
    bytes: int = 0


def _fail(path: Path, text: str) -> NoReturn:
    raise FileError(f"{path} is not a safetensors file: {text}")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"{key!r} comes twice")
            seen.add(key)
    return result


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MAX_SIZE


def _sizes(path: Path, name: str, entry: dict[str, Any], key: str) -> list[int]:
    values = entry.get(key)
    if not isinstance(values, list) or not all(map(_is_size, values)):
        _fail(path, f"{key} of {name!r} must be a list of integers from 0 to 2^63 - 1")
    return values


def _tensor(path: Path, name: str, entry: object, start: int, size: int) -> Tensor:
    """One entry of the header, for a file of `size` bytes whose data begins at `start`."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        _fail(path, f"{name!r} must have dtype, shape and data_offsets, and nothing else")
    dtype = entry["dtype"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        _fail(path, f"{name!r} has unknown dtype {dtype!r}")
    shape = _sizes(path, name, entry, "shape")
    offsets = _sizes(path, name, entry, "data_offsets")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        _fail(path, f"data_offsets of {name!r} are {offsets}: two, in order, are needed")
    bits = 0 if 0 in shape else DTYPE_BITS[dtype]
    for extent in shape:
        bits *= extent
        if bits > 8 * _MAX_SIZE:  # here, so that no product of thousands of factors is made
            _fail(path, f"{name!r} {shape} has more than 2^63 - 1 bytes")
    begin, end = offsets
    if bits != 8 * (end - begin):
        _fail(path, f"{name!r} is {dtype} {shape}, which {end - begin} bytes do not hold")
    if end > size - start:
        _fail(path, f"{name!r} ends at byte {start + end}, the file at {size}")
    return Tensor(dtype, tuple(shape), start + begin, start + end)


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    try:
        document = json.loads(
            text.decode("utf-8"), object_pairs_hook=_object, parse_constant=_no_constant
        )
    except (ValueError, RecursionError) as error:
        _fail(path, f"its header is no JSON: {error}")
    if not isinstance(document, dict):
        _fail(path, "its header must be an object")
    return document


def read_header(path: str | os.PathLike[str]) -> Header:
    """Read and check the header of a safetensors file; no data is read.

    Parameters
    ----------
    path : path
        The file.

    Returns
    -------
    Header

    Raises
    ------
    dcp.FileError
        The file cannot be read, or its header is not the truth; names file and tensor.

    Examples
    --------
    >>> import numpy as np, tempfile
    >>> from safetensors.numpy import save_file
    >>> from dcp.safetensors_header import read_header
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_file({"w": np.zeros((2, 3), np.float32)}, folder + "/a.safetensors")
    ...     read_header(folder + "/a.safetensors").tensors["w"][:2]
    ('F32', (2, 3))
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > size - 8:
                _fail(path, f"{size} bytes do not hold a header of {length}")
            if length > MAX_HEADER_BYTES:
                _fail(path, f"a header of {length} bytes, at most {MAX_HEADER_BYTES} are read")
            text = file.read(length)
    except OSError as error:
        if isinstance(error, FileError):
            raise
        raise FileError(f"{path} cannot be read: {error.strerror}") from error
    if len(text) != length:
        _fail(path, "it changed while it was read")
    document = _parse(path, text)
    metadata = document.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        _fail(path, "__metadata__ must hold strings")
    start = 8 + length
    found = {name: _tensor(path, name, entry, start, size) for name, entry in document.items()}
    tensors = dict(sorted(found.items(), key=lambda item: item[1][2:]))
    at = start
    for name, tensor in tensors.items():
        if tensor.begin != at:
            word = "overlaps the tensor before it" if tensor.begin < at else "follows a hole"
            _fail(path, f"{name!r} begins at byte {tensor.begin}, not {at}: it {word}")
        at = tensor.end
    if at != size:
        _fail(path, f"its tensors end at byte {at}, the file at {size}")
    return Header(path, tensors, metadata, size)
