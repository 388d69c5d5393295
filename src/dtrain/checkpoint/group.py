"""Groups the workers that see the same folder: each group writes one complete copy of a checkpoint.

Workers on one machine, or with a shared file system, form one group; a worker with a disk of its own is a
group by itself. Nothing but short-lived marker files is written here.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from dtrain.base import safe_files
from dtrain.checkpoint.storages import storage_of
from dtrain.interfaces.replica_layout import ReplicaLayout
from dtrain.process_group.value_exchange import exchange


@dataclass(frozen=True)
class Group:
    """The workers that write to one folder.

    Attributes:
        members: the workers' numbers in the job, ascending.
        mine: this worker's index in `members`.
        token: a random word that the group shares, and that no earlier attempt of the job used.
    """

    members: tuple[int, ...]
    mine: int
    token: str

    @property
    def leads(self) -> bool:
        """Whether this worker commits checkpoints for the group."""
        return self.mine == 0


def find_group(folder: str, layout: ReplicaLayout) -> Group:
    """Finds out which workers see the same folder; every worker must call it.

    Args:
        folder: the folder of this worker's checkpoints.
        layout: the strategy's layout.

    Returns:
        The group of this worker.
    """
    token = secrets.token_hex(4)
    if layout.workers == 1:
        return Group((0,), 0, token)
    tokens = exchange(layout, token)
    mark = None if not storage_of(folder).local else _leave(Path(folder), layout.worker, tokens[0])
    marks = exchange(layout, mark)
    # The workers whose mark is in this worker's folder; their folders' paths may differ.
    seen = [w for w, name in enumerate(marks) if name is None or (Path(folder) / name).exists()]
    # A worker that cannot write leaves no mark. It joins the others; its first save then reports the error.
    members = exchange(layout, seen)[min(seen)]
    if mark is not None:
        with contextlib.suppress(OSError):
            safe_files.remove(Path(folder) / mark)
    if layout.worker not in members:
        members = [layout.worker]
    return Group(tuple(members), members.index(layout.worker), tokens[members[0]])


def _leave(folder: Path, worker: int, token: str) -> str | None:
    mark = folder.absolute() / f".worker-{worker}-{token}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(f".worker-{worker}-*"):  # by an attempt that was killed
            safe_files.remove(left)
        os.close(safe_files.create(mark))
    except OSError:
        return None
    return mark.name
