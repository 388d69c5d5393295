"""Writes checkpoints in a background thread: each process writes its share, and the first writer commits.

A checkpoint is either complete or ignored, at whatever moment a process dies. What a checkpoint contains, and
when all workers take one, is not decided here.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import json
import queue
import threading
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from dtrain.base.log import logger
from dtrain.checkpoint import layout, stored
from dtrain.checkpoint.checkpoint_io import CheckpointIO
from dtrain.checkpoint.storages import join, storage_of
from dtrain.checkpoint.stored import committed, read_share
from dtrain.errors import CheckpointError, ConfigurationError
from dtrain.upstream import servers

_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.5  # seconds between two checks for the others' shares
_AT_EXIT = 10.0  # seconds that a program which ends waits for the writing thread

_NOTHING: Mapping[str, Any] = MappingProxyType({})


class _Save(NamedTuple):
    name: layout.CheckpointName
    tensors: dict[str, Any]
    notes: str  # JSON, encoded when `save` was called


class Written(NamedTuple):
    """This process's share of a checkpoint: its step, its size in bytes, and the seconds to write it."""

    step: int
    size: int
    seconds: float


def check_keep(keep: Any) -> None:
    """Raises `ConfigurationError` unless `keep` is a number of checkpoints that can be kept."""
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
        raise ConfigurationError(f"keep is {keep!r}, not an integer of at least 1.")


