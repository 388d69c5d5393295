"""Finds what was made outside of a strategy's scope, or in two different ones, before numbers go wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from dtrain.errors import ScopeError
from dtrain.keras_engine.context import underlying
from dtrain.keras_engine.protocol import layout_of
from dtrain.upstream import keras as upstream_keras


def check_model(model: Any) -> None:
    """Refuses a model whose variables, optimizer or metrics were made outside its strategy's scope.

    Raises:
        ScopeError: naming what was made where.
    """
    strategy = model.distribute_strategy
    made_under = upstream_keras.strategy_of(model)
    check_scope(model, made_under)
    if made_under is None and not tf.distribute.has_strategy():
        return  # TensorFlow's default strategy
    if made_under is not strategy:
        raise ScopeError(
            f"fit was called inside the scope of a {type(strategy).__name__}, but the model {model.name!r} "
            "was made outside of it: it would train on one device only.",
            hint="build and compile the model inside `with strategy.scope():`; fit may stand outside",
        )
    layout = layout_of(strategy)
    if layout is None or layout.replicas == 1:
        return
    for variable in model.variables:
        check_variable(variable, strategy)
    if layout.workers > 1:
        # Replicas of one process can share a plain metric variable; processes would each count their own.
        for variable in model.metrics_variables:
            check_variable(variable, strategy)
    if isinstance(model.optimizer, keras.optimizers.Optimizer):
        check_same_strategy(model.optimizer, strategy, None)


def check_scope(model: Any, made_under: Any) -> None:
    """Refuses to work on a model inside the scope of a strategy that is not its own.

    Raises:
        ScopeError: naming both.
    """
    here = tf.distribute.get_strategy()
    if made_under is not None and tf.distribute.has_strategy() and here is not made_under:
        raise ScopeError(
            f"The model {model.name!r} was made under a {type(made_under).__name__}, but it is used inside "
            f"the scope of another strategy, a {type(here).__name__}.",
            hint="use the model outside of scopes, or build another one inside `with strategy.scope():`",
        )


def check_same_strategy(optimizer: Any, strategy: Any, variables: Sequence[Any] | None) -> None:
    """Refuses an optimizer or variables that belong to another strategy.

    Raises:
        ScopeError: naming the strategy that each was made under.
    """
    made_under = upstream_keras.strategy_of_optimizer(optimizer) or strategy
    if made_under is not strategy:
        raise ScopeError(
            f"The optimizer {optimizer.name!r} was made {_place(made_under)}, "
            f"but it updates a model under {_name(strategy)}.",
            hint="make the optimizer (or call compile with its name) inside `with strategy.scope():`",
        )
    for variable in variables or ():
        check_variable(variable, strategy)


def check_variable(variable: Any, strategy: Any) -> None:
    """Refuses a variable that was not made under `strategy`.

    Raises:
        ScopeError: naming the variable and the strategy that it was made under.
    """
    found = getattr(underlying(variable), "distribute_strategy", None)
    layout = layout_of(strategy)
    if found is strategy or (found is None and layout is not None and layout.replicas == 1):
        return
    name = getattr(variable, "path", None) or variable.name
    raise ScopeError(
        f"The variable {name!r} was made {_place(found)}, but it is used under {_name(strategy)}.",
        hint="build the model and its optimizer inside `with strategy.scope():` of one strategy",
    )


def _place(strategy: Any) -> str:
    if strategy is None or not strategy.extended or type(strategy).__name__ == "_DefaultDistributionStrategy":
        return "outside of any strategy's scope"
    return f"under another {type(strategy).__name__}"


def _name(strategy: Any) -> str:
    return f"{type(strategy).__name__} with {strategy.num_replicas_in_sync} replicas"
