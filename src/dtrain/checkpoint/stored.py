"""Which checkpoints does a directory hold, which are whole, and which may go? Reads, checks and removes them.

It writes none, and does not know what their tensors mean.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dtrain.checkpoint import files as operations
from dtrain.checkpoint import layout
from dtrain.checkpoint.files import join
from dtrain.errors import CheckpointError, ConfigurationError
from dtrain.log import logger

_HINT = "Use an older checkpoint; if it is always so, the disk or the network loses data."

_reported: set[str] = set()


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint that was committed, and whose files have the lengths that they should have.

    Attributes:
        step: the step after which it was taken.
        serial: tells several of one step apart; the later one has the higher number.
        path: its directory.
        writers: how many shares it has.
        notes: what the writer noted.
        token: the word of the attempt that wrote it.
        time: when it was committed, in seconds since 1970.
        shares: for each share its files, with `size` and, of the index, `checksum`.
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
    """The checkpoints of a directory that look whole, newest first; none if there is no directory.

    One whose marker cannot be read, or whose files have other lengths than it says, is skipped, with a
    warning the first time. The content is checked when it is read.

    Raises:
        CheckpointError: it cannot be known what the directory holds.
    """
    import tensorflow as tf

    found = []
    try:
        names = _names(directory)
    except (OSError, tf.errors.OpError) as error:
        raise CheckpointError(
            f"The checkpoints in {directory} cannot be listed: {one_line(error)}",
            hint="Begin again when it can be read, or with another directory.",
        ) from error
    for name in names:
        path = join(directory, str(name))
        if operations.files.exists(join(path, layout.COMMITTED)):
            try:
                found.append(_look_at(path))
            except CheckpointError as error:
                _report(path, error)
    return sorted(found, key=lambda each: (each.step, each.serial, each.time), reverse=True)


def read_share(checkpoint: StoredCheckpoint, share: int) -> dict[str, Any]:
    """The tensors of a share, with every byte checked.

    Args:
        checkpoint: one of `committed`.
        share: the number of the writer that wrote it.

    Returns:
        The tensors by name, as eager tensors on the CPU.

    Raises:
        CheckpointError: a file is missing, torn, cut off or changed.
        ConfigurationError: there is no such share.
    """
    import tensorflow as tf

    if not 0 <= share < checkpoint.writers:
        raise ConfigurationError(
            f"share={share}, but {checkpoint.path} has {checkpoint.writers}.", hint="they count from 0"
        )
    expected = checkpoint.shares[share]
    if not expected:
        return {}
    prefix = join(checkpoint.path, layout.share_prefix(share, checkpoint.writers))
    try:
        _check_files(checkpoint.path, expected)
        return operations.files.read_tensors(prefix)
    except (tf.errors.OpError, OSError) as error:
        raise CheckpointError(f"{prefix} cannot be read: {one_line(error)}", hint=_HINT) from error


def remove_uncommitted(directory: str) -> None:
    """Delete what killed attempts left half-written; what cannot be deleted is logged.

    Nobody may be writing to the directory.
    """
    with _logging_errors(directory):
        for name in _names(directory):
            path = join(directory, str(name))
            if not operations.files.exists(join(path, layout.COMMITTED)):
                remove(path)


def remove_all(directory: str) -> None:
    """Delete all checkpoints, whole or not, and then the directory if nothing else is in it.

    What cannot be deleted is logged; a directory that cannot, such as a mounted disk, is left as it is.
    """
    import tensorflow as tf

    with _logging_errors(directory):
        # The oldest first: should this be stopped half-way, what is left is the newest.
        for name in sorted(_names(directory)):
            remove(join(directory, str(name)))
        if operations.files.exists(directory) and not operations.files.names(directory):
            with contextlib.suppress(OSError, tf.errors.OpError):
                operations.files.remove_directory(directory)


def remove(path: str) -> None:
    """Delete a checkpoint: its marker first, so that at no time a half one counts as whole."""
    operations.files.remove(join(path, layout.COMMITTED))
    for name in operations.files.names(path):
        operations.files.remove(join(path, name))
    operations.files.remove_directory(path)


def sweep(directory: str, before: layout.Name) -> None:
    """Delete what saves of this attempt that failed have left, as slower writers may write to them still."""
    for name in _names(directory):
        path = join(directory, str(name))
        if (
            name.token == before.token
            and name < before
            and not operations.files.exists(join(path, layout.COMMITTED))
        ):
            remove(path)


def prune(directory: str, newest: layout.Name, keep: int) -> None:
    """Delete checkpoints that are no longer needed, after one more has been committed.

    Kept are the newest ones of this attempt, then those that it may have begun from. Newer ones than its
    first, of another attempt, come last: had they been whole, it would have begun from them.

    Args:
        directory: holds them all.
        newest: the one that has just been committed; it is kept always.
        keep: how many are kept.
    """
    whole = {layout.Name(each.step, each.serial, each.token): each for each in committed(directory)}
    own = [name for name in whole if name.token == newest.token] or [newest]
    rest = sorted((name for name in whole if name != newest), reverse=True)
    rest.sort(key=lambda name: 0 if name.token == newest.token else 1 if name < min(own) else 2)
    kept = {newest, *rest[: keep - 1]}
    for name in sorted(_names(directory)):
        path = join(directory, str(name))
        if name not in kept and operations.files.exists(join(path, layout.COMMITTED)):
            remove(path)


def one_line(error: BaseException) -> str:
    """The first line of what an error says."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _names(directory: str) -> list[layout.Name]:
    found = (layout.parse_name(name) for name in operations.files.names(directory))
    return [name for name in found if name is not None]


