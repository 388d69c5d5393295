"""How the workers of a job agree after which call of a loop all of them stop, if one of them wants to.

No worker waits for another as long as none wants to stop. A worker that wants to asks the first worker, which
asks all for the number of calls that they have begun, at which each then pauses. The largest number is the
last call of all.
"""

from __future__ import annotations

from collections.abc import Callable

ASKED, BEGUN, LAST = KINDS = range(10, 13)
"""The kinds of frames: a worker wants to stop, how many calls one has begun, the last call of all."""


class StopVotes:
    """The loops that this worker runs, and which call of each is the last one.

    The caller holds the lock of the connections. A loop is known by the number of its operation, which is
    the same on every worker.

    Args:
        rank: this worker's number.
        size: the number of workers.
        send: sends a frame to a worker: its number, then the kind, the number and the body of the frame.
    """

    def __init__(self, rank: int, size: int, send: Callable[[int, int, int, bytes], None]) -> None:
        self._rank = rank
        self._size = size
        self._send = send
        self._begun: dict[int, int] = {}  # the calls of each loop that have begun
        self._paused: set[int] = set()  # loops of which no further call begins before the last one is known
        self._last: dict[int, int] = {}
        self._answers: dict[int, dict[int, int]] = {}  # on the first worker: the calls begun, by worker

    def open(self, loop: int) -> None:
        """Notes that a loop begins. Another worker may be in it already, and have asked to stop."""
        self._begun[loop] = 0
        if loop in self._paused:
            self._answer(loop)

    def close(self, loop: int) -> None:
        """Forgets a loop that has ended."""
        for by_loop in (self._begun, self._last, self._answers):
            by_loop.pop(loop, None)
        self._paused.discard(loop)

    def is_pending(self, loop: int) -> bool:
        """Whether a worker wants to stop, and the last call is not known yet."""
        return loop in self._paused and loop not in self._last

    def is_known(self, loop: int) -> bool:
        """Whether the last call of a loop is known."""
        return loop in self._last

    def is_over(self, loop: int) -> bool:
        """Whether the last call of a loop has begun."""
        return loop in self._last and self._begun[loop] >= self._last[loop]

    def begin_call(self, loop: int) -> None:
        """Notes that the next call begins."""
        self._begun[loop] += 1

    def ask(self, loop: int) -> None:
        """Asks all workers to stop; the last call is known later."""
        if self._rank == 0:
            self._ask_all(loop)
        else:
            self._send(0, ASKED, loop, b"")

    def receive(self, worker: int, kind: int, number: int, body: bytes) -> None:
        """Receives a frame of one of `KINDS`.

        Raises:
            ValueError: its body is not a number.
        """
        if kind == ASKED:
            (self._ask_all if self._rank == 0 else self._pause)(number)
        elif kind == BEGUN and self._rank == 0:
            self._note(worker, number, int(body))
        elif kind == LAST and self._rank > 0:
            self._set_last(number, int(body))

    def _ask_all(self, loop: int) -> None:
        if loop in self._answers:
            return
        self._answers[loop] = {}
        for other in range(1, self._size):
            self._send(other, ASKED, loop, b"")
        self._pause(loop)

    def _pause(self, loop: int) -> None:
        self._paused.add(loop)
        if loop in self._begun:
            self._answer(loop)

    def _answer(self, loop: int) -> None:
        if self._rank == 0:
            self._note(0, loop, self._begun[loop])
        else:
            self._send(0, BEGUN, loop, b"%d" % self._begun[loop])

    def _note(self, worker: int, loop: int, begun: int) -> None:
        answers = self._answers.get(loop)
        if answers is None:
            return
        answers[worker] = begun
        if len(answers) < self._size:
            return
        last = max(answers.values())
        for other in range(1, self._size):
            self._send(other, LAST, loop, b"%d" % last)
        self._set_last(loop, last)

    def _set_last(self, loop: int, last: int) -> None:
        self._last[loop] = last
