"""Compares which operation each worker of a job is at, numbered in program order.

Each call of `fit`, `evaluate` and `predict`, each epoch and each exchange of values is an operation. A worker
sends its operations to the first worker and does not wait; the first worker compares them, and tells all
workers if two differ, which then raise an error. The tensors of a step are not numbered here.
"""

from __future__ import annotations

from collections.abc import Callable

from dtrain.base.clock import Clock
from dtrain.base.plain_text import cleaned
from dtrain.errors import DtrainError, OperationMismatchError, PeerMissingError

BEGUN, WAITS, UNEQUAL = KINDS = range(7, 10)
"""The kinds of frames: an operation has begun, a worker waits inside of one, two workers' are not equal."""

ENDED = "has ended its program"
"""The text of the last operation of a worker."""

FAILED = "has left "
"""The beginning of the text of an operation that an error has ended."""

_GRACE = 5.0  # seconds in which what a worker sent before its next operation may still arrive elsewhere
_AGAIN = 1.0  # seconds after which a worker that still waits runs, and has received what was there for it
_SHOWN = 2000  # the most characters shown of the first worker's message
_DIFFERS = b"differs"  # the body of a frame WAITS of a worker that has found a difference
_MISMATCH, _LOSS = range(2)  # the number of a frame UNEQUAL: the class of the error

_HINT = (
    "call fit, evaluate, predict, barrier and broadcast on every worker, equally often and in the same "
    "order, with the same data; read metrics and set weights or a learning rate on every worker, to the same "
    "values; print and write files on the chief alone"
)
_LOSS_HINT = "see why it failed; `dtrain launch` starts all workers again (--max-restarts N)"


