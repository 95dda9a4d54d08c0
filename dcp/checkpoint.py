"""Checkpoints: saved by shards, loaded on any number of ranks.

``DIR/step-00000012/`` holds one safetensors file a rank and ``index.json``. Pieces are named by
tensor and global range and no padding is stored, so the number of ranks that saved means nothing
to those that load. A checkpoint is written beside its place and renamed when it is whole: killed
at any moment, a run leaves whole checkpoints and leftovers that the next save clears away.

A kind is what is kept of the tensors: ``weights``, and each state of the optimizer by name. Kinds
may have a dtype and, by tensor, shapes of their own (scales of blocks, preconditioners).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from dcp import _dcp
from dcp import checkpoint_format as form
from dcp.checkpoint_async import AsyncSaver, SaveTimes
from dcp.checkpoint_exchange import convert_index, export_index
from dcp.checkpoint_folder import is_foreign, is_used, latest, resolve
from dcp.checkpoint_foreign import open_foreign
from dcp.checkpoint_format import DTYPES, Array, Index
from dcp.checkpoint_match import (
    Loaded,
    Rename,
    check_kind,
    compare_configs,
    compare_shapes,
    match_tensors,
    names_here,
    wanted_names,
)
from dcp.checkpoint_reader import Reader, Request
from dcp.checkpoint_writer import (
    KindShapes,
    Run,
    Saving,
    Shapes,
    Shards,
    World,
    held_kinds,
    parts_of,
    plain,
    plain_shapes,
    together,
)

__all__ = [
    "AsyncSaver",
    "Loaded",
    "Run",
    "SaveTimes",
    "compare_configs",
    "convert",
    "export",
    "gather",
    "is_used",
    "latest",
    "load",
    "read",
    "resolve",
    "save",
    "show",
    "verify",
]


_logger = logging.getLogger("dcp")


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
    kind_shapes: KindShapes | None = None,
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
    kind_shapes : mapping of str to mapping of str to shape, optional
        Kind to tensor to shape, where it is not the tensor's; runs count its elements.

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
        If an argument is wrong, or ranks differ in step, shapes, dtypes or config.

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
    with together(world, f"saving step {step} in {folder}"):
        names = plain_shapes(shapes)
        saving = Saving(
            folder,
            step=step,
            rank=world.rank,
            size=world.size,
            shapes=names,
            kinds=held_kinds(shards, names, kind_shapes),
            state=state,
            config=config,
            keep=keep,
        )
        with saving:
            if world.rank == 0:
                saving.begin()
            world.barrier()
            parts, arrays = parts_of(shards)
            with saving.open(parts) as writer:
                for chunk in writer.chunks():
                    writer.write(chunk, chunk.of(arrays))
                saving.leave_note(writer.finish())
            world.barrier()
            if world.rank == 0:
                saving.publish()
            world.barrier()
    return saving.place


def _open(path: str | os.PathLike[str]) -> Index:
    """The index of a checkpoint, or of foreign files; checked as far as it goes without data."""
    path = Path(path)
    index = open_foreign(path) if is_foreign(path) else form.read_index(resolve(path))
    form.check(index)
    return index


def load(
    path: str | os.PathLike[str],
    *,
    shards: Shards,
    shapes: Shapes,
    config: Any = None,
    world: World | None = None,
    kind_shapes: KindShapes | None = None,
    partial: bool | Sequence[str] = False,
    rename: Rename | None = None,
) -> Loaded:
    """Fills this rank's shards from a checkpoint of any number of ranks.

    Parameters
    ----------
    path : path
        The checkpoint, or the folder of a run: its newest whole one. Also a folder of Hugging
        Face's, or a safetensors file: weights without checksums.
    shards : mapping of str to sequence of Run
        What this rank holds; the arrays are written. Kinds that are not asked for are not read.
    shapes : mapping of str to shape
        All tensors of the model.
    config : mapping or dataclass, optional
        Compared with what was saved: a field that decides what the model computes must be equal;
        dropout, compute_dtype, initializer_range and max_position_embeddings may differ, and the
        logger says so.
    world : World, optional
        Its ranks load together: none returns before all are done, and a failure ends all.
    kind_shapes : mapping of str to mapping of str to shape, optional
        As for :func:`save`.
    partial : bool or sequence of str, optional
        True: fill what the checkpoint has, leave the rest as it is. Patterns (``*norm*``): of the
        tensors here whose names match. What is filled must have its shape. By default all of both
        must be there.
    rename : mapping or callable, optional
        Names in the checkpoint to names here. A mapping leaves other names as they are; a
        callable may return None for a tensor that is not to be loaded.

    Returns
    -------
    Loaded
        The ``state`` that was saved, with what was ``loaded``, ``missing`` and ``unexpected``.

    Raises
    ------
    dcp.FileError
        If a file is missing, truncated or damaged, pieces are missing or come twice, or a kind is
        not there. The arrays are undefined then.
    dcp.ArgumentError, dcp.DTypeError
        If it is a checkpoint of another model: names what differs, with both values. If a pattern
        or a name of `rename` is nowhere, or two become one.

    Examples
    --------
    >>> import numpy as np, tempfile
    >>> from safetensors.numpy import save_file
    >>> from dcp import checkpoint
    >>> there, here = np.ones(3, np.float32), np.zeros(3, np.float32)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_file({"old": there, "more": there}, folder + "/a.safetensors")
    ...     done = checkpoint.load(folder + "/a.safetensors", shapes={"w": (3,), "b": (3,)},
    ...                            shards={"weights": [checkpoint.Run("w", 0, here)]},
    ...                            rename={"old": "w"}, partial=True)
    >>> here.tolist(), done.loaded, done.missing, done.unexpected
    ([1.0, 1.0, 1.0], {'weights': ['w']}, {'weights': ['b']}, {'weights': ['more']})
    """
    with together(world, f"loading {path}"):
        index = _open(path)
        here = plain_shapes(shapes)
        held = held_kinds(shards, here, kind_shapes, writable=True)
        strict = partial is False
        if config is not None:
            mine = plain(config, "config")
            notices = compare_configs(index.path, index.config, mine, partial=not strict)
            for notice in notices if world is None or world.rank == 0 else ():
                _logger.warning("%s", notice)
        names = names_here(index, rename)
        if strict:
            there = {new: index.shapes[old] for new, old in names.items()}
            compare_shapes(index.path, there, here)
        result = Loaded(index.state)
        wanted = wanted_names(here, partial)
        match_tensors(index, held, here, names=names, wanted=wanted, strict=strict, result=result)
        with Reader(index) as reader:
            reader.read(
                [
                    Request(kind, names[run.name], int(run.first), run.array)
                    for kind, runs in shards.items()
                    for run in runs
                    if run.name in wanted and run.name in names
                ]
            )
        if world is not None:
            world.barrier()
    return result


def show(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What a checkpoint holds, from its index.

    Returns
    -------
    dict
        ``path``, ``step``, ``world``, ``bytes``, ``tensors`` (name, shape, kinds of each; where a
        kind has another shape, ``kind_shapes``), ``kinds`` (dtype as the files say it, elements,
        tensors of each), ``dtypes`` (of each kind's arrays), ``kind_shapes`` (kind to tensor to
        shape, where it is not the tensor's), ``files`` (name, bytes of each), ``config``,
        ``state``.

    Raises
    ------
    dcp.FileError
        If there is no whole checkpoint.

    Examples
    --------
    >>> from dcp import checkpoint
    >>> checkpoint.show("no/such/folder")
    Traceback (most recent call last):
    dcp.FileError: no/such/folder cannot be read: ...
    """
    with together(None, f"reading {path}"):
        index = _open(path)
    return {
        "path": str(index.path),
        "step": index.step,
        "world": index.world,
        "bytes": sum(file.bytes for file in index.files),
        "tensors": [_show_tensor(index, name) for name in index.shapes],
        "kinds": {
            kind: {
                "dtype": held.dtype,
                "elements": sum(map(prod, held.shapes.values())),
                "tensors": len(held.shapes),
            }
            for kind, held in index.kinds.items()
        },
        "dtypes": {
            kind: DTYPES[held.dtype].name
            for kind, held in index.kinds.items()
            if held.dtype is not None
        },
        "kind_shapes": {
            kind: other
            for kind, held in index.kinds.items()
            if (other := {n: list(s) for n, s in held.shapes.items() if s != index.shapes[n]})
        },
        "files": [{"name": file.name, "bytes": file.bytes} for file in index.files],
        "config": index.config,
        "state": index.state,
    }


