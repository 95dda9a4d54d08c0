"""Checkpoints: saved by shards, loaded on any number of ranks.

``DIR/step-00000012/`` holds one safetensors file a rank and ``index.json``. Pieces are named by
tensor and global range and no padding is stored, so the number of ranks that saved means nothing
to those that load. A checkpoint is written beside its place and renamed when it is whole: killed
at any moment, a run leaves whole checkpoints and leftovers that the next save clears away.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from dcp import _dcp
from dcp import checkpoint_format as form
from dcp.checkpoint_format import FloatArray, Index, Piece, ShardFile

__all__ = ["Run", "gather", "is_used", "latest", "load", "resolve", "save", "show", "verify"]

_STEP = re.compile(r"step-(\d{8,})")
_REPLACED = re.compile(r"\.step-(\d{8,})\.replaced")
_KIND = re.compile(r"[A-Za-z0-9_.-]+")


class Run(NamedTuple):
    """Elements ``[first, first + array.size)`` of tensor ``name``, in row-major order.

    ``array`` is a contiguous 1-D float32 view, read by :func:`save` and written by :func:`load`.
    """

    name: str
    first: int
    array: FloatArray


Shards = Mapping[str, Sequence[Run]]
Shapes = Mapping[str, Sequence[int]]


class World(Protocol):
    """What saving and loading need of a world."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def barrier(self) -> None: ...
    def abort(self, text: str, /) -> None: ...


def _plain(value: Any, what: str) -> dict[str, Any]:
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


def _check_shards(shards: Shards, shapes: Mapping[str, tuple[int, ...]], writable: bool) -> None:
    for kind, runs in shards.items():
        if not _KIND.fullmatch(kind):
            raise _dcp.ArgumentError(f"kind {kind!r} must consist of letters, digits, _ . -")
        for name, first, array in runs:
            where = f"shards[{kind!r}], {name}"
            if name not in shapes:
                raise _dcp.ArgumentError(f"{where}: shapes has no such tensor")
            if (
                not isinstance(array, np.ndarray)
                or array.dtype != np.float32
                or array.ndim != 1
                or not array.flags.c_contiguous
            ):
                raise _dcp.DTypeError(f"{where}: array must be contiguous 1-D float32")
            if writable and not array.flags.writeable:
                raise _dcp.ArgumentError(f"{where}: array is read-only")
            size = prod(shapes[name])
            if first < 0 or first + array.size > size:
                raise _dcp.ArgumentError(
                    f"{where}: elements {first}..{first + array.size} pass the end, {size}"
                )


@contextmanager
def _together(world: World | None, what: str) -> Iterator[None]:
    """A failure on one rank ends the others' waits; errors of files become dcp.FileError."""
    try:
        yield
    except BaseException as error:
        if world is not None and world.size > 1:
            world.abort(f"{what} failed on rank {world.rank}: {error}")
        if isinstance(error, OSError) and not isinstance(error, _dcp.Error):
            raise _dcp.FileError(f"{what} failed: {error}") from error
        raise


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One writer a folder. The lock goes with its process, so what it left behind is dead."""
    with (folder / ".lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _dcp.FileError(f"{folder}: another run is writing a checkpoint there") from None
        except OSError:
            pass  # a file system without locks
        yield


def _scan(folder: Path, pattern: re.Pattern[str]) -> list[tuple[int, Path]]:
    """(step, path) of the subfolders that match, oldest first."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            match = pattern.fullmatch(entry.name)
            if match and entry.is_dir():
                found.append((int(match[1]), folder / entry.name))
    return sorted(found)


def _fault(path: Path) -> str | None:
    """Why this is not a whole checkpoint; None if it is. Does not read the data."""
    try:
        index = form.read_index(path)
        form.check_files(index)
        form.check_coverage(path, index.shapes, index.kinds, index.files)
    except _dcp.FileError as error:
        return str(error)
    return None


