"""Notebooks: those that are shipped run, and ranks start from cells of any kind."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

import dcp

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

ROOT = Path(__file__).resolve().parents[2]


def execute(notebook: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run all cells in a fresh kernel that imports the dcp under test; return what they print."""
    found = [str(Path(dcp.__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, found)))
    nbclient.NotebookClient(notebook, timeout=200, kernel_name="python3").execute(cwd=str(folder))
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output.get("text", "") for output in outputs)


def test_first_run(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    path = ROOT / "notebooks" / "first_run.ipynb"
    notebook = nbformat.read(path, as_version=4)
    text = execute(notebook, path.parent, monkeypatch)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2, "two pictures"
    found = re.search(r"loss (\d+\.\d+) -> (\d+\.\d+)", text)
    assert found and float(found[2]) < float(found[1]) - 1.0


@pytest.mark.parametrize(("name", "pictures"), [("plan", 1), ("cluster", 2)])
def test_notebooks_of_the_planner(
    name: str, pictures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    path = ROOT / "notebooks" / f"{name}.ipynb"
    notebook = nbformat.read(path, as_version=4)
    text = execute(notebook, path.parent, monkeypatch)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == pictures
    for strategy in dcp.simulate.every_strategy():
        assert strategy in text
    if name == "plan":
        assert any("<svg" in output.get("data", {}).get("text/html", "") for output in outputs)
        assert "plan breaks the rule" in text and "cap  75 GB" in text
    else:
        gains = [float(x) for x in re.findall(r"([\d.]+) x bucket-published", text)]
        assert len(gains) == 7 and min(gains) > 1.0


def test_notebook_of_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    path = ROOT / "notebooks" / "layouts.ipynb"
    notebook = nbformat.read(path, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    text = execute(notebook, path.parent, monkeypatch)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    assert "256 ranks: FSDP2 99.2%, Megatron at least 32.2%, dcp 0.60%" in text
    found = re.search(r"one buffer: .*padding=([\d.]+)%", text)
    assert found and float(found[1]) > 30, "DeepSeek-V3's dense layer in one buffer"
    assert "model.layers.3 " in text and "x 58" in text and "replicas" in text
    assert len(re.findall(r"  dcp  .*receives", text)) == 4


def test_notebook_of_the_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    path = ROOT / "notebooks" / "control.ipynb"
    notebook = nbformat.read(path, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    text = execute(notebook, path.parent, monkeypatch)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    ratios = dict(re.findall(r"^(\w+) +[\d.]+ s  x ([\d.]+)", text, flags=re.MULTILINE))
    assert float(ratios["joint"]) < 1.03 < float(ratios["decoupled"]) < float(ratios["static"])
    assert len(re.findall(r"decoupled / joint, base \w+: 1\.\d\d to 1\.\d\d", text)) == 2
    assert "16 decisions replayed" in text
    found = re.search(r"loss (\d+\.\d+) -> (\d+\.\d+)", text)
    assert found and float(found[2]) < float(found[1]) - 0.5


CELLS = [
    """
import os, signal
import numpy as np
import dcp
OFFSET = 10
def add(world, x):
    return float(world.allreduce(np.full(1, x + OFFSET, np.float32))[0])
""",
    "print('function', dcp.launch(add, 2, (1,)))",
    "print('lambda', dcp.launch(lambda world: world.rank, 3))",
    """
class Broken(Exception):
    pass
def fail(world):
    if world.rank == 1:
        raise Broken('on purpose')
    world.barrier()
try:
    dcp.launch(fail, 2)
except Exception as error:
    print('error', type(error).__name__, error)
""",
    """
def wait(world):
    world.emit('started')
    signal.pause()
def interrupt(event):
    os.kill(os.getpid(), signal.SIGINT)
try:
    dcp.launch(wait, 2, on_event=interrupt)
except KeyboardInterrupt:
    print('interrupted')
""",
    "OFFSET = 20\nprint('again', dcp.launch(add, 2, (1,)))",
]


def test_ranks_from_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions and lambdas of cells, an error, an interrupt, and a rerun (case E-01)."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in CELLS])
    text = execute(notebook, tmp_path, monkeypatch)
    assert "function [22.0, 22.0]" in text
    assert "lambda [0, 1, 2]" in text
    assert "on purpose" in text
    assert "interrupted" in text
    assert "again [42.0, 42.0]" in text, "the kernel lives, and cells see new values"
