"""Every layer, loss, metric and optimizer of Keras, divided: one device's numbers, and what is gathered.

What no rule divides is listed here with its reason, so that a new version of Keras or TensorFlow that puts
other operations into a step fails this test.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tests import keras_parts
from tests.keras_parts import Part

import dtrain
from dtrain.engine.step.partitioned_steps import DividedFunction
from dtrain.interfaces.managed_strategy import layout_of

_OTHERS_ROWS = "each image is mixed with another one of the batch"
_MIXED = dict.fromkeys(("GatherV2", "StatelessRandomGammaV3", "Sum", "TopKV2"), _OTHERS_ROWS)
_ALIGNMENTS = "the lattice of all alignments is computed on a tensor with labels in front of rows"
_IN_CONDITION = "a gradient through a condition keeps the rows in an Optional"
GATHERED: dict[tuple[str, str], dict[str, str]] = {
    ("layers", "CutMix"): _MIXED,
    ("layers", "HashedCrossing"): {"SparseCross": "its inputs and its result are sparse"},
    ("layers", "MelSpectrogram"): {"MirrorPadGrad": "it is rare, and small beside the spectrogram"},
    ("layers", "MixUp"): _MIXED,
    ("layers", "RandomElasticTransform"): {"StridedSlice": "each image is taken by its number"},
    ("layers", "TextVectorization"): {"StringSplitV2": "the words of all rows are one list"},
    ("losses", "CTC"): dict.fromkeys(("ScatterNd", "TensorScatterAdd", "TensorScatterUpdate"), _ALIGNMENTS),
    ("losses", "Hinge"): {"OptionalFromValue": _IN_CONDITION},
    ("losses", "SquaredHinge"): {"OptionalFromValue": _IN_CONDITION},
}


class Divided:
    """Functions of rows that all replicas compute, the last of which has none.

    Attributes:
        gathered: the types of operations that got all rows, of all functions.
    """

    def __init__(self, strategy: Any) -> None:
        self.gathered: set[str] = set()
        self._strategy = strategy

    def __call__(self, function: Callable[..., Any], batch: Any) -> Any:
        layout = layout_of(self._strategy)
        assert layout is not None
        replicas = layout.replicas
        divided = DividedFunction(function, specs_of(batch), self._strategy, layout)
        self.gathered |= {each.type for each in divided.plan.gathered}
        sizes = [keras_parts.ROWS - 2 * (replicas - 2), *[2] * (replicas - 2), 0]
        cuts = np.cumsum(sizes)[:-1]
        parts = [
            tf.nest.map_structure(lambda each, place=place: tf.constant(np.split(each, cuts)[place]), batch)
            for place in range(replicas)
        ]
        run = tf.function(lambda parts, sizes: divided(parts, sizes), autograph=False)
        return run(parts, tf.constant(sizes, tf.int32))


def specs_of(batch: Any) -> Any:
    """The specs of a batch of any number of rows."""
    return tf.nest.map_structure(lambda each: tf.TensorSpec([None, *each.shape[1:]], each.dtype), batch)


def whole(function: Callable[..., Any], batch: Any) -> Any:
    """What one device computes."""
    traced = tf.function(function, autograph=False).get_concrete_function(specs_of(batch))
    return traced(tf.nest.map_structure(tf.constant, batch))


def same(found: Any, expected: Any, name: str) -> None:
    a, b = (tf.nest.flatten(each, expand_composites=True) for each in (found, expected))
    assert len(a) == len(b)
    for one, other in zip(a, b, strict=True):
        left, right = np.asarray(one), np.asarray(other)
        assert left.shape == right.shape, name
        if left.dtype.kind == "f":
            np.testing.assert_allclose(left, right, rtol=2e-4, atol=2e-5, err_msg=name)
        else:
            np.testing.assert_array_equal(left, right, err_msg=name)


def _differentiated(
    compute: Callable[..., Any], batch: Sequence[Any], weights: Sequence[Any], losses: Callable[[], Any]
) -> Any:
    floats = [each for each in batch if each.dtype.is_floating]
    with tf.GradientTape() as tape:
        tape.watch(floats)
        outputs = compute(*batch)
        numbers = [each for each in tf.nest.flatten(outputs) if each.dtype != tf.string]
        loss = sum(tf.reduce_mean(tf.sin(tf.cast(each, tf.float32))) for each in numbers) + sum(losses())
    gradients = tape.gradient(loss, [*floats, *(each.value for each in weights)])
    return outputs, loss, [each for each in gradients if each is not None]


def of_layer(part: Part, run: Callable[..., Any]) -> Any:
    call, layer = part.make()
    call(*(tf.constant(each[:2]) for each in part.inputs))
    takes = {"training": True} if layer._call_has_training_arg else {}

    def step(batch: Any) -> Any:
        return _differentiated(
            lambda *rows: call(*rows, **takes), batch, layer.trainable_variables, lambda: layer.losses
        )

    found = run(step, list(part.inputs))
    return found, layer.get_weights()


def of_loss(part: Part, run: Callable[..., Any]) -> Any:
    loss = part.make()
    return run(lambda batch: _differentiated(loss, batch, [], list), list(part.inputs))


def of_metric(part: Part, run: Callable[..., Any]) -> Any:
    metric = part.make()

    def step(batch: Any) -> Any:
        metric.update_state(*batch)
        return {}

    for _ in range(2):
        run(step, list(part.inputs))
    return np.asarray(metric.result())


def of_optimizer(part: Part, run: Callable[..., Any]) -> Any:
    body = [keras.layers.Dense(5, "tanh"), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((6,)), *body])
    optimizer = part.make()
    optimizer.build(model.trainable_variables)

    def step(batch: Any) -> Any:
        x, y = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
            scaled = optimizer.scale_loss(loss)
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(scaled, [each.value for each in weights]), weights)
        return loss

    found = [run(step, list(part.inputs)) for _ in range(3)]
    return found, model.get_weights(), [np.asarray(each) for each in optimizer.variables]


KINDS = {
    "layers": (keras_parts.layers, of_layer),
    "losses": (keras_parts.losses, of_loss),
    "metrics": (keras_parts.metrics, of_metric),
    "optimizers": (keras_parts.optimizers, of_optimizer),
}
PARTS = {(kind, name): part for kind, (listed, _) in KINDS.items() for name, part in listed().items()}


@pytest.mark.long
@pytest.mark.parametrize(("kind", "name"), PARTS)
def test_a_part_of_keras_has_the_numbers_of_one_device(kind: str, name: str) -> None:
    compute = KINDS[kind][1]
    keras.utils.set_random_seed(1)
    expected = compute(PARTS[kind, name], whole)
    keras.utils.set_random_seed(1)
    strategy = dtrain.MirroredStrategy()
    run = Divided(strategy)
    with strategy.scope():
        found = compute(PARTS[kind, name], run)
    same(found, expected, name)
    assert run.gathered == set(GATHERED.get((kind, name), {}))