def _remove(path: Path) -> None:
    """Renames first: killed halfway, what is left has no checkpoint's name."""
    aside = path.with_name(f".{path.name.removeprefix('.')}.tmp")
    if aside.exists():
        shutil.rmtree(aside)
    path.rename(aside)
    shutil.rmtree(aside)


def _clear(folder: Path) -> None:
    """Leftovers of dead writers; a checkpoint that was being replaced goes back to its place."""
    for path in folder.glob(".step-*.tmp"):
        shutil.rmtree(path)
    for step, path in _scan(folder, _REPLACED):
        place = folder / f"step-{step:08d}"
        if place.exists():
            _remove(path)
        else:
            path.rename(place)


def _publish(aside: Path, place: Path) -> None:
    """Puts the finished folder where it belongs."""
    replaced = place.with_name(f".{place.name}.replaced")
    if place.exists():
        if _fault(place) is None:
            place.rename(replaced)  # stays findable until the new one is there
        else:
            shutil.rmtree(place)
    aside.rename(place)
    form.fsync_folder(place.parent)
    if replaced.exists():
        _remove(replaced)


def _prune(folder: Path, newest: Path, keep: int) -> None:
    older = [path for _, path in _scan(folder, _STEP) if path != newest and _fault(path) is None]
    for path in older[: max(0, len(older) - (keep - 1))]:
        _remove(path)


def _collect(aside: Path, world: int, agreed: list[Any]) -> list[ShardFile]:
    """What every rank wrote, from the notes that they left beside their files."""
    files = []
    for rank in range(world):
        note = aside / f"rank-{rank}.json"
        document = json.loads(note.read_bytes())
        note.unlink()
        if document["agreed"] != agreed:
            raise _dcp.MismatchError(
                f"rank {rank} saves another step, shapes or config than rank 0"
            )
        pieces = [Piece(*piece) for piece in document["pieces"]]
        files.append(ShardFile(document["name"], document["bytes"], pieces))
    return files


def _finish(
    aside: Path,
    place: Path,
    *,
    step: int,
    world: int,
    shapes: dict[str, tuple[int, ...]],
    kinds: list[str],
    state: dict[str, Any],
    config: dict[str, Any],
    agreed: list[Any],
) -> None:
    """Rank 0, when all files are written: checks them against each other, index, rename."""
    files = _collect(aside, world, agreed)
    names: dict[str, set[str]] = {kind: set() for kind in kinds}
    for file in files:
        for piece in file.pieces:
            names.setdefault(piece.kind, set()).add(piece.tensor)
    names.setdefault("weights", set()).update(shapes)  # the one kind that has every tensor
    listed = {kind: [name for name in shapes if name in names[kind]] for kind in names}
    form.check_coverage(place, shapes, listed, files)
    form.write_index(Index(aside, step, world, shapes, listed, files, config, state))
    form.fsync_folder(aside)
    _publish(aside, place)


