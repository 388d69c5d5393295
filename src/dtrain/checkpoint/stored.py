"""Lists, reads, checks and removes the checkpoints in a directory.

It writes no checkpoint, and does not know what the tensors mean.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dtrain.base.counts import is_count
from dtrain.base.log import logger
from dtrain.checkpoint import layout
from dtrain.checkpoint.storages import join, storage_of
from dtrain.checkpoint.tensor_file import StoredTensor
from dtrain.errors import CheckpointError

_HINT = "Use an older checkpoint. If this happens again, check the disk and the network, which may lose data."

_LATEST = 1e15  # seconds since 1970 that no checkpoint was written at; NaN is not below it either
_reported: set[str] = set()


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint that was committed, and whose files have the recorded sizes.

    Attributes:
        step: the step after which it was taken.
        serial: distinguishes checkpoints of one step; a later one has a higher number.
        path: the directory of the checkpoint.
        writers: how many shares it has.
        notes: the `notes` that the first writer gave to `CheckpointStore.save`.
        token: the token of the attempt that wrote it.
        time: when it was committed, in seconds since 1970.
        shares: for each share, its files by name, with `size` in bytes and, for the index, `checksum`.
    """

    step: int
    serial: int
    path: str
    writers: int
    notes: Mapping[str, Any]
    token: str = ""
    time: float = 0.0
    shares: tuple[Mapping[str, Mapping[str, int]], ...] = field(default=(), repr=False)


def committed(directory: str) -> list[StoredCheckpoint]:
    """The committed checkpoints of a directory, newest first; an empty list if there is no directory.

    A checkpoint whose marker cannot be read, or whose files have other sizes than recorded, is skipped with a
    warning, once for each path. The files' content is checked only when a share is read.

    Raises:
        CheckpointError: the directory cannot be listed.
    """
    import tensorflow as tf

    checkpoints = []
    try:
        names = _names(directory)
    except (OSError, tf.errors.OpError) as error:
        raise CheckpointError(
            f"The checkpoints in {directory} cannot be listed: {one_line(error)}",
            hint="Start again when it can be read, or use another directory.",
        ) from error
    for name in names:
        path = join(directory, str(name))
        if storage_of(path).exists(join(path, layout.COMMITTED)):
            try:
                checkpoints.append(_read_commit(path))
            except CheckpointError as error:
                _report(path, error.message)
    return sorted(
        checkpoints,
        key=lambda checkpoint: (checkpoint.step, checkpoint.serial, checkpoint.time),
        reverse=True,
    )


def read_share(checkpoint: StoredCheckpoint, share: int) -> dict[str, StoredTensor]:
    """Reads the tensors of a share, one after another, and verifies all checksums.

    Args:
        checkpoint: a checkpoint that `committed` returned.
        share: the number of the writer that wrote the share.

    Returns:
        The tensors by name. Their values are read once more when they are asked for.

    Raises:
        CheckpointError: a file is missing, incomplete or changed.
    """
    import tensorflow as tf

    expected = checkpoint.shares[share]
    if not expected:
        return {}
    prefix = join(checkpoint.path, layout.share_prefix(share, checkpoint.writers))
    try:
        _check_files(checkpoint.path, expected, layout.share_prefix(share, checkpoint.writers))
        tensors = storage_of(prefix).read_tensors(prefix)
    except (tf.errors.OpError, OSError, MemoryError) as error:
        raise CheckpointError(f"{prefix} cannot be read: {one_line(error)}", hint=_HINT) from error
    for tensor in tensors.values():
        tensor.read()
    return tensors


def remove_uncommitted(directory: str) -> None:
    """Deletes the incomplete checkpoints of killed attempts; logs what cannot be deleted.

    No process may be writing to the directory.
    """
    with _logging_errors(directory):
        for name in _names(directory):
            path = join(directory, str(name))
            if not storage_of(path).exists(join(path, layout.COMMITTED)):
                remove(path)


def remove_all(directory: str) -> None:
    """Deletes all checkpoints, complete or not, and then the directory if nothing else is in it.

    Logs what cannot be deleted. A directory that cannot be removed, such as a mounted disk, stays, and so
    does what is no directory.
    """
    import tensorflow as tf

    with _logging_errors(directory):
        # The oldest first: if this is interrupted, the newest ones are left.
        for name in sorted(_names(directory)):
            remove(join(directory, str(name)))
        with contextlib.suppress(OSError, tf.errors.OpError):
            storage_of(directory).remove_if_empty(directory)


def remove(path: str) -> None:
    """Deletes a checkpoint: its commit marker first, so that an incomplete one never counts as complete."""
    storage_of(path).remove(join(path, layout.COMMITTED))
    for name in storage_of(path).names(path):
        storage_of(path).remove(join(path, name))
    storage_of(path).remove_directory(path)


def sweep(directory: str, before: layout.CheckpointName) -> None:
    """Deletes what failed saves of this attempt have left, older than `before`.

    A failed save was removed at once, but slower writers may have written to it afterwards.
    """
    for name in _names(directory):
        path = join(directory, str(name))
        if (
            name.token == before.token
            and name < before
            and not storage_of(path).exists(join(path, layout.COMMITTED))
        ):
            remove(path)


