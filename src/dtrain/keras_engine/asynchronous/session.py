"""The chief's side: cuts an epoch into blocks, hands them to the workers, and adds up what they give back.

One session is one epoch of training, or one evaluation. `ClusterCoordinator` finds a worker for each block
and gives a block whose worker died to another.
"""

from __future__ import annotations

import threading
import time
from typing import Any, NamedTuple, Protocol

import numpy as np

from dtrain.keras_engine.asynchronous.batches import Batches, BlockData, BlockReader, bytes_of
from dtrain.keras_engine.asynchronous.pace import Pace
from dtrain.keras_engine.asynchronous.program import BlockProgram, Result
from dtrain.keras_engine.context import underlying
from dtrain.keras_engine.protocol import ServerLayout
from dtrain.upstream import keras as upstream_keras
from dtrain.upstream import tensorflow as upstream_tf

_BLOCK_SECONDS = 0.1
_MOST_STEPS = 256
_OVERLAPPED_STEPS = 8  # at least, where steps overlap: each block's first and last stand alone
_MOST_BYTES = 32 << 20
_LOOK = 0.5  # seconds between two looks whether the coordinator has lost a server
_SHORT_LOOK = 0.001
_UNROLLED = 4  # steps in a turn of a small model's loop
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

    def and_more(self, other: BlockTimes) -> BlockTimes:
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


class Handed(NamedTuple):
    """A block that is not done.

    Attributes:
        since: when it was handed out, or a worker began with it; by `time.monotonic`.
        worker: the number of the worker that has it, or None.
        steps: how many it has.
    """

    since: float
    worker: int | None
    steps: int


class Alarm(Protocol):
    """Who notices that a worker does not get on with a block."""

    def watch(self, session: Session) -> None:
        """Looks at the session now and then, from another thread, until it is over."""


