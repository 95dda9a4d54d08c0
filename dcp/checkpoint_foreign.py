"""Safetensors files that dcp did not write, as a checkpoint that can be read.

A folder of Hugging Face's, an index of several files, or one file: every tensor is one piece of
kind ``weights``, without checksums, read as float32 (float16 and bfloat16 are widened exactly).
Nothing in the files is trusted: see :mod:`dcp.safetensors_header`.
"""

from __future__ import annotations

import dataclasses
import json
import os
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from dcp import _dcp
from dcp.checkpoint_format import (
    FOREIGN_INDEX,
    FOREIGN_SINGLE,
    Index,
    Kind,
    Piece,
    Shape,
    ShardFile,
)
from dcp.checkpoint_reader import READABLE, Reader
from dcp.safetensors_header import Header, read_header

_EMBED, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_COMPARED_BYTES = 4 << 20


def open_foreign(path: Path) -> Index:
    """The index of foreign files; their headers are read and checked.

    A folder has a ``config.json``, which must be of a model that dcp computes. A head that is tied
    to the embedding and stored beside it must be equal, and is left out. A file by itself has no
    configuration.

    Raises
    ------
    dcp.FileError
        A file is missing, broken or not what its header says.
    dcp.UnsupportedError
        The model, or the dtype of a tensor, is none of ours.
    dcp.ArgumentError
        The head differs from the embedding that it is tied to.
    """
    config: dict[str, Any] = {}
    if path.is_dir():
        from dcp import huggingface
        from dcp.models import Transformer1D

        config = dataclasses.asdict(Transformer1D.from_hf(huggingface.read_config(path)))
    headers = _headers(path)
    shapes: dict[str, Shape] = {}
    files = []
    for header, names in headers:
        pieces = []
        for name in names:
            dtype, shape, _, _ = header.tensors[name]
            if name.endswith(".rotary_emb.inv_freq"):  # what old versions stored beside
                continue
            if dtype not in READABLE:
                raise _dcp.UnsupportedError(
                    f"{header.path}: dtype of {name}, {dtype}, is not supported: "
                    f"{', '.join(READABLE)} are"
                )
            shapes[name] = shape
            pieces.append(Piece("weights", name, 0, prod(shape), None))
        files.append(ShardFile(header.path.name, header.bytes, pieces))
    folder = path if path.is_dir() else path.parent
    index = Index(
        path=folder,
        step=0,
        world=len(files),
        shapes=shapes,
        kinds={"weights": Kind("F32", dict(shapes))},
        files=files,
        config=config,
        state={},
        foreign=True,
    )
    return _untie(index) if config.get("tie_word_embeddings") else index


def _headers(path: Path) -> list[tuple[Header, list[str]]]:
    """The files, and the tensors that are to be read from each, in the order of their bytes."""
    if path.is_dir():
        path = path / (FOREIGN_INDEX if (path / FOREIGN_INDEX).is_file() else FOREIGN_SINGLE)
    if path.suffix == ".safetensors":
        header = read_header(path)
        return [(header, list(header.tensors))]
    by_file: dict[str, set[str]] = {}
    for name, file in _weight_map(path).items():
        by_file.setdefault(file, set()).add(name)
    result = []
    for file, names in sorted(by_file.items()):
        header = read_header(path.parent / file)
        missing = sorted(names - header.tensors.keys())
        if missing:
            raise _dcp.FileError(
                f"{header.path} does not hold {missing[0]}, though {path.name} says so"
            )
        result.append((header, [name for name in header.tensors if name in names]))
    return result


def _weight_map(path: Path) -> dict[str, str]:
    """Tensor to file, of an index; files lie beside it."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        names = document["weight_map"]
    except OSError as error:
        raise _dcp.FileError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise _dcp.FileError(f"{path} is no index of safetensors files: {error}") from error
    if not isinstance(names, dict) or not names:
        raise _dcp.FileError(f"{path}: weight_map must name tensors")
    for name, file in names.items():
        if not isinstance(file, str) or os.path.basename(file) != file or file in ("", ".", ".."):
            raise _dcp.FileError(f"{path}: {name} lies in {file!r}, which is no file's name")
    return names


def _untie(index: Index) -> Index:
    """The same without a second copy of the embedding; one that differs is an error."""
    if not {_EMBED, _HEAD} <= index.shapes.keys():
        return index
    if not _equal(index, _EMBED, _HEAD):
        raise _dcp.ArgumentError(
            f"{index.path}: {_HEAD} differs from {_EMBED}, though tie_word_embeddings says that "
            "they are one"
        )
    shapes = {name: shape for name, shape in index.shapes.items() if name != _HEAD}
    files = [
        file._replace(pieces=[piece for piece in file.pieces if piece.tensor != _HEAD])
        for file in index.files
    ]
    return dataclasses.replace(
        index, shapes=shapes, kinds={"weights": Kind("F32", dict(shapes))}, files=files
    )


def _equal(index: Index, left: str, right: str) -> bool:
    if index.shapes[left] != index.shapes[right]:
        return False
    with Reader(index) as one, Reader(index) as other:
        blocks = zip(
            one.blocks("weights", left, _COMPARED_BYTES),
            other.blocks("weights", right, _COMPARED_BYTES),
            strict=True,
        )
        return all(np.array_equal(a.view(np.uint8), b.view(np.uint8)) for a, b in blocks)
