"""The rules of the tree that a compiler does not check.

Who may include whom, which calls the core may not make, file names and lengths, links of the
documents, their numbers, notebooks without stored output. The layers are those of csrc/README.md.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
LONGEST_FILE = 900  # lines


def tracked_files() -> list[Path]:
    """Files of the working tree that git knows; without git, all that are no build output."""
    run = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if run.returncode == 0:
        names = run.stdout.splitlines()
        return sorted({ROOT / name for name in names if (ROOT / name).is_file()})
    skip = {"build", ".venv", "__pycache__"}
    return sorted(path for path in ROOT.rglob("*") if path.is_file() and not skip & set(path.parts))


FILES = tracked_files()
C_FILES = [path for path in FILES if path.suffix in (".c", ".h", ".cu", ".cuh")]
CORE_FILES = [path for path in C_FILES if path.is_relative_to(CSRC)]

# Header of include/dcp -> the folder it belongs to.
HEADER_LAYER = {
    **dict.fromkeys(
        (
            "status",
            "alloc",
            "log",
            "rng",
            "clock",
            "threads",
            "dtype",
            "base",
            "recompute",
            "precision",
        ),
        "base",
    ),
    **dict.fromkeys(("ops", "kernels", "device", "isa"), "kernels"),
    "comm": "comm",
    "reducer": "comm",
    "shard": "shard",
    "dbuffer": "dbuffer",
    "placement": "shard",
    "redistribute": "dbuffer",
    "checkpoint": "shard",
    "plan": "plan",
    "cost": "plan",
    "model": "model",
    "optim": "optim",
    "train": "train",
    "step": "train",
    "executor": "train",
    "sim": "sim",
    "network": "sim",
    "time_to_loss": "sim",
    "link_model": "sim",
    "control": "control",
}

# Files of shard/ that may use comm and kernels: the distributed buffer, what serves it alone, and
# moves between placements.
DBUFFER = ("dbuffer", "exact_sum", "redistribute")

# Folder -> what it may include, itself and base aside.
MAY_INCLUDE: dict[str, set[str]] = {
    "base": set(),
    "kernels": set(),
    "comm": {"kernels"},
    "plan": set(),
    "shard": set(),
    "dbuffer": {"shard", "comm", "kernels"},
    "model": {"kernels"},
    "optim": {"kernels", "comm", "shard", "dbuffer"},
    "train": {"kernels", "comm", "shard", "plan", "dbuffer", "model", "optim", "control"},
    "sim": {"plan", "control", "comm"},
    "control": {"plan"},
}


def layer_of(path: Path) -> str:
    """Layer of a file of csrc: its folder, but for the distributed buffer."""
    folder = path.relative_to(CSRC).parts[0]
    if folder == "include":
        if path.stem not in HEADER_LAYER:
            pytest.fail(f"{path.name}: add its layer to HEADER_LAYER in {Path(__file__).name}")
        return HEADER_LAYER[path.stem]
    return "dbuffer" if folder == "shard" and path.stem.startswith(DBUFFER) else folder


def includes(path: Path) -> list[tuple[int, str]]:
    """(line number, what) of every #include."""
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if match := re.match(r'\s*#\s*include\s*[<"]([^>"]+)[>"]', line):
            found.append((number, match[1]))
    return found


def without_comments(text: str) -> str:
    """C text with comments and string contents blanked, line breaks kept."""
    pattern = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.S)

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match[0])

    return pattern.sub(blank, text)


def where(path: Path, number: int) -> str:
    return f"{path.relative_to(ROOT)}:{number}"


def target_layer(path: Path, what: str) -> str | None:
    """Layer of an included header of ours; None for a system header or a folder's own."""
    if what.startswith("dcp/"):
        header = CSRC / "include" / what
        return layer_of(header) if header.exists() else None
    for base in (path.parent, CSRC):
        header = (base / what).resolve()
        if header.is_file() and header.is_relative_to(CSRC):
            return layer_of(header)
    return None


def test_includes_follow_the_layers() -> None:
    wrong = []
    for path in CORE_FILES:
        layer = layer_of(path)
        if layer == "bind":
            continue
        for number, what in includes(path):
            target = target_layer(path, what)
            if target is None or target in ("base", layer):
                continue
            if target not in MAY_INCLUDE[layer]:
                wrong.append(f"{where(path, number)}: {layer} includes {what} of {target}")
    assert not wrong, "\n".join(wrong)


def test_foreign_headers_stay_in_their_place() -> None:
    """Python.h and NumPy only in bind/, MPI only in comm/mpi.c, CUDA only in cuda/."""
    wrong = []
    for path in C_FILES:
        inside = path.relative_to(ROOT).as_posix()
        for number, what in includes(path):
            python = what == "Python.h" or what.startswith("numpy/")
            if python and not inside.startswith("csrc/bind/"):
                wrong.append(f"{where(path, number)}: {what} outside csrc/bind/")
            if what == "mpi.h" and inside != "csrc/comm/mpi.c":
                wrong.append(f"{where(path, number)}: mpi.h outside csrc/comm/mpi.c")
            cuda = what.startswith(("cuda", "cublas", "cudnn", "nccl"))
            if cuda and not inside.startswith(("cuda/", "tests/")):
                wrong.append(f"{where(path, number)}: {what} outside cuda/")
    assert not wrong, "\n".join(wrong)


