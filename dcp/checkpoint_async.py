"""Saving beside training: a bounded copy now, the disk later.

``save`` copies what fits of this rank's shards into a buffer, writes what does not, and returns;
a thread writes the copy. The weights may change meanwhile. The thread calls no collective: ranks
meet in the folder, by the notes that each leaves beside its file, and rank 0's thread puts the
checkpoint in its place when all notes are there. While a rank writes it holds a lock on its file,
which the kernel drops when its process ends: that is how rank 0 learns of a death.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from dcp import _dcp
from dcp.checkpoint_format import Array, file_name
from dcp.checkpoint_writer import (
    Chunk,
    KindShapes,
    Saving,
    Shapes,
    Shards,
    ShardWriter,
    World,
    held_kinds,
    parts_of,
    plain_shapes,
    together,
)

__all__ = ["AsyncSaver", "SaveTimes"]

_logger = logging.getLogger("dcp")
_POLL_S = 0.01
_FAILED_BEFORE = "saving step {step} in {folder} failed in the background: {error}"


class SaveTimes(NamedTuple):
    """What one save took on this rank.

    Attributes
    ----------
    step : int
    blocked_s : float
        Until ``save`` returned, waiting for an earlier one included.
    hidden_s : float
        In the background, until the checkpoint was in its place (rank 0) or this rank's file was
        on the disk.
    copied_bytes, direct_bytes : int
        Of this rank's shards: copied and written in the background; written before the return.

    Examples
    --------
    >>> from dcp.checkpoint import SaveTimes
    >>> SaveTimes(3, 0.25, 2.0, 4096, 0).hidden_s
    2.0
    """

    step: int
    blocked_s: float
    hidden_s: float
    copied_bytes: int
    direct_bytes: int


class _Background:
    """The rest of a save, in a thread of its own."""

    def __init__(
        self, saving: Saving, writer: ShardWriter, chunks: list[tuple[Chunk, memoryview]],
        deadline_s: float,
    ) -> None:  # fmt: skip
        self.saving = saving
        self.error: BaseException | None = None
        self.seconds = 0.0
        self._writer, self._chunks, self._deadline_s = writer, chunks, deadline_s
        self._thread = threading.Thread(target=self._run, name=f"dcp-save-{saving.step}")
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        start = time.perf_counter()
        try:
            with self.saving:
                self._write()
                if self.saving.rank == 0:
                    self._await_notes()
                    self.saving.publish()
        except BaseException as error:
            self.error = error
        finally:
            self._chunks = []
            self.seconds = time.perf_counter() - start

    def _write(self) -> None:
        """This rank's file and note; the lock goes when the note is there."""
        with self._writer:
            try:
                for chunk, data in self._chunks:
                    self._writer.write(chunk, data)
                self.saving.leave_note(self._writer.finish())
            except Exception as error:
                self.saving.leave_error(f"{type(error).__name__}: {error}")
                raise

    def _await_notes(self) -> None:
        since = time.monotonic()
        for rank in range(1, self.saving.size):
            while not self.saving.note(rank).exists():
                if not self._writes(rank) and not self.saving.note(rank).exists():
                    raise _dcp.RankError(f"rank {rank} ended before its part was written")
                if time.monotonic() - since > self._deadline_s:
                    raise _dcp.DeadlineError(
                        f"rank {rank} has not written its part after {self._deadline_s:g} s"
                    )
                time.sleep(_POLL_S)
            since = time.monotonic()

    def _writes(self, rank: int) -> bool:
        """Whether the rank holds the lock on its file; True where there are no locks."""
        with (self.saving.aside / file_name(rank, self.saving.size)).open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:  # held, or a file system without locks
                return True
            return not _has_locks(file.fileno())


def _has_locks(handle: int) -> bool:
    """Whether a lock keeps others off on this file system: the one on `handle` is held."""
    with open(f"/proc/self/fd/{handle}", "rb") as other:
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False


