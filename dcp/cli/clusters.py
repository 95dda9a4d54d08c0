"""What `dcp plan` and `dcp simulate` share: the cost model, and the strategies asked for."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from dcp.cli import InputError, reading_input

__all__ = ["Cluster", "cluster", "cluster_options", "show_on", "strategies", "writable"]


@dataclasses.dataclass(frozen=True)
class Cluster:
    """A cost model, and the memory of one of its devices in bytes (None: no cap)."""

    cost: Any
    memory_bytes: int | None


def cluster_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that describe devices and model."""
    for option in (
        click.option("--memory", metavar="SIZE", help="Most bytes of a rank.  [the device's]"),
        click.option(
            "--node-ranks",
            type=click.IntRange(min=0),
            metavar="N",
            help="Ranks of a node, 0: all share one.  [the device's]",
        ),
        click.option(
            "--set",
            "sets",
            metavar="CONSTANT=VALUE",
            multiple=True,
            help="A constant of the device, for example matmul_flops_per_s=5e14; a pair "
            "(inside a node, across nodes) as 2e11,4e10.",
        ),
        click.option("--cost", "cost_file", metavar="FILE", help="A cost model of `dcp profile`."),
        click.option("--model", metavar="NAME", help="Model by name, for example llama-3-8b."),
        click.option("--device", metavar="NAME", help="h200, h100 or cpu: a reckoned cost model."),
    ):
        function = option(function)
    return function


def cluster(
    *,
    device: str | None,
    model: str | None,
    cost_file: str | None,
    sets: tuple[str, ...],
    node_ranks: int | None,
    memory: str | None,
) -> Cluster:
    """The cost model of a file, or of a device by name, with what else was said."""
    from dcp import analytic, config
    from dcp.cost import CostModel

    cap: float | None = None
    if cost_file is not None:
        if device is not None or sets:
            raise InputError("--cost FILE says what --device and --set would: give one of them")
        with reading_input():
            cost = CostModel.load(cost_file)
        if model is not None:
            _check_model(cost, model)
    else:
        if device is None or model is None:
            raise InputError("say what runs: --device NAME --model NAME, or --cost FILE")
        chosen = analytic.device_named(device, **_constants(sets))
        cost = CostModel.analytic(model, chosen)
        cap = chosen.memory_bytes
    if node_ranks is not None:
        cost = dataclasses.replace(cost, node_ranks=node_ranks)
    if memory is not None:
        cap = config.parse_bytes(memory, "--memory")
    return Cluster(cost, int(cap) if cap is not None else None)


def _check_model(cost: Any, model: str) -> None:
    """A cost model of another model is refused; one that says nothing is taken for any. What a
    model computes in is up to the file."""
    from dcp import analytic
    from dcp.models import COMPUTE_DTYPES

    config = analytic.config_named(model)
    shape = config if isinstance(config, analytic.Shape) else analytic.Shape.of(config)
    either = [dataclasses.replace(shape, compute_dtype=d).fingerprint for d in COMPUTE_DTYPES]
    if cost.model and cost.model not in either:
        raise InputError(f"--cost: {cost.name!r} is the cost model of another model than {model}")


def _constants(sets: tuple[str, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for text in sets:
        name, equals, value = text.partition("=")
        try:
            numbers = [float(part) for part in value.split(",")]
        except ValueError:
            numbers = []
        if not equals or not numbers:
            raise InputError(f"--set {text}: must be CONSTANT=NUMBER or CONSTANT=NUMBER,NUMBER")
        whole = [int(n) if n.is_integer() and abs(n) < 1e6 else n for n in numbers]
        found[name.strip()] = whole[0] if len(whole) == 1 else tuple(whole)
    return found


def strategies(text: str) -> list[str]:
    """Names of a comma-separated list; "all": all that decide by themselves."""
    from dcp import planning, simulate
    from dcp.config import suggest

    if text == "all":
        return list(simulate.every_strategy())
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in planning.strategies():
            known = [*planning.strategies(), "all"]
            raise InputError(f"--strategy {name}: no such strategy{suggest(name, known)}")
    if not names:
        raise InputError("--strategy: no strategy is named")
    return list(dict.fromkeys(names))


def writable(path: str | None, option: str) -> None:
    """A file that is to be written needs its folder: said before anything is computed."""
    if path is not None and not Path(path).resolve().parent.is_dir():
        raise InputError(f"{option} {path}: no such folder: {Path(path).resolve().parent}")


def show_on(json_to: str | None) -> Any:
    """A console on standard output, or on standard error where that holds the document."""
    from rich.console import Console

    stream = sys.stderr if json_to == "-" else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else 120)