def save(
    folder: str | os.PathLike[str],
    *,
    step: int,
    world: World,
    shards: Shards,
    shapes: Shapes,
    state: Mapping[str, Any],
    config: Any,
    keep: int = 3,
) -> Path:
    """Writes ``folder/step-XXXXXXXX`` from the shards of all ranks. Collective.

    Parameters
    ----------
    folder : path
        Where the checkpoints of this run lie; made if it is not there.
    step : int
        Number of the step after which this is the state, >= 0.
    world : World
        Its ranks call this together.
    shards : mapping of str to sequence of Run
        Kind (``weights``, ``adamw.m``, ...) to what this rank holds of it. Over all ranks the runs
        of ``weights`` cover every tensor once; another kind covers the tensors that it names.
    shapes : mapping of str to shape
        All tensors of the model, tied ones once.
    state, config : mapping
        Of trainer and model, as JSON can hold them; rank 0's is written. `config` may be a
        dataclass.
    keep : int, optional
        Whole checkpoints that stay, this one included, >= 1; older ones go.

    Returns
    -------
    Path
        The checkpoint's folder.

    Raises
    ------
    dcp.FileError
        If the folder cannot be written, another run is writing there, or the shards do not cover
        the tensors. The other ranks get dcp.AbortedError.
    dcp.ArgumentError, dcp.DTypeError, dcp.MismatchError
        If an argument is wrong, or ranks differ in step, shapes or config.

    Examples
    --------
    >>> import numpy as np, tempfile, types
    >>> from dcp import checkpoint
    >>> alone = types.SimpleNamespace(rank=0, size=1, barrier=lambda: None)
    >>> shards = {"weights": [checkpoint.Run("w", 0, np.arange(6, dtype=np.float32))]}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = checkpoint.save(folder, step=12, world=alone, shards=shards,
    ...                            shapes={"w": (2, 3)}, state={"epoch": 1}, config={})
    ...     print(path.name, checkpoint.load(path, shards=shards, shapes={"w": (2, 3)}))
    step-00000012 {'epoch': 1}
    """
    folder = Path(folder)
    place = folder / f"step-{step:08d}"
    aside = folder / f".{place.name}.tmp"
    with _together(world, f"saving {place}"), ExitStack() as stack:
        if step < 0 or keep < 1:
            raise _dcp.ArgumentError(f"step {step} must be at least 0, keep {keep} at least 1")
        plain_shapes = {name: tuple(map(int, shape)) for name, shape in shapes.items()}
        plain_config, plain_state = _plain(config, "config"), _plain(state, "state")
        _check_shards(shards, plain_shapes, writable=False)
        agreed = [step, world.size, {n: list(s) for n, s in plain_shapes.items()}, plain_config]
        if world.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(_locked(folder))
            _clear(folder)
            aside.mkdir()
        world.barrier()
        arrays = [
            (kind, name, int(first), array)
            for kind, runs in shards.items()
            for name, first, array in runs
            if array.size > 0
        ]
        file = form.write_shard(aside / form.file_name(world.rank, world.size), arrays)
        note = file._asdict() | {"agreed": agreed}
        form.write_synced(aside / f"rank-{world.rank}.json", json.dumps(note).encode())
        world.barrier()
        if world.rank == 0:
            _finish(
                aside,
                place,
                step=step,
                world=world.size,
                shapes=plain_shapes,
                kinds=list(shards),
                state=plain_state,
                config=plain_config,
                agreed=agreed,
            )
            _prune(folder, place, keep)
        world.barrier()
    return place


def is_used(folder: str | os.PathLike[str]) -> bool:
    """Whether the folder holds a checkpoint, whole or not.

    Examples
    --------
    >>> from dcp import checkpoint
    >>> checkpoint.is_used("no/such/folder")
    False
    """
    try:
        return bool(_scan(Path(folder), _STEP) or _scan(Path(folder), _REPLACED))
    except OSError:
        return False


def latest(folder: str | os.PathLike[str]) -> Path:
    """The newest whole checkpoint of a folder.

    Incomplete ones are skipped with a warning that names them.

    Raises
    ------
    dcp.FileError
        If the folder cannot be read or none is whole; names them.
    """
    folder = Path(folder)
    try:
        found = [(step, True, path) for step, path in _scan(folder, _STEP)]
        found += [(step, False, path) for step, path in _scan(folder, _REPLACED)]
    except OSError as error:
        raise _dcp.FileError(f"{folder} cannot be read: {error}") from error
    faults: list[tuple[str, str]] = []
    for _, _, path in sorted(found, reverse=True):
        fault = _fault(path)
        if fault is None:
            for skipped, reason in faults:
                warnings.warn(f"{skipped} is skipped: {reason}", RuntimeWarning, stacklevel=2)
            return path
        faults.append((path.name, fault))
    if not faults:
        raise _dcp.FileError(f"{folder} holds no checkpoint")
    names = ", ".join(name for name, _ in faults)
    raise _dcp.FileError(f"{folder}: no checkpoint is whole ({names}): {faults[0][1]}")


