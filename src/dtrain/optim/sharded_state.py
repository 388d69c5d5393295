"""Divides an optimizer's state over the replicas by one call (ZeRO, stage 1).

It says which optimizers can be divided; how the division works is the engine's.
"""

from __future__ import annotations

import keras

from dtrain.errors import ConfigurationError
from dtrain.keras_engine.hook import install
from dtrain.keras_engine.sharded_state import shard
from dtrain.log import logger
from dtrain.upstream import keras as upstream_keras

# Those whose state is shaped as the weights are, begins alike everywhere, and is used in the update alone.
DIVISIBLE = (
    "Adadelta",
    "Adagrad",
    "Adam",
    "Adamax",
    "AdamW",
    "Ftrl",
    "Lamb",
    "Lion",
    "Nadam",
    "RMSprop",
    "SGD",
)


def shard_state(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Has each replica keep the state (moments) of a part of the weights, and update these.

    Stage 1 of ZeRO (Rajbhandari et al., arXiv:1910.02054): with N replicas each holds about 1/N of the
    optimizer's state, weights and gradients stay whole. Weights are given out whole, the largest first, each
    to the replica with the fewest bytes so far. The numbers are those of the optimizer itself: gradients are
    summed, clipped and scaled as before, then every weight is updated by its owner and handed to the others.
    Under several workers that is one more reduction of the weights a step.

    Call it in the strategy's scope, before the optimizer is used:
    `model.compile(dtrain.optim.shard_state(keras.optimizers.Adam()), ...)`. It belongs to this object: one
    that is made from its configuration, as by loading a model, is not divided; `load_weights` into a model
    that was compiled with it takes the state over.

    A saved model holds the whole state and goes on anywhere. Under several workers all of them must save.
    `tf.train.Checkpoint` and `optimizer.variables` see this process' part only.

    It has no effect with one replica, under CentralStorageStrategy, where the state exists once, and under
    ParameterServerStrategy, where it lies on the servers.

    Args:
        optimizer: one of Keras' Adadelta, Adagrad, Adam, Adamax, AdamW, Ftrl, Lamb, Lion, Nadam, RMSprop and
            SGD, a class derived from one, or a `LossScaleOptimizer` around it.

    Returns:
        The same optimizer.

    Raises:
        ConfigurationError: the optimizer is used already, keeps moving averages of the weights (`use_ema`),
            or is not one of those above.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    classes = tuple(getattr(keras.optimizers, name) for name in DIVISIBLE)
    if not isinstance(inner, classes):
        raise ConfigurationError(
            f"shard_state was given a {type(inner).__name__}, whose state cannot be divided by weights.",
            hint=f"one of {', '.join(DIVISIBLE)}",
        )
    if inner.use_ema:
        raise ConfigurationError(
            "shard_state was given an optimizer with use_ema=True, whose averages are written to the weights "
            "of every replica and cannot be divided.",
            hint="leave use_ema out, or do without shard_state",
        )
    if inner.built:
        raise ConfigurationError(
            f"shard_state was given the optimizer {inner.name!r}, which has its state already.",
            hint="call it before compile: compile(shard_state(keras.optimizers.Adam()), ...)",
        )
    install()
    if not shard(inner):
        strategy = upstream_keras.strategy_of_optimizer(inner)
        logger.info("shard_state has no effect under %s.", type(strategy).__name__)
    return optimizer
