"""How many steps a block has, and how many blocks are in flight: by what steps took before."""

from __future__ import annotations

from typing import Any

from dtrain.keras_engine.asynchronous.program import BlockProgram
from dtrain.keras_engine.protocol import ServerLayout

_FAST = 0.01  # seconds
_MANY = 400
_BLOCK_SECONDS = 0.1
_MOST_STEPS = 256
_OVERLAPPED_STEPS = 8  # at least, where steps overlap: each block's first and last stand alone
_UNROLLED = 4  # steps in a turn of a small model's loop


class Pace:
    """The step time of one model's blocks, from one epoch to the next; one object a program.

    What a worker's first run of a function takes says nothing about its steps, and is left out.

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


class BlockSizes:
    """The sizes of the blocks of one session.

    Args:
        program: what a block does.
        layout: the strategy's.
        pace: of the program.
        steps_a_call: steps of a block where callbacks want each call done before the next; else None.

    Attributes:
        active: how many blocks may run at once.
    """

    def __init__(
        self, program: BlockProgram, layout: ServerLayout, pace: Pace, steps_a_call: int | None
    ) -> None:
        self._program = program
        self._workers = layout.workers
        self._pace = pace
        self._steps_a_call = steps_a_call
        self._bound = layout.most_of_others  # updates of others that a step may miss, or None
        self.active = self._workers if self._bound is None else min(self._workers, self._bound + 1)

    def steps(self, left: int | None, pending: int) -> int:
        """How many steps the next block has.

        Args:
            left: steps that are left, where that is known.
            pending: micro-batches that wait for an update; the block ends with it.
        """
        group = self._program.accumulation
        return group - pending if pending else -(-self._wished(left) // group) * group

    def unrolled(self, steps: int) -> int:
        """How many steps of a block of so many batches a turn of its loop has."""
        return _UNROLLED if self._pace.fast and steps >= 4 * _UNROLLED else 1

    @property
    def in_flight(self) -> int:
        """How many blocks may be handed out and not done."""
        waits = self._bound is not None or self._steps_a_call is not None or self._pace.seconds is None
        return self.active if self.active == 1 or waits else 2 * self.active

    @property
    def in_rounds(self) -> bool:
        """Whether blocks go out in rounds, so that nobody is further behind than one of them."""
        return self._bound is not None

    def passes_bound(self, steps: int) -> bool:
        """Whether a block has more steps than another block may miss."""
        return self._bound is not None and self.active > 1 and steps * (self.active - 1) > self._bound

    def _wished(self, left: int | None) -> int:
        if self._steps_a_call is not None:
            return self._steps_a_call
        if self._pace.seconds is None:
            return 1
        steps = int(_BLOCK_SECONDS / max(self._pace.seconds, 1e-6))
        if self._program.overlaps:
            steps = max(steps, _OVERLAPPED_STEPS)
        if left is not None and self._workers > 1:
            # So that the workers end together.
            steps = min(steps, -(-left // (2 * self._workers)))
        if self.active > 1 and self._bound is not None:
            steps = min(steps, self._bound // (self.active - 1))
        return min(max(steps, 1), _MOST_STEPS)
