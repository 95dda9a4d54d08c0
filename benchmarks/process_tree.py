"""Run a command and weigh it: seconds and peak memory of the process and all its descendants.

Memory is the proportional set size, so that pages which several processes share count once. It is
sampled, so a peak shorter than the interval can be missed.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

INTERVAL_S = 0.1


class Weighed(NamedTuple):
    """What a command printed, took and held at most."""

    output: str
    seconds: float
    peak_bytes: int


def descendants(root: int) -> list[int]:
    """Living processes below `root`, itself included."""
    parents: dict[int, int] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError, IndexError, ValueError), open(f"/proc/{name}/stat") as f:
            parents[int(name)] = int(f.read().rpartition(")")[2].split()[1])
    found, layer = [root], [root]
    while layer:
        layer = [child for child, parent in parents.items() if parent in layer]
        found += layer
    return found


def proportional_bytes(pid: int) -> int:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/smaps_rollup") as f:
        for line in f:
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def run(
    command: Sequence[str], done: Callable[[str], bool] | None = None, **options: object
) -> Weighed:
    """Run to the end; a failure raises with the last lines of what it said.

    Output that is `done` counts, whatever the exit code: torchrun sometimes dies after the run.
    """
    start, peak = time.perf_counter(), 0
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, **options)  # type: ignore[call-overload]
        while process.poll() is None:
            peak = max(peak, sum(map(proportional_bytes, descendants(process.pid))))
            time.sleep(INTERVAL_S)
        seconds = time.perf_counter() - start
        out.seek(0)
        err.seek(0)
        output = out.read()
        if process.returncode and not (done is not None and done(output)):
            tail = err.read()[-2000:]
            raise RuntimeError(f"{' '.join(command)}: exit {process.returncode}\n{tail}")
        return Weighed(output, seconds, peak)


def torchrun(ranks: int, *arguments: str) -> tuple[dict[str, Any], int]:
    """The last line of JSON that a script under torchrun printed, and its peak memory."""

    def documents(output: str) -> list[str]:
        return [line for line in output.splitlines() if line.startswith("{")]

    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    weighed = run([*command, *arguments], done=lambda output: bool(documents(output)))
    return json.loads(documents(weighed.output)[-1]), weighed.peak_bytes
