"""dcp.launch and ``dcp launch``: results, errors, deaths, Ctrl-C; and rank discovery."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dcp
from dcp import _env
from dcp.launcher import launch_command

ROOT = Path(dcp.__file__).resolve().parents[1]


def is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rsplit(")", 1)[1].split()[0] not in "ZX"


def wait_until_gone(pids: list[int]) -> list[int]:
    """Those that still live after 10 s."""
    deadline = time.monotonic() + 10
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return [pid for pid in pids if is_alive(pid)]


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No test leaves anything of this user's in shared memory."""
    yield
    mine = f"dcp-{os.geteuid()}-"
    ours = f"{mine}dcp-{os.getpid()}-"
    assert [n for n in os.listdir("/dev/shm") if n.startswith(ours)] == []


class TestResults:
    def test_order_and_arguments(self) -> None:
        base = np.arange(3)

        def work(world: dcp.World, factor: int, names: dict[str, int]) -> Any:
            return world.rank, world.size, base * factor + world.rank, names

        results = dcp.launch(work, 3, (10, {"a": 1}))
        for rank, (got_rank, size, array, names) in enumerate(results):
            assert (got_rank, size, names) == (rank, 3, {"a": 1})
            np.testing.assert_array_equal(array, [rank, 10 + rank, 20 + rank])

    def test_one_rank_is_a_process_too(self) -> None:
        assert dcp.launch(lambda world: (world.size, os.getpid()), 1)[0] != (1, os.getpid())

    def test_large_results(self) -> None:
        results = dcp.launch(lambda world: np.full(400_000, world.rank), 2)
        assert [(r.size, r[-1]) for r in results] == [(400_000, 0), (400_000, 1)]

    def test_ranks_that_end_before_anybody_looks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What they reported counts, not that they are gone."""
        pump = dcp.launcher._Run.pump

        def late(run: Any, timeout: float) -> None:
            if all(child.code is not None for child in run.children):
                pump(run, timeout)

        monkeypatch.setattr(dcp.launcher._Run, "pump", late)
        assert dcp.launch(lambda world: world.rank, 2) == [0, 1]
        with pytest.raises(ZeroDivisionError):
            dcp.launch(lambda world: 1 / 0, 2)

    def test_init_gives_the_same_world(self) -> None:
        assert dcp.launch(lambda world: dcp.init() is world, 2) == [True, True]

    def test_more_ranks_than_cores(self) -> None:
        ranks = 2 * len(os.sched_getaffinity(0)) + 1

        def work(world: dcp.World) -> float:
            for _ in range(20):
                total = world.allreduce(np.full(5000, world.rank, np.float32))
            return float(total[0])

        assert dcp.launch(work, ranks) == [ranks * (ranks - 1) / 2] * ranks

    def test_threads_are_shared_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("DCP_NUM_THREADS", raising=False)
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        names = ("DCP_NUM_THREADS", "OMP_NUM_THREADS")
        expected = str(max(1, len(os.sched_getaffinity(0)) // 2))
        assert dcp.launch(lambda world: [os.environ[n] for n in names], 2) == [[expected] * 2] * 2
        monkeypatch.setenv("DCP_NUM_THREADS", "3")
        assert dcp.launch(lambda world: os.environ["DCP_NUM_THREADS"], 1) == ["3"]

    def test_two_runs_at_once(self) -> None:
        """Case X-08: runs side by side never mix."""
        results: dict[int, Any] = {}

        def work(world: dcp.World, job: int) -> list[int]:
            for _ in range(50):
                jobs = world.allgatherv(np.array([job], np.int64))
            return jobs.tolist()

        def start(job: int) -> None:
            results[job] = dcp.launch(work, 2, (job,))

        threads = [threading.Thread(target=start, args=(job,)) for job in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == {job: [[job, job]] * 2 for job in (1, 2)}

    def test_output_comes_through(self, capsys: pytest.CaptureFixture[str]) -> None:
        def work(world: dcp.World) -> None:
            print(f"out {world.rank} é")
            print(f"err {world.rank}", end="", file=sys.stderr)

        dcp.launch(work, 2)
        out, err = capsys.readouterr()
        assert sorted(out.splitlines()) == ["out 0 é", "out 1 é"]
        assert "err 0" in err and "err 1" in err

    def test_events(self) -> None:
        def work(world: dcp.World) -> None:
            for step in range(100):
                world.emit({"step": step, "rank": world.rank})

        events: list[Any] = []
        dcp.launch(work, 2, on_event=events.append)
        assert events == [{"step": step, "rank": 0} for step in range(100)]

    def test_an_event_handler_that_raises_ends_the_run(self) -> None:
        pids: list[int] = []

        def work(world: dcp.World) -> None:
            world.emit(world.allgatherv(np.array([os.getpid()], np.int64)).tolist())
            while True:
                world.barrier()

        def handler(event: Any) -> None:
            pids.extend(event)
            raise KeyError("from the handler")

        with pytest.raises(KeyError, match="from the handler"):
            dcp.launch(work, 2, on_event=handler)
        assert len(pids) == 2 and wait_until_gone(pids) == []


class TestNotebook:
    """Case E-01, without the notebook: functions of a `__main__` that ranks cannot import."""

    @pytest.fixture
    def cell(self) -> dict[str, Any]:
        return {"__name__": "__main__", "dcp": dcp}

    def test_functions_and_lambdas_of_a_cell(self, cell: dict[str, Any]) -> None:
        exec("scale = 3\ndef helper(x): return x * scale\n", cell)
        exec("def f(world):\n    print('in', world.rank)\n    return helper(world.rank)", cell)
        # a stream without descriptor, as in a kernel
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            assert eval("dcp.launch(f, 2)", cell) == [0, 3]
        assert sorted(shown.getvalue().splitlines()) == ["in 0", "in 1"]
        assert eval("dcp.launch(lambda world: helper(1), 2)", cell) == [3, 3]

    def test_rerun_after_an_error_and_a_change(self, cell: dict[str, Any]) -> None:
        exec("def f(world):\n    raise ValueError('first version')", cell)
        with pytest.raises(ValueError, match="first version"):
            eval("dcp.launch(f, 2)", cell)
        exec("def f(world):\n    return 'second version'", cell)
        assert eval("dcp.launch(f, 2)", cell) == ["second version"] * 2

    def test_classes_of_a_cell_come_back(self, cell: dict[str, Any]) -> None:
        exec("class Point:\n    def __init__(self, x): self.x = x\n", cell)
        results = eval("dcp.launch(lambda world: Point(world.rank), 2)", cell)
        assert [type(p) for p in results] == [cell["Point"]] * 2

    def test_what_cannot_be_sent(self) -> None:
        lock = threading.Lock()
        with pytest.raises(dcp.ArgumentError, match="picklable"):
            dcp.launch(lambda world: lock, 2)


class StrangeError(Exception):
    """Cannot be unpickled: two arguments in, one kept."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"strange {a} {b}")


