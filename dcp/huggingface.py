"""Hugging Face's files: `config.json` of a Llama and its safetensors.

What transformers' Llama would compute differently from ours is an error that names the field; what
it does not read either is ignored. Weights are read tensor by tensor, so that no second copy of a
checkpoint is held.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from dcp._dcp import ArgumentError, FileError, UnsupportedError

__all__ = ["config_fields", "config_json", "read_config", "read_weights", "write_folder"]

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"

# LlamaConfig's own defaults, for files that leave a key out
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "initializer_range": 0.02,
}
_DEFAULT_THETA = 10000.0

# key: the values that mean what we compute
_REQUIRED: dict[str, tuple[Any, ...]] = {
    "model_type": ("llama",),
    "hidden_act": ("silu", "swish"),
    "attention_dropout": (None, 0),
    "pretraining_tp": (None, 0, 1),
    "sliding_window": (None,),
    "quantization_config": (None,),
    "partial_rotary_factor": (None, 1),
}


def _unsupported(key: str, value: object, rule: str) -> UnsupportedError:
    return UnsupportedError(f"{key} {value!r} is not supported: {rule}")


def _theta_of_dict(key: str, settings: object) -> float | None:
    """rope_theta inside `rope_parameters` or `rope_scaling`; only the plain kind is supported."""
    if not isinstance(settings, Mapping):
        raise ArgumentError(f"{key} {settings!r} must be an object")
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind != "default":
        raise _unsupported(f"{key}.rope_type", kind, "only 'default' is")
    partial = settings.get("partial_rotary_factor")
    if partial not in (None, 1):
        raise _unsupported(f"{key}.partial_rotary_factor", partial, "only 1 is")
    theta = settings.get("rope_theta")
    return None if theta is None else float(theta)


def _theta(config: Mapping[str, Any]) -> float:
    """The one rope_theta that a config names, in the form of transformers 4, 5 or both."""
    found = {}
    if config.get("rope_theta") is not None:
        found["rope_theta"] = float(config["rope_theta"])
    for key in ("rope_parameters", "rope_scaling"):
        if config.get(key):
            theta = _theta_of_dict(key, config[key])
            if theta is not None:
                found[f"{key}.rope_theta"] = theta
    if len(set(found.values())) > 1:
        text = ", ".join(f"{key} {value:g}" for key, value in found.items())
        raise ArgumentError(f"{text}: the file must name one rope_theta")
    return next(iter(found.values()), _DEFAULT_THETA)


def config_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `dcp.Transformer1D` from a parsed `config.json`.

    Parameters
    ----------
    config : mapping
        As transformers 4 (`rope_theta`) or 5 (`rope_parameters`) writes it.

    Returns
    -------
    dict
        Keyword arguments of `dcp.Transformer1D`.

    Raises
    ------
    dcp.UnsupportedError
        A field asks for something that dcp does not compute; the message names field and value.
    dcp.ArgumentError
        The two ways of writing `rope_theta` disagree.

    Examples
    --------
    >>> fields = config_fields({"model_type": "llama", "hidden_size": 64, "rope_theta": 500.0})
    >>> fields["hidden_size"], fields["rope_theta"]
    (64, 500.0)
    """
    architectures = config.get("architectures")
    if architectures and list(architectures) != ["LlamaForCausalLM"]:
        raise _unsupported("architectures", architectures, "only ['LlamaForCausalLM'] is")
    if "model_type" not in config:
        raise ArgumentError("config.json has no model_type: it must be 'llama'")
    for key, allowed in _REQUIRED.items():
        if key in config and config[key] not in allowed:
            raise _unsupported(key, config[key], f"it must be {allowed[0]!r}")
    kinds = set(config.get("layer_types") or ())
    if kinds - {"full_attention"}:
        raise _unsupported("layer_types", sorted(kinds), "all must be 'full_attention'")
    fields = {key: config.get(key, default) for key, default in _DEFAULTS.items()}
    fields["rope_theta"] = _theta(config)
    fields["dropout"] = float(config.get("residual_dropout", 0.0))
    for key in ("rms_norm_eps", "initializer_range"):
        fields[key] = float(fields[key])
    return fields


