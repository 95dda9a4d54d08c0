"""Data-centric parallel training of transformers on sequences of very different lengths.

The public names load on first use, so that ``import dcp`` stays quick and does no work.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOME = {
    # errors: one class per status of the core
    **dict.fromkeys(
        (
            "Error",
            "ArgumentError",
            "DTypeError",
            "OutOfMemoryError",
            "StateError",
            "FileError",
            "DeadlineError",
            "RankError",
            "MismatchError",
            "AbortedError",
            "UnsupportedError",
            "NumericError",
            "InfeasibleError",
            "InterruptedCallError",
        ),
        "dcp._dcp",
    ),
    "init": "dcp.world",
    "World": "dcp.world",
    "Traffic": "dcp.world",
    "launch": "dcp.launcher",
    "Transformer1D": "dcp.models",
    "Model": "dcp.models",
    "plan_layout": "dcp.layout",
    "Layout": "dcp.layout",
    "Mesh": "dcp.placement",
    "RaggedShard": "dcp.placement",
    "Replicate": "dcp.placement",
    "Shard": "dcp.placement",
    "redistribute": "dcp.placement",
    "fully_shard": "dcp.sharded",
    "ShardedModel": "dcp.sharded",
    "ShardedTensors": "dcp.sharded_tensors",
    "CostModel": "dcp.cost",
    "profile": "dcp.profiling",
    "Plan": "dcp.planning",
    "plan": "dcp.planning",
    "Loader": "dcp.loader",
    "Controller": "dcp.controller",
    "Trainer": "dcp.trainer",
}
_MODULES = {"buckets", "checkpoint", "data", "layout", "ops", "optim", "placement", "simulate"}

__all__ = ["__version__", *sorted(_HOME), *sorted(_MODULES)]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"dcp.{name}")
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'dcp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
