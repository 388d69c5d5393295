"""The operations that this worker is in, such as an `evaluate` within an epoch of a `fit`.

All workers of a job do the same operations in the same order; `operations.py` compares them. Here they get
their words, and the loops of `fit` and `evaluate` agree on the call after which all workers stop.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from dtrain.errors import DtrainError
from dtrain.interfaces.replica_layout import ReplicaLayout
from dtrain.process_group import operations, peers
from dtrain.process_group.peers import Peers


@dataclass(eq=False)
class Operation:
    """A call of `fit`, `evaluate` or `predict` that runs.

    Attributes:
        name: "fit", "evaluate" or "predict".
        peers: the connections to the other workers.
        epoch: the number of the running epoch of a `fit`, from 1; 0 before the first.
        feed: the data feed that it reads; None before the first batch.
        loop: the number of the running loop over batches, the same on every worker.
    """

    name: str
    peers: Peers
    epoch: int = 0
    loop: int = -1
    feed: Any = None

    def __str__(self) -> str:
        return f"{self.name} (epoch {self.epoch})" if self.epoch else self.name

    def begin_loop(self, epoch: int = 0) -> None:
        """Begins a loop over batches; in a `fit`, that of an epoch."""
        self._close()
        self.epoch = epoch
        self.loop = self.peers.begin(words("\nits batches"))
        self.peers.open_loop(self.loop)

    def begin_call(self) -> bool:
        """Begins the next call of the loop; False if the workers have agreed to stop before it."""
        return self.peers.begin_call(self.loop)

    def stop(self) -> None:
        """Agrees with the other workers on the last call of the loop; `begin_call` is False after it."""
        self.peers.stop(self.loop)

    def _close(self) -> None:
        if self.loop >= 0:
            self.peers.close_loop(self.loop)


must_agree: list[Callable[[], str]] = []
"""What workers must have alike in whatever they do; each returns it in words, or ""."""

_running: ContextVar[tuple[Operation, ...]] = ContextVar("operations", default=())


def words(call: str = "") -> str:
    """What this worker does, for messages: "is in evaluate within fit (epoch 3)".

    After a line break, it says what workers must have alike where they do the same: the name of an exchange,
    and what `must_agree` says.

    Args:
        call: a further call, within the operations that run. After a line break, the name of an exchange,
            which is shown only where nothing else differs, or no operation runs.
    """
    call, _, exchange = call.partition("\n")
    names = [call] if call else []
    names += [str(running) for running in reversed(_running.get())]
    alike = "".join(describe() for describe in must_agree)
    place = f"{exchange or 'its beginning'}{alike}" if alike else exchange
    return f"is in {' within '.join(names) or exchange}" + (f"\n{place}" if place else "")


@contextlib.contextmanager
def operation(layout: ReplicaLayout | None, name: str) -> Iterator[None]:
    """A context in which this worker does an operation, as all workers must.

    With one worker, and without a layout, nothing is compared.

    Raises:
        OperationMismatchError: another worker does something else.
        PeerMissingError: an error has ended another worker's operation, or the worker is lost.
    """
    connected = connected_workers(layout)
    if connected is None:
        yield
        return
    own = Operation(name, connected)
    token = _running.set((*_running.get(), own))
    try:
        connected.begin(words())
        yield
    except Exception as error:
        if type(error).__module__.startswith("tensorflow"):  # of a step that was aborted, perhaps
            connected.raise_if_unequal()
        # The others may wait for this worker inside the operation.
        with contextlib.suppress(DtrainError):
            connected.begin(f"{operations.FAILED}{own} because of an error")
        raise
    finally:
        own._close()
        _running.reset(token)


def current_operation() -> Operation | None:
    """The innermost operation that runs in this thread; None with one worker."""
    running = _running.get()
    return running[-1] if running else None


def note_end_of_data(layout: ReplicaLayout | None) -> None:
    """Notes that this worker has read all batches of an epoch, before the metrics are reduced.

    Raises:
        OperationMismatchError, PeerMissingError: as `operation`.
    """
    connected = connected_workers(layout)
    if connected is not None:
        connected.begin(words("\nthe end of its batches"))


class inside_step:  # noqa: N801
    """A context in which this worker is inside a step, where it may wait for others."""

    def __init__(self) -> None:
        running = current_operation()
        self._peers = None if running is None else running.peers

    def __enter__(self) -> None:
        if self._peers is not None:
            self._peers.inside_step(True)

    def __exit__(self, *_: object) -> None:
        if self._peers is not None:
            self._peers.inside_step(False)


def connected_workers(layout: ReplicaLayout | None) -> Peers | None:
    """The connections to the other workers of a strategy; None with one worker, and before any is made."""
    return None if layout is None or layout.workers == 1 else peers.connected()
