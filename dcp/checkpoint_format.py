"""What a checkpoint is on disk: one safetensors file a rank and an index, with checksums.

A file holds flat pieces of tensors; a key says kind, tensor and elements, for example
``weights/model.norm.weight[0:64]``. ``index.json`` is written last, so a folder without a valid
one is not a checkpoint. It lists every kind with its dtype and the shapes of its tensors, every
piece with a CRC-32 for each ``chunk_bytes`` of it (so a part of a piece is read and checked
without the rest), and carries a CRC-32 of its own.

Schema 1, which is read too, knew float32 only, one shape a tensor, one CRC a piece.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dcp import _dcp

SCHEMA = 2
READABLE = (1, 2)
INDEX = "index.json"
FOREIGN_INDEX = "model.safetensors.index.json"
FOREIGN_SINGLE = "model.safetensors"
CHUNK_BYTES = 4 << 20

_FILE_NAME = re.compile(r"rank-\d{5,}-of-\d{5,}\.safetensors")

# NumPy has no bfloat16: its bits are uint16
DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "U8": np.dtype(np.uint8),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "BF16": np.dtype(np.uint16),
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Array = npt.NDArray[Any]
Shape = tuple[int, ...]


class Piece(NamedTuple):
    """Elements [first, end) of a tensor in a file."""

    kind: str
    tensor: str
    first: int
    end: int
    crcs: tuple[int, ...] | None  # of its chunks; None: foreign, there are none

    @property
    def key(self) -> str:
        return f"{self.kind}/{self.tensor}[{self.first}:{self.end}]"


class ShardFile(NamedTuple):
    """A rank's file; its name lies in the checkpoint's folder."""

    name: str
    bytes: int
    pieces: list[Piece]


class Kind(NamedTuple):
    """Tensors that a kind holds, and what its elements are (None where it has none)."""

    dtype: str | None
    shapes: dict[str, Shape]


@dataclass(frozen=True)
class Index:
    """The content of index.json, or what stands for it where the files are foreign."""

    path: Path  # of the checkpoint
    step: int
    world: int
    shapes: dict[str, Shape]
    kinds: dict[str, Kind]
    files: list[ShardFile]
    config: dict[str, Any]
    state: dict[str, Any]
    chunk_bytes: int | None = None  # None: a piece is one chunk
    foreign: bool = False  # keys are the tensors' names, F16 and BF16 are widened


class Part(NamedTuple):
    """Elements [first, first + size) of a tensor that are to be written."""

    kind: str
    tensor: str
    first: int
    size: int
    dtype: str

    @property
    def bytes(self) -> int:
        return self.size * DTYPES[self.dtype].itemsize


def file_name(rank: int, world: int) -> str:
    return f"rank-{rank:05d}-of-{world:05d}.safetensors"


def fsync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_synced(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def encode_header(entries: Mapping[str, tuple[str, Iterable[int], int]], **metadata: str) -> bytes:
    """The bytes before the data, for tensors (dtype, shape, bytes) that follow each other."""
    header: dict[str, Any] = {"__metadata__": metadata}
    start = 0
    for key, (dtype, shape, count) in entries.items():
        header[key] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [start, start + count],
        }
        start += count
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _checksum(document: Mapping[str, Any]) -> int:
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return zlib.crc32(text.encode())


def write_index(index: Index) -> None:
    """A line for each key of the document."""
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "step": index.step,
        "world": index.world,
        "chunk_bytes": index.chunk_bytes,
        "tensors": {name: list(shape) for name, shape in index.shapes.items()},
        "kinds": {
            kind: {
                "dtype": held.dtype,
                # null: the shape of the tensor itself
                "tensors": {
                    name: None if shape == index.shapes[name] else list(shape)
                    for name, shape in held.shapes.items()
                },
            }
            for kind, held in index.kinds.items()
        },
        "config": index.config,
        "state": index.state,
        "files": [
            {"name": f.name, "bytes": f.bytes, "pieces": [list(p) for p in f.pieces]}
            for f in index.files
        ],
    }
    document["crc32"] = _checksum(document)
    lines = [
        f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}"
        for key, value in document.items()
    ]
    write_synced(index.path / INDEX, ("{\n" + ",\n".join(lines) + "\n}\n").encode())


def _kinds(document: Mapping[str, Any], shapes: Mapping[str, Shape]) -> dict[str, Kind]:
    if document["schema"] == 1:
        return {
            kind: Kind("F32", {name: shapes[name] for name in names})
            for kind, names in document["kinds"].items()
        }
    return {
        kind: Kind(
            held["dtype"],
            {
                name: shapes[name] if shape is None else tuple(shape)
                for name, shape in held["tensors"].items()
            },
        )
        for kind, held in document["kinds"].items()
    }


def _parse(path: Path, document: Any) -> Index:
    """The index of a document whose checksum holds: it is as it was written."""
    old = document["schema"] == 1
    files = [
        ShardFile(
            f["name"],
            f["bytes"],
            [
                Piece(kind, tensor, first, end, (crcs,) if old else tuple(crcs))
                for kind, tensor, first, end, crcs in f["pieces"]
            ],
        )
        for f in document["files"]
    ]
    if not all(_FILE_NAME.fullmatch(f.name) for f in files):
        raise ValueError("the name of a file")
    shapes: dict[str, Shape] = {n: tuple(s) for n, s in document["tensors"].items()}
    kinds = _kinds(document, shapes)
    for kind, held in kinds.items():
        if held.dtype not in DTYPES and (held.dtype is not None or any(held.shapes.values())):
            raise ValueError(f"the dtype of {kind}, {held.dtype!r}")
    return Index(
        path=path,
        step=document["step"],
        world=document["world"],
        shapes=shapes,
        kinds=kinds,
        files=files,
        config=document["config"],
        state=document["state"],
        chunk_bytes=None if old else document["chunk_bytes"],
    )


def read_index(path: Path) -> Index:
    """Reads and checks index.json; dcp.FileError where it is missing or damaged."""
    where = path / INDEX
    try:
        text = where.read_bytes()
    except OSError as error:
        raise _dcp.FileError(f"{path} is not a whole checkpoint: {error}") from error
    try:
        document = json.loads(text)
        schema, crc = document["schema"], document.pop("crc32")
        if schema in READABLE and crc == _checksum(document):
            return _parse(path, document)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise _dcp.FileError(f"{where} is damaged or half-written: {error}") from error
    if schema not in READABLE:
        raise _dcp.FileError(f"{where} has schema {schema!r}, this version reads 1 and 2")
    raise _dcp.FileError(f"{where} is damaged: its checksum does not hold")


def check_files(index: Index) -> None:
    """Every file is there with the size that the index says."""
    for file in index.files:
        where = index.path / file.name
        try:
            size = where.stat().st_size
        except OSError as error:
            raise _dcp.FileError(
                f"{index.path} is not whole: {file.name} cannot be read: {error.strerror}"
            ) from error
        if size != file.bytes:
            raise _dcp.FileError(
                f"{where} has {size} bytes, the index says {file.bytes}: truncated or damaged"
            )


def check_coverage(path: Path, kinds: Mapping[str, Kind], files: list[ShardFile]) -> None:
    """Each element of each tensor of each kind comes exactly once."""
    found: dict[tuple[str, str], list[Piece]] = {
        (kind, tensor): [] for kind, held in kinds.items() for tensor in held.shapes
    }
    for file in files:
        for piece in file.pieces:
            if (piece.kind, piece.tensor) not in found:
                raise _dcp.FileError(f"{path}: {file.name} has a surplus piece {piece.key}")
            found[piece.kind, piece.tensor].append(piece)
    for (kind, tensor), pieces in found.items():
        end = 0
        for piece in sorted(pieces, key=lambda p: p.first):
            if piece.first > end:
                raise _dcp.FileError(f"{path}: {kind}/{tensor}[{end}:{piece.first}] is missing")
            if piece.first < end:
                raise _dcp.FileError(
                    f"{path}: {kind}/{tensor}[{piece.first}:{min(end, piece.end)}] comes twice"
                )
            end = piece.end
        size = prod(kinds[kind].shapes[tensor])
        if end < size:
            raise _dcp.FileError(f"{path}: {kind}/{tensor}[{end}:{size}] is missing")
        if end > size:
            raise _dcp.FileError(
                f"{path}: {kind}/{tensor}[{size}:{end}] is surplus: the tensor has {size} elements"
            )


def check(index: Index) -> None:
    """Files and coverage: all that can be known without reading data."""
    check_files(index)
    check_coverage(index.path, index.kinds, index.files)
