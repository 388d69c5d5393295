"""Makes an optimizer from a name, an object, a class or a function, with the run's rate and accumulation.

It only changes these two settings in the configuration of Keras' optimizers; it does not change what they
compute.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

import keras

from dtrain.errors import ConfigurationError
from dtrain.upstream import keras_optimizers

OptimizerLike: TypeAlias = str | keras.optimizers.Optimizer | Callable[..., keras.optimizers.Optimizer]
"""A name that Keras knows, an optimizer that was not used yet, a class, or a function that takes a rate."""


def base_optimizer(optimizer: OptimizerLike, learning_rate: Any = None) -> keras.optimizers.Optimizer:
    """The optimizer with its rate before any scaling.

    Args:
        optimizer: a name, an optimizer, a class, or a function of the rate.
        learning_rate: a number or a Keras schedule; None keeps the optimizer's own rate.

    Raises:
        ConfigurationError: `optimizer` is none of these, has been used already, or is a function of the rate
            and `learning_rate` is None.
    """
    if isinstance(optimizer, str):
        try:
            instance = keras.optimizers.get(optimizer)
        except ValueError as error:
            raise ConfigurationError(
                f"The optimizer {optimizer!r} is not known to Keras.",
                hint="Use a name such as 'adam', 'adamw' or 'sgd', or an optimizer of keras.optimizers.",
            ) from error
    elif isinstance(optimizer, keras.optimizers.Optimizer):
        instance = optimizer
    elif isinstance(optimizer, type):
        instance = optimizer()
    elif callable(optimizer):
        instance = _called(optimizer, learning_rate)
    else:
        raise ConfigurationError(
            f"The optimizer is {optimizer!r}.",
            hint="Give a name, an optimizer of keras.optimizers, its class, or a function of the rate.",
        )
    if not isinstance(instance, keras.optimizers.Optimizer):
        raise ConfigurationError(
            f"{optimizer!r} gave {instance!r}, which is not an optimizer of keras.optimizers.",
            hint="Give a function that returns a keras.optimizers.Optimizer.",
        )
    if instance.built:
        raise ConfigurationError(
            f"The optimizer {instance.name!r} has been used with a model already.",
            hint="Give a new one, or a function that makes one.",
        )
    return instance if learning_rate is None else with_settings(instance, learning_rate=learning_rate)


def _called(function: Callable[..., Any], learning_rate: Any) -> Any:
    """Call a function with the rate, or without arguments if the rate is None."""
    given = () if learning_rate is None else (learning_rate,)
    try:
        inspect.signature(function).bind(*given)
    except ValueError:
        pass  # a built-in function without a signature
    except TypeError as error:
        condition = "learning_rate is not set" if learning_rate is None else "learning_rate is set"
        raise ConfigurationError(
            f"The optimizer is the function {function!r}, and {condition}: {error}.",
            hint="A function of the rate needs learning_rate; it is called with that alone.",
        ) from error
    return function(*given)


def rate_of(optimizer: keras.optimizers.Optimizer) -> Any:
    """The rate of an optimizer: a float, or a Keras schedule.

    Raises:
        ConfigurationError: the rate is a function, or a schedule that Keras cannot make from its
        configuration.
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return rate_of(optimizer.inner_optimizer)
    try:
        rate = optimizer.get_config()["learning_rate"]
        if not isinstance(rate, dict):
            return float(rate)
        schedule = keras.saving.deserialize_keras_object(rate)
    except (TypeError, ValueError) as error:
        raise _no_rate(optimizer, str(error)) from error
    if not isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
        raise _no_rate(optimizer, f"it is {schedule!r}")
    return schedule


def _no_rate(optimizer: keras.optimizers.Optimizer, found: str) -> ConfigurationError:
    return ConfigurationError(
        f"The learning rate of the optimizer {optimizer.name!r} is neither a number nor a schedule that "
        f"Keras can make anew: {found}",
        hint="Give a number or a schedule of keras.optimizers.schedules; the class of a schedule of your "
        "own must have get_config and be registered with keras.saving.register_keras_serializable.",
    )


def with_settings(
    optimizer: keras.optimizers.Optimizer, *, learning_rate: Any = None, accumulation: int | None = None
) -> keras.optimizers.Optimizer:
    """A new optimizer with the same configuration, except for the given settings.

    Args:
        optimizer: the optimizer to copy; it is not changed.
        learning_rate: a number or a Keras schedule; None keeps the rate.
        accumulation: micro-batches in an update, 1 for no accumulation; None keeps the setting.

    Raises:
        ConfigurationError: the optimizer already accumulates another number of micro-batches.
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        inner = with_settings(
            optimizer.inner_optimizer, learning_rate=learning_rate, accumulation=accumulation
        )
        settings = optimizer.get_config()
        return keras.optimizers.LossScaleOptimizer(
            inner, settings["initial_scale"], settings["dynamic_growth_steps"]
        )
    config = optimizer.get_config()
    if learning_rate is not None:
        config["learning_rate"] = learning_rate
    if accumulation is not None:
        own = config.get("gradient_accumulation_steps")
        if own not in (None, accumulation):
            raise ConfigurationError(
                f"The optimizer has gradient_accumulation_steps={own}, but {accumulation} are set here.",
                hint="Leave it to one of the two.",
            )
        config["gradient_accumulation_steps"] = accumulation if accumulation > 1 else None
    made = type(optimizer).from_config(config)
    keras_optimizers.copy_decay_exclusions(optimizer, made)
    return made
