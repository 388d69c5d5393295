"""A block of steps as one TensorFlow function: read the weights, loop over batches, return what changed.

The chief traces the function, and any worker can run it: the result depends only on the arguments and on the
servers' state. Which worker runs a block, and how large it is, is not decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dtrain import events
from dtrain.keras_engine.asynchronous.block import COUNTED, Block, BlockSetting
from dtrain.keras_engine.asynchronous.exchange import Exchange
from dtrain.keras_engine.asynchronous.outputs import Outputs
from dtrain.keras_engine.asynchronous.overlap import Overlapped
from dtrain.keras_engine.asynchronous.packing import Packing
from dtrain.keras_engine.asynchronous.rehearsal import ModelStep, Rehearsal, StepPlan, spec_of
from dtrain.keras_engine.input import map_leaves, present_leaves
from dtrain.log import logger

CHIEF = "/job:chief/replica:0/task:0/device:CPU:0"


@dataclass
class BlockResult:
    """The results of one block.

    Attributes:
        held: the new values of the variables that the chief holds.
        staleness: the sum over the block's updates, their maximum, and the number of updates.
        seconds: how long the block took, by the worker's clock.
        exchange: the part of `seconds` in which the worker only waited for the servers.
        outputs: what the last step returned.
    """

    held: list[np.ndarray]
    staleness: tuple[int, int, int]
    seconds: float
    exchange: float
    outputs: Any


class BlockProgram:
    """Traces the blocks of one model for training, testing or predicting.

    Args:
        model: a built Keras model.
        strategy: the model's parameter-server strategy.
        kind: "train", "test" or "predict".

    Attributes:
        held: the variables that the chief holds: all that are not on a server, such as metrics' variables.
        stock: whether the step and what it returns are Keras' own.
        turns: the numbers of steps in one loop iteration for which a block was traced.
        overlaps: whether a step computes while the update of the step before it is sent.
        accumulating: the optimizer whose micro-batches each worker accumulates, or None.
        accumulation: micro-batches in one update if the workers accumulate them; else 1.
    """

    def __init__(self, model: Any, strategy: Any, kind: str) -> None:
        self._step = ModelStep(model, kind)
        self._strategy = strategy
        self._rehearsal = Rehearsal(self._step, strategy)
        self._functions: dict[str, TracedBlock] = {}
        self._wants_overlap = kind == "train" and strategy.dtrain_servers.overlap
        self.stock = self._step.stock
        self.turns: set[int] = set()
        self.held: list[Any] = []
        self.overlaps = False
        self.accumulating: Any = None
        self.accumulation = 1

    def trace(self, spec: Any, *, many: bool, unrolled: int = 1) -> TracedBlock:
        """Returns the function for batches of a spec; traces it at the first call.

        Args:
            spec: the spec of one batch, a nest of `tf.TypeSpec`s and None.
            many: whether the function takes any number of concatenated batches; else it takes one batch.
            unrolled: steps in one iteration of the loop. Larger iterations save messages, but take longer to
                trace; the results are the same.
        """
        key = f"{many}{unrolled}{spec}"
        if key not in self._functions:
            with events.part("start"):
                setting = self._set(self._rehearsal.plan(spec))
                self.turns.add(unrolled)
                traced = self._many(setting, spec, unrolled) if many else self._one(setting, spec)
            self._functions[key] = traced
        return self._functions[key]

    def _set(self, plan: StepPlan) -> BlockSetting:
        layout, training = self._strategy.dtrain_servers, self._step.kind == "train"
        alone = layout.workers == 1
        # With one worker, the optimizer accumulates on the servers as it does on one device.
        accumulating = [] if alone or not training else list(filter(_accumulates, plan.optimizers))
        self.held = plan.held
        self.accumulating = next(iter(accumulating), None)
        self.accumulation = max((o.gradient_accumulation_steps for o in accumulating), default=1)
        if self._wants_overlap:
            self.overlaps = plan.obstacle is None
            if plan.obstacle is not None:
                self._wants_overlap = False  # warn once: the step is the same for batches of other specs
                logger.warning("overlap=True was set, but this step runs without: %s.", plan.obstacle)
        return BlockSetting(
            plan=plan,
            exchange=Exchange(layout.servers, plan.pulled),
            strategy=self._strategy,
            alone=alone,
            meets=training or bool(plan.written),
            accumulating=accumulating,
            held=Packing([spec_of(v) for v in plan.held]),
        )

    def _many(self, setting: BlockSetting, spec: Any, unrolled: int) -> TracedBlock:
        kind = Overlapped if self.overlaps else Block
        leaves = present_leaves(spec)

        def run(block: Block, sizes: tf.Tensor, data: list[Any]) -> list[tf.Tensor]:
            places = [_places(sizes[n], leaf.shape.rank) for n, leaf in enumerate(leaves)]

            def step(i: tf.Tensor) -> Any:
                rest = iter(zip(leaves, data, places, strict=True))

                def cut(leaf: Any) -> Any:
                    if leaf is None:
                        return None
                    _, values, (starts, lengths) = next(rest)
                    return tf.ensure_shape(tf.slice(values, starts[i], lengths[i]), leaf.shape)

                return self._step(map_leaves(cut, spec))

            return block.loop(step, tf.shape(sizes)[1], unrolled)

        data_specs = [tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype) for leaf in leaves]
        return _traced(setting, kind, run, tf.TensorSpec([len(leaves), None], tf.int32), data_specs)

    def _one(self, setting: BlockSetting, spec: Any) -> TracedBlock:
        def run(block: Block, sizes: tf.Tensor, data: Any) -> list[tf.Tensor]:
            return block.step(lambda: self._step(data))

        return _traced(setting, Block, run, tf.TensorSpec([0, 0], tf.int32), spec)


class TracedBlock:
    """The function of a block, with the packing of its arguments and results.

    Args:
        function: takes numbers, sizes, the packed values that the chief holds, and the data.
        held: the packing of the values that the chief holds.
        found: the packing of the results.
        outputs: the structure of what a step returns.
    """

    def __init__(self, function: Any, held: Packing, found: Packing, outputs: Outputs) -> None:
        self._function = function
        self._held = held
        self._found = found
        self._outputs = outputs

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
        found = self._function(first, second, flats, data)
        with tf.device(CHIEF):
            fetched = self._found.unpack([tf.identity(value) for value in found])
            values = [value.numpy() for value in fetched]
        end = len(held)
        stale, (seconds, waited) = values[end], values[end + 1]
        return BlockResult(
            held=values[:end],
            staleness=(int(stale[0]), int(stale[1]), int(stale[2])),
            seconds=float(seconds),
            exchange=float(waited),
            outputs=self._outputs.restore(values[end + 2 :]),
        )


def _traced(
    setting: BlockSetting, kind: type[Block], run: Callable[..., list[tf.Tensor]], sizes: Any, data: Any
) -> TracedBlock:
    """Traces a block.

    Args:
        setting: what the blocks of one step have in common.
        kind: the class of the block.
        run: takes the block, the batches' sizes and the data; returns the outputs of the last step.
        sizes: the spec of the batches' sizes.
        data: the specs of the data.
    """
    outputs = setting.plan.outputs
    found = Packing([*setting.held.specs, *COUNTED, *outputs.specs()])

    def function(numbers: tf.Tensor, sizes: tf.Tensor, held: list[Any], data: Any) -> list[tf.Tensor]:
        block = kind(setting, numbers, held)
        with block.entered():
            return found.pack(block.results(run(block, sizes, data)))

    concrete = tf.function(function, autograph=False).get_concrete_function(
        tf.TensorSpec([2], tf.int64), sizes, setting.held.flat_specs, data
    )
    return TracedBlock(concrete, setting.held, found, outputs)


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
