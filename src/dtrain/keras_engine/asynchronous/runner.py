"""Runs blocks on the workers, and adds up what they give back.

`ClusterCoordinator` finds a worker for each block, and gives a block whose worker died to another.
"""

from __future__ import annotations

import threading
import time
from typing import Any, NamedTuple, Protocol

import numpy as np

from dtrain.keras_engine.asynchronous.batches import BlockData
from dtrain.keras_engine.asynchronous.block_sizes import Pace
from dtrain.keras_engine.asynchronous.program import BlockResult, TracedBlock
from dtrain.keras_engine.context import underlying
from dtrain.upstream import tensorflow as upstream_tf

_LOOK = 0.5  # seconds between two looks whether the coordinator has lost a server
_SHORT_LOOK = 0.001
_END_SECONDS = 1.0  # for the blocks that run on when an error has ended a session


class BlockTimes(NamedTuple):
    """How long blocks took, by the clocks of the workers that ran them.

    Attributes:
        blocks: how many are done.
        seconds: of all of them together.
        exchange: for how long of these a worker only waited for the servers.
    """

    blocks: int = 0
    seconds: float = 0.0
    exchange: float = 0.0

    def plus(self, other: BlockTimes) -> BlockTimes:
        """Both together."""
        return BlockTimes(
            self.blocks + other.blocks, self.seconds + other.seconds, self.exchange + other.exchange
        )


class Staleness:
    """Updates between a step's read of the weights and its write; where steps overlap, its own worker's too.

    Attributes:
        mean: over the steps; 0.0 without any.
        most: of one step.
        updates: how many steps have updated the servers.
    """

    def __init__(self) -> None:
        self._sum = 0
        self.most = 0
        self.updates = 0

    @property
    def mean(self) -> float:
        """Over the steps."""
        return self._sum / self.updates if self.updates else 0.0

    def add(self, total: int, most: int, updates: int) -> None:
        """Counts a block."""
        self._sum += total
        self.most = max(self.most, most)
        self.updates += updates


class InFlightBlock(NamedTuple):
    """A block that is handed out and not done.

    Attributes:
        since: when it was handed out, or a worker began with it; by `time.monotonic`.
        worker: the number of the worker that has it, or None.
        steps: how many it has.
    """

    since: float
    worker: int | None
    steps: int


class Alarm(Protocol):
    """Notices that a worker does not get on with a block."""

    def watch(self, runner: BlockRunner) -> None:
        """Looks at its blocks now and then, from another thread, until it is over."""


