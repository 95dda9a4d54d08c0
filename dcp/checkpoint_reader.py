"""Reads ranges of tensors from the files of a checkpoint, and checks what it reads.

A range is read chunk by chunk, straight into the caller's array where it takes a whole chunk, and
through one small buffer where it takes a part (the rest of that chunk is read for its checksum
only). So a rank that needs a few rows of a piece reads those and at most two chunk ends, and the
memory beside the caller's arrays is one block, whatever the size of tensors and files.

A file's header must agree with the index before anything is read from it.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from dcp import _dcp
from dcp.checkpoint_format import DTYPES, Array, Index, Piece, ShardFile
from dcp.safetensors_header import Header, read_header

BLOCK_BYTES = 256 << 10  # read and checked at a time: stays in the core's own cache
OPEN_FILES = 64

_WIDENED = {"F16": np.dtype(np.float16), "BF16": np.dtype(np.uint16)}
READABLE = ("F32", *_WIDENED)  # of foreign files: read as float32


class _Open(NamedTuple):
    handle: int
    header: Header


class Request(NamedTuple):
    """Elements [first, first + out.size) of a tensor, and where they go."""

    kind: str
    tensor: str
    first: int
    out: Array


class Reader:
    """Reads tensors of a checkpoint whose index was checked. A context manager."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.read_bytes = 0
        self._open: OrderedDict[str, _Open] = OrderedDict()
        self._block = np.empty(BLOCK_BYTES, np.uint8)
        self._places: dict[tuple[str, str], list[tuple[Piece, ShardFile]]] = {}
        for file in index.files:
            for piece in file.pieces:
                self._places.setdefault((piece.kind, piece.tensor), []).append((piece, file))

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *exception: object) -> None:
        while self._open:
            os.close(self._open.popitem()[1].handle)

    def read(self, requests: list[Request]) -> None:
        """Fills the arrays of the requests; a file at a time, in the order of its bytes."""
        parts: dict[str, list[tuple[Piece, Request]]] = {}
        for request in requests:
            end = request.first + request.out.size
            for piece, file in self._places.get((request.kind, request.tensor), ()):
                if piece.first < end and request.first < piece.end:
                    parts.setdefault(file.name, []).append((piece, request))
        for file in self.index.files:
            wanted = parts.pop(file.name, [])
            if wanted:
                tensors = self._file(file).header.tensors
                wanted.sort(key=lambda part: (tensors[self._key(part[0])].begin, part[1].first))
            for piece, request in wanted:
                low = max(piece.first, request.first)
                high = min(piece.end, request.first + request.out.size)
                out = request.out[low - request.first : high - request.first]
                self._read_piece(file, piece, low, out)

    def verify(self) -> None:
        """Reads every byte."""
        for file in self.index.files:
            self._file(file)
            for piece in file.pieces:
                self._read_piece(file, piece, piece.first, None)

    def blocks(self, kind: str, tensor: str, bytes_: int) -> Iterator[Array]:
        """A tensor's elements in order, in arrays of at most `bytes_`; each is overwritten by the
        next."""
        held = self.index.kinds[kind]
        size = prod(held.shapes[tensor])
        dtype = DTYPES[held.dtype or "F32"]
        buffer = np.empty(min(size, max(1, bytes_ // dtype.itemsize)), dtype)
        for first in range(0, size, max(1, buffer.size)):
            out = buffer[: min(buffer.size, size - first)]
            self.read([Request(kind, tensor, first, out)])
            yield out

    def _key(self, piece: Piece) -> str:
        return piece.tensor if self.index.foreign else piece.key

    def _file(self, file: ShardFile) -> _Open:
        opened = self._open.get(file.name)
        if opened is not None:
            self._open.move_to_end(file.name)
            return opened
        where = self.index.path / file.name
        header = read_header(where)
        self._compare(where, header, file)
        if len(self._open) >= OPEN_FILES:
            os.close(self._open.popitem(last=False)[1].handle)
        try:
            opened = _Open(os.open(where, os.O_RDONLY), header)
        except OSError as error:
            raise _dcp.FileError(f"{where} cannot be read: {error.strerror}") from error
        self._open[file.name] = opened
        return opened

    def _compare(self, where: Path, header: Header, file: ShardFile) -> None:
        """Header and index say the same."""
        wanted = {self._key(piece): piece for piece in file.pieces}
        odd = wanted.keys() - header.tensors.keys()
        if not self.index.foreign:
            odd = header.tensors.keys() ^ wanted.keys()
        for key in sorted(odd):
            state = "is missing" if key in wanted else "is surplus"
            raise _dcp.FileError(f"{where}: {key} {state}")
        for key, piece in wanted.items():
            dtype, shape, begin, end = header.tensors[key]
            expected = self.index.kinds[piece.kind].dtype or ""
            count = piece.end - piece.first
            if self.index.foreign:
                fits = (dtype == expected or dtype in _WIDENED) and prod(shape) == count
            else:
                fits = dtype == expected and shape == (count,)
            if not fits:
                raise _dcp.FileError(
                    f"{where}: {key} is {dtype} {list(shape)}, {expected} [{count}] was expected"
                )
            chunk = self.index.chunk_bytes or max(1, end - begin)
            chunks = -(-(end - begin) // chunk)
            if piece.crcs is not None and len(piece.crcs) != chunks:
                raise _dcp.FileError(
                    f"{where}: {key} has {len(piece.crcs)} checksums in the index, not {chunks}"
                )

    def _read_piece(self, file: ShardFile, piece: Piece, low: int, out: Array | None) -> None:
        """Elements [low, low + out.size) of a piece into `out`; all of it, unkept, for None."""
        handle, header = self._file(file)
        tensor = header.tensors[self._key(piece)]
        stored = DTYPES.get(tensor.dtype) or _WIDENED[tensor.dtype]
        if out is not None and out.dtype != stored:
            self._read_widened(file.name, handle, tensor.begin, tensor.dtype, low, out)
            return
        target = out.view(np.uint8).data if out is not None else None
        start = (low - piece.first) * stored.itemsize  # of the target, in bytes of the piece
        stop = start + (out.nbytes if out is not None else tensor.end - tensor.begin)
        if piece.crcs is None:
            self._read_range(file.name, handle, tensor.begin + start, stop - start, target, 0)
            return
        size = tensor.end - tensor.begin
        chunk = self.index.chunk_bytes or max(1, size)
        for number in range(start // chunk, -(-stop // chunk)):
            begin = number * chunk
            count = min(chunk, size - begin)
            crc = self._read_range(
                file.name, handle, tensor.begin + begin, count, target, begin - start
            )
            if crc != piece.crcs[number]:
                raise _dcp.FileError(
                    f"{self.index.path / file.name}: {piece.key} is damaged: the checksum of its "
                    f"bytes {begin} to {begin + count} does not hold"
                )

    def _read_range(
        self, name: str, handle: int, begin: int, count: int, target: memoryview | None, place: int
    ) -> int:
        """CRC of bytes [begin, begin + count) of a file, which lie at `place` of the target: only
        those inside it are kept."""
        crc = 0
        room = len(target) if target is not None else 0
        for at in range(0, count, BLOCK_BYTES):
            size = min(BLOCK_BYTES, count - at)
            left = place + at
            if target is not None and left >= 0 and left + size <= room:
                block = target[left : left + size]
                self._pread(name, handle, block, begin + at)
            else:
                block = self._block[:size].data
                self._pread(name, handle, block, begin + at)
                first, last = max(left, 0), min(left + size, room)
                if target is not None and first < last:
                    target[first:last] = block[first - left : last - left]
            crc = crc32(block, crc)
        return crc

    def _pread(self, name: str, handle: int, block: memoryview, offset: int) -> None:
        self.read_bytes += len(block)
        done = 0
        while done < len(block):
            count = os.preadv(handle, [block[done:]], offset + done)
            if count == 0:
                raise _dcp.FileError(f"{self.index.path / name} ends early: it was truncated")
            done += count

    def _read_widened(
        self, name: str, handle: int, begin: int, dtype: str, first: int, out: Array
    ) -> None:
        """float16 or bfloat16 of a foreign file as float32: exact."""
        narrow = _WIDENED[dtype]
        step = BLOCK_BYTES // narrow.itemsize
        for at in range(0, out.size, step):
            block = self._block[: min(step, out.size - at) * narrow.itemsize]
            self._pread(name, handle, block.data, begin + (first + at) * narrow.itemsize)
            out[at : at + step] = widen(block.view(narrow), dtype)


def widen(values: Array, dtype: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    """float32 of float16 or of the bits of bfloat16, which are the upper half of a float32."""
    if dtype == "BF16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)
