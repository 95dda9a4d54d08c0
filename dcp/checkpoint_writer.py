"""Writes one rank's part of a checkpoint, and puts the parts of all ranks together.

Every rank writes its own file and then leaves a note beside it: what it wrote, and what it thinks
the checkpoint is. Rank 0 reads the notes, checks them against each other, writes the index and
renames the folder. Nothing but the folder passes between ranks, so a thread can do it all.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from zlib import crc32

import numpy as np

from dcp import _dcp
from dcp import checkpoint_folder as folders
from dcp import checkpoint_format as form
from dcp.checkpoint_format import Array, Index, Kind, Part, Piece, Shape, ShardFile

_KIND = re.compile(r"[A-Za-z0-9_.-]+")
_BLOCK_BYTES = 256 << 10


class Run(NamedTuple):
    """Elements ``[first, first + array.size)`` of tensor ``name``, in row-major order.

    ``array`` is a contiguous 1-D view, read by :func:`save` and written by :func:`load`: float32,
    float64, uint8, int32, int64, or uint16 for the bits of bfloat16; one dtype a kind.

    Examples
    --------
    >>> import numpy as np
    >>> from dcp.checkpoint import Run
    >>> Run("w", 4, np.zeros(2, np.float32)).first
    4
    """

    name: str
    first: int
    array: Array


Shards = Mapping[str, Sequence[Run]]
Shapes = Mapping[str, Sequence[int]]
KindShapes = Mapping[str, Shapes]


class World(Protocol):
    """What saving and loading need of a world."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def barrier(self) -> None: ...
    def abort(self, text: str, /) -> None: ...


@contextmanager
def together(world: World | None, what: str) -> Iterator[None]:
    """A failure on one rank ends the others' waits; errors of files become dcp.FileError."""
    try:
        yield
    except BaseException as error:
        if world is not None and world.size > 1:
            world.abort(f"{what} failed on rank {world.rank}: {error}")
        if isinstance(error, OSError) and not isinstance(error, _dcp.Error):
            raise _dcp.FileError(f"{what} failed: {error}") from error
        raise


def plain(value: Any, what: str) -> dict[str, Any]:
    """As JSON gives it back."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    try:
        result = json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise _dcp.ArgumentError(f"{what} cannot be written as JSON: {error}") from error
    if not isinstance(result, dict):
        raise _dcp.ArgumentError(f"{what} must be a mapping, got {type(value).__name__}")
    return result


def plain_shapes(shapes: Shapes) -> dict[str, Shape]:
    return {name: tuple(map(int, shape)) for name, shape in shapes.items()}


def held_kinds(
    shards: Shards,
    shapes: Mapping[str, Shape],
    kind_shapes: KindShapes | None,
    *,
    writable: bool = False,
) -> dict[str, Kind]:
    """What the shards of a rank hold, checked: dtype of each kind, shapes of its tensors."""
    other = {kind: plain_shapes(of) for kind, of in (kind_shapes or {}).items()}
    if any(shapes.get(name) != shape for name, shape in other.get("weights", {}).items()):
        raise _dcp.ArgumentError("kind_shapes: weights have the shapes of the tensors")
    held = {}
    for kind, runs in shards.items():
        if not _KIND.fullmatch(kind):
            raise _dcp.ArgumentError(f"kind {kind!r} must consist of letters, digits, _ . -")
        found: dict[str, Shape] = {}
        dtype: str | None = None
        for run in runs:
            where = f"shards[{kind!r}], {run.name}"
            if run.name not in shapes:
                raise _dcp.ArgumentError(f"{where}: shapes has no such tensor")
            shape = other.get(kind, {}).get(run.name, shapes[run.name])
            name = _check_run(where, run, prod(shape), writable)
            if dtype not in (None, name):
                raise _dcp.DTypeError(f"{where}: array is {name}, the kind has {dtype} too")
            found[run.name], dtype = shape, name
        held[kind] = Kind(dtype, found)
    return held


def _check_run(where: str, run: Run, size: int, writable: bool) -> str:
    """The name of the array's dtype."""
    array = run.array
    if (
        not isinstance(array, np.ndarray)
        or array.dtype not in form.DTYPE_NAMES
        or array.ndim != 1
        or not array.flags.c_contiguous
    ):
        names = ", ".join(str(dtype) for dtype in form.DTYPE_NAMES)
        raise _dcp.DTypeError(f"{where}: array must be contiguous 1-D, of {names}")
    if writable and not array.flags.writeable:
        raise _dcp.ArgumentError(f"{where}: array is read-only")
    if run.first < 0 or run.first + array.size > size:
        raise _dcp.ArgumentError(
            f"{where}: elements {run.first}..{run.first + array.size} pass the end, {size}"
        )
    return form.DTYPE_NAMES[array.dtype]


