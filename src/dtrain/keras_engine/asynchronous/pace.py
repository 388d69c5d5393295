"""How long a step takes: learnt from the blocks that are done, and known from one epoch to the next.

What a worker's first run of a function takes says nothing about its steps, and is left out.
"""

from __future__ import annotations

from typing import Any

_FAST = 0.01  # seconds
_MANY = 400


class Pace:
    """The step time of one model's blocks; one object a program, for all of its sessions.

    Attributes:
        seconds: what a step took lately; None before a function has run twice on one worker.
    """

    def __init__(self) -> None:
        self.seconds: float | None = None
        self._steps = 0
        self._warm: set[tuple[int, int | None]] = set()
        self._functions: list[Any] = []

    @property
    def fast(self) -> bool:
        """Whether steps are so short, and have been so many, that messages are worth saving."""
        return self.seconds is not None and self.seconds < _FAST and self._steps >= _MANY

    def note(self, function: Any, worker: int | None, seconds: float, steps: int) -> None:
        """Learns from a block.

        Args:
            function: what was run; it is kept alive.
            worker: the number of the worker that ran it.
            seconds: for the whole block.
            steps: in the block, at least 1.
        """
        self._steps += steps
        run = (id(function), worker)
        if run in self._warm:
            self.seconds = seconds / steps
            return
        self._warm.add(run)
        self._functions.append(function)
