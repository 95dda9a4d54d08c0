"""What the build refuses: parts and settings that are asked for by name and cannot be had."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("DCP_CUDA=1", "DCP_CUDA=1"),
        ("DCP_MPI=1", "DCP_MPI=1"),
        ("DCP_BLAS=scipy-openblas", "must be auto or none"),
    ],
)
def test_forced_parts_that_are_not_there(setting: str, words: str, tmp_path: Path) -> None:
    """A forced part fails with its name; it is never left out silently (case E-02)."""
    pytest.importorskip("setuptools", minversion="77")
    name, _, value = setting.partition("=")
    folders = [f"--build-temp={tmp_path}/t", f"--build-lib={tmp_path}/l"]
    run = subprocess.run(
        [sys.executable, "setup.py", "build_ext", *folders],
        cwd=ROOT,
        env={**os.environ, name: value, "CC": "false"},
        capture_output=True,
        text=True,
    )
    assert run.returncode != 0
    assert words in run.stderr, run.stderr


def test_import_needs_neither_cuda_nor_torch(tmp_path: Path) -> None:
    """Importing dcp, its core and its command loads no optional package (case E-02)."""
    code = (
        "import sys, dcp, dcp.cli, dcp.config; dcp.Model, dcp.Trainer, dcp.Loader; "
        "print([m for m in ('torch', 'matplotlib', 'tensorboardX', 'rich') if m in sys.modules])"
    )
    import dcp

    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(dcp.__file__).resolve().parents[1])},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "[]"
