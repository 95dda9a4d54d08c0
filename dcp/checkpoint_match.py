"""What of a checkpoint goes where: settings, names, shapes and kinds of both sides compared."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from dcp import _dcp
from dcp.checkpoint_format import Index, Kind, Shape

# fields of a model's settings that may differ between a checkpoint and who loads it
_FREE = {"dropout", "compute_dtype", "initializer_range", "max_position_embeddings"}


def compare_configs(
    path: Path, there: Mapping[str, Any], here: Mapping[str, Any], *, partial: bool = False
) -> list[str]:
    """What differs between the settings of a checkpoint's model and of this one.

    A field that neither shapes nor what was learned depend on is a notice; any other is
    dcp.ArgumentError, unless the load is `partial`: there the shapes decide.

    Examples
    --------
    >>> from pathlib import Path
    >>> from dcp.checkpoint import compare_configs
    >>> compare_configs(Path("run"), {"dropout": 0.1}, {"dropout": 0.0})
    ['run: dropout is 0.1 there and 0.0 here']
    """
    notices = []
    for key in sorted(there.keys() | here.keys()):
        if there.get(key) == here.get(key):
            continue
        text = f"{key} is {there.get(key)!r} there and {here.get(key)!r} here"
        if key not in _FREE and not partial:
            raise _dcp.ArgumentError(f"{path} is a checkpoint of another model: {text}")
        if key in there and key in here:  # what one version does not know is none
            notices.append(f"{path}: {text}")
    return notices


def compare_shapes(path: Path, there: Mapping[str, Shape], here: Mapping[str, Shape]) -> None:
    for name in [*here, *(name for name in there if name not in here)]:
        if there.get(name) != here.get(name):
            values = (f"has shape {s[name]}" if name in s else "is missing" for s in (there, here))
            raise _dcp.ArgumentError(
                f"{path} is a checkpoint of another model: {name} {next(values)} there "
                f"and {next(values)} here"
            )


def check_kind(index: Index, kind: str) -> None:
    if kind not in index.kinds:
        raise _dcp.FileError(
            f"{index.path} holds no {kind}, only {', '.join(index.kinds) or 'nothing'}"
        )


class Loaded(dict[str, Any]):
    """The ``state`` that was saved, and which tensors were filled.

    Attributes
    ----------
    loaded : dict of str to list of str
        Kind to the tensors that were filled, over all ranks.
    missing : dict of str to list of str
        Kind to the tensors that were left as they are, since the checkpoint does not hold them
        or they were not asked for; but for weights, only what this rank has runs of.
    unexpected : dict of str to list of str
        Kind to the checkpoint's tensors, by their names there, that nothing here took.

    Examples
    --------
    >>> from dcp.checkpoint import Loaded
    >>> Loaded({"step": 3}).missing
    {}
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        super().__init__(state)
        self.loaded: dict[str, list[str]] = {}
        self.missing: dict[str, list[str]] = {}
        self.unexpected: dict[str, list[str]] = {}


Rename = Mapping[str, str] | Callable[[str], str | None]


def names_here(index: Index, rename: Rename | None) -> dict[str, str]:
    """The name here of each tensor that is to be loaded -> its name in the checkpoint."""
    if rename is None:
        return {name: name for name in index.shapes}
    if not callable(rename):
        for old in rename:
            if old not in index.shapes:
                raise _dcp.ArgumentError(f"rename: {index.path} holds no {old!r}")
    result: dict[str, str] = {}
    for old in index.shapes:
        new = rename(old) if callable(rename) else rename.get(old, old)
        if new is None:
            continue
        if new in result:
            raise _dcp.ArgumentError(f"rename: {result[new]!r} and {old!r} both become {new!r}")
        result[new] = old
    return result


def wanted_names(here: Mapping[str, Shape], partial: bool | Sequence[str]) -> set[str]:
    if isinstance(partial, bool):
        return set(here)
    if isinstance(partial, str):
        raise _dcp.ArgumentError(f"partial = {partial!r} must be True or a list of patterns")
    found: set[str] = set()
    for pattern in partial:
        hits = fnmatch.filter(here, pattern)
        if not hits:
            raise _dcp.ArgumentError(f"partial: {pattern!r} names no tensor of this model")
        found.update(hits)
    return found


def match_tensors(
    index: Index,
    here: Mapping[str, Kind],
    shapes: Mapping[str, Shape],
    *,
    names: Mapping[str, str],
    wanted: set[str],
    strict: bool,
    result: Loaded,
) -> None:
    """Which tensors are to be filled; an error where one does not fit, or is not there."""
    for kind, (dtype, held) in here.items():
        if strict:
            check_kind(index, kind)
        there = index.kinds.get(kind, Kind(None, {}))
        if None not in (dtype, there.dtype) and dtype != there.dtype:
            raise _dcp.DTypeError(f"{index.path}: {kind} is {there.dtype} there and {dtype} here")
        asked = {**(shapes if kind == "weights" else {}), **held}
        for name, shape in asked.items():
            stored = there.shapes.get(names.get(name, "")) if name in wanted else None
            if stored is None and not strict:
                result.missing.setdefault(kind, []).append(name)
            elif stored is None and prod(shape) > 0:
                raise _dcp.FileError(f"{index.path} holds no {kind} of {name}")
            elif stored is not None and stored != shape:
                raise _dcp.ArgumentError(
                    f"{index.path}: {kind} of {name} has shape {stored} there and {shape} here"
                )
        taken = [n for n in shapes if n in wanted and names.get(n, "") in there.shapes]
        result.loaded[kind] = taken
        used = {names[name] for name in taken}
        if unexpected := [name for name in there.shapes if name not in used]:
            result.unexpected[kind] = unexpected