def resolve(path: str | os.PathLike[str]) -> Path:
    """The checkpoint that `path` means: itself, or the newest whole one of that folder."""
    path = Path(path)
    if _STEP.fullmatch(path.name) or (path / form.INDEX).exists():
        return path
    return latest(path)


def _compare_configs(path: Path, there: dict[str, Any], here: dict[str, Any]) -> None:
    for key in sorted(there.keys() | here.keys()):
        if there.get(key) != here.get(key):
            raise _dcp.ArgumentError(
                f"{path} is a checkpoint of another model: {key} is {there.get(key)!r} there "
                f"and {here.get(key)!r} here"
            )


def _compare_shapes(
    path: Path, there: Mapping[str, tuple[int, ...]], here: Mapping[str, tuple[int, ...]]
) -> None:
    for name in [*here, *(name for name in there if name not in here)]:
        if there.get(name) != here.get(name):
            values = (f"has shape {s[name]}" if name in s else "is missing" for s in (there, here))
            raise _dcp.ArgumentError(
                f"{path} is a checkpoint of another model: {name} {next(values)} there "
                f"and {next(values)} here"
            )


def _check_kinds(index: Index, shards: Shards) -> None:
    for kind, runs in shards.items():
        if kind not in index.kinds:
            raise _dcp.FileError(
                f"{index.path} holds no {kind}, only {', '.join(index.kinds) or 'nothing'}"
            )
        held = set(index.kinds[kind])
        for name, _, array in runs:
            if name not in held and array.size > 0:
                raise _dcp.FileError(f"{index.path} holds no {kind} of {name}")


def load(
    path: str | os.PathLike[str],
    *,
    shards: Shards,
    shapes: Shapes,
    config: Any = None,
    world: World | None = None,
) -> dict[str, Any]:
    """Fills this rank's shards from a checkpoint of any number of ranks.

    Parameters
    ----------
    path : path
        The checkpoint, or the folder of a run: its newest whole one.
    shards : mapping of str to sequence of Run
        What this rank holds; the arrays are written. Kinds that are not asked for are not read.
    shapes : mapping of str to shape
        All tensors of the model.
    config : mapping or dataclass, optional
        Compared with what was saved.
    world : World, optional
        Its ranks load together: none returns before all are done, and a failure ends all.

    Returns
    -------
    dict
        The ``state`` that was saved.

    Raises
    ------
    dcp.FileError
        If a file is missing, truncated or damaged, pieces are missing or come twice, or a kind is
        not there. The arrays are undefined then.
    dcp.ArgumentError
        If it is a checkpoint of another model: names what differs, with both values.
    """
    with _together(world, f"loading {path}"):
        index = form.read_index(resolve(path))
        plain_shapes = {name: tuple(map(int, shape)) for name, shape in shapes.items()}
        _check_shards(shards, plain_shapes, writable=True)
        if config is not None:
            _compare_configs(index.path, index.config, _plain(config, "config"))
        _compare_shapes(index.path, index.shapes, plain_shapes)
        form.check_files(index)
        form.check_coverage(index.path, index.shapes, index.kinds, index.files)
        _check_kinds(index, shards)
        wanted: dict[tuple[str, str], list[Run]] = {}
        for kind, runs in shards.items():
            for run in runs:
                wanted.setdefault((kind, run.name), []).append(run)
        for file in index.files:
            _load_file(index, file, wanted)
        if world is not None:
            world.barrier()
    return index.state