def prune(directory: str, newest: layout.CheckpointName, keep: int, fence: Callable[[], None]) -> None:
    """Deletes the checkpoints that are no longer needed, after another one was committed.

    It keeps first the newest checkpoints of this attempt, then the newest ones that this attempt may have
    resumed from. Checkpoints of other attempts that are newer than this attempt's first come last: if they
    had been readable, this attempt would have resumed from them.

    Args:
        directory: the directory of the checkpoints.
        newest: the checkpoint that was just committed; it is always kept.
        keep: how many checkpoints to keep.
        fence: raises if this process may delete nothing any more. It is called after the last look at the
            directory: what a process finds that was stopped meanwhile may be its successor's.
    """
    whole = {
        layout.CheckpointName(checkpoint.step, checkpoint.serial, checkpoint.token): checkpoint
        for checkpoint in committed(directory)
    }
    own = [name for name in whole if name.token == newest.token] or [newest]
    rest = sorted((name for name in whole if name != newest), reverse=True)
    rest.sort(key=lambda name: 0 if name.token == newest.token else 1 if name < min(own) else 2)
    kept = {newest, *rest[: keep - 1]}
    paths = [join(directory, str(name)) for name in sorted(_names(directory)) if name not in kept]
    unneeded = [path for path in paths if storage_of(path).exists(join(path, layout.COMMITTED))]
    fence()
    for path in unneeded:
        remove(path)


def one_line(error: BaseException) -> str:
    """The first line of an error's message; the name of its class if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _names(directory: str) -> list[layout.CheckpointName]:
    """The names of checkpoints, complete or not. A link is left out: it leads to files of somebody else."""
    storage = storage_of(directory)
    names = []
    for name in map(layout.parse_name, storage.names(directory)):
        path = join(directory, str(name))
        if name is not None and not storage.is_link(path):
            names.append(name)
        elif name is not None:
            _report(path, "it is a symbolic link, so it is neither read nor deleted.")
    return names


def _read_commit(path: str) -> StoredCheckpoint:
    import tensorflow as tf

    marker = join(path, layout.COMMITTED)
    try:
        content = layout.decode(storage_of(path).read_at_most(marker, layout.MOST_BYTES), marker)
        # A marker that dtrain has not written may say anything, despite its checksum.
        names = ("step", "serial", "token", "writers", "notes", "time")
        noted: dict[str, Any] = {name: content.get(name) for name in names}
        shares = content.get("shares")
        name = layout.CheckpointName(noted["step"], noted["serial"], noted["token"])
        if not (
            all(map(is_count, (noted["step"], noted["serial"], noted["writers"])))
            and layout.parse_name(path.rpartition("/")[2]) == name
            and type(noted["time"]) in (int, float)
            and abs(noted["time"]) < _LATEST
            and isinstance(noted["notes"], dict)
            and isinstance(shares, list)
            and len(shares) == noted["writers"] > 0
        ):
            raise CheckpointError(f"{marker} does not describe a checkpoint.", hint=_HINT)
        for number, share in enumerate(shares):
            check_sizes(path, share, layout.share_prefix(number, len(shares)))
        return StoredCheckpoint(path=path, shares=tuple(shares), **noted)
    except (tf.errors.OpError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {one_line(error)}", hint=_HINT) from error


def check_sizes(path: str, expected: Any, prefix: str) -> None:
    """Checks that the files of a share are there, and have the recorded sizes.

    Args:
        path: the directory of the checkpoint.
        expected: the files by name, with their `size` in bytes, as a marker says.
        prefix: the prefix of the names of the share's files.

    Raises:
        CheckpointError: a file has another size, or the marker does not describe this share.
        OSError, tf.errors.OpError: a file is missing.
    """
    if not isinstance(expected, dict) or (expected and {*expected} != {*layout.tensor_files(prefix)}):
        raise CheckpointError(f"{path} has a marker that does not describe {prefix}.", hint=_HINT)
    for name, metadata in expected.items():
        if not (isinstance(metadata, dict) and is_count(metadata.get("size"))):
            raise CheckpointError(f"{path} has a marker that does not describe {prefix}.", hint=_HINT)
        size = storage_of(path).size(join(path, name))
        if size != metadata["size"]:
            raise CheckpointError(
                f"{join(path, name)} has {size} bytes; {metadata['size']} were written.", hint=_HINT
            )


def _check_files(path: str, expected: Mapping[str, Mapping[str, int]], prefix: str) -> None:
    check_sizes(path, expected, prefix)
    # Only the index has a checksum here; it contains one for each tensor in the data.
    index = layout.tensor_files(prefix)[0]
    content = storage_of(path).read_at_most(join(path, index), layout.MOST_BYTES)
    if layout.checksum(content) != expected[index].get("checksum"):
        raise CheckpointError(f"{join(path, index)} was changed: its checksum is wrong.", hint=_HINT)


@contextlib.contextmanager
def _logging_errors(directory: str) -> Iterator[None]:
    import tensorflow as tf

    try:
        yield
    except (OSError, tf.errors.OpError) as error:
        logger.warning("Checkpoints in %s cannot be removed: %s", directory, one_line(error))


def _report(path: str, problem: str) -> None:
    if path not in _reported:
        _reported.add(path)
        logger.warning("The checkpoint %s is not used: %s", path, problem)
