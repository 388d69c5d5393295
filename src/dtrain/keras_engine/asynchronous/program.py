"""A block of steps as one TensorFlow function: read the weights, loop over batches, give back what changed.

It is traced on the chief and run by any worker; what it computes depends on nothing but its arguments and
the servers.
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
    """What a block gives back.

    Attributes:
        held: the new values of the variables that the chief holds.
        staleness: the sum over the block's updates, the most of one, and the number of updates.
        seconds: how long the block took, by the worker's clock.
        exchange: for how long of these the worker only waited for the servers.
        outputs: what the last step returned.
    """

    held: list[np.ndarray]
    staleness: tuple[int, int, int]
    seconds: float
    exchange: float
    outputs: Any


class BlockProgram:
    """The blocks of one model for training, testing or predicting.

    Args:
        model: a built Keras model.
        strategy: its parameter-server strategy.
        kind: "train", "test" or "predict".

    Attributes:
        held: the variables that the chief holds: metrics', and all that are not on a server.
        stock: whether the step and what it returns are Keras' own.
        turns: how many steps a turn of the loops has that were traced.
        overlaps: whether a step computes while what the one before it has left is sent.
        accumulating: the optimizer whose micro-batches each worker adds up, or None.
        accumulation: micro-batches an update, where workers add them up themselves; else 1.
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
        """The function for batches of a spec.

        Args:
            spec: a nest of `tf.TypeSpec`s; None stays None.
            many: whether it takes any number of batches, concatenated; else it takes one as it is.
            unrolled: steps in a turn of the loop. Each turn costs messages of its own, and each step time to
                trace; the numbers are the same.
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
        # Alone, the servers add micro-batches up as one device does.
        accumulating = [] if alone or not training else list(filter(_accumulates, plan.optimizers))
        self.held = plan.held
        self.accumulating = next(iter(accumulating), None)
        self.accumulation = max((o.gradient_accumulation_steps for o in accumulating), default=1)
        if self._wants_overlap:
            self.overlaps = plan.obstacle is None
            if plan.obstacle is not None:
                self._wants_overlap = False  # it is the same step for other batches
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
    """A block's function, and how its arguments and results are put together.

    Args:
        function: takes numbers, sizes, the packed values that the chief holds, and the data.
        held: how those values are packed.
        found: how what it gives is packed.
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
        """Runs it on the device that is in force, and fetches what it gives."""
        # A tensor made on a worker that does not answer would stop every thread of this process.
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
    """Traces a block whose steps `run` makes, given the block, the batches' sizes and the data."""
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
    """Whether workers add up an optimizer's micro-batches."""
    scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    return bool(getattr(optimizer, "gradient_accumulation_steps", None)) and not scaled


def _places(sizes: tf.Tensor, rank: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Where each batch begins in what is concatenated, and its size; both of shape (batches, rank)."""
    starts = tf.cumsum(sizes, exclusive=True)[:, None]
    rest = tf.ones([tf.size(sizes), rank - 1], tf.int32)
    return tf.concat([starts, 0 * rest], axis=1), tf.concat([sizes[:, None], -1 * rest], axis=1)