class CheckpointStore:
    """Saves checkpoints to a directory that all writers see, and keeps the newest ones.

    Attributes:
        last_committed: the step of the last checkpoint that this object committed; None before the first,
            and on all writers but the first.
        last_written: the last share that this process wrote; None before the first.

    Args:
        directory: a path, or a URL of a storage (see `storages`); created when needed.
        token: letters and digits that all writers of one attempt share, and no other attempt uses, so that
            shares of a killed attempt are never used for a new checkpoint.
        writer: the number of this process among the writers; writer 0 commits.
        writers: how many processes write a share of each checkpoint.
        keep: how many committed checkpoints to keep, at least 1.
        patience: how many seconds the first writer waits for the others' shares, in addition to ten times
            the time that its own share took.
        fence: called before something is committed or removed; raises if this process may not do so any more.
        announce: called on the writing thread with the step of a committed checkpoint, after the fence.
    """

    def __init__(
        self,
        directory: str,
        *,
        token: str,
        writer: int = 0,
        writers: int = 1,
        keep: int = 2,
        patience: float = 60.0,
        fence: Callable[[], None] = lambda: None,
        announce: Callable[[int], None] = lambda step: None,
    ) -> None:
        self.last_committed: int | None = None
        self.last_written: Written | None = None
        self._directory = directory
        self._token = token
        self._writer = writer
        self._writers = writers
        self._keep = keep
        self._patience = patience
        self._fence = fence
        self._announce = announce
        self._saves: queue.SimpleQueue[_Save | None] = queue.SimpleQueue()
        self._change = threading.Condition()
        self._unfinished = 0
        self._problem: str | None = None
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._used: set[layout.CheckpointName] = set()

    # --- the training thread's side

    @property
    def busy(self) -> bool:
        """Whether a share is still being written or, on the first writer, a checkpoint not yet committed."""
        return self._unfinished > 0

    def save(
        self, step: int, tensors: Mapping[str, Any], notes: Mapping[str, Any] = _NOTHING, *, serial: int = 0
    ) -> None:
        """Queues this process's share of a checkpoint for writing, and returns at once.

        All writers must call it for the same checkpoints. A save that is queued behind another keeps its
        tensors in memory: see `busy`. `take_problem` tells what went wrong.

        Args:
            step: how many steps are done; a higher step is a newer checkpoint.
            tensors: eager tensors by name, of any dtype and shape, possibly none. They are not copied:
                assigning to a variable meanwhile must not change them, as TensorFlow guarantees.
            notes: values that JSON can hold, stored in the commit marker; only the first writer's are used.
            serial: orders checkpoints of one step. If it was used before, the next free number is used,
                because a checkpoint is never overwritten.

        Raises:
            ConfigurationError: the store is closed.
            TypeError, ValueError: JSON cannot hold a note.
        """
        if self._closing.is_set():
            raise ConfigurationError(
                f"The checkpoint of step {step} was requested after the store was closed.",
                hint="make another store",
            )
        stored_notes = json.dumps(dict(notes))  # may raise, before anything is counted or queued
        name = layout.CheckpointName(step, serial, self._token)
        while name in self._used:
            name = name._replace(serial=name.serial + 1)
        self._used.add(name)
        with self._change:
            self._unfinished += 1
        self._saves.put(_Save(name, dict(tensors), stored_notes))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="dtrain-checkpoints", daemon=True)
            self._thread.start()
            atexit.register(self._stop, _AT_EXIT)

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until nothing is being written, at most `timeout` seconds; returns whether that is so."""
        with self._change:
            return self._change.wait_for(lambda: not self._unfinished, timeout)

    def take_problem(self) -> str | None:
        """Why the latest failed save failed; None if no save has failed since the last call."""
        with self._change:
            problem, self._problem = self._problem, None
        return problem

    def close(self, timeout: float | None = None) -> bool:
        """Waits until nothing is being written, at most `timeout` seconds, and ends the thread.

        Returns:
            Whether everything was written in time.
        """
        done = self.wait(timeout)
        self._stop(_LONGEST_PAUSE)
        if self._thread is None or not self._thread.is_alive():
            atexit.unregister(self._stop)
        return done

    def _stop(self, timeout: float) -> None:
        """Ends the thread without waiting for other writers.

        The thread must not be inside TensorFlow when Python ends.
        """
        self._closing.set()
        self._saves.put(None)
        if self._thread is not None:
            self._thread.join(timeout)

    # --- the thread's side

    @property
    def _storage(self) -> CheckpointIO:
        return storage_of(self._directory)

    def _run(self) -> None:
        # With its own executor, a failed operation raises in this thread, and not in the training thread.
        executor = servers.own_executor()
        while (save := self._saves.get()) is not None:
            try:
                self._write(save)
            except Exception as error:  # whatever a file system raises: training must continue
                executor.clear_error()
                self._abort(save, error)
            save.tensors.clear()
            with self._change:
                self._unfinished -= 1
                self._change.notify_all()

    def _write(self, save: _Save) -> None:
        path = join(self._directory, str(save.name))
        self._fence()
        if self._writer == 0:
            stored.sweep(self._directory, save.name)
        began = time.monotonic()
        self._storage.make_directories(path)
        if self._storage.is_link(path):
            raise CheckpointError(f"{path} is a symbolic link, which dtrain has not made")
        share = self._write_share(path, save.tensors)
        size = sum(file["size"] for file in share.values())
        self.last_written = Written(save.name.step, size, time.monotonic() - began)
        if self._writer == 0:
            others = self._wait_for_others(path, self._patience + 10 * (time.monotonic() - began))
            self._fence()
            self._commit(path, save, [share, *others])
            self._fence()
            self._announce(save.name.step)
            self._remove_older(save.name)

    def _write_share(self, path: str, tensors: dict[str, Any]) -> dict[str, dict[str, int]]:
        prefix = layout.share_prefix(self._writer, self._writers)
        share: dict[str, dict[str, int]] = {}
        if tensors:
            self._storage.write_tensors(join(path, prefix), tensors)
            index, data = layout.tensor_files(prefix)
            for name in (index, data):
                self._storage.sync(join(path, name))
                share[name] = {"size": self._storage.size(join(path, name))}
            content = self._storage.read_at_most(join(path, index), layout.MOST_BYTES)
            share[index]["checksum"] = layout.checksum(content)
        marker = layout.encode({"version": layout.VERSION, "files": share})
        self._storage.write_whole(join(path, layout.whole_marker(self._writer, self._writers)), marker)
        return share

    def _wait_for_others(self, path: str, patience: float) -> list[dict[str, dict[str, int]]]:
        shares: dict[int, dict[str, dict[str, int]]] = {}
        deadline = time.monotonic() + patience
        pause = _FIRST_PAUSE
        while True:
            for writer in range(1, self._writers):
                if writer not in shares and (share := self._share_of(writer, path)) is not None:
                    shares[writer] = share
            missing = [writer for writer in range(1, self._writers) if writer not in shares]
            if not missing:
                return [shares[writer] for writer in range(1, self._writers)]
            if not self._storage.exists(join(path, layout.whole_marker(0, self._writers))):
                raise CheckpointError(f"{path} has vanished")
            if self._closing.is_set() or time.monotonic() > deadline:
                raise CheckpointError(
                    f"the shares of writers {', '.join(map(str, missing))} of {self._writers} did not "
                    f"arrive; all writers must see the directory {self._directory}"
                )
            self._closing.wait(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE)

    def _share_of(self, writer: int, path: str) -> dict[str, dict[str, int]] | None:
        """The files of another writer's share when the share is complete; None before.

        Raises:
            CheckpointError: the other writer has reported that it failed.
        """
        failure = join(path, layout.failure_marker(writer, self._writers))
        if self._storage.exists(failure):
            content = layout.decode(self._storage.read_at_most(failure, layout.MOST_BYTES), failure)
            raise _ShareFailedError(
                f"writer {writer}: {content.get('reason')}", out_of_space=bool(content.get("no_room"))
            )
        marker = join(path, layout.whole_marker(writer, self._writers))
        if not self._storage.exists(marker):
            return None
        try:
            content = layout.decode(self._storage.read_at_most(marker, layout.MOST_BYTES), marker)
            share: dict[str, dict[str, int]] | None = content.get("files")
            stored.check_sizes(path, share, layout.share_prefix(writer, self._writers))
        except CheckpointError:
            return None  # a network file system may show new files late, or in part
        return share

    def _commit(self, path: str, save: _Save, shares: list[dict[str, dict[str, int]]]) -> None:
        content = {
            "version": layout.VERSION,
            "step": save.name.step,
            "serial": save.name.serial,
            "token": save.name.token,
            "time": time.time(),
            "writers": self._writers,
            "shares": shares,
            "notes": json.loads(save.notes),
        }
        self._storage.write_whole(join(path, layout.COMMITTED), layout.encode(content))
        # The new directory's name must also be on the disk, so that the checkpoint survives a crash.
        self._storage.sync(self._directory)
        self.last_committed = save.name.step

    def _remove_older(self, newest: layout.CheckpointName) -> None:
        try:
            stored.prune(self._directory, newest, self._keep, self._fence)
        except Exception as error:  # the new checkpoint is committed anyway
            self._set_problem(
                f"Older checkpoints in {self._directory} cannot be removed: {stored.one_line(error)}"
            )

    def _abort(self, save: _Save, error: Exception) -> None:
        save.tensors.clear()
        out_of_space = _is_out_of_space(error)
        reason = error.message if isinstance(error, CheckpointError) else stored.one_line(error)
        self._set_problem(
            f"The checkpoint of step {save.name.step} was not written to {self._directory}: {reason}"
        )
        logger.debug("the checkpoint of step %d failed", save.name.step, exc_info=error)
        path = join(self._directory, str(save.name))
        # Remove the incomplete checkpoint at once: the next one may need its room on the disk.
        with contextlib.suppress(Exception):
            if self._writer:
                self._withdraw(path, reason, out_of_space)
            else:
                stored.remove(path)
                if out_of_space:
                    self._free_space()

    def _withdraw(self, path: str, reason: str, out_of_space: bool) -> None:
        """Removes this share, and leaves a marker that tells the first writer not to wait for it."""
        prefix = layout.share_prefix(self._writer, self._writers)
        for name in self._storage.names(path):
            if name.startswith(f"{prefix}."):
                self._storage.remove(join(path, name))
        marker = layout.encode({"version": layout.VERSION, "reason": reason, "no_room": out_of_space})
        self._storage.write_whole(join(path, layout.failure_marker(self._writer, self._writers)), marker)

    def _free_space(self) -> None:
        """Removes all checkpoints but the newest readable one, because the disk has no room for another."""
        for checkpoint in committed(self._directory):
            try:
                for share in range(checkpoint.writers):
                    read_share(checkpoint, share)
            except CheckpointError as error:
                logger.warning("The checkpoint %s is incomplete: %s", checkpoint.path, error.message)
                continue
            stored.prune(
                self._directory,
                layout.CheckpointName(checkpoint.step, checkpoint.serial, checkpoint.token),
                keep=1,
                fence=self._fence,
            )
            return

    def _set_problem(self, problem: str) -> None:
        with self._change:
            self._problem = problem


class _ShareFailedError(CheckpointError):
    def __init__(self, message: str, *, out_of_space: bool) -> None:
        self.out_of_space = out_of_space
        super().__init__(message)


def _is_out_of_space(error: Exception) -> bool:
    import tensorflow as tf

    if isinstance(error, _ShareFailedError):
        return error.out_of_space
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return isinstance(error, tf.errors.ResourceExhaustedError)
