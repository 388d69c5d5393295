"""Which workers see one folder: they divide a checkpoint between them, and each such group has a whole one.

Workers on one machine, or with a shared file system, are one group; so is one with a disk of its own.
"""

from __future__ import annotations

import contextlib
import secrets
from dataclasses import dataclass
from pathlib import Path

from dtrain.keras_engine.protocol import ReplicaLayout
from dtrain.keras_engine.talk import exchange


@dataclass(frozen=True)
class Group:
    """The workers that write to one folder.

    Attributes:
        members: their numbers in the job, ascending.
        mine: this worker's place among them.
        token: a word that they share, and no earlier attempt had.
    """

    members: tuple[int, ...]
    mine: int
    token: str

    @property
    def leads(self) -> bool:
        """Whether this is the worker that says when a checkpoint is whole."""
        return self.mine == 0


def find_group(folder: str, layout: ReplicaLayout) -> Group:
    """Finds out who sees the folder; every worker must call it.

    Args:
        folder: where this worker's checkpoints go.
        layout: the strategy's.
    """
    token = secrets.token_hex(4)
    if layout.workers == 1:
        return Group((0,), 0, token)
    tokens = exchange(layout, token)
    mark = None if "://" in folder else _leave(Path(folder), layout.worker, tokens[0])
    marks = exchange(layout, mark)
    # Their marks in this worker's folder: it may be another one, also on a disk that both see.
    seen = [w for w, name in enumerate(marks) if name is None or (Path(folder) / name).exists()]
    # A worker that cannot write there leaves no mark; it is with the others, and its writes will say why.
    members = exchange(layout, seen)[min(seen)]
    if mark is not None:
        with contextlib.suppress(OSError):
            (Path(folder) / mark).unlink()
    if layout.worker not in members:
        members = [layout.worker]
    return Group(tuple(members), members.index(layout.worker), tokens[members[0]])


def _leave(folder: Path, worker: int, token: str) -> str | None:
    mark = folder.absolute() / f".worker-{worker}-{token}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(f".worker-{worker}-*"):  # by an attempt that was killed
            left.unlink(missing_ok=True)
        mark.touch()
    except OSError:
        return None
    return mark.name
