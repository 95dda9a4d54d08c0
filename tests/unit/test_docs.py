"""What documents show works: docstring examples and the README's Python."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import io
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dcp

ROOT = Path(__file__).resolve().parents[2]
OPTIONAL = dict.fromkeys(
    ("dcp.viz", "dcp.control_plot", "dcp.time_to_loss"), "matplotlib"
)  # module -> what its examples need


def modules() -> Iterator[str]:
    for found in pkgutil.walk_packages(dcp.__path__, "dcp."):
        if found.name != "dcp.__main__" and not found.name.endswith("._dcp"):
            yield found.name


def examples() -> Iterator[Any]:
    """Every docstring of dcp that has an example."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    for name in modules():
        module = importlib.import_module(name)
        # as if typed by the user: launched functions belong to no module that ranks could import
        names = {"dcp": dcp, "np": np} | vars(module) | {"__name__": "__main__"}
        for test in finder.find(module, name, globs=names):
            if test.examples:
                yield pytest.param(name, test, id=test.name)


@pytest.mark.parametrize(("module", "test"), list(examples()))
def test_example(module: str, test: doctest.DocTest, monkeypatch: pytest.MonkeyPatch) -> None:
    if module in OPTIONAL:
        pytest.importorskip(OPTIONAL[module])
        monkeypatch.setenv("MPLBACKEND", "agg")
    report = io.StringIO()
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | doctest.IGNORE_EXCEPTION_DETAIL
    runner = doctest.DocTestRunner(optionflags=flags, verbose=False)
    result = runner.run(test, out=report.write, clear_globs=False)
    assert result.failed == 0, report.getvalue()


@pytest.fixture(autouse=True)
def no_world_stays_open() -> Iterator[None]:
    """Examples share the process's world; the tests of other files start without one."""
    yield
    from dcp import world

    if world._world is not None:
        world._world.close()


def public_names() -> list[str]:
    """Classes and functions of `dcp` and of its public modules, the errors aside."""
    names = [name for name in dcp.__all__ if not name.startswith("__")]
    found = []
    for name in names:
        value = getattr(dcp, name)
        if inspect.ismodule(value):
            found += [f"{name}.{inner}" for inner in value.__all__]
        elif not (inspect.isclass(value) and issubclass(value, Exception)):
            found.append(name)
    return found


@pytest.mark.parametrize("name", public_names())
def test_every_public_name_is_documented_with_an_example(name: str) -> None:
    value: Any = dcp
    for part in name.split("."):
        value = getattr(value, part)
    if not callable(value):
        return
    assert inspect.getdoc(value), f"dcp.{name} has no docstring"
    texts = [inspect.getdoc(value) or ""]
    if inspect.isclass(value):
        texts += [inspect.getdoc(member) or "" for _, member in inspect.getmembers(value)]
    assert any(">>>" in text for text in texts), f"dcp.{name} has no example"


def test_every_name_of_the_package_loads() -> None:
    for name in dcp.__all__:
        assert getattr(dcp, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        dcp.no_such_name  # noqa: B018


def readme_block(heading: str, language: str) -> str:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    pattern = rf"^#+ {re.escape(heading)}\s*$.*?^```{language}\n(.*?)^```"
    match = re.search(pattern, text, re.M | re.S)
    assert match, f"README.md: no {language} block under {heading!r}"
    return match[1]


def test_ten_lines_of_the_readme(tmp_path: Path) -> None:
    code = readme_block("Ten lines of Python", "python")
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    script = tmp_path / "ten_lines.py"
    script.write_text(code)
    run = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=250,
        env=environment(),
    )
    assert run.returncode == 0, run.stderr
    losses = ast.literal_eval(run.stdout)
    assert len(losses) == 3 and losses[2] < losses[0]


def environment() -> dict[str, str]:
    """The environment of a script outside the tree that imports the dcp under test."""
    import os

    return {**os.environ, "PYTHONPATH": str(Path(dcp.__file__).resolve().parents[1])}


def test_commands_of_the_readme_are_accepted() -> None:
    """Every `dcp train` line of the README parses and its settings are valid."""
    from dcp import cli

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = re.findall(r"dcp train ([^`\n]*)", text)
    assert len(lines) >= 3
    for line in lines:
        args = [word.strip('"') for word in line.split() if word != "--print-config"]
        assert cli.run(["train", *args, "--print-config"]) == 0, line
