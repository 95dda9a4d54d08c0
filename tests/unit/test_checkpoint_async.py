"""dcp.checkpoint.AsyncSaver: the weights go on, the checkpoint is of the moment it was taken."""

import json
import os
import threading
import warnings

import numpy as np
import pytest
from checkpoint_cases import (
    ALONE,
    STATE,
    arguments,
    load,
    random_values,
    same,
    save,
    shards_of,
    together,
)

import dcp
from dcp import checkpoint, checkpoint_async, checkpoint_format
from dcp.checkpoint import AsyncSaver
from dcp.checkpoint_writer import Saving, ShardWriter


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(checkpoint_format, "CHUNK_BYTES", 64)


@pytest.fixture
def gate(monkeypatch):
    """Background threads wait until it is set."""
    event = threading.Event()
    write = checkpoint_async._Background._write

    def wait(background):
        assert event.wait(60)
        write(background)

    monkeypatch.setattr(checkpoint_async._Background, "_write", wait)
    return event


def copy_of(values):
    return {kind: {n: a.copy() for n, a in tensors.items()} for kind, tensors in values.items()}


def overwrite(values):
    for tensors in values.values():
        for array in tensors.values():
            array.view(np.uint8)[...] = 0xA5


@pytest.mark.parametrize("copy_bytes", [0, 100, 3000, 1 << 20])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_weights_change_meanwhile(tmp_path, small_chunks, gate, size, copy_bytes):
    """Everything was written or copied when save returns, at most `copy_bytes` of it copied."""
    values = random_values()
    wanted = copy_of(values)
    returned = threading.Barrier(size + 1)

    def call(world):
        with AsyncSaver(tmp_path, world, copy_bytes=copy_bytes) as saver:
            held = dcp.ShardedModel.memory(None)["held"]
            assert saver.wait() is None
            shards = shards_of(values, world.rank, size)
            path = saver.save(step=3, shards=shards, **arguments(state=STATE))
            returned.wait()  # all have what they need: the values change
            returned.wait()
            times = saver.wait()
            assert times is saver.last
            assert times.copied_bytes <= min(copy_bytes, saver.staging_bytes) <= copy_bytes
            total = sum(run.array.nbytes for runs in shards.values() for run in runs)
            assert times.copied_bytes + times.direct_bytes == total
            assert times.step == 3 and times.blocked_s > 0 and times.hidden_s > 0
            assert size > 1 or saver.staging_bytes == dcp.ShardedModel.memory(None)["held"] - held
        assert saver.staging_bytes == 0
        return path, times

    def change():
        returned.wait()
        assert not (tmp_path / "step-00000003").exists()
        overwrite(values)
        gate.set()
        returned.wait()

    changer = threading.Thread(target=change)
    changer.start()
    outcomes = together(size, call)
    changer.join()
    assert all(path == tmp_path / "step-00000003" for path, _ in outcomes)
    assert (sum(times.direct_bytes for _, times in outcomes) == 0) == (copy_bytes == 1 << 20)
    checkpoint.verify(tmp_path)
    for loaded in (1, 3):
        assert same(load(tmp_path, size=loaded), wanted)


def test_many_in_turn(tmp_path):
    """Each save waits for the one before; keep counts; what was asynchronous or not is the same."""
    values = random_values()

    def call(world):
        with AsyncSaver(tmp_path / "async", world, keep=2) as saver:
            for step in range(5):
                shards = shards_of(values, world.rank, 3)
                saver.save(step=step, shards=shards, **arguments(state=STATE))
                assert (saver.last.step if saver.last else -1) == step - 1
                assert saver.staging_bytes == sum(
                    run.array.nbytes for runs in shards.values() for run in runs
                )
        return saver.last.step

    assert together(3, call) == [4, 4, 4]
    names = sorted(path.name for path in (tmp_path / "async").iterdir())
    assert names == [".lock", "step-00000003", "step-00000004"]
    path = save(tmp_path / "sync", values, size=3, step=4)
    for file in path.iterdir():
        assert file.read_bytes() == (tmp_path / "async" / path.name / file.name).read_bytes()


