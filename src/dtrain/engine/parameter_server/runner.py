"""Runs blocks on the workers, and takes their results on the chief.

TensorFlow's `ClusterCoordinator` chooses the worker for each block, and runs a block again on another worker
if its worker dies. What is in a block, and how results are merged, is not decided here.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import numpy as np

from dtrain.base.clock import REAL, Clock
from dtrain.engine.parameter_server.block_batches import BlockData
from dtrain.engine.parameter_server.block_program import CHIEF, BlockFunction, BlockResult, BlockTotals
from dtrain.engine.parameter_server.block_sizes import Pace
from dtrain.engine.parameter_server.held_variables import HeldVariables
from dtrain.upstream import servers

_CHECK_INTERVAL = 0.5  # seconds between two checks whether the coordinator has lost a server
_SHORT_INTERVAL = 0.001
_END_SECONDS = 1.0  # to wait for running blocks after an error has ended a session


class InFlightBlock(NamedTuple):
    """A block that was submitted and is not done.

    Attributes:
        since: when its worker started it, or when it was submitted if no worker runs it; on the clock of
            the runner.
        worker: the number of the worker that runs it; None if no worker does.
        steps: how many steps it has.
    """

    since: float
    worker: int | None
    steps: int


class BlockRunner:
    """Runs the blocks of one session.

    Args:
        coordinator: the `ClusterCoordinator` of the strategy's cluster.
        workers: the number of workers.
        pace: records how long steps take.
        clock: the clock of the blocks' times.

    Attributes:
        workers, clock: as given.
        totals: what all finished blocks took and did.
    """

    def __init__(self, coordinator: Any, *, workers: int, pace: Pace, clock: Clock = REAL) -> None:
        self._coordinator = coordinator
        self._pace = pace
        self._changed = threading.Condition()
        self._in_flight: dict[int, InFlightBlock] = {}
        self._blocks = 0
        self._done = 0  # finished blocks
        self._held = HeldVariables([], CHIEF)
        self._outputs: tuple[int, Any] = (-1, None)
        self._error: BaseException | None = None
        self._ended = False
        self.workers = workers
        self.clock = clock
        self.totals = BlockTotals()

    def begin(self, variables: list[Any]) -> None:
        """Starts the session: waits for the blocks of an abandoned session, or of one that is interrupted.

        A callback of `fit` interrupts the session of `fit` by calling `evaluate` or `train_on_batch`.

        Args:
            variables: the variables that the chief holds.
        """
        while not self._coordinator.done():
            self.clock.sleep(_SHORT_INTERVAL)
        self._held = HeldVariables(variables, CHIEF)

    def submit(self, traced: BlockFunction, pending: int, data: BlockData) -> None:
        """Submits a block; returns at once.

        Args:
            traced: the function of the block.
            pending: micro-batches that the servers have accumulated before this block.
            data: the batches of the block.
        """
        number = self._blocks
        with self._changed:
            self._blocks += 1
            self._in_flight[number] = InFlightBlock(self.clock.now(), None, data.count)
        servers.schedule(self._coordinator, lambda: self._run(traced, number, pending, data))

    def wait(self, most: int = 0) -> None:
        """Waits until at most `most` blocks are in flight.

        Raises:
            Exception: what a step raised, or the loss of a server; the session is then abandoned.
        """
        try:
            while not self._wait_once(most):
                self._coordinator.done()  # raises where a server is lost
        except BaseException:
            self.abandon()
            raise

    def end(self) -> None:
        """Ends the session after its last block, and assigns its results."""
        with self._changed:
            self._ended = True
        self.assign()

    def abandon(self) -> None:
        """Ends the session at once because of an error, and drops the blocks that no worker has started.

        Waits at most a second for the blocks that workers have started, and ignores their results.
        """
        with self._changed:
            self._ended = True
            for number in [n for n, block in self._in_flight.items() if block.worker is None]:
                del self._in_flight[number]
            self._changed.wait_for(lambda: not self._in_flight, _END_SECONDS)

    def assign(self) -> None:
        """Assigns the results of all finished blocks to the variables that the chief holds.

        No other method does, so the variables do not change during a callback.
        """
        with self._changed:
            self._held.assign()

    @property
    def outputs(self) -> Any:
        """What the last step of the newest finished block returned; None if no block is done."""
        with self._changed:
            return self._outputs[1]

    @property
    def in_flight(self) -> list[InFlightBlock]:
        """The blocks that are not done."""
        with self._changed:
            return list(self._in_flight.values())

    @property
    def progress(self) -> int:
        """A number that grows with every block that is submitted or done."""
        with self._changed:
            return self._blocks + self._done

    @property
    def over(self) -> bool:
        """Whether the session has ended, and none of its blocks is in flight."""
        with self._changed:
            return self._ended and not self._in_flight

    @property
    def step_seconds(self) -> float | None:
        """The latest step time in seconds; None if it is unknown (see `Pace.seconds`)."""
        return self._pace.seconds

    def _run(self, traced: BlockFunction, number: int, pending: int, data: BlockData) -> None:
        """Runs one block on the coordinator's thread of one worker; another worker may run it again."""
        worker = servers.current_worker()
        with self._changed:
            if self._ended:
                self._remove(number)
                return
            held = self._held.values()
            begun = self.clock.now()
            self._in_flight[number] = InFlightBlock(begun, worker, data.count)
        try:
            result = traced(np.array([number, pending], np.int64), data.sizes, held, data.values)
        except Exception as error:
            with self._changed:
                if servers.is_process_failure(error):
                    # The coordinator runs the block again on another worker.
                    self._pace.forget(worker)
                    self._in_flight[number] = InFlightBlock(self.clock.now(), None, data.count)
                    raise
                self._error = self._error or error
                self._remove(number)
            return
        with self._changed:
            if not self._ended:
                self._take(number, result, held)
                self._pace.note(traced, worker, self.clock.now() - begun, data.count)
            self._remove(number)

    def _remove(self, number: int) -> None:
        self._in_flight.pop(number, None)
        self._changed.notify_all()

    def _take(self, number: int, result: BlockResult, given: list[np.ndarray]) -> None:
        self._done += 1
        self._held.add(given, result.held)
        self.totals = self.totals.plus(result.totals)
        if number > self._outputs[0]:
            self._outputs = (number, result.outputs)

    def _wait_once(self, most: int) -> bool:
        """Waits for one interval at most; returns whether at most `most` blocks are in flight."""
        with self._changed:
            done = self._changed.wait_for(
                lambda: self._error is not None or len(self._in_flight) <= most, _CHECK_INTERVAL
            )
            if self._error is not None:
                raise self._error
            return done