class TestFailures:
    def test_exception_of_a_rank(self) -> None:
        def work(world: dcp.World) -> None:
            if world.rank == 1:
                raise ValueError("no such column")
            while True:
                world.barrier()

        with pytest.raises(ValueError, match="no such column") as caught:
            dcp.launch(work, 3)
        note = "".join(caught.value.__notes__)
        assert "rank 1 of 3 (process " in note
        assert 'raise ValueError("no such column")' in note or "in work" in note

    def test_exception_that_does_not_travel(self) -> None:
        def work(world: dcp.World) -> None:
            if world.rank == 0:
                raise StrangeError(1, 2)
            world.barrier()

        with pytest.raises(dcp.RankError, match=r"rank 0 of 2 .* raised StrangeError: strange 1 2"):
            dcp.launch(work, 2)

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
    def test_killed_rank(self, number: int, tmp_path: Path) -> None:
        """Case X-06: ends all, names the rank, its process and the signal, leaves nothing."""

        def work(world: dcp.World) -> None:
            (tmp_path / str(world.rank)).write_text(str(os.getpid()))
            world.barrier()
            if world.rank == 1:
                os.kill(os.getpid(), number)
            while True:
                world.allreduce(np.ones(10, np.float32))

        with pytest.raises(dcp.RankError) as caught:
            dcp.launch(work, 3)
        pids = [int((tmp_path / str(rank)).read_text()) for rank in range(3)]
        name = signal.Signals(number).name
        assert f"rank 1 (process {pids[1]}) was killed by {name}" in str(caught.value)
        assert not any(map(is_alive, pids))

    def test_rank_that_computes_is_ended_too(self, tmp_path: Path) -> None:
        """A rank that never waits for others does not notice: the launcher ends it."""

        def work(world: dcp.World) -> None:
            (tmp_path / str(world.rank)).write_text(str(os.getpid()))
            world.barrier()
            if world.rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True:
                pass

        with pytest.raises(dcp.RankError, match=r"rank 0 .* was killed by SIGKILL"):
            dcp.launch(work, 2)
        assert not any(is_alive(int((tmp_path / r).read_text())) for r in "01")

    def test_rank_that_exits(self) -> None:
        def leave(world: dcp.World) -> None:
            if world.rank == 0:
                os._exit(0)
            world.barrier()

        with pytest.raises(dcp.RankError, match=r"rank 0 \(process \d+\) exited with code 0"):
            dcp.launch(leave, 2)

        def exit_nicely(world: dcp.World) -> None:
            if world.rank == 1:
                sys.exit("had enough")
            world.barrier()

        with pytest.raises(dcp.RankError, match=r"rank 1 of 2 .* called sys.exit\('had enough'\)"):
            dcp.launch(exit_nicely, 2)

    def test_background_processes_of_ranks_end(self, tmp_path: Path) -> None:
        def work(world: dcp.World) -> int:
            return subprocess.Popen(["sleep", "600"]).pid

        pids = dcp.launch(work, 2)
        assert wait_until_gone(pids) == []

    def test_arguments(self) -> None:
        most = 64 * len(os.sched_getaffinity(0))
        for ranks in (0, -1, most + 1, 2.0, True):
            with pytest.raises(dcp.ArgumentError, match="ranks"):
                dcp.launch(lambda world: None, ranks)
        with pytest.raises(dcp.ArgumentError, match=f"at most {most}"):
            dcp.launch(lambda world: None, most + 1)
        with pytest.raises(dcp.ArgumentError, match="callable"):
            dcp.launch(3, 1)  # type: ignore[arg-type]


