"""A block of steps as one TensorFlow function: read the weights, loop over batches, return what changed.

The chief traces the function, and any worker can run it: the result depends only on the arguments and on the
servers' state. Which worker runs a block, and how large it is, is not decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from dtrain.base.log import logger
from dtrain.engine.batches.batch_rows import map_leaves, present_leaves
from dtrain.engine.parameter_server.block import COUNTED, Block, BlockSetting
from dtrain.engine.parameter_server.exchange import Exchange
from dtrain.engine.parameter_server.overlap import Overlapped
from dtrain.engine.parameter_server.packing import Packing
from dtrain.engine.parameter_server.step_planner import ModelStep, StepPlan, StepPlanner, spec_of
from dtrain.telemetry import events
from dtrain.upstream import tf_tracing

CHIEF = "/job:chief/replica:0/task:0/device:CPU:0"


class BlockTotals(NamedTuple):
    """What one block, or several, took and did. Times are by the clocks of the workers.

    A step's staleness is the number of updates that the servers applied between the step's read of the
    weights and its own update. They are updates of other workers; with overlapped steps also those of the
    same worker.

    Attributes:
        blocks: how many blocks are done.
        seconds: the sum of their durations; 0 with deterministic operations, which clocks are not.
        exchange: the part of `seconds` in which a worker only waited for the servers.
        updates: how many updates the servers have applied.
        stale: the sum of the staleness of all updates.
        most: the maximum staleness of one update.
    """

    blocks: int = 0
    seconds: float = 0.0
    exchange: float = 0.0
    updates: int = 0
    stale: int = 0
    most: int = 0

    def plus(self, other: BlockTotals) -> BlockTotals:
        """The totals of both."""
        return BlockTotals(
            self.blocks + other.blocks,
            self.seconds + other.seconds,
            self.exchange + other.exchange,
            self.updates + other.updates,
            self.stale + other.stale,
            max(self.most, other.most),
        )

    @property
    def mean_staleness(self) -> float:
        """The mean over all updates; 0.0 if there was none."""
        return self.stale / self.updates if self.updates else 0.0


class BlockResult(NamedTuple):
    """The results of one block.

    Attributes:
        held: the new values of the variables that the chief holds.
        totals: what the block took and did.
        outputs: what the last step returned.
    """

    held: list[np.ndarray]
    totals: BlockTotals
    outputs: Any


class BlockProgram:
    """Traces the blocks of one model for training, testing or predicting.

    Args:
        model: a built Keras model.
        strategy: the model's parameter-server strategy.
        kind: "train", "test" or "predict".

    Attributes:
        step: the model's step.
        turns: the numbers of steps in one loop iteration for which a block was traced.
        setting: what the blocks have in common, as of the latest trace.
    """

    def __init__(self, model: Any, strategy: Any, kind: str) -> None:
        self.step = ModelStep(model, kind)
        self._strategy = strategy
        self._planner = StepPlanner(self.step, strategy)
        self._functions: dict[str, BlockFunction] = {}
        self._wants_overlap = kind == "train" and strategy.dtrain_managed.layout.overlap
        self.turns: set[int] = set()
        self.setting: BlockSetting

    def trace(self, spec: Any, *, many: bool, unrolled: int = 1) -> BlockFunction:
        """Returns the function for batches of a spec; traces it at the first call.

        Args:
            spec: the spec of one batch, a nest of `tf.TypeSpec`s and None.
            many: whether the function takes any number of concatenated batches; else it takes one batch.
            unrolled: steps in one iteration of the loop. Larger iterations save messages, but take longer to
                trace; the results are the same.
        """
        key = f"{many}{unrolled}{spec}{tf_tracing.deterministic_operations()}"  # which decides about clocks
        if key not in self._functions:
            with events.part("start"):
                self.setting = self._setting_of(self._planner.plan(spec))
                self.turns.add(unrolled)
                run = _concatenated(self.step, spec, unrolled) if many else _single(self.step, spec)
                # A block of one batch has no next step to overlap with.
                kind = Overlapped if many and self.setting.overlaps else Block
                self._functions[key] = BlockFunction(kind, self.setting, *run)
        return self._functions[key]

    def _setting_of(self, plan: StepPlan) -> BlockSetting:
        layout, training = self._strategy.dtrain_managed.layout, self.step.kind == "train"
        alone = layout.workers == 1
        if self._wants_overlap and plan.obstacle is not None:
            self._wants_overlap = False  # warn once: the step is the same for batches of other specs
            logger.warning("overlap=True was set, but this step runs without: %s.", plan.obstacle)
        return BlockSetting(
            plan=plan,
            exchange=Exchange(layout.servers, plan.pulled),
            strategy=self._strategy,
            alone=alone,
            sends=training or bool(plan.written),
            overlaps=self._wants_overlap,
            # With one worker, the optimizer accumulates on the servers as it does on one device.
            accumulating=[] if alone or not training else list(filter(_accumulates, plan.optimizers)),
            held=Packing([spec_of(v) for v in plan.held]),
        )


Run = Callable[[Block, tf.Tensor, Any], list[tf.Tensor]]


def _concatenated(step: ModelStep, spec: Any, unrolled: int) -> tuple[Run, Any, Any]:
    """The run of a block on concatenated batches, and the specs of the batches' sizes and of the data."""
    leaves = present_leaves(spec)

    def run(block: Block, sizes: tf.Tensor, data: list[Any]) -> list[tf.Tensor]:
        places = [_places(sizes[n], leaf.shape.rank) for n, leaf in enumerate(leaves)]

        def one(i: tf.Tensor) -> Any:
            rest = iter(zip(leaves, data, places, strict=True))

            def cut(leaf: Any) -> Any:
                if leaf is None:
                    return None
                _, values, (starts, lengths) = next(rest)
                return tf.ensure_shape(tf.slice(values, starts[i], lengths[i]), leaf.shape)

            return step(map_leaves(cut, spec))

        return block.loop(one, tf.shape(sizes)[1], unrolled)

    data_specs = [tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype) for leaf in leaves]
    return run, tf.TensorSpec([len(leaves), None], tf.int32), data_specs


