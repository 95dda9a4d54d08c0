"""`dcp checkpoint show|verify|export|convert PATH`: look at checkpoints, and turn them into others.

PATH is the folder of a run, one step's folder in it, a folder of Hugging Face's, or a safetensors
file.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click

from dcp.cli import FAILED, Exit, InputError, common, reading_input


@click.group("checkpoint")
def command() -> None:
    """Look at checkpoints, export and convert them.

    PATH is the folder of a run, one step's folder in it, a folder of Hugging Face's, or a
    safetensors file.
    """


def find(path: str) -> Path:
    """Return the checkpoint that `path` means: itself, or the newest whole one in it."""
    if not Path(path).exists():
        raise InputError(f"{path}: no such file or folder")
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
        "kinds": shown["kinds"],
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


@command.command("export")
@click.argument("path")
@click.option("--out", metavar="FOLDER", required=True, help="A new or empty folder.")
@click.option(
    "--max-shard-size",
    metavar="BYTES",
    default="5GB",
    show_default=True,
    help="Larger weights go to several files and an index.",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    default="float32",
    show_default=True,
    help="Of the stored weights.",
)
@common
def export(
    json_to: str | None, path: str, out: str, max_shard_size: str, dtype: str
) -> dict[str, Any]:
    """Write the weights as Hugging Face's files: config.json and model.safetensors."""
    where = find(path)
    from dcp import checkpoint
    from dcp.config import parse_bytes

    with reading_input():
        most = parse_bytes(max_shard_size, "--max-shard-size")
        shown = checkpoint.show(where)
    try:
        written = checkpoint.export(where, out, max_shard_bytes=most, dtype=dtype)
    except OSError as error:
        raise Exit(FAILED, str(error)) from error
    document = _document(shown, where) | {"out": out} | written
    if json_to != "-":
        click.echo(f"{out}: {len(document['tensors'])} tensors, {_files(len(written['files']))}")
    return document


@command.command("convert")
@click.argument("path")
@click.option("--out", metavar="DIR", required=True, help="Folder of checkpoints to make.")
@click.option("--ranks", type=int, metavar="N", help="Files to write.  [default: as many]")
@common
def convert(json_to: str | None, path: str, out: str, ranks: int | None) -> dict[str, Any]:
    """Write a checkpoint of N files; from Hugging Face's files, weights at step 0."""
    where = find(path)
    from dcp import checkpoint

    if ranks is not None and ranks < 1:
        raise InputError(f"--ranks {ranks} must be at least 1")
    try:
        made = checkpoint.convert(where, out, ranks=ranks)
    except OSError as error:
        raise Exit(FAILED, str(error)) from error
    document = _document(checkpoint.show(made), made) | {"source": str(where)}
    if json_to != "-":
        _print(document)
    return document


def _files(count: int) -> str:
    return "1 file" if count == 1 else f"{count:,} files"


def _print(document: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from dcp.cli.show import size

    console = Console()
    console.print(
        f"{document['path']}: step {document['step']}, {_files(document['world'])}, "
        f"{size(document['bytes'])}"
    )
    kinds = Table(box=None, pad_edge=False)
    for name in ("kind", "dtype", "tensors", "elements"):
        kinds.add_column(name)
    for kind, held in document["kinds"].items():
        kinds.add_row(kind, held["dtype"] or "-", f"{held['tensors']:,}", f"{held['elements']:,}")
    console.print(kinds)
    table = Table(box=None, pad_edge=False)
    for name in ("tensor", "shape", "elements"):
        table.add_column(name)
    for tensor in document["tensors"]:
        shape = tensor["shape"]
        table.add_row(tensor["name"], " x ".join(map(str, shape)), f"{math.prod(shape):,}")
    console.print(table)
