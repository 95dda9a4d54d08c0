"""What a checkpoint is on disk: one safetensors file a rank and an index, with checksums.

A file holds flat float32 pieces of tensors; a key says kind, tensor and elements, for example
``weights/model.norm.weight[0:64]``. ``index.json`` is written last, so a folder without a valid
one is not a checkpoint. It lists every piece with its CRC-32, and carries one of its own.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dcp import _dcp

SCHEMA = 1
INDEX = "index.json"
CHUNK_ELEMENTS = 1 << 20

_FILE_NAME = re.compile(r"rank-\d{5,}-of-\d{5,}\.safetensors")

FloatArray = npt.NDArray[np.float32]


class Piece(NamedTuple):
    """Elements [first, end) of a tensor in a file."""

    kind: str
    tensor: str
    first: int
    end: int
    crc32: int

    @property
    def key(self) -> str:
        return f"{self.kind}/{self.tensor}[{self.first}:{self.end}]"


class ShardFile(NamedTuple):
    """A rank's file; its name lies in the checkpoint's folder."""

    name: str
    bytes: int
    pieces: list[Piece]


@dataclass(frozen=True)
class Index:
    """The content of index.json."""

    path: Path  # of the checkpoint
    step: int
    world: int
    shapes: dict[str, tuple[int, ...]]
    kinds: dict[str, list[str]]  # names of the tensors that each kind holds
    files: list[ShardFile]
    config: dict[str, Any]
    state: dict[str, Any]


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


def write_shard(path: Path, arrays: list[tuple[str, str, int, FloatArray]]) -> ShardFile:
    """Writes (kind, tensor, first element, values) as a safetensors file, straight from the arrays.

    The library's own writer would copy all of them first.
    """
    header: dict[str, Any] = {"__metadata__": {"dcp_schema": str(SCHEMA)}}
    start = 0
    for kind, tensor, first, array in arrays:
        key = Piece(kind, tensor, first, first + array.size, 0).key
        end = start + array.nbytes
        header[key] = {"dtype": "F32", "shape": [array.size], "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    pieces = []
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for kind, tensor, first, array in arrays:
            crc = 0
            for at in range(0, array.size, CHUNK_ELEMENTS):
                chunk = array[at : at + CHUNK_ELEMENTS].data.cast("B")
                crc = zlib.crc32(chunk, crc)
                file.write(chunk)
            pieces.append(Piece(kind, tensor, first, first + array.size, crc))
        file.flush()
        os.fsync(file.fileno())
    return ShardFile(path.name, 8 + len(text) + start, pieces)


def _checksum(document: Mapping[str, Any]) -> int:
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return zlib.crc32(text.encode())


def write_index(index: Index) -> None:
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "step": index.step,
        "world": index.world,
        "tensors": {name: list(shape) for name, shape in index.shapes.items()},
        "kinds": index.kinds,
        "config": index.config,
        "state": index.state,
        "files": [
            {"name": f.name, "bytes": f.bytes, "pieces": [list(p) for p in f.pieces]}
            for f in index.files
        ],
    }
    document["crc32"] = _checksum(document)
    write_synced(index.path / INDEX, json.dumps(document, indent=1, allow_nan=False).encode())


def _parse(path: Path, document: Any) -> Index:
    """The index of a document whose checksum holds: it is as it was written."""
    files = [
        ShardFile(f["name"], f["bytes"], [Piece(*p) for p in f["pieces"]])
        for f in document["files"]
    ]
    if not all(_FILE_NAME.fullmatch(f.name) for f in files):
        raise ValueError("the name of a file")
    return Index(
        path=path,
        step=document["step"],
        world=document["world"],
        shapes={name: tuple(shape) for name, shape in document["tensors"].items()},
        kinds=document["kinds"],
        files=files,
        config=document["config"],
        state=document["state"],
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
        if schema == SCHEMA and crc == _checksum(document):
            return _parse(path, document)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise _dcp.FileError(f"{where} is damaged or half-written: {error}") from error
    if schema != SCHEMA:
        raise _dcp.FileError(f"{where} has schema {schema!r}, this version reads {SCHEMA}")
    raise _dcp.FileError(f"{where} is damaged: its checksum does not hold")


def check_files(index: Index) -> None:
    """Every file is there with the size that the index says."""
    for file in index.files:
        where = index.path / file.name
        try:
            size = where.stat().st_size
        except OSError as error:
            raise _dcp.FileError(f"{index.path} is not whole: {error}") from error
        if size != file.bytes:
            raise _dcp.FileError(
                f"{where} has {size} bytes, the index says {file.bytes}: truncated or damaged"
            )


def check_coverage(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    kinds: Mapping[str, list[str]],
    files: list[ShardFile],
) -> None:
    """Each element of each tensor of each kind comes exactly once."""
    found: dict[tuple[str, str], list[Piece]] = {
        (kind, tensor): [] for kind, tensors in kinds.items() for tensor in tensors
    }
    for file in files:
        for piece in file.pieces:
            if (piece.kind, piece.tensor) not in found or piece.tensor not in shapes:
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
        size = prod(shapes.get(tensor, (0,)))
        if end < size:
            raise _dcp.FileError(f"{path}: {kind}/{tensor}[{end}:{size}] is missing")
        if end > size:
            raise _dcp.FileError(
                f"{path}: {kind}/{tensor}[{size}:{end}] is surplus: the tensor has {size} elements"
            )


@contextmanager
def open_shard(index: Index, file: ShardFile) -> Iterator[Any]:
    """The safetensors handle of a file whose header agrees with the index."""
    from safetensors import SafetensorError, safe_open

    where = index.path / file.name
    try:
        with safe_open(where, framework="numpy") as handle:
            keys = set(handle.keys())
            wanted = {piece.key: piece for piece in file.pieces}
            for key in sorted(keys ^ set(wanted)):
                state = "is missing" if key in wanted else "is surplus"
                raise _dcp.FileError(f"{where}: {key} {state}")
            for key, piece in wanted.items():
                view = handle.get_slice(key)
                dtype, shape = view.get_dtype(), list(view.get_shape())
                if dtype != "F32" or shape != [piece.end - piece.first]:
                    raise _dcp.FileError(f"{where}: {key} is {dtype} {shape}")
            yield handle
    except (SafetensorError, OSError, ValueError) as error:
        if isinstance(error, _dcp.Error):
            raise
        raise _dcp.FileError(f"{where} cannot be read: {error}") from error


def read_piece(handle: Any, where: Path, piece: Piece) -> Iterator[tuple[int, FloatArray]]:
    """Yields (first element, values) in chunks; dcp.FileError at the end if the CRC differs."""
    view = handle.get_slice(piece.key)
    crc = 0
    for first in range(piece.first, piece.end, CHUNK_ELEMENTS):
        at = first - piece.first
        values: FloatArray = view[at : min(at + CHUNK_ELEMENTS, piece.end - piece.first)]
        crc = zlib.crc32(values.data.cast("B"), crc)
        yield first, values
    if crc != piece.crc32:
        raise _dcp.FileError(f"{where}: {piece.key} is damaged: its checksum does not hold")