def _look_at(path: str) -> StoredCheckpoint:
    import tensorflow as tf

    marker = join(path, layout.COMMITTED)
    try:
        content = layout.decode(operations.files.read(marker), marker)
        for share in content["shares"]:
            check_sizes(path, share)
        noted = {name: content[name] for name in ("step", "serial", "writers", "notes", "token", "time")}
        return StoredCheckpoint(path=path, shares=tuple(content["shares"]), **noted)
    except (tf.errors.OpError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {one_line(error)}", hint=_HINT) from error
    except (KeyError, TypeError, AttributeError) as error:  # its sum is right, but dtrain did not write it
        raise CheckpointError(f"{marker} says something else than a checkpoint's.", hint=_HINT) from error


def check_sizes(path: str, expected: Mapping[str, Mapping[str, int]]) -> None:
    """See that the files of a share have the lengths that they should have.

    Raises:
        CheckpointError: one has not.
        OSError, tf.errors.OpError: one is not there.
    """
    for name, facts in expected.items():
        if "/" in name:
            raise CheckpointError(f"{path} names the file {name!r}, which is not its own.", hint=_HINT)
        size = operations.files.size(join(path, name))
        if size != facts["size"]:
            raise CheckpointError(
                f"{join(path, name)} has {size} bytes; {facts['size']} were written.", hint=_HINT
            )


def _check_files(path: str, expected: Mapping[str, Mapping[str, int]]) -> None:
    check_sizes(path, expected)
    for name, facts in expected.items():
        # The data has a checksum for each tensor, in the index.
        if (
            "checksum" in facts
            and layout.checksum(operations.files.read(join(path, name))) != facts["checksum"]
        ):
            raise CheckpointError(f"{join(path, name)} was changed: its checksum is wrong.", hint=_HINT)


@contextlib.contextmanager
def _logging_errors(directory: str) -> Iterator[None]:
    import tensorflow as tf

    try:
        yield
    except (OSError, tf.errors.OpError) as error:
        logger.warning("Checkpoints in %s cannot be removed: %s", directory, one_line(error))


def _report(path: str, error: CheckpointError) -> None:
    if path not in _reported:
        _reported.add(path)
        logger.warning("The checkpoint %s is not used: %s", path, error.message)