def parts_of(shards: Shards) -> tuple[list[Part], list[Array]]:
    """What to write of checked shards, and the arrays in the same order.

    Wide elements come first, so that all lie at multiples of their size.
    """
    found = [
        (Part(kind, name, int(first), array.size, form.DTYPE_NAMES[array.dtype]), array)
        for kind, runs in shards.items()
        for name, first, array in runs
        if array.size > 0
    ]
    found.sort(key=lambda entry: -entry[1].itemsize)
    return [part for part, _ in found], [array for _, array in found]


class Chunk(NamedTuple):
    """Bytes [begin, begin + bytes) of a part, which one checksum covers; `offset` in the file."""

    part: int
    number: int
    begin: int
    bytes: int
    offset: int

    def of(self, arrays: Sequence[Array]) -> memoryview:
        return arrays[self.part].view(np.uint8).data[self.begin : self.begin + self.bytes]


class ShardWriter:
    """One rank's file, written in any order of its chunks. A context manager."""

    def __init__(self, path: Path, parts: Sequence[Part]) -> None:
        self.path, self.parts = path, parts
        header = form.encode_header(
            {
                Piece(part.kind, part.tensor, part.first, part.first + part.size, None).key: (
                    part.dtype,
                    (part.size,),
                    part.bytes,
                )
                for part in parts
            },
            dcp_schema=str(form.SCHEMA),
        )
        self._start = len(header)
        self._chunk_bytes = form.CHUNK_BYTES
        self._crcs = [[0] * -(-part.bytes // self._chunk_bytes) for part in parts]
        self._file = path.open("xb", buffering=0)
        self._write(memoryview(header), 0)

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    @property
    def handle(self) -> int:
        return self._file.fileno()

    def chunks(self) -> Iterator[Chunk]:
        """All chunks, in the order of the file."""
        offset = self._start
        for place, part in enumerate(self.parts):
            for number, begin in enumerate(range(0, part.bytes, self._chunk_bytes)):
                size = min(self._chunk_bytes, part.bytes - begin)
                yield Chunk(place, number, begin, size, offset + begin)
            offset += part.bytes

    def write(self, chunk: Chunk, data: memoryview) -> None:
        """A block at a time, so that it is still in the cache when it is written."""
        crc = 0
        for at in range(0, chunk.bytes, _BLOCK_BYTES):
            block = data[at : at + _BLOCK_BYTES]
            crc = crc32(block, crc)
            self._write(block, chunk.offset + at)
        self._crcs[chunk.part][chunk.number] = crc

    def _write(self, block: memoryview, offset: int) -> None:
        done = 0
        while done < len(block):
            done += os.pwrite(self.handle, block[done:], offset + done)

    def finish(self) -> ShardFile:
        """On the disk, with the checksums of what was written."""
        os.fsync(self.handle)
        pieces = [
            Piece(part.kind, part.tensor, part.first, part.first + part.size, tuple(crcs))
            for part, crcs in zip(self.parts, self._crcs, strict=True)
        ]
        size = self._start + sum(part.bytes for part in self.parts)
        return ShardFile(self.path.name, size, pieces)


class Saving:
    """One checkpoint of one rank on its way to the disk. A context manager.

    ``begin`` (rank 0: the folder), then ``open`` and the writer's work on every rank,
    ``leave_note``, and when all ranks' notes are there, ``publish`` on rank 0.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        step: int,
        rank: int,
        size: int,
        shapes: Mapping[str, Shape],
        kinds: dict[str, Kind],
        state: Mapping[str, Any],
        config: Any,
        keep: int,
    ) -> None:
        if step < 0 or keep < 1:
            raise _dcp.ArgumentError(f"step {step} must be at least 0, keep {keep} at least 1")
        self.folder = Path(folder)
        self.place = self.folder / folders.step_name(step)
        self.aside = self.folder / f".{self.place.name}.tmp"
        self.step, self.rank, self.size, self.keep = step, rank, size, keep
        self.shapes, self.kinds = dict(shapes), kinds
        self.config, self.state = plain(config, "config"), plain(state, "state")
        self._stack = ExitStack()
        self._agreed = {
            "step": step,
            "number of ranks": size,
            "shapes": _digest({name: list(shape) for name, shape in self.shapes.items()}),
            "config": _digest(self.config),
        }

    def __enter__(self) -> Saving:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def begin(self) -> None:
        """Rank 0, before the others open their files."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._stack.enter_context(folders.locked(self.folder))
        folders.clear(self.folder)
        self.aside.mkdir()

    def open(self, parts: Sequence[Part]) -> ShardWriter:
        name = form.file_name(self.rank, self.size)
        return ShardWriter(self.aside / name, parts)

    def note(self, rank: int) -> Path:
        return self.aside / f"rank-{rank}.json"

    def leave_note(self, file: ShardFile) -> None:
        """For rank 0, when this rank's file is on the disk."""
        kinds = {kind: [held.dtype, held.shapes] for kind, held in self.kinds.items()}
        self._leave(file._asdict() | {"agreed": self._agreed, "kinds": kinds})

    def leave_error(self, text: str) -> None:
        """For rank 0, in place of a note."""
        self._leave({"error": text})

    def _leave(self, document: dict[str, Any]) -> None:
        """Renamed, so that who sees it sees all of it."""
        place = self.note(self.rank)
        part = place.with_suffix(".part")
        part.unlink(missing_ok=True)
        form.write_synced(part, json.dumps(document).encode())
        part.rename(place)

    def publish(self) -> None:
        """Rank 0, when all notes are there: checks them against each other, index, rename."""
        files, kinds = self._collect()
        form.check_coverage(self.place, kinds, files)
        form.write_index(
            Index(
                path=self.aside,
                step=self.step,
                world=self.size,
                shapes=self.shapes,
                kinds=kinds,
                files=files,
                config=self.config,
                state=self.state,
                chunk_bytes=form.CHUNK_BYTES,
            )
        )
        form.fsync_folder(self.aside)
        folders.publish(self.aside, self.place)
        folders.prune(self.folder, self.place, self.keep)

    def _collect(self) -> tuple[list[ShardFile], dict[str, Kind]]:
        """What every rank wrote, from the notes; the kinds of all ranks together."""
        files = []
        # weights are the one kind that has every tensor
        kinds = {"weights": Kind(None, dict(self.shapes))}
        for rank in range(self.size):
            note = self.note(rank)
            document = json.loads(note.read_bytes())
            note.unlink()
            if "error" in document:
                raise _dcp.FileError(f"rank {rank}: {document['error']}")
            for what, value in self._agreed.items():
                if document["agreed"][what] != value:
                    raise _dcp.MismatchError(f"rank {rank} saves another {what} than rank 0")
            for kind, (dtype, shapes) in document["kinds"].items():
                self._merge(kinds, rank, kind, dtype, plain_shapes(shapes))
            pieces = [
                Piece(kind, tensor, first, end, tuple(crcs))
                for kind, tensor, first, end, crcs in document["pieces"]
            ]
            files.append(ShardFile(document["name"], document["bytes"], pieces))
        ordered = {
            kind: Kind(held.dtype, {n: held.shapes[n] for n in self.shapes if n in held.shapes})
            for kind, held in kinds.items()
        }
        return files, ordered

    @staticmethod
    def _merge(
        kinds: dict[str, Kind], rank: int, kind: str, dtype: str | None, shapes: dict[str, Shape]
    ) -> None:
        held = kinds.setdefault(kind, Kind(None, {}))
        if dtype is not None and held.dtype is not None and dtype != held.dtype:
            raise _dcp.MismatchError(f"{kind} is {dtype} on rank {rank} and {held.dtype} before")
        for name, shape in shapes.items():
            if held.shapes.setdefault(name, shape) != shape:
                raise _dcp.MismatchError(
                    f"{kind} of {name} has shape {shape} on rank {rank} and "
                    f"{held.shapes[name]} before"
                )
        kinds[kind] = Kind(dtype or held.dtype, held.shapes)


def _digest(document: dict[str, Any]) -> str:
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