class Session:
    """Blocks of steps, handed out until `finish`.

    Args:
        program: what a block does.
        layout: the strategy's.
        coordinator: TensorFlow's, of the same cluster.
        steps_a_call: batches between two calls of batch callbacks.
        every_batch: whether callbacks want each call done before the next (with several workers: as many
            calls at once as there are workers).
        total: the number of batches, where it is known.
        alarm: watches its blocks until it is over.
        pace: what earlier sessions of the program have learnt.

    Attributes:
        staleness: of the blocks that are done.
        times: of the blocks that are done.
    """

    def __init__(
        self,
        program: BlockProgram,
        layout: ServerLayout,
        coordinator: Any,
        *,
        steps_a_call: int,
        every_batch: bool,
        total: int | None,
        alarm: Alarm,
        pace: Pace | None = None,
    ) -> None:
        self._program = program
        self._layout = layout
        self._coordinator = coordinator
        self._every_batch = every_batch
        self._steps_a_call = steps_a_call
        self._left = total
        self._alarm = alarm
        self._changed = threading.Condition()
        self._outstanding: dict[int, Handed] = {}
        self._blocks = 0
        self._held: list[np.ndarray] | None = None
        self._version = 0
        self._stored = 0
        self._outputs: tuple[int, Any] = (-1, None)
        self._pace = Pace() if pace is None else pace
        self._error: BaseException | None = None
        self._ended = False
        self._batches = Batches()
        self._batch_bytes = 0
        self._leftover = 0
        self._round = 0
        self.staleness = Staleness()
        self.examples: int | None = None  # in what was read last
        self.times = BlockTimes()

    def add(self, batch: Any, spec: Any = None, *, alone: bool = False) -> None:
        """Takes a batch; hands out a block when there are enough.

        Args:
            batch: a nest of tensors.
            spec: its spec, where it is known; else any number of rows of these shapes.
            alone: make it a block of its own.
        """
        if not self._batches.fits(batch, spec):
            self.flush()
        self._batches.add(batch, spec, alone=alone)
        if self._held is None:
            self._begin(self._batches.spec, many=self._batches.many)
        if self._left is not None:
            self._left -= 1
        if self._batches.count >= self._block_steps() or self._batches.bytes > _MOST_BYTES:
            self.flush()

    def read(self, iterator: Any, reader: BlockReader) -> int:
        """Takes a block of batches at once and hands it out; says how many they are, 0 at the end."""
        if self._held is None:
            self._begin(reader.spec, many=True)
        steps = self._block_steps()
        if self._left is not None:
            steps = max(1, min(steps, self._left))
        if self._batch_bytes:
            steps = max(1, min(steps, _MOST_BYTES // self._batch_bytes))
        data = reader.read(iterator, steps)
        if data is None:
            return 0
        self._batch_bytes = sum(map(bytes_of, data.values)) // data.count
        if self._left is not None:
            self._left -= data.count
        self.examples = data.rows
        self._hand_out(data)
        return data.count

    def flush(self) -> None:
        """Hands out what has been taken batch by batch."""
        if self._batches.count:
            self._hand_out(self._batches.take())

    def _hand_out(self, data: BlockData) -> None:
        unrolled = _UNROLLED if data.many and self._pace.fast and data.count >= 4 * _UNROLLED else 1
        traced = self._program.trace(data.spec, many=data.many, unrolled=unrolled)
        group, left = self._program.accumulation, self._leftover
        # What does not begin and end with an update must find on the servers what was left before it.
        alone = bool(left or data.count % group) or self._passes_bound(data.count)
        self._wait(0 if alone else self._places() - 1)
        number = self._blocks
        self._blocks += 1
        self._leftover = (left + data.count) % group
        with self._changed:
            self._outstanding[number] = Handed(time.monotonic(), None, data.count)

        def run() -> None:
            self._run(traced, number, left, data)

        upstream_tf.schedule(self._coordinator, run)
        if alone:
            self._wait(0)
        self._end_round()

    def called(self) -> None:
        """After each of Keras' calls."""
        if self._every_batch:
            self.flush()
            self._wait(0 if self._layout.workers == 1 else self._layout.workers - 1)

    def finish(self) -> None:
        """Hands out what is left, and waits until all blocks are done."""
        self.flush()
        self._wait(0)
        with self._changed:
            self._ended = True
        self.store()

    def rest(self) -> bool:
        """Waits until all that was taken is done, and stores it; False where an update is half added up."""
        self.flush()
        if self._leftover:
            return False
        self._wait(0)
        self.store()
        return True

    def abandon(self) -> None:
        """Ends it at once, because of an error: what no worker has begun with is dropped.

        Blocks that a worker has begun with get a second to end; what they still give back is not taken.
        """
        with self._changed:
            self._ended = True
            for number in [n for n, block in self._outstanding.items() if block.worker is None]:
                del self._outstanding[number]
            self._changed.wait_for(lambda: not self._outstanding, _END_SECONDS)

    def store(self) -> None:
        """Writes what the workers have counted so far to the chief's variables."""
        with self._changed:
            if self._held is None or self._stored == self._version:
                return
            values, self._stored = list(self._held), self._version
        for variable, value in zip(self._program.held, values, strict=True):
            underlying(variable).assign(value)

    @property
    def outputs(self) -> Any:
        """What the newest block's last step returned; None before any is done."""
        with self._changed:
            return self._outputs[1]

    @property
    def handed_out(self) -> list[Handed]:
        """The blocks that are not done."""
        with self._changed:
            return list(self._outstanding.values())

    @property
    def progress(self) -> int:
        """A number that grows with every block that is handed out or done."""
        with self._changed:
            return self._blocks + self._version

    @property
    def workers(self) -> int:
        """How many workers there are."""
        return self._layout.workers

    @property
    def over(self) -> bool:
        """Whether it has ended, and no worker has a block of it."""
        with self._changed:
            return self._ended and not self._outstanding

    @property
    def step_seconds(self) -> float | None:
        """What a step took lately; None before any is done."""
        return self._pace.seconds

    def _begin(self, spec: Any, *, many: bool) -> None:
        self._program.trace(spec, many=many)  # it tells what the chief holds and what is accumulated
        while not self._coordinator.done():  # blocks that an abandoned session has left
            time.sleep(_SHORT_LOOK)
        self._alarm.watch(self)
        self._held = [np.asarray(underlying(v).numpy()) for v in self._program.held]
        optimizer = self._program.optimizer
        if optimizer is not None:
            done = int(upstream_keras.iterations_of(optimizer).numpy())
            self._leftover = done % self._program.accumulation

    def _run(self, traced: Any, number: int, left: int, data: BlockData) -> None:
        """On a coordinator's thread, for one worker; may be run again on another one."""
        worker = upstream_tf.current_worker()
        with self._changed:
            if self._ended:
                self._take_back(number)
                return
            held, version = self._held, self._version
            begun = time.monotonic()
            self._outstanding[number] = Handed(begun, worker, data.count)
        if held is None:
            raise RuntimeError("a block runs in a session that has not begun")
        try:
            result = traced(np.array([number, left], np.int64), data.sizes, held, data.values)
        except Exception as error:
            with self._changed:
                if upstream_tf.blames_a_process(error):
                    # The coordinator finds another worker for it.
                    self._outstanding[number] = Handed(time.monotonic(), None, data.count)
                    raise
                self._error = self._error or error
                self._take_back(number)
            return
        with self._changed:
            if not self._ended:
                self._merge(number, result, held, fresh=version == self._version)
                self._pace.note(traced, worker, time.monotonic() - begun, data.count)
            self._take_back(number)

    def _take_back(self, number: int) -> None:
        self._outstanding.pop(number, None)
        self._changed.notify_all()

    def _merge(self, number: int, result: Result, given: list[np.ndarray], *, fresh: bool) -> None:
        self._version += 1
        if fresh or self._held is None:
            self._held = result.held
        else:
            self._held = [
                _added(now, then, new) for now, then, new in zip(self._held, given, result.held, strict=True)
            ]
        self.staleness.add(*result.staleness)
        self.times = self.times.and_more(BlockTimes(1, result.seconds, result.exchange))
        if number > self._outputs[0]:
            self._outputs = (number, result.outputs)

    def _block_steps(self) -> int:
        if self._leftover:
            return self._program.accumulation - self._leftover
        steps = self._wished_steps()
        group = self._program.accumulation
        return -(-steps // group) * group

    def _wished_steps(self) -> int:
        if self._every_batch:
            return self._steps_a_call
        if self._pace.seconds is None:
            return 1
        steps = int(_BLOCK_SECONDS / max(self._pace.seconds, 1e-6))
        if self._program.overlaps:
            steps = max(steps, _OVERLAPPED_STEPS)
        workers = self._layout.workers
        if self._left is not None and workers > 1:
            # So that the workers end together.
            steps = min(steps, -(-(self._left + self._batches.count) // (2 * workers)))
        active, bound = self._active()
        if active > 1 and bound is not None:
            steps = min(steps, bound // (active - 1))
        return min(max(steps, 1), _MOST_STEPS)

    def _active(self) -> tuple[int, int | None]:
        """How many blocks may run at once, and how many updates of others a step may miss."""
        bound = self._layout.most_of_others
        workers = self._layout.workers
        return (workers if bound is None else min(workers, bound + 1)), bound

    def _passes_bound(self, steps: int) -> bool:
        """Whether a block has more steps than another block may miss."""
        active, bound = self._active()
        return bound is not None and active > 1 and steps * (active - 1) > bound

    def _places(self) -> int:
        """How many blocks may be handed out and not done."""
        active, bound = self._active()
        if active == 1 or bound is not None or self._every_batch or self._pace.seconds is None:
            return active
        return 2 * active

    def _end_round(self) -> None:
        """Under a bound, blocks go out in rounds: nobody is further behind than one round."""
        active, bound = self._active()
        if bound is None:
            return
        self._round += 1
        if self._round == active:
            self._round = 0
            self._wait(0)

    def _wait(self, most: int) -> None:
        """Until at most so many blocks are not done.

        Raises:
            whatever a step raised; the session is abandoned then.
        """
        try:
            while not self._done(most):
                self._coordinator.done()  # raises where a server is lost
        except BaseException:
            self.abandon()
            raise

    def _done(self, most: int) -> bool:
        """Waits a while until at most so many blocks are not done; says whether they are."""
        with self._changed:
            done = self._changed.wait_for(
                lambda: self._error is not None or len(self._outstanding) <= most, _LOOK
            )
            if self._error is not None:
                raise self._error
            return done


def _added(now: np.ndarray, then: np.ndarray, new: np.ndarray) -> np.ndarray:
    """A value that two blocks have changed, both starting from `then`."""
    if now.dtype == bool or now.dtype.kind in "OSU":
        return new
    return np.asarray(now + (new - then), now.dtype)