# ---- scripts, and launchers in processes of their own ----

LAUNCH = "import sys; from dcp.launcher import launch_command as c; sys.exit(c(sys.argv[2:], {n}))"


def start(tmp_path: Path, code: str, ranks: int = 2, *args: str) -> subprocess.Popen[str]:
    """``dcp launch -n ranks script args`` in a process of its own."""
    script = tmp_path / "script.py"
    script.write_text("import os, sys, time\nimport numpy as np\nimport dcp\n" + code)
    return start_python(LAUNCH.format(n=ranks), "launch", str(script), *args)


def start_python(code: str, *args: str, **env: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-c", code, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, **env},
    )


class TestScripts:
    def test_arguments_and_output(self, tmp_path: Path) -> None:
        code = """
if __name__ == "__main__":
    with dcp.init() as world:
        total = int(world.allreduce(np.array([world.rank + 1]))[0])
        name = os.path.basename(sys.argv[0])
        sys.stdout.write(f"{world.rank} {total} {sys.argv[1:]} {name}\\n")  # one piece
"""
        process = start(tmp_path, code, 3, "-x", "1")
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert sorted(out.splitlines()) == [f"{r} 6 ['-x', '1'] script.py" for r in range(3)]

    def test_a_script_finds_its_neighbours(self, tmp_path: Path) -> None:
        (tmp_path / "neighbour.py").write_text("answer = 42\n")
        process = start(tmp_path, "import neighbour; sys.exit(neighbour.answer)", 1)
        process.communicate(timeout=60)
        assert process.returncode == 42

    @pytest.mark.parametrize(
        ("ending", "code", "text"),
        [
            ("sys.exit(3)", 3, "exited with code 3"),
            ("raise ValueError('no data')", 1, "ValueError: no data"),
            ("os.kill(os.getpid(), 9)", 137, "was killed by SIGKILL"),
        ],
    )
    def test_exit_codes(self, tmp_path: Path, ending: str, code: int, text: str) -> None:
        script = f"""
world = dcp.init()
pids = world.allgatherv(np.array([os.getpid()]))
if world.rank == 1:
    print(pids.tolist(), flush=True)
    {ending}
while True:
    world.barrier()
"""
        process = start(tmp_path, script, 3)
        out, err = process.communicate(timeout=60)
        pids = [int(p) for p in out.strip("[]\n").split(",")]
        assert process.returncode == code, err
        assert text in err and f"rank 1 (process {pids[1]})" in err
        assert wait_until_gone(pids) == []

    def test_arguments(self, tmp_path: Path) -> None:
        with pytest.raises(dcp.ArgumentError, match="script"):
            launch_command([], 2)
        with pytest.raises(dcp.ArgumentError, match=r"nothing\.py"):
            launch_command([str(tmp_path / "nothing.py")], 2)

    @pytest.mark.parametrize("where", ["meeting", "collective", "computing", "saving"])
    def test_ctrl_c(self, tmp_path: Path, where: str) -> None:
        """Case X-06: Ctrl-C ends all ranks wherever they are, and leaves nothing."""
        code = """
where = sys.argv[1]
rank = int(os.environ["DCP_RANK"])
os.write(1, f"{os.getpid()}\\n".encode())
if where == "meeting" and rank == 1:
    time.sleep(600)
world = dcp.init()
if where == "computing" or (where == "collective" and rank == 1):
    time.sleep(600)
while True:
    if where == "saving":
        with open(f"{sys.argv[2]}-{rank}", "wb") as file:
            file.write(bytes(1 << 20))
            os.fsync(file.fileno())
    world.barrier()
"""
        process = start(tmp_path, code, 3, where, str(tmp_path / "file"))
        assert process.stdout is not None
        pids = [int(process.stdout.readline()) for _ in range(3)]
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
        assert process.returncode == 130
        assert wait_until_gone(pids) == []

    def test_ctrl_c_of_launch(self) -> None:
        code = """
import dcp, os, sys, numpy as np
def work(world):
    pids = world.allgatherv(np.array([os.getpid()]))
    if world.rank == 0:
        print(*pids, flush=True)
    while True:
        world.barrier()
try:
    dcp.launch(work, 2)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    sys.exit(7)
"""
        process = start_python(code)
        assert process.stdout is not None
        pids = [int(p) for p in process.stdout.readline().split()]
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=30)
        assert (process.returncode, out) == (7, "interrupted\n")
        assert wait_until_gone(pids) == []

    def test_ranks_end_with_their_launcher(self) -> None:
        code = """
import dcp, os, numpy as np
def work(world):
    pids = world.allgatherv(np.array([os.getpid()]))
    if world.rank == 0:
        print(*pids, flush=True)
    while True:
        world.barrier()
dcp.launch(work, 2)
"""
        process = start_python(code)
        assert process.stdout is not None
        pids = [int(p) for p in process.stdout.readline().split()]
        process.kill()
        process.wait()
        assert wait_until_gone(pids) == []
        process.communicate()