class AsyncSaver:
    """Writes the checkpoints of a run beside its training. Every rank makes one.

    Parameters
    ----------
    folder : path
        Where the checkpoints of this run lie.
    world : World
        Its ranks save together.
    copy_bytes : int, optional
        At most so many bytes of this rank's shards are copied and written in the background, the
        rest is written before ``save`` returns. The buffer is made at the first save, as large as
        it needs to be, counted by the core as held, and kept.
    keep : int, optional
        Whole checkpoints that stay, >= 1.
    deadline_s : float, optional
        Rank 0 gives up when no further rank has finished for so long.

    Notes
    -----
    One checkpoint is on its way at a time: the next ``save`` waits for it. What goes wrong in the
    background is raised by the next ``save``, ``wait`` or ``close`` of the rank where it did, and
    rank 0's, and ends the others as any failure does. Killed at any moment, a run leaves its last
    whole checkpoint.

    Examples
    --------
    >>> import numpy as np, tempfile, types
    >>> from dcp import checkpoint
    >>> alone = types.SimpleNamespace(rank=0, size=1, barrier=lambda: None)
    >>> w = np.ones(6, np.float32)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with checkpoint.AsyncSaver(folder, alone) as saver:
    ...         path = saver.save(step=3, shards={"weights": [checkpoint.Run("w", 0, w)]},
    ...                           shapes={"w": (2, 3)}, state={}, config={})
    ...         w[:] = 2  # what was saved does not change
    ...     checkpoint.read(path, "w").ravel().tolist(), saver.last.copied_bytes
    ([1.0, 1.0, 1.0, 1.0, 1.0, 1.0], 24)
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        world: World,
        *,
        copy_bytes: int = 256 << 20,
        keep: int = 3,
        deadline_s: float = 1800.0,
    ) -> None:
        if copy_bytes < 0 or keep < 1:
            raise _dcp.ArgumentError(
                f"copy_bytes {copy_bytes} must be at least 0, keep {keep} at least 1"
            )
        self.folder, self.world = Path(folder), world
        self.copy_bytes, self.keep, self.deadline_s = copy_bytes, keep, deadline_s
        self.last: SaveTimes | None = None  # of the newest save that is done
        self._pending: _Background | None = None
        self._times: SaveTimes | None = None  # of the one on its way
        self._buffer: Array = np.empty(0, np.uint8)

    @property
    def staging_bytes(self) -> int:
        """Bytes of the buffer, now."""
        return self._buffer.size

    def save(
        self,
        *,
        step: int,
        shards: Shards,
        shapes: Shapes,
        state: Mapping[str, Any],
        config: Any,
        kind_shapes: KindShapes | None = None,
    ) -> Path:
        """Takes the state of all ranks and returns; as :func:`dcp.checkpoint.save`. Collective.

        Returns
        -------
        Path
            Where the checkpoint will be.

        Raises
        ------
        dcp.Error
            What the save before met in the background; and as :func:`dcp.checkpoint.save`.
        """
        start = time.perf_counter()
        with together(self.world, f"saving step {step} in {self.folder}"):
            self._finish()
            names = plain_shapes(shapes)
            saving = Saving(
                self.folder,
                step=step,
                rank=self.world.rank,
                size=self.world.size,
                shapes=names,
                kinds=held_kinds(shards, names, kind_shapes),
                state=state,
                config=config,
                keep=self.keep,
            )
            with ExitStack() as undo:
                undo.enter_context(saving)
                if self.world.rank == 0:
                    saving.begin()
                self.world.barrier()
                parts, arrays = parts_of(shards)
                writer = undo.enter_context(saving.open(parts))
                _lock(writer)
                chunks = self._stage(writer, arrays)
                self.world.barrier()  # every rank holds its lock
                undo.pop_all()
            copied = sum(chunk.bytes for chunk, _ in chunks)
            direct = sum(part.bytes for part in parts) - copied
            self._pending = _Background(saving, writer, chunks, self.deadline_s)
            self._times = SaveTimes(step, time.perf_counter() - start, 0.0, copied, direct)
        return saving.place

    def wait(self) -> SaveTimes | None:
        """Until the newest checkpoint is in its place. Collective.

        Returns
        -------
        SaveTimes or None
            Of that save; None if there was none.

        Raises
        ------
        dcp.Error
            What it met in the background.
        """
        with together(self.world, f"saving in {self.folder}"):
            self._finish()
            self.world.barrier()
        return self.last

    def close(self) -> None:
        """``wait``, and let go of the buffer. Collective; again it does nothing.

        Raises
        ------
        dcp.Error
            What the newest save met in the background.
        """
        try:
            if self._pending is not None:
                self.wait()
        finally:
            self._release()

    def __enter__(self) -> AsyncSaver:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        try:  # the others may be gone: what can be finished is, alone
            self._finish()
        except Exception as failure:
            _logger.warning("%s", failure)
        finally:
            self._release()

    def _finish(self) -> None:
        """Joins the thread and raises what it met."""
        pending, times = self._pending, self._times
        self._pending = self._times = None
        if pending is None or times is None:
            return
        pending.join()
        if pending.error is not None:
            text = _FAILED_BEFORE.format(step=times.step, folder=self.folder, error=pending.error)
            raised = type(pending.error)
            if not isinstance(pending.error, _dcp.Error):
                raised = _dcp.FileError
            raise raised(text) from pending.error
        self.last = times._replace(hidden_s=pending.seconds)

    def _stage(self, writer: ShardWriter, arrays: list[Array]) -> list[tuple[Chunk, memoryview]]:
        """Copies chunks while there is room, and writes the others."""
        total = sum(part.bytes for part in writer.parts)
        self._reserve(min(self.copy_bytes, total))
        room = self._buffer.data
        used = 0
        staged = []
        for chunk in writer.chunks():
            data = chunk.of(arrays)
            if used + chunk.bytes <= len(room):
                place = room[used : used + chunk.bytes]
                place[:] = data
                staged.append((chunk, place))
                used += chunk.bytes
            else:
                writer.write(chunk, data)
        return staged

    def _reserve(self, size: int) -> None:
        if size > self._buffer.size:
            _dcp.account_memory(size - self._buffer.size)
            self._buffer = np.empty(0, np.uint8)  # before the larger one is made
            self._buffer = np.empty(size, np.uint8)

    def _release(self) -> None:
        _dcp.account_memory(-self._buffer.size)
        self._buffer = np.empty(0, np.uint8)


def _lock(writer: ShardWriter) -> None:
    with suppress(OSError):  # a file system without locks: the deadline tells
        fcntl.flock(writer.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
