"""The chief's side of an epoch: groups batches into blocks, and submits the blocks to the workers.

One session is one epoch of training, one evaluation or one predicted batch. What a block computes is not
decided here (see `block_program`).
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from dtrain.engine.parameter_server.block_batches import BlockBuffer, BlockData, BlockReader, as_batch
from dtrain.engine.parameter_server.block_program import BlockProgram
from dtrain.engine.parameter_server.block_sizes import BlockSizes, Pace
from dtrain.engine.parameter_server.runner import BlockRunner
from dtrain.engine.parameter_server.stuck import ALARM
from dtrain.upstream import keras_optimizers

_MOST_BYTES = 32 << 20


class BlockSession:
    """Submits blocks of steps until `finish`.

    Args:
        program: traces the function of a block.
        strategy: the parameter-server strategy.
        pace: the step time measured in earlier sessions of the same program.
        steps_a_call: batches in one call of the train function, if a callback needs the results of every
            call; then at most one call for each worker is in flight. None if no callback needs them.
        total: the number of batches in the session; None if unknown.

    Attributes:
        runner: runs the blocks of this session.
        examples: the number of examples in the block that `read` took last; None before the first.
    """

    def __init__(
        self, program: BlockProgram, strategy: Any, pace: Pace, *, steps_a_call: int | None, total: int | None
    ) -> None:
        layout = strategy.dtrain_managed.layout
        self._program = program
        self._watched = steps_a_call is not None
        self._left = total
        self._sizes = BlockSizes(program, layout, pace, steps_a_call)
        self._buffer = BlockBuffer()
        self._round = 0
        self._begun = False
        # TensorFlow makes only one for a strategy.
        coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        self.runner = BlockRunner(coordinator, workers=layout.workers, pace=pace)
        self.examples: int | None = None

    def add(self, batch: Any, spec: Any = None, *, alone: bool = False) -> None:
        """Adds one batch; submits a block when enough batches are waiting.

        Args:
            batch: a nest of tensors.
            spec: the batch's nest of `tf.TypeSpec`s; None derives it from the batch, with any number of rows.
            alone: whether the batch becomes a block of its own.
        """
        given = as_batch(batch, spec, alone=alone)
        if not self._buffer.fits(given):
            self.flush()
        self._buffer.add(given)
        self._begin(given.spec, many=given.key is not None)
        if self._left is not None:
            self._left -= 1
        left = None if self._left is None else self._left + len(self._buffer)
        full = len(self._buffer) >= self._sizes.steps(left, self._pending)
        if full or given.key is None or self._buffer.bytes > _MOST_BYTES:
            self.flush()

    def read(self, iterator: Any, reader: BlockReader) -> int:
        """Reads the batches of one block and submits the block.

        Returns:
            The number of batches; 0 at the end of the data.
        """
        self._begin(reader.spec, many=True)
        most = max(1, _MOST_BYTES // max(reader.batch_bytes, 1))
        steps = min(self._sizes.steps(self._left, self._pending, most), most)
        if self._left is not None:
            steps = min(steps, self._left)
        data = reader.read(iterator, max(1, steps))
        if data is None:
            return 0
        if self._left is not None:
            self._left -= data.count
        self.examples = data.rows
        self._submit(data)
        return data.count

    def flush(self) -> None:
        """Submits the batches that `add` has collected, if any, as a block."""
        if self._buffer:
            self._submit(self._buffer.take())

    def called(self) -> None:
        """Called after each call of the train or test function.

        If callbacks need the results of every call, it submits the batches of this call, and waits until
        another block may run. So if blocks run one after another, none runs during the callbacks.
        """
        if self._watched:
            self.flush()
            self.runner.wait(self._sizes.in_flight - 1)

    def finish(self) -> None:
        """Submits the remaining batches, and waits until all blocks are done."""
        self.flush()
        self.runner.wait()
        self.runner.end()

    def rest(self) -> bool:
        """Waits until all blocks are done, and assigns their results to the chief's variables.

        Returns:
            Whether it did; False, without waiting, if an update lacks some of its micro-batches.
        """
        self.flush()
        if self._pending:
            return False
        self.runner.wait()
        self.runner.assign()
        return True

    def _begin(self, spec: Any, *, many: bool) -> None:
        if self._begun:
            return
        self._begun = True
        self._program.trace(spec, many=many)
        setting = self._program.setting
        self.runner.begin(setting.plan.held)
        ALARM.watch(self.runner)

    @property
    def _pending(self) -> int:
        """Micro-batches accumulated on the servers since the last update.

        The servers alone count them, because a callback may train between two blocks. The blocks in flight
        do not matter: those that start or end between two updates run alone.
        """
        setting = self._program.setting
        if not self._begun or not setting.accumulating:
            return 0
        return int(keras_optimizers.iterations_of(setting.accumulating[0]).numpy()) % setting.accumulation

    def _submit(self, data: BlockData) -> None:
        unrolled = self._sizes.unrolled(data.count) if data.many else 1
        traced = self._program.trace(data.spec, many=data.many, unrolled=unrolled)
        group, pending = self._program.setting.accumulation, self._pending
        # A block that does not start and end with an update shares its accumulated gradients with its
        # neighbours through the servers. So no other block may run at the same time.
        alone = bool(pending or data.count % group) or self._sizes.passes_bound(data.count)
        self.runner.wait(0 if alone else self._sizes.in_flight - 1)
        self.runner.submit(traced, pending, data)
        if alone:
            self.runner.wait()
        if self._sizes.in_rounds:
            self._round = (self._round + 1) % self._sizes.active
            if self._round == 0:
                self.runner.wait()