# ---- ranks that other launchers started ----

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-1@1",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),3",
    "SLURM_NODEID": "2",
    "SLURM_JOB_ID": "99",
}
OURS = {
    "DCP_RANK": "0",
    "DCP_WORLD_SIZE": "2",
    "DCP_LOCAL_RANK": "0",
    "DCP_LOCAL_WORLD_SIZE": "2",
    "DCP_RUN_ID": "mine",
}


class TestDiscovery:
    @pytest.mark.parametrize(
        ("env", "launcher", "numbers"),
        [
            ({}, "none", (0, 1, 0, 1)),
            (OURS, "dcp", (0, 2, 0, 2)),
            (TORCHRUN, "torchrun", (1, 4, 1, 4)),
            (OPENMPI, "openmpi", (2, 4, 0, 2)),
            (HYDRA, "hydra", (3, 4, 1, 2)),
            (SLURM, "slurm", (5, 7, 1, 3)),
            ({**SLURM, **HYDRA, **OPENMPI, **TORCHRUN, **OURS}, "dcp", (0, 2, 0, 2)),
            ({**SLURM, **HYDRA, **OPENMPI, **TORCHRUN}, "torchrun", (1, 4, 1, 4)),
            ({**SLURM, **HYDRA, **OPENMPI}, "openmpi", (2, 4, 0, 2)),
            ({**SLURM, **HYDRA}, "hydra", (3, 4, 1, 2)),
            # srun inside salloc: a set that is not complete does not count
            ({**SLURM, "RANK": "0", "WORLD_SIZE": "9"}, "slurm", (5, 7, 1, 3)),
        ],
    )
    def test_order(self, env: dict[str, str], launcher: str, numbers: tuple[int, ...]) -> None:
        place = _env.find_place(env)
        assert place.launcher == launcher
        assert (place.rank, place.size, place.local_rank, place.local_size) == numbers

    def test_run_ids(self) -> None:
        """Jobs at once get different ids, ranks of one job the same."""
        one = {**TORCHRUN, "TORCHELASTIC_RUN_ID": "none", "MASTER_PORT": "29500"}
        other = {**one, "MASTER_PORT": "29501"}
        ids = [_env.find_place(env).run_id for env in (one, {**one, "RANK": "2"}, other)]
        assert ids[0] == ids[1] != ids[2]
        assert _env.find_place({**one, "DCP_RUN_ID": "named"}).run_id == "named"
        first, second = _env.find_place(HYDRA).run_id, _env.find_place(HYDRA).run_id
        assert first == second is not None

    @pytest.mark.parametrize(
        ("env", "text"),
        [
            ({**TORCHRUN, "RANK": "x"}, "RANK='x'"),
            ({**TORCHRUN, "RANK": "4"}, "RANK=4"),
            ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2(y2)"}, "SLURM_STEP_TASKS_PER_NODE"),
        ],
    )
    def test_contradictions(self, env: dict[str, str], text: str) -> None:
        with pytest.raises(dcp.ArgumentError) as caught:
            _env.find_place(env)
        assert text in str(caught.value)

    def test_numbers(self) -> None:
        with pytest.raises(dcp.ArgumentError, match="DCP_TIMEOUT='soon'"):
            _env.seconds("DCP_TIMEOUT", 1.0, {"DCP_TIMEOUT": "soon"})
        with pytest.raises(dcp.ArgumentError, match="DCP_NUM_THREADS='0'"):
            _env.thread_count(1, {"DCP_NUM_THREADS": "0"})
        assert _env.thread_count(10**6, {}) == 1

    def test_jobs_of_torchrun_at_once(self) -> None:
        """Case X-08: two jobs with the default job id on one machine."""
        code = """
import dcp, numpy as np, os
for _ in range(2):  # worlds one after the other do not mix either
    with dcp.init() as world:
        jobs = world.allgatherv(np.array([int(os.environ["JOB"])]))
print(world.closed, jobs.tolist())
"""
        jobs = {}
        for job in (1, 2):
            jobs[job] = [
                start_python(
                    code,
                    RANK=rank,
                    LOCAL_RANK=rank,
                    WORLD_SIZE="2",
                    LOCAL_WORLD_SIZE="2",
                    TORCHELASTIC_RUN_ID="none",
                    MASTER_PORT=str(29500 + job),
                    JOB=str(job),
                )
                for rank in "01"
            ]
        for job, processes in jobs.items():
            for process in processes:
                out, err = process.communicate(timeout=60)
                assert out == f"True [{job}, {job}]\n", err

    def test_missing_rank_is_named(self) -> None:
        env = {**OURS, "DCP_RUN_ID": f"missing-{os.getpid()}", "DCP_JOIN_TIMEOUT": "0.3"}
        process = start_python("import dcp; dcp.init()", **env)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 1
        assert "DeadlineError: rank 1 did not come to join" in err and "within 0.3 s" in err

    def test_interrupt_in_a_collective(self) -> None:
        """Ctrl-C reaches a rank that waits in the core; the others are told."""
        code = """
import dcp, os
world = dcp.init()
if world.rank == 0:
    print("waiting", flush=True)
    world.barrier()
else:
    try:
        world.exchange([], [(__import__("numpy").zeros(1), 0)])
    except (dcp.AbortedError, dcp.RankError) as error:
        print(error)
"""
        env = {**OURS, "DCP_RUN_ID": f"interrupt-{os.getpid()}"}
        first = start_python(code, **env)
        second = start_python(code, **{**env, "DCP_RANK": "1", "DCP_LOCAL_RANK": "1"})
        assert first.stdout is not None
        first.stdout.readline()
        first.send_signal(signal.SIGINT)
        _, err = first.communicate(timeout=60)
        assert "KeyboardInterrupt" in err
        out, err = second.communicate(timeout=60)
        # the second where the signal came just before the wait
        name = f"rank 0 (process {first.pid})"
        assert out.startswith((f"{name} was interrupted in barrier", f"{name} has closed")), err

    def test_backends(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(dcp.ArgumentError, match="backend='udp'"):
            dcp.init("udp")
        with pytest.raises(dcp.UnsupportedError, match="mpi"):
            dcp.init("mpi")
        for name, value in OPENMPI.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(dcp.UnsupportedError, match="4 ranks, but 2 on this machine"):
            dcp.init()

    def test_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with dcp.init() as world:
            assert (world.rank, world.size, world.transport) == (0, 1, "self")
            assert dcp.init() is world
        with dcp.init("shm") as again:
            assert again is not world
            assert again.transport == "shm"
            assert again.allreduce(np.array([3.0]))[0] == 3.0


def test_every_variable_is_listed() -> None:
    """Variables that the package reads stand in dcp/_env.py."""
    listed = (ROOT / "dcp" / "_env.py").read_text()
    for path in (ROOT / "dcp").rglob("*.py"):
        for name in re.findall(r'["\'](DCP_[A-Z_]+)["\']', path.read_text()):
            assert name in listed, path
