"""Finds what was made outside of a strategy's scope, or in two different ones, before numbers go wrong.

It knows which strategies this process has made; it changes neither models nor strategies.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from dtrain.errors import ScopeError
from dtrain.keras_engine.context import underlying
from dtrain.keras_engine.protocol import layout_of, servers_of
from dtrain.log import logger
from dtrain.upstream import keras as upstream_keras

# What was made of several workers, in words: a process that has joined a job is part of it for its life.
_with_workers = ""
# The last strategy that this process alone leads, over devices or servers, until a scope is entered.
_never_entered: weakref.ref[Any] | None = None
_loop_noted = False


def strategy_made(strategy: Any) -> None:
    """Notes that this process has made a strategy; a model that is outside of its scope is then found."""
    global _with_workers, _never_entered
    layout = layout_of(strategy)
    if layout is not None and layout.workers > 1:
        _with_workers = f"a {type(strategy).__name__} of {layout.workers} workers"
    elif servers_of(strategy) is not None or (layout is not None and layout.replicas > 1):
        _never_entered = weakref.ref(strategy)


def scope_entered() -> None:
    """Notes that the program enters a scope, so that a model outside of it is meant to be there."""
    global _never_entered
    _never_entered = None


def check_left_out(model: Any) -> None:
    """Finds a model that is about to train outside of every scope, although the process made a strategy.

    Where several workers run the program, each would train a model of its own. Devices of one process, and
    the workers of a chief, would stay idle, but the numbers are right: that is a warning, and only where no
    scope was ever entered.

    Raises:
        ScopeError: the strategy has several workers that run the program.
    """
    global _never_entered
    if upstream_keras.strategy_of(model) is not None or tf.distribute.has_strategy():
        return
    if layout_of(tf.distribute.get_strategy()) is not None:
        return  # the program has asked for the default strategy by its name
    if _with_workers:
        raise ScopeError(
            f"The model {model.name!r} was made outside of any strategy's scope, but this process made "
            f"{_with_workers}: each process would train a model of its own.",
            hint="build and compile the model inside `with strategy.scope():`; a model that each process is "
            'to train by itself, inside `with dtrain.OneDeviceStrategy("/cpu:0").scope():`',
        )
    strategy = _never_entered() if _never_entered is not None else None
    if strategy is not None:
        _never_entered = None  # said once
        warnings.warn(
            f"The model {model.name!r} was made outside of the scope of the {type(strategy).__name__}: it "
            "trains on one device of this process only. Hint: build and compile the model inside "
            "`with strategy.scope():`.",
            stacklevel=2,
        )


def check_optimizer_left_out(optimizer: Any) -> None:
    """Warns once where a loop of the program's own trains outside of the scope of a strategy of workers.

    It is no error: a process may update something that concerns itself alone.
    """
    global _loop_noted
    own = upstream_keras.strategy_of_optimizer(optimizer)
    if not _with_workers or _loop_noted or own is not tf.distribute.get_strategy():
        return
    _loop_noted = True
    logger.warning(
        "The optimizer %r updates variables outside of any strategy's scope, but this process made %s: "
        "nothing is reduced over the workers, so each trains a model of its own. Hint: make the model and "
        "the optimizer inside `with strategy.scope():`, and take the step by `strategy.run`.",
        optimizer.name,
        _with_workers,
    )


@contextlib.contextmanager
def tensorflows_own_explained(model: Any) -> Iterator[None]:
    """Adds what to write instead to errors of Keras 3 under TensorFlow's own strategies of workers."""
    strategy = model.distribute_strategy
    instead = {
        tf.distribute.MultiWorkerMirroredStrategy: "dtrain.MultiWorkerMirroredStrategy()",
        tf.distribute.ParameterServerStrategy: "dtrain.ParameterServerStrategy()",
    }
    found = [ours for theirs, ours in instead.items() if isinstance(strategy, theirs)]
    try:
        yield
    except ValueError as error:
        if found and not isinstance(error, ScopeError):
            error.add_note(
                f"Hint: Keras 3 cannot train under tf.distribute.{type(strategy).__name__}; "
                f"write strategy = {found[0]} instead."
            )
        raise


def check_model(model: Any) -> None:
    """Refuses a model whose variables, optimizer or metrics were made outside its strategy's scope.

    Raises:
        ScopeError: naming what was made where.
    """
    import keras  # late: strategies import this module before they have checked Keras' backend

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