def failing(monkeypatch, rank, error):
    finish = ShardWriter.finish

    def fail(writer):
        if f"rank-{rank:05d}" in writer.path.name and writer.path.parent.name.startswith(".step"):
            raise error
        return finish(writer)

    monkeypatch.setattr(ShardWriter, "finish", fail)


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("method", ["save", "wait", "close"])
def test_failure_in_the_background(tmp_path, monkeypatch, rank, method):
    """A full disk is raised by the next call, on its rank and on rank 0, and ends the others."""
    values = random_values()
    save(tmp_path, values, size=3, step=1)
    failing(monkeypatch, rank, OSError(28, "No space left on device"))

    def call(world):
        saver = AsyncSaver(tmp_path, world)
        content = {"shards": shards_of(values, world.rank, 3)} | arguments(state=STATE)
        saver.save(step=2, **content)
        if method == "save":
            saver.save(step=3, **content)
        else:
            getattr(saver, method)()

    outcomes = together(3, call)
    assert "saving step 2" in str(outcomes[rank]) and "No space left" in str(outcomes[rank])
    for place, outcome in enumerate(outcomes):
        assert isinstance(outcome, dcp.FileError if place in (0, rank) else dcp.AbortedError) or (
            place in (0, rank) and isinstance(outcome, dcp.AbortedError)
        )
    assert any(isinstance(outcome, dcp.FileError) for outcome in outcomes)
    assert checkpoint.latest(tmp_path).name == "step-00000001"
    monkeypatch.undo()
    save(tmp_path, values, size=2, step=3)  # clears what was left behind
    assert not list(tmp_path.glob(".step*"))


def test_leaving_with_an_error(tmp_path, caplog):
    """The error that goes through is the one that is seen; what was taken is written."""
    values = random_values()
    with pytest.raises(KeyError), AsyncSaver(tmp_path, ALONE) as saver:
        saver.save(step=1, shards=shards_of(values, 0, 1), **arguments(state=STATE))
        raise KeyError
    assert same(load(tmp_path), values)
    assert not caplog.records


def test_bad_arguments(tmp_path):
    values = random_values()
    for changes, word in (({"copy_bytes": -1}, "copy_bytes -1"), ({"keep": 0}, "keep 0")):
        with pytest.raises(dcp.ArgumentError, match=word):
            AsyncSaver(tmp_path, ALONE, **changes)
    with AsyncSaver(tmp_path, ALONE) as saver:
        for changes, word in (({"state": {"x": object()}}, "state"), ({"step": -1}, "step -1")):
            content = {"step": 1, "shards": shards_of(values, 0, 1)} | arguments(state={})
            with pytest.raises(dcp.ArgumentError, match=word):
                saver.save(**(content | changes))
        assert saver.wait() is None
    assert not checkpoint.is_used(tmp_path)


def test_two_runs_and_one_folder(tmp_path, gate):
    """While a checkpoint is on its way nobody else writes there; afterwards they may."""
    values = random_values()
    content = {"shards": shards_of(values, 0, 1)} | arguments(state=STATE)
    with AsyncSaver(tmp_path, ALONE) as first, AsyncSaver(tmp_path, ALONE) as second:
        first.save(step=1, **content)
        for other in (second.save, lambda **kw: checkpoint.save(tmp_path, world=ALONE, **kw)):
            with pytest.raises(dcp.FileError, match="another run is writing"):
                other(step=2, **content)
        gate.set()
        first.wait()
        second.save(step=2, **content)
    assert checkpoint.latest(tmp_path).name == "step-00000002"
    checkpoint.verify(tmp_path / "step-00000001")


