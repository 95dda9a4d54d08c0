"""What every result file says about its machine; figures that do not exist are null, never NaN."""

from __future__ import annotations

import math
from typing import Any

import machine


def pytest_benchmark_update_machine_info(config: Any, machine_info: dict[str, Any]) -> None:
    machine_info.clear()  # the plug-in's own lists the host's name
    machine_info.update(machine.describe())


def pytest_benchmark_update_json(config: Any, benchmarks: Any, output_json: Any) -> None:
    output_json.update(_without_nan(output_json))


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
