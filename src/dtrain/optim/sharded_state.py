"""Shards an optimizer's state over the replicas by one call (ZeRO, stage 1).

It checks whether an optimizer can be sharded; the sharding itself is in `engine/sharding/sharding_plan.py`.
"""

from __future__ import annotations

import keras

from dtrain.base.log import logger
from dtrain.engine.install import install
from dtrain.engine.sharding.sharding_plan import shard
from dtrain.errors import ConfigurationError
from dtrain.upstream import keras_optimizers

# Optimizers whose state has the shape of the weights, begins equal on all replicas, and is used in updates
# only.
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
    """Shard an optimizer's state: each replica keeps the state (moments) of some weights, and updates these.

    This is stage 1 of ZeRO (Rajbhandari et al., arXiv:1910.02054): of N replicas, each holds about 1/N of the
    optimizer's state; weights and gradients are not sharded. Each weight is assigned as a whole to one
    replica, its owner: the largest weight first, each to the replica with the fewest bytes so far. The
    numbers are those of the optimizer without sharding: gradients are all-reduced, clipped and scaled as
    before, then the owner updates each weight and sends it to the other replicas. With several workers this
    costs one more all-reduce of the weights in each step.

    Call it in the strategy's scope, before the optimizer is used:
    `model.compile(dtrain.optim.shard_state(keras.optimizers.Adam()), ...)`. Only this object is sharded: an
    optimizer that is made from its configuration, for example by loading a model, is not. To restore the
    state into a sharded optimizer, call `load_weights` on a model that was compiled with one.

    A saved model holds the whole state, and training can resume from it under any strategy. With several
    workers, all of them must save. `tf.train.Checkpoint` and `optimizer.variables` see only this process'
    shard.

    It has no effect with one replica, under CentralStorageStrategy, where the state exists once, and under
    ParameterServerStrategy, where the state is on the servers.

    Args:
        optimizer: one of Keras' Adadelta, Adagrad, Adam, Adamax, AdamW, Ftrl, Lamb, Lion, Nadam, RMSprop and
            SGD, a class derived from one, or a `LossScaleOptimizer` around it.

    Returns:
        The same optimizer.

    Raises:
        ConfigurationError: the optimizer has been used already, keeps moving averages of the weights
            (`use_ema`), or is not one of the above.

    Example:
        ```python
        with dtrain.strategy("mirrored").scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile(dtrain.optim.shard_state(keras.optimizers.Adam()), "mse")
        ```
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
        strategy = keras_optimizers.strategy_of_optimizer(inner)
        logger.info("shard_state has no effect under %s.", type(strategy).__name__)
    return optimizer
