"""Writes checkpoints beside the training: each process its share, in a thread, and the first commits them.

A checkpoint is there whole or not at all, at whatever moment a process dies. What is in it, when it is
taken and who agrees about that is not decided here.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import json
import queue
import threading
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from dtrain.checkpoint import files as operations
from dtrain.checkpoint import layout, stored
from dtrain.checkpoint.files import join
from dtrain.checkpoint.stored import committed, read_share
from dtrain.errors import CheckpointError, ConfigurationError
from dtrain.log import logger
from dtrain.upstream import tensorflow as upstream_tf

_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.5  # seconds between two looks for the others' shares
_AT_EXIT = 10.0  # seconds that a program which ends waits for what it is writing

_NOTHING: Mapping[str, Any] = MappingProxyType({})


class _Save(NamedTuple):
    name: layout.Name
    tensors: dict[str, Any]
    notes: str  # JSON, taken when the save was asked for


class Written(NamedTuple):
    """This process' share of a checkpoint: its step, its bytes, and the seconds that writing it took."""

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
        last_committed: the step of the last checkpoint that this object committed; None before, and on
            all writers but the first.
        last_written: what the last one that this process wrote took; None before.

    Args:
        directory: a path, or a URL of a file system that TensorFlow can write; made when it is needed.
        token: letters and digits, the same for all writers of one attempt and of no other, so that shares
            of a killed attempt are never taken for new ones.
        writer: which of the writers this process is; 0 commits.
        writers: how many processes write a share of each checkpoint.
        keep: how many committed ones are kept, at least 1.
        patience: seconds that the first writer waits for the others' shares, beside ten times what its own
            took.

    Raises:
        ConfigurationError: an argument cannot be used.
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
    ) -> None:
        layout.check_token(token)
        if not 0 <= writer < writers:
            raise ConfigurationError(f"writer={writer} of {writers} writers.", hint="they count from 0")
        check_keep(keep)
        self.last_committed: int | None = None
        self.last_written: Written | None = None
        self._directory = directory
        self._token = token
        self._writer = writer
        self._writers = writers
        self._keep = keep
        self._patience = patience
        self._saves: queue.SimpleQueue[_Save | None] = queue.SimpleQueue()
        self._change = threading.Condition()
        self._unfinished = 0
        self._problem: str | None = None
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._used: set[layout.Name] = set()

    # --- the training thread's side

    @property
    def busy(self) -> bool:
        """Whether something is still being written or, on the first writer, not yet committed."""
        return self._unfinished > 0

    def save(
        self, step: int, tensors: Mapping[str, Any], notes: Mapping[str, Any] = _NOTHING, *, serial: int = 0
    ) -> None:
        """Write this process's share of a checkpoint; it returns at once.

        All writers must call it for the same checkpoints. While one is written another one waits, and
        holds its tensors in memory: see `busy`. What goes wrong is told by `take_problem`.

        Args:
            step: orders the checkpoints.
            tensors: eager tensors by name, of any type and shape, possibly none. They are not copied: a
                variable that is assigned to meanwhile must leave them alone, as TensorFlow's do.
            notes: JSON, kept in the commit marker; only the first writer's count.
            serial: orders checkpoints of one step. One that was given before counts as the next free one,
                as a checkpoint is never written over.

        Raises:
            ConfigurationError: `notes` are no JSON, or the store is closed.
        """
        if self._closing.is_set():
            raise ConfigurationError(
                f"The checkpoint of step {step} comes after the store was closed.", hint="make another store"
            )
        try:
            text = json.dumps(dict(notes))
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"notes={notes!r} are no JSON: {error}.", hint="plain data") from None
        name = layout.Name(step, serial, self._token)
        while name in self._used:
            name = name._replace(serial=name.serial + 1)
        self._used.add(name)
        with self._change:
            self._unfinished += 1
        self._saves.put(_Save(name, dict(tensors), text))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="dtrain-checkpoints", daemon=True)
            self._thread.start()
            atexit.register(self._stop, _AT_EXIT)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is being written; False when the time, in seconds, was over before."""
        with self._change:
            return self._change.wait_for(lambda: not self._unfinished, timeout)

    def take_problem(self) -> str | None:
        """Why the last save that failed did so; None if none has failed since it was asked last."""
        with self._change:
            problem, self._problem = self._problem, None
        return problem

    def close(self, timeout: float | None = None) -> bool:
        """Finish what is being written, end the thread; False when the time (in seconds) was over before."""
        done = self.wait(timeout)
        self._stop(_LONGEST_PAUSE)
        if self._thread is None or not self._thread.is_alive():
            atexit.unregister(self._stop)
        return done

    def _stop(self, timeout: float) -> None:
        """End the thread without waiting for others; it must not be in TensorFlow when Python ends."""
        self._closing.set()
        self._saves.put(None)
        if self._thread is not None:
            self._thread.join(timeout)

    # --- the thread's side

    def _run(self) -> None:
        # That an operation failed is this thread's to hear, not that of the one that trains meanwhile.
        executor = upstream_tf.own_executor()
        while (save := self._saves.get()) is not None:
            try:
                self._write(save)
            except Exception as error:  # whatever a file system makes of it: the training goes on
                executor.clear_error()
                self._give_up(save, error)
            save.tensors.clear()
            with self._change:
                self._unfinished -= 1
                self._change.notify_all()

    def _write(self, save: _Save) -> None:
        path = join(self._directory, str(save.name))
        if self._writer == 0:
            stored.sweep(self._directory, save.name)
        began = time.monotonic()
        operations.files.make_directories(path)
        share = self._write_share(path, save.tensors)
        size = sum(file["size"] for file in share.values())
        self.last_written = Written(save.name.step, size, time.monotonic() - began)
        # From here on variables may be updated in place again.
        save.tensors.clear()
        if self._writer == 0:
            others = self._wait_for_others(path, self._patience + 10 * (time.monotonic() - began))
            self._commit(path, save, [share, *others])
            self._tidy(save.name)

    def _write_share(self, path: str, tensors: Mapping[str, Any]) -> dict[str, dict[str, int]]:
        prefix = layout.share_prefix(self._writer, self._writers)
        share: dict[str, dict[str, int]] = {}
        if tensors:
            operations.files.write_tensors(join(path, prefix), tensors)
            index, data = layout.tensor_files(prefix)
            for name in (index, data):
                operations.files.sync(join(path, name))
                share[name] = {"size": operations.files.size(join(path, name))}
            share[index]["checksum"] = layout.checksum(operations.files.read(join(path, index)))
        marker = layout.encode({"version": layout.VERSION, "files": share})
        operations.write_whole(join(path, layout.whole_marker(self._writer, self._writers)), marker)
        return share

    def _wait_for_others(self, path: str, patience: float) -> list[dict[str, dict[str, int]]]:
        found: dict[int, dict[str, dict[str, int]]] = {}
        deadline = time.monotonic() + patience
        pause = _FIRST_PAUSE
        while True:
            for writer in range(1, self._writers):
                if writer not in found and (share := self._share_of(writer, path)) is not None:
                    found[writer] = share
            missing = [writer for writer in range(1, self._writers) if writer not in found]
            if not missing:
                return [found[writer] for writer in range(1, self._writers)]
            if not operations.files.exists(join(path, layout.whole_marker(0, self._writers))):
                raise CheckpointError(f"{path} has vanished")
            if self._closing.is_set() or time.monotonic() > deadline:
                raise CheckpointError(
                    f"the shares of writers {', '.join(map(str, missing))} of {self._writers} did not come; "
                    f"all must see the directory {self._directory}"
                )
            self._closing.wait(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE)

    def _share_of(self, writer: int, path: str) -> dict[str, dict[str, int]] | None:
        """The files of another writer's share once they are there whole; None before.

        Raises:
            CheckpointError: that writer has said that it failed.
        """
        failure = join(path, layout.failure_marker(writer, self._writers))
        if operations.files.exists(failure):
            content = layout.decode(operations.files.read(failure), failure)
            raise _ShareFailedError(f"writer {writer}: {content['reason']}", no_room=content["no_room"])
        marker = join(path, layout.whole_marker(writer, self._writers))
        if not operations.files.exists(marker):
            return None
        try:
            share: dict[str, dict[str, int]] = layout.decode(operations.files.read(marker), marker)["files"]
            stored.check_sizes(path, share)
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
        operations.write_whole(join(path, layout.COMMITTED), layout.encode(content))
        # The names of new directories must be on the disk, too, for it to count after a crash.
        operations.files.sync(self._directory)
        self.last_committed = save.name.step

    def _tidy(self, newest: layout.Name) -> None:
        try:
            stored.prune(self._directory, newest, self._keep)
        except Exception as error:  # it is committed; that older ones take room is another matter
            self._tell(f"Older checkpoints in {self._directory} cannot be removed: {stored.one_line(error)}")

    def _give_up(self, save: _Save, error: Exception) -> None:
        save.tensors.clear()
        no_room = _is_for_room(error)
        reason = error.message if isinstance(error, CheckpointError) else stored.one_line(error)
        self._tell(f"The checkpoint of step {save.name.step} was not written to {self._directory}: {reason}")
        logger.debug("the checkpoint of step %d failed", save.name.step, exc_info=error)
        path = join(self._directory, str(save.name))
        # What is torn goes at once: it takes room that the next one may need.
        with contextlib.suppress(Exception):
            if self._writer:
                self._withdraw(path, reason, no_room)
            else:
                stored.remove(path)
                if no_room:
                    self._make_room()

    def _withdraw(self, path: str, reason: str, no_room: bool) -> None:
        """Remove this share, and tell the first writer not to wait for it."""
        prefix = layout.share_prefix(self._writer, self._writers)
        for name in operations.files.names(path):
            if name.startswith(f"{prefix}."):
                operations.files.remove(join(path, name))
        marker = layout.encode({"version": layout.VERSION, "reason": reason, "no_room": no_room})
        operations.write_whole(join(path, layout.failure_marker(self._writer, self._writers)), marker)

    def _make_room(self) -> None:
        """Keep only the newest checkpoint that can be read, as another one does not fit beside them all."""
        for checkpoint in committed(self._directory):
            try:
                for share in range(checkpoint.writers):
                    read_share(checkpoint, share)
            except CheckpointError as error:
                logger.warning("The checkpoint %s is not whole: %s", checkpoint.path, error.message)
                continue
            stored.prune(
                self._directory, layout.Name(checkpoint.step, checkpoint.serial, checkpoint.token), keep=1
            )
            return

    def _tell(self, problem: str) -> None:
        with self._change:
            self._problem = problem


class _ShareFailedError(CheckpointError):
    def __init__(self, message: str, *, no_room: bool) -> None:
        self.no_room = no_room
        super().__init__(message)


def _is_for_room(error: Exception) -> bool:
    import tensorflow as tf

    if isinstance(error, _ShareFailedError):
        return error.no_room
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return isinstance(error, tf.errors.ResourceExhaustedError)
