"""Every environment variable that dcp reads, and the rank of this process from its launcher.

======================  ====================================================================
DCP_NUM_THREADS         threads of one rank; default: cores / ranks of this machine
DCP_ISA                 instruction set of the CPU kernels: portable, avx2, avx512, avx512bf16
DCP_LOG                 level of the logger "dcp": debug, info, warning
DCP_TIMEOUT             seconds that a rank waits for another one (600)
DCP_JOIN_TIMEOUT        seconds that ranks wait for each other at the start (60)
DCP_RUN_ID              names the run; ranks with the same one meet
DCP_RANK, ...           set by ``dcp.launch`` and ``dcp launch``: see `find_place`
DCP_BLAS, DCP_CUDA, DCP_MPI, DCP_EMULATED, DCP_DEBUG, DCP_SANITIZE, DCP_WERROR
                        read by setup.py when dcp is built
======================  ====================================================================
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from dcp._dcp import ArgumentError, StateError

__all__ = [
    "VARIABLES",
    "Place",
    "find_place",
    "parse_tasks_per_node",
    "seconds",
    "short_id",
    "thread_count",
]

VARIABLES = (
    "DCP_NUM_THREADS",
    "DCP_ISA",
    "DCP_LOG",
    "DCP_TIMEOUT",
    "DCP_JOIN_TIMEOUT",
    "DCP_RUN_ID",
    "DCP_RANK",
    "DCP_WORLD_SIZE",
    "DCP_LOCAL_RANK",
    "DCP_LOCAL_WORLD_SIZE",
)


@dataclass(frozen=True)
class Place:
    """Where this process stands in its run.

    Attributes
    ----------
    rank, size : int
        Its number and the count of all processes.
    local_rank, local_size : int
        The same among the processes of this machine.
    run_id : str or None
        What ranks of one run have in common; None for a process that was not launched.
    launcher : str
        Who said so: ``dcp``, ``torchrun``, ``openmpi``, ``hydra``, ``slurm`` or ``none``.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    run_id: str | None
    launcher: str


# rank, size, local rank, local size; the first launcher whose four are all set wins. The order
# matters: srun inside mpirun, or torchrun inside srun, leave both sets.
_LAUNCHERS = (
    ("dcp", ("DCP_RANK", "DCP_WORLD_SIZE", "DCP_LOCAL_RANK", "DCP_LOCAL_WORLD_SIZE")),
    ("torchrun", ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")),
    (
        "openmpi",
        (
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        ),
    ),
    ("hydra", ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")),
    ("slurm", ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")),
)

# What tells one job from another; the parent process stands in where a launcher sets nothing:
# the ranks of one machine are children of one daemon.
_JOB_IDS = {
    "dcp": (),
    "torchrun": ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"),
    "openmpi": ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    "hydra": (),
    "slurm": ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
}


def parse_tasks_per_node(text: str, node: int) -> int:
    """Tasks on one node from Slurm's compressed list.

    Parameters
    ----------
    text : str
        For example ``"4(x2),3"``: nodes 0 and 1 have 4 tasks, node 2 has 3.
    node : int
        Number of the node.

    Returns
    -------
    int

    Examples
    --------
    >>> [parse_tasks_per_node("4(x2),3", node) for node in range(3)]
    [4, 4, 3]
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\(x(\d+)\))?\s*", part)
        if match is None:
            raise ArgumentError(f"SLURM_STEP_TASKS_PER_NODE={text!r}: expected the form 4(x2),3")
        counts += [int(match[1])] * int(match[2] or 1)
    if not 0 <= node < len(counts):
        raise ArgumentError(f"SLURM_STEP_TASKS_PER_NODE={text!r} has no node {node}")
    return counts[node]


def _integer(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except ValueError:
        raise ArgumentError(f"{name}={env[name]!r} must be an integer") from None


def _run_id(launcher: str, env: Mapping[str, str]) -> str:
    if env.get("DCP_RUN_ID"):
        return env["DCP_RUN_ID"]
    if launcher == "dcp":
        raise StateError("DCP_RANK is set, but DCP_RUN_ID is not: set both, or none")
    parts = [launcher, *(env.get(name, "") for name in _JOB_IDS[launcher])]
    if not any(parts[1:]):
        parent = os.getppid()
        with open(f"/proc/{parent}/stat") as stat:
            start = stat.read().rsplit(")", 1)[1].split()[19]
        parts += [str(parent), start]
    return f"{launcher}-{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:20]}"


def short_id(text: str) -> str:
    """A run id that can name a file: the text itself, or its hash.

    Examples
    --------
    >>> short_id("job-7.0"), len(short_id("a/b" * 99))
    ('job-7.0', 40)
    """
    if re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", text):
        return text
    return hashlib.sha256(text.encode()).hexdigest()[:40]


def find_place(env: Mapping[str, str] | None = None) -> Place:
    """Rank of this process as its launcher tells it.

    Looks for dcp's own variables, then torchrun's, Open MPI's, MPICH's and Intel's (hydra),
    Slurm's; the first complete set wins. Without any, the process is alone.

    Parameters
    ----------
    env : mapping, optional
        Default ``os.environ``.

    Returns
    -------
    Place

    Raises
    ------
    ArgumentError
        A variable is no integer, or the numbers contradict each other.

    Examples
    --------
    >>> find_place({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    ...             "MASTER_PORT": "29500"}).launcher
    'torchrun'
    >>> find_place({}).size
    1
    """
    env = os.environ if env is None else env
    for launcher, names in _LAUNCHERS:
        if not all(env.get(name) for name in names):
            continue
        rank, size, local_rank = (_integer(env, name) for name in names[:3])
        if launcher == "slurm":
            node = int(env.get("SLURM_NODEID") or 0)
            local_size = parse_tasks_per_node(env[names[3]], node)
        else:
            local_size = _integer(env, names[3])
        if not (0 <= rank < size and 0 <= local_rank < local_size <= size):
            shown = ", ".join(f"{name}={env[name]}" for name in names)
            raise ArgumentError(f"{shown}: ranks must lie below their counts")
        return Place(rank, size, local_rank, local_size, _run_id(launcher, env), launcher)
    return Place(0, 1, 0, 1, None, "none")


def seconds(name: str, default: float, env: Mapping[str, str] | None = None) -> float:
    """A positive number of seconds from the environment.

    Examples
    --------
    >>> seconds("DCP_TIMEOUT", 600.0, {"DCP_TIMEOUT": "2.5"})
    2.5
    """
    text = (os.environ if env is None else env).get(name)
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e9:
        raise ArgumentError(f"{name}={text!r} must be a positive number of seconds")
    return value


def thread_count(local_size: int, env: Mapping[str, str] | None = None) -> int:
    """Threads of one rank: ``DCP_NUM_THREADS``, or the cores shared evenly, at least one.

    Examples
    --------
    >>> thread_count(2, {"DCP_NUM_THREADS": "3"})
    3
    """
    text = (os.environ if env is None else env).get("DCP_NUM_THREADS")
    if text:
        try:
            value = int(text)
        except ValueError:
            value = 0
        if not 1 <= value <= 4096:
            raise ArgumentError(f"DCP_NUM_THREADS={text!r} must be an integer in 1..4096")
        return value
    return max(1, len(os.sched_getaffinity(0)) // local_size)
