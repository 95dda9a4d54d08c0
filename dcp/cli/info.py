"""`dcp info`: what this build and this machine offer."""

from __future__ import annotations

import os
import shutil
from typing import Any

import click

import dcp
from dcp.cli import common


def _available(reason: str | None = None) -> dict[str, Any]:
    return {"available": reason is None, "reason": reason}


def _shared_memory() -> tuple[str | None, int | None]:
    """Why /dev/shm cannot be used (None: it can), and its free bytes."""
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError as error:
        return f"/dev/shm: {error.strerror}", None
    if not os.access("/dev/shm", os.W_OK):
        return "/dev/shm cannot be written", free
    return None, free


def _memory_bytes() -> tuple[int | None, int | None]:
    """Memory of the machine and what is available of it, in bytes."""
    found: dict[str, int] = {}
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                name, _, rest = line.partition(":")
                if name in ("MemTotal", "MemAvailable"):
                    found[name] = int(rest.split()[0]) * 1024
    except OSError:
        pass
    return found.get("MemTotal"), found.get("MemAvailable")


def collect() -> dict[str, Any]:
    """Return the document of `dcp info`."""
    from dcp import _dcp

    shm_reason, _ = _shared_memory()
    later = "not part of this version"
    return {
        "version": dcp.__version__,
        "cpu": _dcp.cpu_info(),
        "backends": {
            "self": _available(),
            "shm": _available(shm_reason),
            "mpi": _available(later),
            "nccl": _available(later),
        },
        "cuda": _available(later) | {"devices": []},
    }


@click.command("info")
@common
def command(json_to: str | None) -> dict[str, Any]:
    """Show cores, instruction sets, BLAS, backends and limits."""
    document = collect()
    if json_to != "-":
        _print(document)
    return document


def _print(document: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from dcp.cli.show import size

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    cpu = document["cpu"]
    table.add_row("dcp", document["version"])
    table.add_row("cores", str(cpu["cores"]))
    table.add_row("instruction set", f"{cpu['isa']} (of {', '.join(cpu['isas'])}; DCP_ISA sets it)")
    table.add_row("BLAS", cpu["blas"])
    for name, backend in document["backends"].items():
        table.add_row(f"backend {name}", backend["reason"] or "available")
    table.add_row(
        "CUDA", document["cuda"]["reason"] or f"{len(document['cuda']['devices'])} devices"
    )
    total, free = _memory_bytes()
    table.add_row("memory", f"{size(total)}, {size(free)} available")
    _, shm_free = _shared_memory()
    table.add_row("/dev/shm", f"{size(shm_free)} free: ranks meet there")
    Console().print(table)
