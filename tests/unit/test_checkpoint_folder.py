"""dcp.checkpoint: what lies in the folder of a run, also after a death at any moment."""

import os
import shutil
import sys
import warnings

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
from dcp import checkpoint, checkpoint_folder
from dcp.checkpoint_writer import ShardWriter


def test_keep_and_latest(tmp_path):
    values = random_values()
    assert not checkpoint.is_used(tmp_path / "none") and not checkpoint.is_used(tmp_path)
    for step in (1, 2, 3, 4):
        save(tmp_path, values, step=step, keep=2)
        assert checkpoint.latest(tmp_path).name == f"step-{step:08d}"
    assert sorted(p.name for p in tmp_path.glob("*")) == [".lock", "step-00000003", "step-00000004"]
    assert checkpoint.is_used(tmp_path)
    # a run that went back: the newest to be written stays, whatever its number
    save(tmp_path, values, step=2, keep=1)
    assert [p.name for p in tmp_path.glob("step-*")] == ["step-00000002"]
    save(tmp_path, random_values(1), step=2)
    assert same(load(tmp_path), random_values(1))


def test_incomplete_is_skipped_with_a_warning(tmp_path):
    values = random_values()
    save(tmp_path, values, step=2)
    broken = [save(tmp_path, values, step=step, keep=9) for step in (3, 4, 5)]
    (broken[0] / "index.json").unlink()
    (broken[1] / "index.json").write_text('{"half": ')
    next(broken[2].glob("*.safetensors")).unlink()
    with pytest.warns(RuntimeWarning, match="step-0000000[345]") as caught:
        assert checkpoint.latest(tmp_path).name == "step-00000002"
    assert len(caught) == 3
    with pytest.warns(RuntimeWarning, match="step-00000005"):
        assert same(load(tmp_path), values)
    # what is not whole does not count for keep, and gives way to a new one of its number
    save(tmp_path, values, step=4, keep=1)
    with pytest.warns(RuntimeWarning, match="step-00000005"):
        assert checkpoint.latest(tmp_path).name == "step-00000004"
    assert not (tmp_path / "step-00000002").exists()


def test_none_is_whole(tmp_path):
    with pytest.raises(dcp.FileError, match="none"):
        checkpoint.latest(tmp_path / "none")
    with pytest.raises(dcp.FileError, match="holds no checkpoint"):
        checkpoint.latest(tmp_path)
    (tmp_path / "step-00000004").mkdir()
    (tmp_path / "step-00000004" / "index.json").write_text('{"half": ')
    assert checkpoint.is_used(tmp_path)
    with pytest.raises(dcp.FileError, match="step-00000004"):
        checkpoint.latest(tmp_path)
    with pytest.raises(dcp.FileError, match="step-00000004"):
        checkpoint.show(tmp_path / "step-00000004")


def saved_until(folder, values, count):
    """Saves step 2 in a child process that dies at its count-th file operation; whether it died."""
    child = os.fork()
    if child == 0:
        left = count

        def die(event, _):
            nonlocal left
            if event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.scandir"):
                left -= 1
                if left == 0:
                    os._exit(9)

        try:
            sys.addaudithook(die)
            checkpoint.save(
                folder, step=2, world=ALONE, shards=shards_of(values, 0, 1), keep=2,
                **arguments(state=STATE),
            )  # fmt: skip
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


@pytest.mark.parametrize("replace", [False, True])
def test_killed_anywhere(tmp_path, replace, monkeypatch):
    """The last whole checkpoint is there after a death at any file operation, and the next save
    leaves nothing of the dead behind - also where a checkpoint of the same step is replaced."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # no power is cut
    before, after = random_values(1), random_values(2)
    count, died, old = 1, True, 0
    while died:
        folder = tmp_path / str(count)
        for step in (0, 1, 2) if replace else (0, 1):
            save(folder, before, step=step)
        died = saved_until(folder, after, count)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = load(folder)
        assert same(found, before) or same(found, after)
        assert died or same(found, after)
        old += same(found, before)
        save(folder, after, step=3, keep=2)
        names = sorted(p.name for p in folder.glob("*"))
        assert names == [".lock", "step-00000002", "step-00000003"] or (
            names == [".lock", "step-00000001", "step-00000003"] and not replace
        )
        shutil.rmtree(folder)
        count += 1
    assert old > 5 and count - old > 3


def test_another_writer(tmp_path):
    with (
        checkpoint_folder.locked(tmp_path),
        pytest.raises(dcp.FileError, match="another run is writing"),
    ):
        save(tmp_path, random_values())


def test_full_disk(tmp_path, monkeypatch):
    """A failure on one rank is an error on all, and the checkpoint before stays."""
    values = random_values()
    save(tmp_path, values, size=3, step=1)
    finish = ShardWriter.finish

    def full(writer):
        if "rank-00001" in writer.path.name:
            raise OSError(28, "No space left on device")
        return finish(writer)

    monkeypatch.setattr(ShardWriter, "finish", full)
    outcomes = together(
        3,
        lambda world: checkpoint.save(
            tmp_path, step=2, world=world, shards=shards_of(values, world.rank, 3),
            **arguments(state=STATE),
        ),
    )  # fmt: skip
    assert isinstance(outcomes[1], dcp.FileError) and "No space left" in str(outcomes[1])
    assert isinstance(outcomes[0], dcp.AbortedError) and isinstance(outcomes[2], dcp.AbortedError)
    assert checkpoint.latest(tmp_path).name == "step-00000001"