def config_json(fields: Mapping[str, Any]) -> dict[str, Any]:
    """`config.json` for the fields of a `dcp.Transformer1D`; transformers 4 and 5 read it.

    Both ways of writing the rotary settings are there: each version reads its own. `compute_dtype`
    is left out: it is a choice of a run, not a property of the model.

    Examples
    --------
    >>> import dcp
    >>> config_json(dcp.Transformer1D.preset("tiny").core())["rope_parameters"]
    {'rope_type': 'default', 'rope_theta': 10000.0}
    """
    config = {key: fields[key] for key in _DEFAULTS}
    theta = fields["rope_theta"]
    config |= {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": "float32",
        "use_cache": True,
    }
    if fields["dropout"]:
        config["residual_dropout"] = fields["dropout"]
    return config


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FileError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise FileError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise FileError(f"{path} must hold an object")
    return value


def read_config(folder: Path) -> dict[str, Any]:
    """Parsed `config.json` of a folder."""
    return _read_json(folder / "config.json")


def _files(folder: Path) -> dict[str, Path]:
    """Which file holds which tensor; from the index where there is one."""
    if (folder / _INDEX).exists():
        names = _read_json(folder / _INDEX).get("weight_map")
        if not isinstance(names, dict):
            raise FileError(f"{folder / _INDEX} has no weight_map")
        return {name: folder / file for name, file in names.items()}
    path = folder / _SINGLE
    if not path.exists():
        raise FileError(f"{folder} has neither {_SINGLE} nor {_INDEX}")
    return dict.fromkeys(_keys(path), path)


def _keys(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="numpy") as file:
            return list(file.keys())
    except (OSError, SafetensorError) as error:
        raise FileError(f"{path} is not a readable safetensors file: {error}") from None


def _read_bf16(path: Path, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """NumPy has no bfloat16: its 16 bits are the upper half of a float32."""
    with open(path, "rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        begin, _ = json.loads(file.read(header_bytes))[name]["data_offsets"]
    count = int(np.prod(shape, dtype=np.int64))
    bits = np.fromfile(path, np.dtype("<u2"), count, offset=8 + header_bytes + begin)
    return (bits.astype(np.uint32) << 16).view(np.float32).reshape(shape)


def _read_file(path: Path, names: list[str]) -> Iterator[tuple[str, NDArray[np.float32]]]:
    try:
        with safe_open(path, framework="numpy") as file:
            there = set(file.keys())
            for name in names:
                if name not in there:
                    raise FileError(f"{path} does not hold {name}, though the index says so")
                part = file.get_slice(name)
                kind, shape = part.get_dtype(), tuple(part.get_shape())
                if kind == "BF16":
                    yield name, _read_bf16(path, name, shape)
                elif kind in ("F32", "F16"):
                    yield name, file.get_tensor(name).astype(np.float32, copy=False)
                else:
                    raise _unsupported(f"{path}: dtype of {name},", kind, "F32, F16 or BF16 is")
    except (OSError, SafetensorError) as error:
        if isinstance(error, FileError):
            raise
        raise FileError(f"{path} is not a readable safetensors file: {error}") from None


def read_weights(folder: Path) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Every tensor of a checkpoint as float32, one at a time.

    Reads `model.safetensors`, or the shards that `model.safetensors.index.json` names; float32,
    float16 and bfloat16 (widened exactly).

    Raises
    ------
    dcp.FileError
        A file is missing or broken.
    dcp.UnsupportedError
        A tensor has another dtype.
    """
    by_file: dict[Path, list[str]] = {}
    for name, path in _files(folder).items():
        by_file.setdefault(path, []).append(name)
    for path, names in by_file.items():
        yield from _read_file(path, names)


def write_folder(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, NDArray[np.float32]]
) -> None:
    """Write `config.json` and `model.safetensors`; each appears whole or not at all."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f"{_SINGLE}.part"
        save_file(dict(tensors), part, metadata={"format": "pt"})
        os.replace(part, folder / _SINGLE)
        part = folder / "config.json.part"
        part.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        os.replace(part, folder / "config.json")
    except (OSError, SafetensorError) as error:
        raise FileError(f"{folder}: {error}") from None
