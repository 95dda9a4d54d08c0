"""`dcp checkpoint show|verify PATH`: what a checkpoint holds, and whether it is whole."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click

from dcp.cli import FAILED, Exit, InputError, common


@click.group("checkpoint")
def command() -> None:
    """Look at checkpoints: PATH is the folder of a run, or one step's folder in it."""


def find(path: str) -> Path:
    """Return the step's folder that `path` means: itself, or the newest whole one in it."""
    from dcp import checkpoint

    folder = Path(path)
    if not folder.is_dir():
        raise InputError(f"{path}: no such folder")
    if folder.name.startswith("step-"):
        return folder
    newest = checkpoint.latest(folder)
    if newest is None:
        broken = sorted(found.name for found in folder.glob("step-*"))
        raise InputError(
            f"{path}: none of {', '.join(broken)} is whole" if broken else f"{path}: no checkpoint"
        )
    return Path(newest)


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
    from dcp import checkpoint

    where = find(path)
    document = _document(checkpoint.show(where), where)
    if json_to is None:
        _print(document)
    return document


@command.command("verify")
@click.argument("path")
@common
def verify(json_to: str | None, path: str) -> dict[str, Any]:
    """Read every byte: each element of each tensor once, and the checksums."""
    from dcp import checkpoint

    where = find(path)
    try:
        checkpoint.verify(where)
    except (OSError, ValueError) as error:
        raise Exit(FAILED, str(error)) from error
    document = _document(checkpoint.show(where), where)
    if json_to is None:
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
