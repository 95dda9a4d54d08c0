"""`dcp checkpoint show|verify PATH`: what a checkpoint holds, and whether it is whole."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click

from dcp.cli import FAILED, Exit, InputError, common, reading_input


@click.group("checkpoint")
def command() -> None:
    """Look at checkpoints: PATH is the folder of a run, or one step's folder in it."""


def find(path: str) -> Path:
    """Return the step's folder that `path` means: itself, or the newest whole one in it."""
    if not Path(path).is_dir():
        raise InputError(f"{path}: no such folder")
    from dcp import checkpoint

    with reading_input():
        return checkpoint.resolve(path)


def _document(shown: dict[str, Any], where: Path) -> dict[str, Any]:
    return {
        "path": str(where),
        "step": shown["step"],
        "world": shown["world"],
        "bytes": shown["bytes"],
        "tensors": shown["tensors"],
    }


@command.command("show")
@click.argument("path")
@common
def show(json_to: str | None, path: str) -> dict[str, Any]:
    """Show step, world, size and tensors."""
    where = find(path)
    from dcp import checkpoint

    with reading_input():
        document = _document(checkpoint.show(where), where)
    if json_to != "-":
        _print(document)
    return document


@command.command("verify")
@click.argument("path")
@common
def verify(json_to: str | None, path: str) -> dict[str, Any]:
    """Read every byte: each element of each tensor once, and the checksums."""
    where = find(path)
    from dcp import checkpoint

    try:
        checkpoint.verify(where)
    except OSError as error:
        raise Exit(FAILED, str(error)) from error
    document = _document(checkpoint.show(where), where)
    if json_to != "-":
        click.echo(f"{where}: whole, {len(document['tensors'])} tensors")
    return document


def _print(document: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from dcp.cli.show import size

    console = Console()
    console.print(
        f"{document['path']}: step {document['step']}, written by {document['world']} ranks, "
        f"{size(document['bytes'])}"
    )
    table = Table(box=None, pad_edge=False)
    for name in ("tensor", "shape", "elements"):
        table.add_column(name)
    for tensor in document["tensors"]:
        shape = tensor["shape"]
        table.add_row(tensor["name"], " x ".join(map(str, shape)), f"{math.prod(shape):,}")
    console.print(table)
