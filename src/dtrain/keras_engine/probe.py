"""Finds out what the losses of a user's own train step are: means over the batch, sums, or scaled already.

A step may be written as for one device (`mean(loss)`) or as for TensorFlow's strategies (`sum(loss) /
global_batch`, `compute_average_loss`). One replica tries it on some examples, on the same examples twice
over, and as on one device; how the gradients change tells. Nothing that the trial changes is kept.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from dtrain.keras_engine import messages
from dtrain.keras_engine.context import ReplicaStep, replica_step
from dtrain.keras_engine.input import batch_rows, map_leaves
from dtrain.keras_engine.losses import is_own_loss, learn_coupling
from dtrain.keras_engine.protocol import ReplicaLayout
from dtrain.log import logger
from dtrain.upstream import keras as upstream_keras

ROWS = 8  # examples that a trial takes at most
_NEAR = 0.2  # how far from a whole factor the gradients may lie (random layers make them differ)


@messages.sendable
@dataclass(frozen=True, kw_only=True)
class LossKind:
    """What is combined at one point of a step: the loss of a `tape.gradient` call, or a number.

    Attributes:
        sums: whether the loss adds up over examples, rather than being their mean.
        scale: what the step has multiplied the loss by because there are several replicas; 1 for none.
    """

    sums: bool = False
    scale: float = 1.0

    def weight(self, share: Any) -> Any:
        """What a replica's loss is weighted by, so that the sum over replicas is the whole batch's."""
        return (tf.ones_like(share) if self.sums else share) / self.scale


def loss_kinds(
    step: Callable[[Any, ReplicaStep], None],
    part: Any,
    strategy: Any,
    layout: ReplicaLayout,
    *,
    rows: int,
    training: bool,
) -> list[LossKind]:
    """What a train step's losses and numbers are, in the order in which the replicas are combined.

    Args:
        step: runs the user's step on a batch, with a `ReplicaStep` to write to.
        part: a batch of one replica.
        strategy: the model's.
        layout: the strategy's.
        rows: examples to try with.
        training: whether it is a train step.
    """
    once = map_leaves(lambda leaf: _first_rows(leaf, rows), part)
    twice = map_leaves(lambda leaf: _twice(leaf), once)
    try:
        alone = _trial(step, once, rows, layout, None, training)
        here = _trial(step, once, rows, layout, strategy, training)
        doubled = _trial(step, twice, rows, layout, strategy, training)
    except Exception as error:
        logger.debug("the train step cannot be tried out: %s", error, exc_info=True)
        return []
    return [
        _kind(number, *each, layout) for number, each in enumerate(zip(alone, here, doubled, strict=False))
    ]


def has_own_layers(model: Any) -> bool:
    """Whether a model has layers that are not Keras' own, which may add losses of any kind."""
    return any(
        type(layer).__module__.partition(".")[0] != "keras" for layer in upstream_keras.layers_of(model)
    )


def summed_losses(model: Any, part: Any, layout: ReplicaLayout, rows: int) -> frozenset[int]:
    """Which of the losses that layers add are sums over the batch rather than means or constants.

    Args:
        model: a built model; it is called, its state is left as it was.
        part: a batch of one replica.
        layout: the strategy's.
        rows: examples to try with.

    Returns:
        Positions in `model.losses`.
    """
    x, _, _ = keras.utils.unpack_x_y_sample_weight(part)
    once = map_leaves(lambda leaf: _first_rows(leaf, rows), x)

    def added(x: Any) -> list[Any]:
        trial = ReplicaStep(layout, size=batch_rows(x), total=rows, training=True, probing=True)
        with replica_step(trial):
            model(x, training=True) if upstream_keras.takes_training(model) else model(x)
        return [tf.reduce_sum(loss) for loss in model.losses]

    strategy = model.distribute_strategy
    try:
        before = _leaving_no_trace(added, once, strategy)
        after = _leaving_no_trace(added, map_leaves(_twice, once), strategy) if before else []
    except Exception as error:
        logger.debug("the model's own losses cannot be tried out: %s", error, exc_info=True)
        return frozenset()
    pairs = enumerate(zip(map(float, before), map(float, after), strict=True))
    return frozenset(i for i, (a, b) in pairs if a != 0 and abs(b / a - 2) < abs(b / a - 1))


