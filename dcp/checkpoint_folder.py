"""The folder of a run: which checkpoints it holds, who may write, how one is put in place.

A checkpoint is written beside its place and renamed when it is whole: killed at any moment, a run
leaves whole checkpoints and leftovers that the next save clears away.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dcp import _dcp
from dcp import checkpoint_format as form

STEP = re.compile(r"step-(\d{8,})")
_REPLACED = re.compile(r"\.step-(\d{8,})\.replaced")


def step_name(step: int) -> str:
    return f"step-{step:08d}"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
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
        form.check(form.read_index(path))
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


def clear(folder: Path) -> None:
    """Leftovers of dead writers; a checkpoint that was being replaced goes back to its place."""
    for path in folder.glob(".step-*.tmp"):
        shutil.rmtree(path)
    for step, path in _scan(folder, _REPLACED):
        place = folder / step_name(step)
        if place.exists():
            _remove(path)
        else:
            path.rename(place)


def publish(aside: Path, place: Path) -> None:
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


def prune(folder: Path, newest: Path, keep: int) -> None:
    """Older whole checkpoints go; `keep` stay, the newest included."""
    older = [path for _, path in _scan(folder, STEP) if path != newest and _fault(path) is None]
    for path in older[: max(0, len(older) - (keep - 1))]:
        _remove(path)


def is_foreign(path: Path) -> bool:
    """Whether this is a safetensors file, an index of some, or a folder with either."""
    if path.is_file():
        return path.suffix == ".safetensors" or path.name.endswith(".safetensors.index.json")
    return any((path / name).is_file() for name in (form.FOREIGN_INDEX, form.FOREIGN_SINGLE))


def is_used(folder: str | os.PathLike[str]) -> bool:
    """Whether the folder holds a checkpoint, whole or not.

    Examples
    --------
    >>> from dcp import checkpoint
    >>> checkpoint.is_used("no/such/folder")
    False
    """
    try:
        return bool(_scan(Path(folder), STEP) or _scan(Path(folder), _REPLACED))
    except OSError:
        return False


def latest(folder: str | os.PathLike[str]) -> Path:
    """The newest whole checkpoint of a folder.

    Incomplete ones are skipped with a warning that names them.

    Raises
    ------
    dcp.FileError
        If the folder cannot be read or none is whole; names them.

    Examples
    --------
    >>> from dcp import checkpoint
    >>> checkpoint.latest("no/such/folder")
    Traceback (most recent call last):
    dcp.FileError: no/such/folder cannot be read: ...
    """
    folder = Path(folder)
    try:
        found = [(step, True, path) for step, path in _scan(folder, STEP)]
        found += [(step, False, path) for step, path in _scan(folder, _REPLACED)]
    except OSError as error:
        raise _dcp.FileError(f"{folder} cannot be read: {error.strerror}") from error
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
    """The checkpoint that `path` means: itself, or the newest whole one of that folder.

    Hugging Face's folders and safetensors files mean themselves.

    Examples
    --------
    >>> from dcp import checkpoint
    >>> checkpoint.resolve("run/step-00000012").name
    'step-00000012'
    """
    path = Path(path)
    if path.is_file() and not is_foreign(path):
        raise _dcp.FileError(f"{path} must be a folder, .safetensors or .safetensors.index.json")
    if STEP.fullmatch(path.name) or (path / form.INDEX).exists() or is_foreign(path):
        return path
    return latest(path)