def _load_file(index: Index, file: ShardFile, wanted: dict[tuple[str, str], list[Run]]) -> None:
    """Copies what the file holds of the runs. Pieces are read whole, for their checksum."""
    needed = []
    for piece in file.pieces:
        runs = [
            run
            for run in wanted.get((piece.kind, piece.tensor), ())
            if run.first < piece.end and piece.first < run.first + run.array.size
        ]
        if runs:
            needed.append((piece, runs))
    if not needed:
        return
    with form.open_shard(index, file) as handle:
        for piece, runs in needed:
            for first, values in form.read_piece(handle, index.path / file.name, piece):
                for run in runs:
                    low = max(first, run.first)
                    high = min(first + values.size, run.first + run.array.size)
                    if low < high:
                        run.array[low - run.first : high - run.first] = values[
                            low - first : high - first
                        ]


def show(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What a checkpoint holds, from its index.

    Returns
    -------
    dict
        ``path``, ``step``, ``world``, ``bytes``, ``tensors`` (name, shape, kinds of each),
        ``kinds`` (elements of each), ``files`` (name, bytes of each), ``config``, ``state``.

    Raises
    ------
    dcp.FileError
        If there is no whole checkpoint.
    """
    index = form.read_index(resolve(path))
    return {
        "path": str(index.path),
        "step": index.step,
        "world": index.world,
        "bytes": sum(file.bytes for file in index.files),
        "tensors": [
            {
                "name": name,
                "shape": list(shape),
                "kinds": [kind for kind, names in index.kinds.items() if name in names],
            }
            for name, shape in index.shapes.items()
        ],
        "kinds": {
            kind: sum(prod(index.shapes[name]) for name in names)
            for kind, names in index.kinds.items()
        },
        "files": [{"name": file.name, "bytes": file.bytes} for file in index.files],
        "config": index.config,
        "state": index.state,
    }


def verify(path: str | os.PathLike[str]) -> None:
    """Reads every byte of a checkpoint and checks it.

    Raises
    ------
    dcp.FileError
        Names the file and piece that is missing, comes twice or is damaged.
    """
    with _together(None, f"verifying {path}"):
        index = form.read_index(resolve(path))
        form.check_files(index)
        form.check_coverage(index.path, index.shapes, index.kinds, index.files)
        for file in index.files:
            with form.open_shard(index, file) as handle:
                for piece in file.pieces:
                    for _ in form.read_piece(handle, index.path / file.name, piece):
                        pass


def gather(
    path: str | os.PathLike[str], *, kinds: Sequence[str] | None = None
) -> Iterator[tuple[str, str, FloatArray]]:
    """Yields (kind, name, array) of every tensor, whole and in its shape, one at a time.

    Parameters
    ----------
    path : path
        The checkpoint, or the folder of a run: its newest whole one.
    kinds : sequence of str, optional
        Which to yield; all by default.

    Raises
    ------
    dcp.FileError
        If the checkpoint is damaged or has no such kind.
    """
    with _together(None, f"reading {path}"), ExitStack() as stack:
        index = form.read_index(resolve(path))
        form.check_files(index)
        form.check_coverage(index.path, index.shapes, index.kinds, index.files)
        kinds = list(index.kinds) if kinds is None else list(kinds)
        _check_kinds(index, dict.fromkeys(kinds, ()))
        pieces: dict[tuple[str, str], list[tuple[ShardFile, Piece]]] = {}
        for file in index.files:
            for piece in file.pieces:
                pieces.setdefault((piece.kind, piece.tensor), []).append((file, piece))
        handles: dict[str, Any] = {}
        for kind in kinds:
            for name in index.kinds[kind]:
                flat = np.empty(prod(index.shapes[name]), np.float32)
                for file, piece in pieces.get((kind, name), ()):
                    if file.name not in handles:
                        handles[file.name] = stack.enter_context(form.open_shard(index, file))
                    where = index.path / file.name
                    for first, values in form.read_piece(handles[file.name], where, piece):
                        flat[first : first + values.size] = values
                yield kind, name, flat.reshape(index.shapes[name])