FORBIDDEN = {
    r"\b(?:malloc|calloc|realloc|free|aligned_alloc|posix_memalign|strdup|strndup)\s*\(": (
        "memory comes from dcp/alloc.h",
        ("csrc/base/", "csrc/bind/"),
    ),
    r"\b(?:printf|vprintf|puts|putchar|perror|fprintf|vfprintf|fputs)\s*\(": (
        "the library never prints: dcp/log.h",
        (),
    ),
    r"\b(?:exit|_exit|_Exit|abort|quick_exit)\s*\(": (
        "the library never ends the process: return a status",
        (),
    ),
    r"\b(?:sprintf|strcpy|strcat|gets|strtok|atoi|atol|rand|srand)\s*\(": (
        "has a safe form",
        (),
    ),
}


@pytest.mark.parametrize("pattern", FORBIDDEN)
def test_forbidden_calls(pattern: str) -> None:
    reason, allowed = FORBIDDEN[pattern]
    wrong = []
    for path in CORE_FILES:
        if path.relative_to(ROOT).as_posix().startswith(allowed):
            continue
        code = without_comments(path.read_text(encoding="utf-8"))
        for number, line in enumerate(code.splitlines(), 1):
            for match in re.finditer(pattern, line):
                # a member or another name's tail is no call of the C library
                before = line[: match.start()]
                if not before.endswith(("->", ".", "_")):
                    wrong.append(f"{where(path, number)}: {match[0].strip('( ')}: {reason}")
    assert not wrong, "\n".join(wrong)


def test_c_file_names_are_unique() -> None:
    seen: dict[str, Path] = {}
    for path in C_FILES:
        assert path.name not in seen, f"{path} and {seen[path.name]} have one name"
        seen[path.name] = path


def test_files_stay_short() -> None:
    long = []
    for path in FILES:
        if path.suffix in (".c", ".h", ".cu", ".cuh", ".py", ".pyi"):
            count = len(path.read_text(encoding="utf-8").splitlines())
            if count > LONGEST_FILE:
                long.append(f"{path.relative_to(ROOT)}: {count} lines, at most {LONGEST_FILE}")
    assert not long, "\n".join(long)


def test_sources_open_with_what_they_decide() -> None:
    """Every .c of the core opens with a comment."""
    wrong = [
        str(path.relative_to(ROOT))
        for path in CORE_FILES
        if not path.read_text(encoding="utf-8").lstrip().startswith("/*")
    ]
    assert not wrong, f"no opening comment: {wrong}"


def test_no_notes_to_self() -> None:
    note = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X|HA" + r"CK)\b")
    wrong = []
    for path in FILES:
        if path.suffix not in (".c", ".h", ".cu", ".py", ".pyi", ".md", ".toml"):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if note.search(line):
                wrong.append(where(path, number))
    assert not wrong, "open questions belong into issues: " + ", ".join(wrong)


def test_document_links_exist() -> None:
    """Relative links of Markdown files, and headings they point to."""
    wrong = []
    for path in FILES:
        if path.suffix != ".md":
            continue
        text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if re.match(r"[a-z]+:", target):
                continue
            name, _, anchor = target.partition("#")
            file = (path.parent / name).resolve() if name else path
            if not file.exists():
                wrong.append(f"{path.relative_to(ROOT)}: {target}")
            elif anchor and file.suffix == ".md":
                headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.M)
                slugs = {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}
                if anchor not in slugs:
                    wrong.append(f"{path.relative_to(ROOT)}: {target}: no such heading")
    assert not wrong, "\n".join(wrong)


def test_notebooks_hold_no_output() -> None:
    notebooks = [path for path in FILES if path.suffix == ".ipynb"]
    assert notebooks, "notebooks/ is empty"
    for path in notebooks:
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            stored = cell.get("outputs") or cell.get("execution_count")
            assert not stored, f"{path.relative_to(ROOT)}: clear its output before committing"


def test_public_headers_stand_alone_in_cpp(tmp_path: Path) -> None:
    """Each header of include/dcp compiles alone as C++ as well as C."""
    import shutil

    compilers = [("cc", "c", "-std=c11"), ("c++", "c++", "-std=c++17")]
    found = [entry for entry in compilers if shutil.which(entry[0])]
    assert found, "no C compiler"
    for compiler, language, standard in found:
        for header in sorted((CSRC / "include" / "dcp").glob("*.h")):
            flags = ["-Wall", "-Werror", "-fsyntax-only", f"-I{CSRC / 'include'}"]
            run = subprocess.run(
                [compiler, "-x", language, standard, *flags, "-"],
                input=f'#include "dcp/{header.name}"\n',
                capture_output=True,
                text=True,
            )
            assert run.returncode == 0, f"{header.name} as {language}: {run.stderr}"


def test_decisions_are_numbered() -> None:
    headings = re.findall(r"^## (.*)$", (CSRC / "DECISIONS.md").read_text(), re.M)
    numbers = [int(heading.split(". ")[0]) for heading in headings]
    assert numbers == list(range(1, len(numbers) + 1))
    assert len({heading.split(". ", 1)[1] for heading in headings}) == len(headings)