class Operations:
    """The operations of all workers on the first worker; elsewhere, what the first worker said about them.

    The caller holds the lock of the connections. A text says what a worker does, such as "is in fit
    (epoch 3)"; after a line break, it may say which of several exchanges there it is at.

    Args:
        rank: this worker's number.
        size: the number of workers.
        send: sends a frame to a worker: its number, then the kind, the number and the body of the frame.
        clock: the clock of all limits.

    Attributes:
        on_unequal: called with the message when two workers are known to be at different operations.
    """

    def __init__(
        self, rank: int, size: int, send: Callable[[int, int, int, bytes], None], clock: Clock
    ) -> None:
        self._rank = rank
        self._size = size
        self._send = send
        self._clock = clock
        self._error: DtrainError | None = None
        self.on_unequal: Callable[[str], None] = lambda message: None
        # What follows is known to the first worker alone.
        self._texts: dict[int, dict[int, bytes]] = {}  # of operations that not all workers have reached
        self._latest = [b"has not begun"] * size
        self._reached = [0] * size  # how many operations each worker has begun
        self._since = [clock.now()] * size  # when it began its last one
        self._in_vain: dict[int, float] = {}  # since when workers wait for one that is at a later operation
        self._ended: dict[int, int] = {}  # the number of the last operation of workers that have ended

    @property
    def unequal(self) -> bool:
        """Whether two workers are known to be at different operations."""
        return self._error is not None

    def raise_if_unequal(self) -> None:
        """Returns if no two workers are known to be at different operations.

        Raises:
            OperationMismatchError: two are.
            PeerMissingError: an error has ended another worker's operation.
        """
        if self._error is not None:
            raise type(self._error)(self._error.message, hint=self._error.hint)

    def begin(self, number: int, text: bytes) -> None:
        """Notes that this worker begins an operation; the first worker is told."""
        if self._rank == 0:
            self.note(0, number, text)
        else:
            self._send(0, BEGUN, number, text)

    def wait(self, reached: int, *, differs: bool = False) -> None:
        """Notes that this worker waits for others, after it has begun so many operations.

        It must be called about once a second while it waits.

        Args:
            reached: how many operations this worker has begun.
            differs: whether it has found that another worker is not at its own operation.
        """
        if self._rank == 0:
            self._note_waiting(0, reached, differs=differs)
        else:
            self._send(0, WAITS, reached, _DIFFERS if differs else b"")

    def receive(self, worker: int, kind: int, number: int, body: bytes) -> None:
        """Receives a frame of one of `KINDS`."""
        if kind == UNEQUAL and self._rank > 0:
            message = cleaned(body.decode("utf-8", "replace"), _SHOWN)
            self._set(_error(message, lost=number == _LOSS))
        elif kind == BEGUN and self._rank == 0:
            self.note(worker, number, body)
        elif kind == WAITS and self._rank == 0:
            self._note_waiting(worker, number, differs=body == _DIFFERS)

    def note(self, worker: int, number: int, text: bytes) -> None:
        """On the first worker: notes that a worker has begun an operation, and compares."""
        if text == ENDED.encode():
            self._ended[worker] = number
            if self._latest[worker].startswith(FAILED.encode()):
                text = self._latest[worker]  # the error that others must hear of, not the end that follows it
        self._latest[worker], self._since[worker] = text, self._clock.now()
        self._reached[worker] = number + 1
        self._in_vain.pop(worker, None)
        there = self._texts.setdefault(number, {})
        there[worker] = text
        if any(other != text for other in there.values()) or self._goes_on_after_the_end():
            self._tell(there)
        if len(there) == self._size:
            del self._texts[number]

    def _goes_on_after_the_end(self) -> bool:
        """Whether a worker has begun an operation that a worker that has ended will not reach."""
        first = min(self._ended.values(), default=max(self._reached))
        return any(
            reached > first and self._ended.get(worker) != first
            for worker, reached in enumerate(self._reached)
        )

    def _note_waiting(self, worker: int, reached: int, *, differs: bool) -> None:
        """Compares a worker that waits inside an operation with those that are at a later one.

        No later operation begins before the collectives of the earlier ones have ended, so such a worker will
        not join the one that this worker waits in, unless what it sent is on its way. A worker that was
        stopped may say that it waits although its wait is over; it does not say so again a second later.
        """
        now = self._clock.now()
        if differs and any(other != reached for other in self._reached):
            self._tell({})
        in_vain = reached == self._reached[worker] and any(
            other > reached and now - since >= _GRACE
            for other, since in zip(self._reached, self._since, strict=True)
        )
        if in_vain and now - self._in_vain.setdefault(worker, now) >= _AGAIN:
            self._tell({})

    def _tell(self, there: dict[int, bytes]) -> None:
        """Tells all workers that two are not at the same operation.

        Args:
            there: the texts of the workers that have reached the operation at which they differ; of the
                others, their last one counts.
        """
        if self._error is not None:
            return
        texts = [there.get(w, self._latest[w]).decode("utf-8", "replace") for w in range(self._size)]
        shown = [text.partition("\n")[0] for text in texts]
        inside = len({*shown}) == 1
        if inside:
            shown = [text.replace("\n", ", at ") for text in texts]
        lost = any(text.startswith(FAILED) for text in shown)
        message = _by_worker(shown)
        if not lost:
            message = f"The workers are not at the same point of the program: {message}"
            if len({*shown}) == 1:
                message += (
                    ", but one exchanges what the others do not: is a metric read, or the model called, "
                    "behind is_chief()?"
                )
            elif not (inside or ENDED in shown):
                message += ": is one of them behind is_chief()?"
        self._set(_error(message, lost=lost))
        for other in range(1, self._size):
            self._send(other, UNEQUAL, _LOSS if lost else _MISMATCH, message.encode())

    def _set(self, error: DtrainError) -> None:
        if self._error is None:
            self._error = error
            self.on_unequal(error.message)


def _error(message: str, *, lost: bool) -> DtrainError:
    if lost:
        return PeerMissingError(message, hint=_LOSS_HINT)
    return OperationMismatchError(message, hint=_HINT)


def _by_worker(texts: list[str]) -> str:
    """What each worker does, in words; workers that do the same are put together."""
    clauses: list[str] = []
    for text in dict.fromkeys(texts):
        workers = [str(worker) for worker, other in enumerate(texts) if other == text]
        if len(workers) > 4:
            workers = [*workers[:2], f"{len(workers) - 2} more"]
        who = (
            f"workers {', '.join(workers[:-1])} and {workers[-1]}" if workers[1:] else f"worker {workers[0]}"
        )
        verb = text.replace("is ", "are ", 1).replace("has ", "have ", 1) if workers[1:] else text
        repeated = any(clause.split(" is ")[1:] or clause.split(" are ")[1:] for clause in clauses)
        for word in ("is ", "are "):
            verb = verb.removeprefix(word) if repeated else verb
        clauses.append(f"{who} {verb}")
    return ", ".join(clauses)
