"""`dcp launch -n N SCRIPT ...`: run a Python script on ranks of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dcp.cli import Exit, InputError, common


# Options after SCRIPT belong to the script.
@click.command("launch", context_settings={"allow_interspersed_args": False})
@click.option("-n", "--ranks", type=int, required=True, metavar="N", help="Number of ranks.")
@click.argument("script", metavar="SCRIPT")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENTS]...")
@common
def command(
    json_to: str | None, ranks: int, script: str, arguments: tuple[str, ...]
) -> dict[str, Any]:
    """Run SCRIPT on N ranks; `dcp.init()` in it joins them. Passes on the worst exit code."""
    from dcp.config import MOST_RANKS_PER_CORE, core_count

    most = MOST_RANKS_PER_CORE * core_count()
    if not 1 <= ranks <= most:
        raise InputError(f"-n {ranks}: ranks must lie in 1..{most} ({MOST_RANKS_PER_CORE} a core)")
    if not Path(script).is_file():
        raise InputError(f"{script}: no such file")
    from dcp.launcher import launch_command

    code = launch_command([script, *arguments], ranks)
    if code != 0:
        raise Exit(code)
    return {"exit_code": code}