def coupled_losses(model: Any, part: Any, layout: ReplicaLayout, rows: int) -> list[bool]:
    """For each of the compiled losses, whether it couples the examples of a batch.

    A user's own loss that cannot be tried is taken to do so: that is slower, and right in any case.

    Args:
        model: a compiled and built model; it is called, its state is left as it was.
        part: a batch of one replica.
        layout: the strategy's.
        rows: examples to try with; with fewer than two none is tried.
    """
    losses = upstream_keras.compiled_losses(model)
    own = [is_own_loss(loss) for _, loss in losses]
    x, y_true, _ = keras.utils.unpack_x_y_sample_weight(part)
    if rows < 2 or y_true is None or not any(own):
        return own
    x, y_true = map_leaves(lambda leaf: _first_rows(leaf, rows), (x, y_true))

    def predict(x: Any) -> Any:
        trial = ReplicaStep(layout, size=rows, total=rows, training=False, probing=True)
        with replica_step(trial):
            return model(x, training=False) if upstream_keras.takes_training(model) else model(x)

    try:
        y_pred = _leaving_no_trace(predict, x, model.distribute_strategy)
        return [
            mine and learn_coupling(loss, _at(path, y_true), _at(path, y_pred))
            for mine, (path, loss) in zip(own, losses, strict=True)
        ]
    except Exception as error:
        logger.debug("the losses cannot be tried out: %s", error, exc_info=True)
        return own


def _at(path: Any, nest: Any) -> Any:
    for key in path:
        nest = nest[key]
    return nest


def _kind(number: int, alone: Any, here: Any, doubled: Any, layout: ReplicaLayout) -> LossKind:
    growth, scale = _ratio(doubled, here), _ratio(here, alone)
    sums = math.isfinite(growth) and abs(growth - 2) < abs(growth - 1)
    scaled = math.isfinite(scale) and abs(scale * layout.replicas - 1) < _NEAR
    clear = abs(growth - (2 if sums else 1)) < _NEAR and (scaled or abs(scale - 1) < _NEAR)
    if not clear and math.isfinite(growth):
        warnings.warn(
            f"Value {number + 1} that train_step differentiates or reports is neither a mean nor a sum over "
            f"the batch (twice the examples give {growth:.3g} times of it): replicas are combined as for a "
            f"{'sum' if sums else 'mean'}, and the numbers may differ from one device's. "
            "Hint: make every part of the loss a mean over the examples.",
            stacklevel=2,
        )
    return LossKind(sums=sums, scale=1 / layout.replicas if scaled and layout.replicas > 1 else 1.0)


def _ratio(numerator: Sequence[Any], denominator: Sequence[Any]) -> float:
    """The factor between two lists of gradients, by least squares; NaN where there is none."""
    dot = square = 0.0
    for a, b in zip(numerator, denominator, strict=True):
        if a is None or b is None:
            continue
        a, b = (tf.cast(tf.convert_to_tensor(g), tf.float64) for g in (a, b))
        dot += float(tf.reduce_sum(a * b))
        square += float(tf.reduce_sum(b * b))
    return dot / square if square > 0 else math.nan


def _trial(
    step: Callable[[Any, ReplicaStep], None],
    part: Any,
    rows: int,
    layout: ReplicaLayout,
    strategy: Any,
    training: bool,
) -> list[list[Any]]:
    """What stands at each combining point of the step for a batch; all variables are as before."""

    def run(part: Any) -> list[list[Any]]:
        trial = ReplicaStep(layout, size=batch_rows(part), total=rows, training=training, probing=True)
        with replica_step(trial):
            step(part, trial)
        return trial.taken

    return list(_leaving_no_trace(run, part, strategy))


def _leaving_no_trace(function: Callable[[Any], Any], part: Any, strategy: Any) -> Any:
    """What a function returns for a batch, on one replica; all variables are as before.

    Args:
        function: takes a batch.
        part: the batch.
        strategy: the model's; None runs the function as on one device.
    """

    def everywhere(part: Any) -> Any:
        if strategy is None:
            return function(part)
        return strategy.run(upstream_keras.with_seed_generator(function), args=(part,))

    traced = tf.function(everywhere, autograph=False).get_concrete_function(part)
    with _kept(traced.graph.variables):
        found = traced(part)
    if strategy is None:
        return found
    return map_leaves(lambda v: None if v is None else strategy.experimental_local_results(v)[0], found)


@contextmanager
def _kept(variables: Sequence[Any]) -> Iterator[None]:
    """Puts back the values of variables."""
    before = [(variable, tf.identity(variable.read_value())) for variable in variables]
    try:
        yield
    finally:
        for variable, value in before:
            variable.assign(value)


def _first_rows(leaf: Any, rows: int) -> Any:
    if leaf is None or isinstance(leaf, tf.experimental.Optional):
        return None
    if isinstance(leaf, tf.SparseTensor):
        return tf.sparse.slice(leaf, [0] * leaf.shape.rank, [rows, *leaf.dense_shape[1:]])
    return leaf if leaf.shape.rank == 0 else leaf[:rows]


def _twice(leaf: Any) -> Any:
    if leaf is None or leaf.shape.rank == 0:
        return leaf
    if isinstance(leaf, tf.SparseTensor):
        return tf.sparse.concat(0, [leaf, leaf])
    return tf.concat([leaf, leaf], axis=0)
