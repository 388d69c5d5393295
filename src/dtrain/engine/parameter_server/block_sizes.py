"""Decides how many steps a block has, and how many blocks are in flight, from measured step times.

It only computes numbers: forming and submitting blocks is the session's task.
"""

from __future__ import annotations

from typing import Any

from dtrain.engine.parameter_server.block_program import BlockProgram
from dtrain.interfaces.replica_layout import ServerLayout

_FAST = 0.01  # seconds
_MANY = 400
_BLOCK_SECONDS = 0.1  # seconds of a block, times the number of blocks that run at the same time,
_MOST_BLOCK_SECONDS = 0.4  # but at most this many
_MOST_STEPS = 256
_OVERLAPPED_STEPS = 8  # at least, with overlap: a block's first step and last update overlap with nothing
_UNROLLED = 4  # steps in one iteration of a small model's loop
_LEAST_UNROLLED = 4 * _UNROLLED  # the fewest steps of a block whose loop is unrolled
_EVEN = 1.5  # workers are equally fast if none takes more than this many times as long for a step as another
_EVEN_STEPS = 100  # over about so many steps a worker's step time is averaged


class Pace:
    """Measures the step time of one program's blocks, across epochs.

    It ignores the first run of a function on a worker, which includes preparing the function.

    Attributes:
        seconds: the latest step time in seconds; None until a function has run twice on one worker.
    """

    def __init__(self) -> None:
        self.seconds: float | None = None
        self._steps = 0
        self._by_worker: dict[int | None, float] = {}
        self._warm: set[tuple[int, int | None]] = set()
        self._functions: list[Any] = []

    @property
    def fast(self) -> bool:
        """Whether steps are short and numerous enough that unrolling the loop, to save messages, pays off."""
        return self.seconds is not None and self.seconds < _FAST and self._steps >= _MANY

    def even(self, workers: int) -> bool:
        """Whether the step times of so many workers are known and about the same."""
        times = [*self._by_worker.values()]  # other threads note blocks meanwhile
        return len(times) == workers and max(times) <= _EVEN * min(times)

    def forget(self, worker: int | None) -> None:
        """Forgets the times of a lost worker: the process that replaces it has to prepare functions again."""
        self._by_worker.pop(worker, None)
        self._warm = {run for run in self._warm if run[1] != worker}

    def note(self, function: Any, worker: int | None, seconds: float, steps: int) -> None:
        """Records the duration of one block.

        Args:
            function: the function that ran; a reference to it is kept, so that its `id` stays unique.
            worker: the number of the worker that ran it.
            seconds: the duration of the whole block.
            steps: the number of steps in the block, at least 1.
        """
        self._steps += steps
        run = (id(function), worker)
        if run in self._warm:
            self.seconds = seconds / steps
            mean = self._by_worker.get(worker, self.seconds)
            self._by_worker[worker] = mean + (self.seconds - mean) * min(1.0, steps / _EVEN_STEPS)
            return
        self._warm.add(run)
        self._functions.append(function)


class BlockSizes:
    """Computes the sizes of the blocks of one session.

    Args:
        program: traces the function of a block.
        layout: the strategy's server layout.
        pace: the program's measured step time.
        steps_a_call: steps in a block if callbacks need the results of every call; else None.

    Attributes:
        active: how many blocks may run at the same time.
    """

    def __init__(
        self, program: BlockProgram, layout: ServerLayout, pace: Pace, steps_a_call: int | None
    ) -> None:
        self._program = program
        self._workers = layout.workers
        self._pace = pace
        self._steps_a_call = steps_a_call
        # Of the current round of equal blocks: steps that were left before it, and its steps.
        self._round = (0, 0)
        self._bound = layout.most_of_others  # updates of other workers that a step may miss, or None
        self.active = self._workers if self._bound is None else min(self._workers, self._bound + 1)

    def steps(self, left: int | None, pending: int, most: int = _MOST_STEPS) -> int:
        """How many steps the next block has; the same for the same arguments until a block is done.

        Args:
            left: steps that are left in the session; None if unknown.
            pending: micro-batches accumulated since the last update; if there are any, the block ends with
                the update that they belong to.
            most: the most steps whose batches fit in a block.
        """
        group = self._program.setting.accumulation
        return group - pending if pending else -(-self._wished(left, min(most, _MOST_STEPS)) // group) * group

    def unrolled(self, steps: int) -> int:
        """How many steps one loop iteration has in a block of `steps` steps."""
        return _UNROLLED if self._pace.fast and steps >= _LEAST_UNROLLED else 1

    @property
    def in_flight(self) -> int:
        """How many submitted blocks may be unfinished."""
        waits = self._bound is not None or self._steps_a_call is not None or self._pace.seconds is None
        return self.active if self.active == 1 or waits else 2 * self.active

    @property
    def in_rounds(self) -> bool:
        """Whether all blocks of one round must be done before the next round, to keep the staleness bound."""
        return self._bound is not None

    def passes_bound(self, steps: int) -> bool:
        """Whether the other blocks of a round, with `steps` steps each, would exceed the staleness bound."""
        return self._bound is not None and self.active > 1 and steps * (self.active - 1) > self._bound

    def _wished(self, left: int | None, most: int) -> int:
        if self._steps_a_call is not None:
            return self._steps_a_call
        if self._pace.seconds is None:
            return 1
        # Forming a block takes the chief some milliseconds, so blocks are longer with more workers.
        length = min(_BLOCK_SECONDS * self.active, _MOST_BLOCK_SECONDS)
        steps = max(int(length / max(self._pace.seconds, 1e-6)), self._fewest())
        if self.active > 1 and self._bound is not None:
            most = min(most, self._bound // (self.active - 1))
        steps = min(steps, most)
        if left is None or self.active == 1:
            return steps
        return max(min(self._shared(left, steps), most), 1)

    def _fewest(self) -> int:
        """The fewest steps of a block, however long they take."""
        return _OVERLAPPED_STEPS if self._program.setting.overlaps else 1

    def _shared(self, left: int, most: int) -> int:
        """How many of the steps that are left the next block has, so that all workers end at the same time.

        Workers that are equally fast get equal blocks, as few as possible, because each block costs the chief
        and its worker some milliseconds. Otherwise blocks become smaller towards the end, so that a slow
        worker finishes soon after the others.

        Args:
            left: steps that are left in the session.
            most: the most steps that a block should have.
        """
        # Blocks of fast steps that are too small to be unrolled would cost more than they save.
        least = min(_LEAST_UNROLLED, most) if self._pace.fast else 1
        if not self._pace.even(self._workers):
            self._round = (0, 0)
            steps = max(min(most, -(-left // (2 * self._workers))), least)
            return left if left - steps < least else steps
        before, of_round = self._round
        if not before - of_round < left <= before:
            rounds = max(1, -(-left // (self.active * most)))
            before, of_round = self._round = left, -(-left // rounds)
        blocks = max(1, min(self.active, of_round // least))
        steps, larger = divmod(of_round, blocks)
        return steps + (before - left < larger * (steps + 1))