def _single(step: ModelStep, spec: Any) -> tuple[Run, Any, Any]:
    """As `_concatenated`, for a block of one batch."""

    def run(block: Block, sizes: tf.Tensor, data: Any) -> list[tf.Tensor]:
        return block.step(lambda: step(data))

    return run, tf.TensorSpec([0, 0], tf.int32), spec


class BlockFunction:
    """The traced function of a block, with the packing of its arguments and results.

    Args:
        kind: the class of the block.
        setting: what the blocks of one step have in common.
        run: takes the block, the batches' sizes and the data; returns the outputs of the last step.
        sizes: the spec of the batches' sizes.
        data: the specs of the data.
    """

    def __init__(self, kind: type[Block], setting: BlockSetting, run: Run, sizes: Any, data: Any) -> None:
        self._outputs = setting.plan.outputs
        self._held = setting.held
        self._found = Packing([*setting.held.specs, *COUNTED, *self._outputs.specs()])

        def function(numbers: tf.Tensor, sizes: tf.Tensor, held: list[Any], data: Any) -> list[tf.Tensor]:
            block = kind(setting, numbers, held)
            with block.entered():
                return self._found.pack(block.results(run(block, sizes, data)))

        self._function = tf_tracing.made_for_each_model(function).get_concrete_function(
            tf.TensorSpec([2], tf.int64), sizes, setting.held.flat_specs, data
        )

    def __call__(
        self, numbers: np.ndarray, sizes: np.ndarray, held: Sequence[np.ndarray], data: Any
    ) -> BlockResult:
        """Runs the block on the current device, and copies its results to the chief.

        Args:
            numbers: as `Block`'s, int64 of shape (2,).
            sizes: as `BlockData.sizes`.
            held: the values of the variables that the chief holds.
            data: as `BlockData.values`.
        """
        # Creating a tensor on a worker that does not answer would block every thread of this process.
        with tf.device(CHIEF):
            flats = self._held.pack([tf.constant(value) for value in held])
            first, second = tf.constant(numbers), tf.constant(sizes)
        packed = self._function(first, second, flats, data)
        with tf.device(CHIEF):
            fetched = self._found.unpack([tf.identity(value) for value in packed])
            values = [value.numpy() for value in fetched]
        end = len(held)
        (stale, most, updates), (seconds, waited) = map(np.ndarray.tolist, values[end : end + 2])
        totals = BlockTotals(1, seconds, waited, updates, stale, most)
        return BlockResult(values[:end], totals, self._outputs.restore(values[end + 2 :]))


def _accumulates(optimizer: Any) -> bool:
    """Whether the workers accumulate an optimizer's micro-batches."""
    scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    return bool(getattr(optimizer, "gradient_accumulation_steps", None)) and not scaled


def _places(sizes: tf.Tensor, rank: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Where each batch starts in the concatenated tensor, and its size; both int32 of shape (batches, rank).

    Args:
        sizes: rows of each batch, int32 of shape (batches,).
        rank: the rank of the concatenated tensor.
    """
    starts = tf.cumsum(sizes, exclusive=True)[:, None]
    rest = tf.ones([tf.size(sizes), rank - 1], tf.int32)
    return tf.concat([starts, 0 * rest], axis=1), tf.concat([sizes[:, None], -1 * rest], axis=1)
