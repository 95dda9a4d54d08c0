"""The machine's limits, measured beside whatever is compared with them, and what it is."""

from __future__ import annotations

import functools
import os
import platform
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np

from dcp import _dcp


@functools.cache
def _probe() -> Path | None:
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    binary = Path(tempfile.mkdtemp(prefix="dcp-bench-")) / "fma_peak"
    source = Path(__file__).parent / "fma_peak.c"
    subprocess.run([compiler, "-O2", str(source), "-o", str(binary)], check=True)
    return binary


def fma_peak_gflops(isa: str | None = None, repeats: int = 20, compute: str = "float32") -> float:
    """Multiply-adds of one core with the vectors of an instruction set; best of a few."""
    isa = isa or _dcp.cpu_info()["isa"]
    if isa == "avx512bf16" and compute == "float32":
        isa = "avx512"
    binary = _probe()
    if binary is None:
        return float("nan")
    out = subprocess.run([str(binary), str(repeats)], capture_output=True, text=True, check=True)
    rates = dict(line.split() for line in out.stdout.splitlines())
    return float(rates.get(isa, "nan"))


def copy_bytes_per_s(size: int = 1 << 26, repeats: int = 9) -> float:
    """Bytes copied a second by one core between buffers that no cache holds."""
    a, b = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        np.copyto(b, a)
        best = min(best, time.perf_counter() - start)
    return size / best


def describe() -> dict[str, str | int]:
    """Processor, cores, instruction set, kernel and commit."""
    name = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            name = line.partition(":")[2].strip()
            break
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    info = _dcp.cpu_info()
    return {
        "cpu": name,
        "cores": info["cores"],
        "isa": info["isa"],
        "kernel": platform.release(),
        "commit": commit.stdout.strip() or "unknown",
    }
