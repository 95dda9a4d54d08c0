"""Tensor lists from files: names, shapes and dtypes; weights are never read.

A safetensors file, the index of a Hugging Face checkpoint (the headers of the files that it lists),
or JSON: a list of ``{"name": ..., "shape": [...], "dtype": ...}``, or an object that holds it as
``tensors``, or one of names to shapes. dtype may be left out; ``"tied": {name: other}`` beside
``tensors`` says which are one tensor under two names.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NoReturn

from dcp._dcp import ArgumentError, FileError
from dcp.layout_groups import is_layer

__all__ = ["TensorList", "read_tensors"]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MOST_BYTES = 256 * 2**20  # of a JSON file

_DTYPES = {
    "BOOL": "bool",
    "I8": "int8",
    "U8": "uint8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "I64": "int64",
    "U64": "uint64",
    "F64": "float64",
    "C64": "complex64",
}

Entry = tuple[str, tuple[int, ...], str]


class TensorList(list[Entry]):
    """(name, shape, dtype) of every tensor, and which of them are another one under a second name.

    Examples
    --------
    >>> TensorList([("w", (2, 3), "float32")], tied={}).tied
    {}
    """

    def __init__(self, entries: list[Entry], *, tied: dict[str, str] | None = None) -> None:
        super().__init__(entries)
        self.tied = tied or {}


def read_tensors(path: str | Path) -> TensorList:
    """The tensors of a file, or of a folder that holds a checkpoint.

    Raises
    ------
    dcp.FileError
        The file cannot be read, or does not hold what it should: names file and tensor.
    dcp.ArgumentError
        A name that ends in neither .json nor .safetensors.

    Examples
    --------
    >>> import json, pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder) / "tensors.json"
    ...     _ = path.write_text(json.dumps([{"name": "w", "shape": [4, 8]}]))
    ...     read_tensors(path)
    [('w', (4, 8), 'float32')]
    """
    path = Path(path)
    if path.is_dir():
        found = [path / name for name in (INDEX, SINGLE) if (path / name).is_file()]
        if not found:
            raise FileError(f"{path} holds neither {INDEX} nor {SINGLE}")
        path = found[0]
    if path.suffix == ".safetensors":
        return TensorList(_in_order_of_a_pass(_header(path)))
    if path.suffix != ".json":
        raise ArgumentError(f"{path}: must end in .json or .safetensors")
    document = _json(path)
    if isinstance(document, dict) and "weight_map" in document:
        return TensorList(_index(path, document["weight_map"]))
    return _list(path, document)


def _fail(path: Path, text: str) -> NoReturn:
    raise FileError(f"{path}: {text}")


def _json(path: Path) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            names = [name for name, _ in pairs]
            raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} comes twice")
        return result

    try:
        if path.stat().st_size > _MOST_BYTES:
            _fail(path, f"more than {_MOST_BYTES >> 20} MiB are no list of tensors")
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique)
    except OSError as error:
        if isinstance(error, FileError):
            raise
        _fail(path, f"cannot be read: {error.strerror}")
    except (ValueError, RecursionError) as error:
        _fail(path, f"is no JSON: {error}")


def _header(path: Path) -> list[Entry]:
    from dcp.safetensors_header import read_header

    entries: list[Entry] = []
    for name, tensor in read_header(path).tensors.items():
        if tensor.dtype not in _DTYPES:
            _fail(path, f"dtype {tensor.dtype} of {name!r} has no whole bytes an element")
        entries.append((name, tensor.shape, _DTYPES[tensor.dtype]))
    return entries


def _index(path: Path, weight_map: Any) -> list[Entry]:
    """The tensors that the index names, in its order, from the files that it names."""
    if not isinstance(weight_map, dict) or not weight_map:
        _fail(path, "weight_map must be an object of names and files")
    files: dict[str, dict[str, Entry]] = {}
    entries: list[Entry] = []
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or not file:
            _fail(path, f"file {file!r} of {name!r} must be a file name in the same folder")
        if file not in files:
            if not (path.parent / file).is_file():
                _fail(path, f"lists {name!r} in {file}, which is missing")
            files[file] = {entry[0]: entry for entry in _header(path.parent / file)}
        if name not in files[file]:
            _fail(path, f"lists {name!r} in {file}, which does not hold it")
        entries.append(files[file][name])
    return _in_order_of_a_pass(entries)


def _in_order_of_a_pass(entries: list[Entry]) -> list[Entry]:
    """Embeddings, layers by number, what is left: files and indexes are sorted as text."""

    def key(entry: Entry) -> tuple[int, list[tuple[int, int, str]]]:
        name = entry[0]
        stage = 1 if is_layer(name) else 2
        if stage == 2 and any(word in name for word in ("embed", "wte", "wpe")):
            stage = 0
        parts = re.split(r"(\d+)", name) if stage == 1 else []
        return stage, [(1, int(p), "") if p.isdecimal() else (0, 0, p) for p in parts]

    return sorted(entries, key=key)


def _list(path: Path, document: Any) -> TensorList:
    tied: dict[str, str] = {}
    if isinstance(document, dict) and isinstance(document.get("tensors"), list):
        tied = document.get("tied", {})
        if not isinstance(tied, dict) or not all(isinstance(v, str) for v in tied.values()):
            _fail(path, "tied must be an object of names and names")
        document = document["tensors"]
    elif isinstance(document, dict):
        document = [{"name": name, "shape": shape} for name, shape in document.items()]
    if not isinstance(document, list):
        _fail(path, "must hold a list of tensors")
    entries: list[Entry] = []
    for number, tensor in enumerate(document):
        if not isinstance(tensor, dict) or not isinstance(tensor.get("name"), str):
            _fail(path, f"tensor {number} must be an object with name and shape")
        name, shape = tensor["name"], tensor.get("shape")
        if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
            _fail(path, f"shape {shape!r} of {name!r} must be a list of integers from 0")
        dtype = tensor.get("dtype", "float32")
        if not isinstance(dtype, str):
            _fail(path, f"dtype {dtype!r} of {name!r} must be a name")
        entries.append((name, tuple(shape), _DTYPES.get(dtype, dtype)))
    return TensorList(entries, tied=tied)
