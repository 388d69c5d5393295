"""Gradient hooks: what is sent to the servers, and where it becomes a gradient again."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtrain
from dtrain.errors import ConfigurationError
from dtrain.interfaces.gradient_hook import GradientHook
from dtrain.upstream import keras_optimizers

from .common import BATCH, STEPS, classifier, data, iterations
from .registry import Job, case


class Noted(GradientHook):
    """Sends bfloat16, and notes the gradients' variables and where they arrive."""

    def __init__(self) -> None:
        self.sent: set[str] = set()
        self.arrived: set[tuple[str, str]] = set()

    def compress(self, gradient: tf.Tensor, variable: Any) -> tf.Tensor:
        self.sent.add(variable.path.split("/")[-1])
        return tf.cast(gradient, tf.bfloat16)

    def decompress(self, received: tf.Tensor, variable: Any) -> tf.Tensor:
        found = tf.identity(received)
        self.arrived.add((found.dtype.name, tf.DeviceSpec.from_string(found.device).job))
        return found


def trained(strategy: Any, **options: Any) -> Any:
    """A model that was fitted for two epochs."""
    keras.utils.set_random_seed(6)
    model = classifier(strategy, lambda: keras.optimizers.SGD(0.1, momentum=0.5, **options))
    x, y = data()
    model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    return model


@case
def gradients_are_compressed_on_the_worker_and_decompressed_on_the_server(job: Job) -> None:
    plain = trained(dtrain.ParameterServerStrategy(max_staleness=0))
    hook = Noted()
    found = trained(dtrain.ParameterServerStrategy(max_staleness=0, gradient_hook=hook))
    pairs = zip(found.get_weights(), plain.get_weights(), strict=True)
    apart = max(float(np.abs(a - b).max()) for a, b in pairs)
    assert 1e-6 < apart < 4 * 2.0**-8, apart
    assert (hook.sent, hook.arrived) == ({"kernel", "bias"}, {("bfloat16", "ps")})


@case
def counters_beside_the_gradients_are_sent_as_they_are(job: Job) -> None:
    """With overlap, accumulated micro-batches travel with their number."""
    hook = Noted()
    strategy = dtrain.ParameterServerStrategy(max_staleness=1, overlap=True, gradient_hook=hook)
    model = trained(strategy, gradient_accumulation_steps=2)
    assert (hook.sent, hook.arrived) == ({"kernel", "bias"}, {("bfloat16", "ps")})
    # Keras gives the number of updates; the optimizer's variable counts the micro-batches.
    assert iterations(model) == 2 * STEPS // 2
    assert int(keras_optimizers.iterations_of(model.optimizer).numpy()) == 2 * STEPS


@case
def hooks_that_need_replicas_are_refused(job: Job) -> None:
    class Reduces(GradientHook):
        def reduce(self, gradients: Any, variables: Any, all_reduce: Any) -> Any:
            return all_reduce(gradients)

    for hook, said in (
        ("local_sgd", "exist once, on the servers"),
        (Reduces(), "only a `reduce` of its own"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            dtrain.ParameterServerStrategy(gradient_hook=hook)
