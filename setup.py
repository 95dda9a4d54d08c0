"""Builds dcp._dcp: the C11 core, one object set per instruction set, and the binding.

Environment (all optional):
  DCP_BLAS      auto (default) | none: the built-in matrix product, which no BLAS beat
                (csrc/DECISIONS.md, 8); anything else is an error
  DCP_DEBUG     1: -O1 -g and asserts
  DCP_SANITIZE  for example address,undefined: passed to -fsanitize
  DCP_CUDA, DCP_MPI   auto | 0 (default) ; 1 is an error until those parts exist
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
CSRC = ROOT / "csrc"
WARNINGS = [
    "-Wall",
    "-Wextra",
    "-Wconversion",
    "-Wshadow",
    "-Wstrict-prototypes",
    "-Wno-unused-function",
]


def isa_sets() -> list[tuple[str, list[str], list[str]]]:
    """Instruction sets of csrc/isa.txt for this machine: (name, file patterns, compiler flags)."""
    sets = []
    for line in (CSRC / "isa.txt").read_text().splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        machine, name, files, *flags = line.split()
        if re.fullmatch(machine, platform.machine()):
            sets.append((name, files.split(","), flags))
    return sets


def refuse_absent_parts() -> None:
    """A part that is asked for by name and cannot be built is an error, never a silent skip."""
    blas = os.environ.get("DCP_BLAS", "auto")
    if blas not in ("", "auto", "none"):
        raise SystemExit(
            f"DCP_BLAS={blas!r}: must be auto or none, this version calls no BLAS "
            "(csrc/DECISIONS.md, 8)"
        )
    for key, tool in (("DCP_CUDA", "nvcc"), ("DCP_MPI", "mpicc")):
        if os.environ.get(key, "0") not in ("", "0", "auto"):
            found = shutil.which(tool)
            raise SystemExit(
                f"{key}={os.environ[key]}: this version has no such part yet"
                + ("" if found else f" (and {tool} is not on PATH)")
            )


class BuildCore(build_ext):
    """Compiles in parallel; recompiles what is older than its source or any header."""

    def build_extension(self, ext: Extension) -> None:
        import numpy

        refuse_absent_parts()
        debug = os.environ.get("DCP_DEBUG", "0") == "1"
        sanitize = os.environ.get("DCP_SANITIZE", "")
        cc = shlex.split(os.environ.get("CC", "cc"))
        flags = [
            "-std=c11",
            "-fPIC",
            "-fvisibility=hidden",
            "-pthread",
            f"-I{CSRC / 'include'}",
            *WARNINGS,
        ]
        flags += ["-Werror"] if os.environ.get("DCP_WERROR") == "1" else []
        flags += (
            ["-O1", "-g"] if debug else ["-O3", "-DNDEBUG", "-fno-math-errno", "-fno-trapping-math"]
        )
        flags += [f"-fsanitize={sanitize}", "-fno-omit-frame-pointer"] if sanitize else []
        python = [f"-isystem{self.include_dirs[0]}", f"-isystem{numpy.get_include()}"]
        python += [f"-isystem{d}" for d in self.include_dirs[1:]]

        # a build directory per set of flags, so that objects of different builds never mix
        stamp = hashlib.sha256(repr(cc + flags).encode()).hexdigest()[:8]
        out = Path(self.build_temp).resolve() / stamp
        newest_header = max(h.stat().st_mtime for h in CSRC.rglob("*.h"))
        jobs: list[tuple[list[str], Path, Path]] = []
        for source in sorted(CSRC.rglob("*.c")):
            name = source.relative_to(CSRC).as_posix().replace("/", "__")
            if source.parent.name == "isa":
                for isa, patterns, isa_flags in isa_sets():
                    if any(source.match(pattern) for pattern in patterns):
                        own = [*flags, *isa_flags, f"-DDCP_ISA={isa}"]
                        jobs.append((own, source, out / f"{name}.{isa}.o"))
            else:
                extra = python if source.parent.name == "bind" else []
                jobs.append(([*flags, *extra], source, out / f"{name}.o"))

        def compile_one(job: tuple[list[str], Path, Path]) -> None:
            job_flags, source, target = job
            if target.exists() and target.stat().st_mtime > max(
                source.stat().st_mtime, newest_header
            ):
                return
            self.spawn([*cc, *job_flags, "-c", str(source), "-o", str(target)])

        out.mkdir(parents=True, exist_ok=True)
        workers = os.cpu_count() or 1
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(compile_one, jobs))

        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        link = [
            *cc,
            "-shared",
            "-pthread",
            *(str(j[2]) for j in jobs),
            "-o",
            str(target),
            "-lm",
        ]
        link += [f"-fsanitize={sanitize}"] if sanitize else []
        self.spawn(link)


setup(ext_modules=[Extension("dcp._dcp", sources=[])], cmdclass={"build_ext": BuildCore})