class BlockRunner:
    """The blocks of one session.

    Args:
        coordinator: TensorFlow's, of the strategy's cluster.
        workers: how many there are.
        pace: learns how long steps take.
        alarm: watches the blocks until the session is over.

    Attributes:
        workers: as given.
        staleness: of the blocks that are done.
        times: of the blocks that are done.
    """

    def __init__(self, coordinator: Any, *, workers: int, pace: Pace, alarm: Alarm) -> None:
        self._coordinator = coordinator
        self._pace = pace
        self._alarm = alarm
        self._changed = threading.Condition()
        self._in_flight: dict[int, InFlightBlock] = {}
        self._blocks = 0
        self._variables: list[Any] = []
        self._held: list[np.ndarray] = []  # their values, with what the blocks that are done have added
        self._version = 0
        self._stored = 0
        self._outputs: tuple[int, Any] = (-1, None)
        self._error: BaseException | None = None
        self._ended = False
        self.workers = workers
        self.staleness = Staleness()
        self.times = BlockTimes()

    def begin(self, variables: list[Any]) -> None:
        """Begins with the values of the variables that the chief holds."""
        while not self._coordinator.done():  # blocks that an abandoned session has left
            time.sleep(_SHORT_LOOK)
        self._alarm.watch(self)
        self._variables = variables
        self._held = [np.asarray(underlying(v).numpy()) for v in variables]

    def submit(self, traced: TracedBlock, pending: int, data: BlockData) -> None:
        """Hands out a block.

        Args:
            traced: what it does.
            pending: micro-batches that the servers hold from before.
            data: of its steps.
        """
        number = self._blocks
        with self._changed:
            self._blocks += 1
            self._in_flight[number] = InFlightBlock(time.monotonic(), None, data.count)
        upstream_tf.schedule(self._coordinator, lambda: self._run(traced, number, pending, data))

    def wait(self, most: int = 0) -> None:
        """Until at most so many blocks are in flight.

        Raises:
            whatever a step raised; the session is abandoned then.
        """
        try:
            while not self._done(most):
                self._coordinator.done()  # raises where a server is lost
        except BaseException:
            self.abandon()
            raise

    def end(self) -> None:
        """No block comes any more."""
        with self._changed:
            self._ended = True
        self.store()

    def abandon(self) -> None:
        """Ends it at once, because of an error: what no worker has begun with is dropped.

        Blocks that a worker has begun with get a second to end; what they still give back is not taken.
        """
        with self._changed:
            self._ended = True
            for number in [n for n, block in self._in_flight.items() if block.worker is None]:
                del self._in_flight[number]
            self._changed.wait_for(lambda: not self._in_flight, _END_SECONDS)

    def store(self) -> None:
        """Writes what the workers have counted so far to the chief's variables."""
        with self._changed:
            if self._stored == self._version:
                return
            values, self._stored = list(self._held), self._version
        for variable, value in zip(self._variables, values, strict=True):
            underlying(variable).assign(value)

    @property
    def outputs(self) -> Any:
        """What the newest block's last step returned; None before any is done."""
        with self._changed:
            return self._outputs[1]

    @property
    def in_flight(self) -> list[InFlightBlock]:
        """The blocks that are not done."""
        with self._changed:
            return list(self._in_flight.values())

    @property
    def progress(self) -> int:
        """A number that grows with every block that is handed out or done."""
        with self._changed:
            return self._blocks + self._version

    @property
    def over(self) -> bool:
        """Whether it has ended, and no worker has a block of it."""
        with self._changed:
            return self._ended and not self._in_flight

    @property
    def step_seconds(self) -> float | None:
        """What a step took lately; None before any is done."""
        return self._pace.seconds

    def _run(self, traced: TracedBlock, number: int, pending: int, data: BlockData) -> None:
        """On a coordinator's thread, for one worker; may be run again on another one."""
        worker = upstream_tf.current_worker()
        with self._changed:
            if self._ended:
                self._remove(number)
                return
            held, version = self._held, self._version
            begun = time.monotonic()
            self._in_flight[number] = InFlightBlock(begun, worker, data.count)
        try:
            result = traced(np.array([number, pending], np.int64), data.sizes, held, data.values)
        except Exception as error:
            with self._changed:
                if upstream_tf.blames_a_process(error):
                    # The coordinator finds another worker for it.
                    self._in_flight[number] = InFlightBlock(time.monotonic(), None, data.count)
                    raise
                self._error = self._error or error
                self._remove(number)
            return
        with self._changed:
            if not self._ended:
                self._merge(number, result, held, fresh=version == self._version)
                self._pace.note(traced, worker, time.monotonic() - begun, data.count)
            self._remove(number)

    def _remove(self, number: int) -> None:
        self._in_flight.pop(number, None)
        self._changed.notify_all()

    def _merge(self, number: int, result: BlockResult, given: list[np.ndarray], *, fresh: bool) -> None:
        self._version += 1
        if fresh:
            self._held = result.held
        else:
            self._held = [
                _added(now, then, new) for now, then, new in zip(self._held, given, result.held, strict=True)
            ]
        self.staleness.add(*result.staleness)
        self.times = self.times.plus(BlockTimes(1, result.seconds, result.exchange))
        if number > self._outputs[0]:
            self._outputs = (number, result.outputs)

    def _done(self, most: int) -> bool:
        """Waits a while until at most so many blocks are in flight; says whether they are."""
        with self._changed:
            done = self._changed.wait_for(
                lambda: self._error is not None or len(self._in_flight) <= most, _LOOK
            )
            if self._error is not None:
                raise self._error
            return done


def _added(now: np.ndarray, then: np.ndarray, new: np.ndarray) -> np.ndarray:
    """A value that two blocks have changed, both starting from `then`."""
    if now.dtype == bool or now.dtype.kind in "OSU":
        return new
    return np.asarray(now + (new - then), now.dtype)
