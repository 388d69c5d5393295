"""Reads and sets private names in Keras' variables, scopes and random seeds."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from typing import Any

from dtrain.upstream import keras_names
from dtrain.upstream.reach import keras_is_at_least


def seed_generator_global() -> Any:
    """Keras' global seed generator; created if it does not exist yet.

    Creating it does not change Python's random state, so layers created afterwards get the same seeds.
    """
    from keras.src.random.seed_generator import global_seed_generator

    state = random.getstate()
    try:
        return global_seed_generator()
    finally:
        random.setstate(state)


def shape_of_pure_initializer(arguments: dict[str, Any]) -> Any:
    """The shape and dtype of an initial value that is the same however often and by whomever it is drawn.

    Only Keras' own initializers are known for it: those with plain settings, such as a number as seed. A
    `SeedGenerator` advances a state, and so may a user's initializer.

    Args:
        arguments: those of the creator of a `tf.Variable`.

    Returns:
        A `tf.TensorSpec`; None for any other initial value.
    """
    import keras
    import tensorflow as tf

    value = arguments["initial_value"]
    of_keras = keras_names.INITIALIZE.original().__code__.co_consts
    if not inspect.isfunction(value) or value.__code__ not in of_keras:
        return None
    used = inspect.getclosurevars(value).nonlocals
    initializer = used["initializer"]
    kind = type(initializer)
    if getattr(keras.initializers, kind.__name__, None) is not kind:
        return None
    if not all(isinstance(setting, _PLAIN) for setting in vars(initializer).values()):
        return None
    return tf.TensorSpec(used["self"].shape, arguments["dtype"])


_PLAIN = int | float | str | None


def made_in_parts(make: Callable[[], Any], aggregation: Any) -> Any:
    """Makes a metric's variable hold a part on each replica; the parts are combined when it is read.

    Keras does so itself since 3.10. Before, replicas would have to communicate at each update.

    Args:
        make: makes the variable. In a stateless scope, Keras gives it a value later.
        aggregation: a `tf.VariableAggregation`, how the parts are combined; None leaves it to Keras.
    """
    import tensorflow as tf

    if aggregation is None and keras_is_at_least(3, 10):
        return make()
    asked = {"synchronization": tf.VariableSynchronization.ON_READ}
    if aggregation is not None:
        asked["aggregation"] = aggregation

    def on_read(create: Callable[..., Any], **kwargs: Any) -> Any:
        return create(**kwargs | asked)

    with tf.variable_creator_scope(on_read):
        variable = make()
    if getattr(variable, "_value", variable) is None:

        def initialize() -> None:
            del variable._deferred_initialize
            with tf.variable_creator_scope(on_read):
                variable._deferred_initialize()

        variable._deferred_initialize = initialize
    return variable


def in_stateless_scope() -> bool:
    """Whether a Keras `StatelessScope` is active, so that variables are read from and written to it."""
    from keras.src.backend.common.stateless_scope import in_stateless_scope as found

    return bool(found())


def value_of(variable: Any) -> Any:
    """The `tf.Variable` that a Keras variable wraps; None for other objects."""
    return getattr(variable, "_value", None)


def set_value_of(variable: Any, value: Any) -> None:
    """Makes a Keras variable wrap another `tf.Variable`."""
    variable._value = value