def _show_tensor(index: Index, name: str) -> dict[str, Any]:
    shape = index.shapes[name]
    held = {kind: of.shapes[name] for kind, of in index.kinds.items() if name in of.shapes}
    result: dict[str, Any] = {"name": name, "shape": list(shape), "kinds": list(held)}
    other = {kind: list(of) for kind, of in held.items() if of != shape}
    return result | ({"kind_shapes": other} if other else {})


def verify(path: str | os.PathLike[str]) -> None:
    """Reads every byte of a checkpoint and checks it.

    Raises
    ------
    dcp.FileError
        Names the file and piece that is missing, comes twice or is damaged.

    Examples
    --------
    >>> from dcp import checkpoint
    >>> checkpoint.verify("no/such/folder")
    Traceback (most recent call last):
    dcp.FileError: no/such/folder cannot be read: ...
    """
    with together(None, f"verifying {path}"):
        index = _open(path)
        with Reader(index) as reader:
            reader.verify()


def gather(
    path: str | os.PathLike[str], *, kinds: Sequence[str] | None = None
) -> Iterator[tuple[str, str, Array]]:
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

    Examples
    --------
    >>> from dcp import checkpoint
    >>> list(checkpoint.gather("no/such/folder"))
    Traceback (most recent call last):
    dcp.FileError: no/such/folder cannot be read: ...
    """
    with together(None, f"reading {path}"):
        index = _open(path)
        kinds = list(index.kinds) if kinds is None else list(kinds)
        for kind in kinds:
            check_kind(index, kind)
        with Reader(index) as reader:
            for kind in kinds:
                dtype, shapes = index.kinds[kind]
                for name, shape in shapes.items():
                    flat = np.empty(prod(shape), DTYPES[dtype or "F32"])
                    reader.read([Request(kind, name, 0, flat)])
                    yield kind, name, flat.reshape(shape)


def read(
    path: str | os.PathLike[str],
    name: str,
    *,
    kind: str = "weights",
    first: int = 0,
    count: int | None = None,
) -> Array:
    """One tensor of a checkpoint, or a range of its elements; nothing else is read.

    Parameters
    ----------
    path : path
        The checkpoint, the folder of a run (its newest whole one), a folder of Hugging Face's or a
        safetensors file.
    name : str
        The tensor.
    kind : str, optional
        What of it.
    first, count : int, optional
        Elements ``[first, first + count)`` in row-major order; to its end where `count` is None.

    Returns
    -------
    numpy.ndarray
        The tensor in its shape, or the range, 1-D. uint16 for the bits of bfloat16.

    Raises
    ------
    dcp.FileError
        If the checkpoint is damaged there, or does not hold the tensor.
    dcp.ArgumentError
        If the range does not lie in the tensor.

    Examples
    --------
    >>> import numpy as np, tempfile
    >>> from safetensors.numpy import save_file
    >>> from dcp import checkpoint
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_file({"w": np.ones((2, 3), np.float32)}, folder + "/a.safetensors")
    ...     checkpoint.read(folder + "/a.safetensors", "w", first=2, count=3).tolist()
    [1.0, 1.0, 1.0]
    """
    with together(None, f"reading {path}"):
        index = _open(path)
        check_kind(index, kind)
        dtype, shapes = index.kinds[kind]
        if name not in shapes:
            raise _dcp.FileError(f"{index.path} holds no {kind} of {name}")
        size = prod(shapes[name])
        last = size if count is None else first + count
        if not 0 <= first <= last <= size:
            raise _dcp.ArgumentError(
                f"elements {first}..{last} do not lie in {name}, which has {size}"
            )
        flat = np.empty(last - first, DTYPES[dtype or "F32"])
        with Reader(index) as reader:
            reader.read([Request(kind, name, first, flat)])
    return flat.reshape(shapes[name]) if first == 0 and count is None else flat


def export(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    max_shard_bytes: int = 5 * 10**9,
    dtype: str = "float32",
) -> dict[str, Any]:
    """Writes the weights as a folder of Hugging Face's: ``config.json`` and safetensors.

    Parameters
    ----------
    path : path
        The checkpoint, or the folder of a run: its newest whole one.
    out : path
        A new or empty folder.
    max_shard_bytes : int, optional
        Weights of more bytes go to several files and an index; a tensor stays whole.
    dtype : {"float32", "bfloat16"}, optional
        bfloat16 is rounded to nearest, ties to even.

    Returns
    -------
    dict
        ``files``, ``bytes`` of the tensors.

    Raises
    ------
    dcp.FileError
        If the checkpoint is damaged or the folder cannot be written.
    dcp.ArgumentError
        If `out` is not empty, a setting breaks a rule, or the checkpoint has no model's settings.

    Examples
    --------
    >>> import dcp, tempfile
    >>> from dcp import checkpoint
    >>> model = dcp.Model(dcp.Transformer1D(11, 8, 12, 1, 2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     model.save_pretrained(folder + "/model")
    ...     checkpoint.export(folder + "/model", folder + "/half", dtype="bfloat16")
    {'files': ['model.safetensors'], 'bytes': 1488}
    """
    with together(None, f"exporting {path}"):
        index = _open(path)
        return export_index(index, Path(out), max_shard_bytes=max_shard_bytes, dtype=dtype)


def convert(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    ranks: int | None = None,
) -> Path:
    """Writes any checkpoint, or foreign weights, as a checkpoint of so many files.

    Parameters
    ----------
    path : path
        A checkpoint, or the folder of a run: all its kinds and its state are kept. Or a folder of
        Hugging Face's, its index, or a safetensors file: weights as float32, at step 0.
    out : path
        Where ``step-XXXXXXXX`` is made; a folder that holds no checkpoints.
    ranks : int, optional
        Files; by default as many as there were.

    Returns
    -------
    Path
        The new checkpoint's folder.

    Raises
    ------
    dcp.FileError
        If the source is damaged or `out` cannot be written.
    dcp.ArgumentError
        If `out` holds checkpoints, or `ranks` is less than 1.

    Examples
    --------
    >>> import numpy as np, tempfile
    >>> from safetensors.numpy import save_file
    >>> from dcp import checkpoint
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_file({"w": np.arange(6.0, dtype=np.float32)}, folder + "/a.safetensors")
    ...     path = checkpoint.convert(folder + "/a.safetensors", folder + "/run", ranks=2)
    ...     checkpoint.show(path)["world"], path.name
    (2, 'step-00000000')
    """
    with together(None, f"converting {path}"):
        if is_used(out):
            raise _dcp.ArgumentError(f"{out} holds checkpoints already: name another folder")
        index = _open(path)
        chosen = ranks if ranks is not None else max(1, index.world)
        return convert_index(index, Path(out), ranks=chosen, step=index.step)
