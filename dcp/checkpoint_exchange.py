"""Checkpoints to and from other forms: Hugging Face's folders, other numbers of files.

Both ways run through memory a few megabytes at a time, whatever the size of tensors and files.
"""

from __future__ import annotations

import bisect
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from dcp import _dcp
from dcp import checkpoint_format as form
from dcp.checkpoint_format import DTYPES, Array, Index, Kind, Part, Shape
from dcp.checkpoint_reader import Reader, Request
from dcp.checkpoint_writer import Saving

BLOCK_BYTES = 16 << 20
DTYPE_CHOICES = {"float32": "F32", "bfloat16": "BF16"}
KEEP_ALL = 1 << 62


def to_bfloat16(values: Array) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """The bits of float32 rounded to bfloat16, to nearest, ties to even; NaN stays NaN."""
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def export_index(index: Index, out: Path, *, max_shard_bytes: int, dtype: str) -> dict[str, Any]:
    """Writes `config.json` and the weights: :func:`checkpoint.export` says how."""
    from dcp import huggingface
    from dcp.models import Transformer1D

    if dtype not in DTYPE_CHOICES:
        raise _dcp.ArgumentError(f"dtype {dtype!r} must be one of {', '.join(DTYPE_CHOICES)}")
    if max_shard_bytes < 1:
        raise _dcp.ArgumentError(f"max_shard_bytes {max_shard_bytes} must be at least 1")
    if not index.config:
        raise _dcp.ArgumentError(f"{index.path} holds no configuration of a model to export")
    config = huggingface.config_json(Transformer1D(**index.config).core())
    config["torch_dtype"] = dtype
    shapes = index.kinds["weights"].shapes
    item_bytes = DTYPES[DTYPE_CHOICES[dtype]].itemsize
    groups = _groups({n: prod(s) * item_bytes for n, s in shapes.items()}, max_shard_bytes)
    _make_empty(out)
    names = [form.FOREIGN_SINGLE]
    if len(groups) > 1:
        stem = form.FOREIGN_SINGLE.removesuffix(".safetensors")
        count = len(groups)
        names = [f"{stem}-{n + 1:05d}-of-{count:05d}.safetensors" for n in range(count)]
    with Reader(index) as reader:
        for name, group in zip(names, groups, strict=True):
            of = {tensor: shapes[tensor] for tensor in group}
            _write_file(reader, out / name, of, DTYPE_CHOICES[dtype])
    total = sum(prod(shape) for shape in shapes.values()) * item_bytes
    if len(groups) > 1:
        where = {t: name for name, group in zip(names, groups, strict=True) for t in group}
        _write_json(
            out / form.FOREIGN_INDEX, {"metadata": {"total_size": total}, "weight_map": where}
        )
    _write_json(out / "config.json", config)
    return {"files": names, "bytes": total}


def _groups(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """Tensors in their order, a file at a time; one that is larger has a file of its own."""
    groups: list[list[str]] = [[]]
    used = 0
    for name, size in sizes.items():
        if groups[-1] and used + size > most:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    return groups


def _make_empty(out: Path) -> None:
    """What is there stays as it is."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            raise _dcp.ArgumentError(f"{out} is not empty: name a new folder")
    except OSError as error:
        if isinstance(error, _dcp.Error):
            raise
        raise _dcp.FileError(f"{out} cannot be made: {error.strerror}") from error


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    part = path.with_name(path.name + ".part")
    form.write_synced(part, (json.dumps(document, indent=2, sort_keys=True) + "\n").encode())
    part.replace(path)


def _write_file(reader: Reader, path: Path, shapes: Mapping[str, Shape], dtype: str) -> None:
    """Whole tensors in their shapes, block by block; the file appears when it is whole."""
    item_bytes = DTYPES[dtype].itemsize
    entries = {n: (dtype, shape, prod(shape) * item_bytes) for n, shape in shapes.items()}
    part = path.with_name(path.name + ".part")
    with part.open("xb", buffering=0) as file:
        file.write(form.encode_header(entries, format="pt"))
        for name in shapes:
            for block in reader.blocks("weights", name, BLOCK_BYTES):
                values = to_bfloat16(block) if dtype == "BF16" else block
                data = values.view(np.uint8).data
                while len(data) > 0:
                    data = data[file.write(data) :]
        os.fsync(file.fileno())
    part.replace(path)


def convert_index(index: Index, out: Path, *, ranks: int, step: int) -> Path:
    """Writes a checkpoint of `ranks` files: :func:`checkpoint.convert` says how."""
    if ranks < 1:
        raise _dcp.ArgumentError(f"ranks {ranks} must be at least 1")
    shares = _shares(index.kinds, ranks)
    savings = [
        Saving(
            out,
            step=step,
            rank=rank,
            size=ranks,
            shapes=index.shapes,
            kinds=index.kinds,
            state=index.state,
            config=index.config,
            keep=KEEP_ALL,
        )
        for rank in range(ranks)
    ]
    with savings[0] as first, ThreadPoolExecutor(min(ranks, os.cpu_count() or 1, 4)) as pool:
        first.begin()
        list(pool.map(lambda job: _convert_file(index, *job), zip(savings, shares, strict=True)))
        first.publish()
    return first.place


def _shares(kinds: Mapping[str, Kind], ranks: int) -> list[list[Part]]:
    """Each kind's elements in order, cut evenly."""
    shares: list[list[Part]] = [[] for _ in range(ranks)]
    ordered = sorted(kinds.items(), key=lambda item: -DTYPES[item[1].dtype or "U8"].itemsize)
    for kind, (dtype, shapes) in ordered:
        total = sum(map(prod, shapes.values()))
        cuts = [total * rank // ranks for rank in range(ranks + 1)]
        at = 0
        for name, shape in shapes.items():
            end = at + prod(shape)
            rank = bisect.bisect_right(cuts, at) - 1
            while at < end:
                high = min(end, cuts[rank + 1])
                if at < high:
                    first = at - end + prod(shape)
                    shares[rank].append(Part(kind, name, first, high - at, dtype or "F32"))
                at, rank = high, rank + 1
    return shares


def _convert_file(index: Index, saving: Saving, parts: list[Part]) -> None:
    """One file. Reads several chunks at a time, since those of the source end elsewhere, and each
    is read for every part of it."""
    buffer = np.empty(max(1, BLOCK_BYTES // form.CHUNK_BYTES) * form.CHUNK_BYTES, np.uint8)
    with saving.open(parts) as writer, Reader(index) as reader:
        begin = end = 0  # bytes of the part that the buffer holds
        last = -1
        for chunk in writer.chunks():
            part = parts[chunk.part]
            if chunk.part != last or chunk.begin >= end:
                last, begin = chunk.part, chunk.begin
                end = min(begin + buffer.size, part.bytes)
                _fill(reader, part, buffer[: end - begin], begin)
            writer.write(chunk, buffer[chunk.begin - begin :][: chunk.bytes].data)
        saving.leave_note(writer.finish())


def _fill(reader: Reader, part: Part, buffer: Array, begin: int) -> None:
    dtype = DTYPES[part.dtype]
    out = buffer.view(dtype)
    reader.read([Request(part.kind, part.tensor, part.first + begin // dtype.itemsize, out)])
