"""The chief's side: cuts the batches of an epoch into blocks, and hands these to the workers.

One session is one epoch of training, or one evaluation.
"""

from __future__ import annotations

from typing import Any

from dtrain.keras_engine.asynchronous.batches import Batches, BlockData, BlockReader, bytes_of
from dtrain.keras_engine.asynchronous.block_sizes import BlockSizes, Pace
from dtrain.keras_engine.asynchronous.program import BlockProgram
from dtrain.keras_engine.asynchronous.runner import BlockRunner
from dtrain.keras_engine.asynchronous.stuck import ALARM
from dtrain.upstream import keras as upstream_keras

_MOST_BYTES = 32 << 20


class BlockSession:
    """Blocks of steps, handed out until `finish`.

    Args:
        program: what a block does.
        strategy: the parameter-server strategy.
        pace: what earlier sessions of the program have learnt.
        steps_a_call: batches between two calls of batch callbacks, where these want each call done before the
            next (with several workers: as many calls at once as there are workers); else None.
        total: the number of batches, where it is known.

    Attributes:
        runner: of its blocks.
        examples: in what was read last.
    """

    def __init__(
        self, program: BlockProgram, strategy: Any, pace: Pace, *, steps_a_call: int | None, total: int | None
    ) -> None:
        layout = strategy.dtrain_servers
        self._program = program
        self._watched = steps_a_call is not None
        self._workers = layout.workers
        self._left = total
        self._sizes = BlockSizes(program, layout, pace, steps_a_call)
        self._batches = Batches()
        self._batch_bytes = 0
        self._pending = 0  # micro-batches that the servers hold and no update has had
        self._round = 0
        self._begun = False
        self.runner = BlockRunner(
            strategy.dtrain_coordinator(), workers=layout.workers, pace=pace, alarm=ALARM
        )
        self.examples: int | None = None

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
        self._begin(self._batches.spec, many=self._batches.many)
        if self._left is not None:
            self._left -= 1
        left = None if self._left is None else self._left + self._batches.count
        if self._batches.count >= self._sizes.steps(left, self._pending) or self._batches.bytes > _MOST_BYTES:
            self.flush()

    def read(self, iterator: Any, reader: BlockReader) -> int:
        """Takes a block of batches at once and hands it out; says how many they are, 0 at the end."""
        self._begin(reader.spec, many=True)
        steps = self._sizes.steps(self._left, self._pending)
        if self._left is not None:
            steps = min(steps, self._left)
        if self._batch_bytes:
            steps = min(steps, _MOST_BYTES // self._batch_bytes)
        data = reader.read(iterator, max(1, steps))
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

    def called(self) -> None:
        """After each of Keras' calls."""
        if self._watched:
            self.flush()
            self.runner.wait(self._workers - 1)

    def finish(self) -> None:
        """Hands out what is left, and waits until all blocks are done."""
        self.flush()
        self.runner.wait()
        self.runner.end()

    def rest(self) -> bool:
        """Waits until all that was taken is done, and stores it; False where an update is half added up."""
        self.flush()
        if self._pending:
            return False
        self.runner.wait()
        self.runner.store()
        return True

    def _begin(self, spec: Any, *, many: bool) -> None:
        if self._begun:
            return
        self._begun = True
        self._program.trace(spec, many=many)  # it tells what the chief holds and what is accumulated
        self.runner.begin(self._program.held)
        optimizer = self._program.accumulating
        if optimizer is not None:
            done = int(upstream_keras.iterations_of(optimizer).numpy())
            self._pending = done % self._program.accumulation

    def _hand_out(self, data: BlockData) -> None:
        unrolled = self._sizes.unrolled(data.count) if data.many else 1
        traced = self._program.trace(data.spec, many=data.many, unrolled=unrolled)
        group, pending = self._program.accumulation, self._pending
        # What does not begin and end with an update must find on the servers what was left before it.
        alone = bool(pending or data.count % group) or self._sizes.passes_bound(data.count)
        self.runner.wait(0 if alone else self._sizes.in_flight - 1)
        self._pending = (pending + data.count) % group
        self.runner.submit(traced, pending, data)
        if alone:
            self.runner.wait()
        if self._sizes.in_rounds:
            self._round = (self._round + 1) % self._sizes.active
            if self._round == 0:
                self.runner.wait()