def in_child(call):
    """The exit code of a forked process that runs this."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = call() or 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class FileWorld:
    """A rank of a world of processes that meet in a folder; for tests of deaths only."""

    def __init__(self, folder, rank, size):
        self.folder, self.rank, self.size, self.count = folder, rank, size, 0

    def barrier(self):
        self.count += 1
        (self.folder / f"{self.count}-{self.rank}").touch()
        while len(list(self.folder.glob(f"{self.count}-*"))) < self.size:
            os.sched_yield()

    def abort(self, text):
        pass


@pytest.mark.parametrize("dead", [1, 2])
def test_a_rank_dies_while_it_writes(tmp_path, dead):
    """Rank 0 names it, at once: the lock on its file went with its process."""
    values = random_values()
    save(tmp_path / "run", values, step=1)
    (tmp_path / "meet").mkdir()

    def run(rank):
        def die(background):
            os._exit(9)

        if rank == dead:
            checkpoint_async._Background._write = die
        saver = AsyncSaver(tmp_path / "run", FileWorld(tmp_path / "meet", rank, 3))
        shards = shards_of(values, rank, 3)
        saver.save(step=2, shards=shards, **arguments(state=STATE))
        if rank == 0:
            with pytest.raises(dcp.RankError, match=f"rank {dead} ended before"):
                saver._finish()
        saver._finish()

    children = []
    for rank in range(3):
        child = os.fork()
        if child == 0:
            try:
                run(rank)
                os._exit(0)
            finally:
                os._exit(1)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert codes == [9 if rank == dead else 0 for rank in range(3)]
    assert checkpoint.latest(tmp_path / "run").name == "step-00000001"


def test_deadline(tmp_path, monkeypatch):
    """A rank that neither finishes nor ends is given up."""
    values = random_values()
    hold = threading.Event()
    leave_note = Saving.leave_note

    def late(saving, file):
        if saving.rank == 1:
            assert hold.wait(60)
        leave_note(saving, file)

    monkeypatch.setattr(Saving, "leave_note", late)

    def call(world):
        saver = AsyncSaver(tmp_path, world, deadline_s=0.05)
        shards = shards_of(values, world.rank, 2)
        saver.save(step=1, shards=shards, **arguments(state=STATE))
        try:
            return saver.wait()
        finally:
            if world.rank == 0:
                hold.set()

    first, _ = together(2, call)
    assert isinstance(first, dcp.DeadlineError) and "rank 1 has not written" in str(first)


def saved_until(folder, values, count):
    """Saves steps 2 and 3 in a child that dies at its count-th operation; whether it died."""

    def run():
        left = [count]
        lock = threading.Lock()

        def counted(call):
            def wrapped(*arguments, **keywords):
                with lock:
                    left[0] -= 1
                    if left[0] == 0:
                        os._exit(9)
                return call(*arguments, **keywords)

            return wrapped

        for name in ("pwrite", "rename", "mkdir", "unlink", "rmdir", "fsync", "open"):
            setattr(os, name, counted(getattr(os, name)))
        with AsyncSaver(folder, ALONE, copy_bytes=5000, keep=2) as saver:
            for step in (2, 3):
                shards = shards_of(values, 0, 1)
                saver.save(step=step, shards=shards, **arguments(state=STATE))
        return 0

    return in_child(run) == 9


def test_killed_anywhere(tmp_path, monkeypatch):
    """A death at any write, sync or rename, here or in the thread, leaves a whole checkpoint."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # no power is cut
    monkeypatch.setattr(checkpoint_format, "CHUNK_BYTES", 2048)
    before, after = random_values(1), random_values(2)
    count, died, found = 1, True, set()
    while died:
        folder = tmp_path / str(count)
        save(folder, before, step=1)
        died = saved_until(folder, after, count)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            newest = checkpoint.latest(folder)
        checkpoint.verify(newest)
        assert same(load(newest), before if newest.name == "step-00000001" else after)
        found.add(newest.name)
        save(folder, after, step=4, keep=1)
        assert sorted(path.name for path in folder.iterdir()) == [".lock", "step-00000004"]
        count += 1 if count < 12 or count > 60 else 5
    assert found == {"step-00000001", "step-00000002", "step-00000003"}


def train(world, folder, asynchronous, steps, resume):
    config = dcp.Transformer1D.preset("tiny", num_hidden_layers=1)
    text = dcp.data.TextFiles("stdlib", max_length=128)
    cost = dcp.CostModel.for_model(config)
    loader = dcp.Loader(text, world, cost, tokens_per_step=256)
    with dcp.fully_shard(config, world) as model:
        trainer = dcp.Trainer(
            model, dcp.optim.AdamW(lr=0.01), loader, checkpoint=folder, save_every=2,
            keep=9, asynchronous=asynchronous, copy_bytes=500_000, resume=resume,
        )  # fmt: skip
        report = trainer.fit(steps)
        world.barrier()
        return [step.loss for step in report.steps], model.parameters_sha256()


def test_training(tmp_path):
    """Saved beside training or not: the same checkpoints, and resuming goes on bitwise."""
    losses, _ = dcp.launch(train, 2, args=(tmp_path / "a", True, 5, False))[0]
    whole, digest = dcp.launch(train, 2, args=(tmp_path / "b", False, 7, False))[0]
    for name in ("step-00000002", "step-00000004"):
        checkpoint.verify(tmp_path / "a" / name)
        for file in (tmp_path / "a" / name).glob("*.safetensors"):
            assert file.read_bytes() == (tmp_path / "b" / name / file.name).read_bytes()
    lines = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").open()]
    saves = [line for line in lines if line["kind"] == "save"]
    assert [line["step"] for line in saves] == [2, 4, 5]
    assert all(line["hidden_s"] > 0 and 0 < line["copied_bytes"] <= 500_000 for line in saves)
    assert all(line["direct_bytes"] > 0 for line in saves)
    more, resumed = dcp.launch(train, 2, args=(tmp_path / "a", True, 7, True))[0]
    assert (losses + more, resumed) == (whole, digest)
