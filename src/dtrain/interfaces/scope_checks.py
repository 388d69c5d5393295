"""Refuses what was made outside of its strategy's scope, before it trains to wrong results.

A strategy tells when it is made and when its scope is entered. Models, optimizers, variables and metrics are
checked against that before they are used. A distribution of `keras.distribution` is refused, too.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from dtrain.base.log import logger
from dtrain.errors import ConfigurationError, ScopeError
from dtrain.interfaces.managed_strategy import layout_of
from dtrain.interfaces.replica_layout import ReplicaLayout
from dtrain.upstream import keras_models, keras_optimizers
from dtrain.upstream.tf_variables import underlying

# Describes this process' strategy of several workers; never reset, as a process cannot leave its job.
_with_workers = ""
# The last strategy over this process' devices or over parameter servers, until any scope is entered.
_never_entered: weakref.ref[Any] | None = None
_loop_noted = False


def _distribute() -> Any:
    """`tf.distribute`, imported late, as strategies import this module before they check the versions."""
    import tensorflow as tf

    return tf.distribute


def strategy_made(strategy: Any) -> None:
    """Notes that this process has made a strategy, so that models outside of its scope are detected."""
    global _with_workers, _never_entered
    layout = layout_of(strategy)
    if layout is not None and layout.workers > 1:
        _with_workers = f"a {type(strategy).__name__} of {layout.workers} workers"
    elif layout is None or layout.replicas > 1:
        _never_entered = weakref.ref(strategy)


def scope_entered() -> None:
    """Notes that the program has entered a scope; a model outside of it then counts as intended."""
    global _never_entered
    check_distribution()
    _never_entered = None


def check_distribution() -> None:
    """Refuses a distribution of `keras.distribution`, which Keras ignores on TensorFlow, without a message.

    Raises:
        ConfigurationError: names the distribution, and the strategy to use instead.
    """
    import keras  # imported here, because strategies import this module before they check Keras' backend

    distribution = keras.distribution.distribution()
    if distribution is None:
        return
    data, weights = 'dtrain.strategy("mirrored") or "multi_worker"', 'dtrain.strategy("fully_sharded")'
    if isinstance(distribution, keras.distribution.DataParallel):
        instead = f"{data} divides the batches"
    elif isinstance(distribution, keras.distribution.ModelParallel):
        instead = f"{weights} divides the weights"
    else:
        instead = f"{data} divides the batches, {weights} the weights too"
    raise ConfigurationError(
        f"keras.distribution has a {type(distribution).__name__}, which does nothing on Keras' TensorFlow "
        "backend.",
        hint=f"leave out keras.distribution.set_distribution: {instead}",
    )


def check_left_out(model: Any) -> None:
    """Refuses, or warns of, a model about to train outside of every scope in a process with a strategy.

    If several workers run the program, each would train its own model: that is an error. With devices of one
    process, or a chief's workers, the result is right but devices stay idle: that is a warning, given once
    and only if no scope was ever entered.

    Raises:
        ScopeError: the process made a strategy of several workers that each run the program.
    """
    global _never_entered
    if keras_models.strategy_of(model) is not None or _distribute().has_strategy():
        return
    if layout_of(_distribute().get_strategy()) is not None:
        return  # the program has called `default_strategy`, so that one device is intended
    if _with_workers:
        raise ScopeError(
            f"The model {model.name!r} was made outside of any strategy's scope, but this process made "
            f"{_with_workers}: each process would train a model of its own.",
            hint="build and compile the model inside `with strategy.scope():`; a model that each process is "
            'to train by itself, inside `with dtrain.OneDeviceStrategy("/cpu:0").scope():`',
        )
    strategy = _never_entered() if _never_entered is not None else None
    if strategy is not None:
        _never_entered = None  # so that the warning is given once
        warnings.warn(
            f"The model {model.name!r} was made outside of the scope of the {type(strategy).__name__}: it "
            "trains on one device of this process only. Hint: build and compile the model inside "
            "`with strategy.scope():`.",
            stacklevel=2,
        )


def check_optimizer_left_out(optimizer: Any) -> None:
    """Warns once of an optimizer that a user's own loop applies outside of the scope, in a job of workers.

    It is no error, because a process may update variables that it does not share with other workers.
    """
    global _loop_noted
    own = keras_optimizers.strategy_of_optimizer(optimizer)
    if not _with_workers or _loop_noted or own is not _distribute().get_strategy():
        return
    _loop_noted = True
    logger.warning(
        "The optimizer %r updates variables outside of any strategy's scope, but this process made %s: "
        "nothing is reduced over the workers, so each trains a model of its own. Hint: make the model and "
        "the optimizer inside `with strategy.scope():`, and run the step by `strategy.run`.",
        optimizer.name,
        _with_workers,
    )


@contextlib.contextmanager
def tensorflows_own_explained(model: Any) -> Iterator[None]:
    """Adds a hint to Keras' errors under TensorFlow's own multi-worker strategies: use dtrain's instead."""
    strategy = model.distribute_strategy
    distribute = _distribute()
    instead = {
        distribute.MultiWorkerMirroredStrategy: "dtrain.MultiWorkerMirroredStrategy()",
        distribute.ParameterServerStrategy: "dtrain.ParameterServerStrategy()",
    }
    replacements = [ours for theirs, ours in instead.items() if isinstance(strategy, theirs)]
    try:
        yield
    except ValueError as error:
        if replacements and not isinstance(error, ScopeError):
            error.add_note(
                f"Hint: Keras 3 cannot train under tf.distribute.{type(strategy).__name__}; "
                f"write strategy = {replacements[0]} instead."
            )
        raise


def check_model(model: Any) -> None:
    """Refuses a model whose variables, optimizer or metrics were made outside of its strategy's scope.

    Raises:
        ScopeError: names the object, and where it was made.
        ConfigurationError: as `check_distribution`.
    """
    import keras  # as in `check_distribution`

    check_distribution()
    strategy = model.distribute_strategy
    check_scope(model, made_under := keras_models.strategy_of(model))
    if made_under is None and not _distribute().has_strategy():
        return  # TensorFlow's default strategy
    if made_under is not strategy:
        raise ScopeError(
            f"fit was called inside the scope of a {type(strategy).__name__}, but the model {model.name!r} "
            "was made outside of it: it would train on one device only.",
            hint="build and compile the model inside `with strategy.scope():`; fit may be called outside",
        )
    layout = layout_of(strategy)
    if layout is None or layout.replicas == 1:
        return
    for variable in model.variables:
        check_variable(variable, strategy)
    check_metrics(model, layout)
    if isinstance(model.optimizer, keras.optimizers.Optimizer):
        check_same_strategy(model.optimizer, strategy, None)


def check_metrics(model: Any, layout: ReplicaLayout) -> None:
    """Refuses metrics made outside of the strategy's scope if local SGD gives each process those of its rows.

    Raises:
        ScopeError: names the metric's variable.
    """
    if layout.workers > 1 and layout.average_every:
        for variable in model.metrics_variables:
            check_variable(variable, model.distribute_strategy)


def check_scope(model: Any, made_under: Any) -> None:
    """Refuses a model that is used inside the scope of another strategy than its own.

    Raises:
        ScopeError: names both strategies.
    """
    here = _distribute().get_strategy()
    if made_under is not None and _distribute().has_strategy() and here is not made_under:
        raise ScopeError(
            f"The model {model.name!r} was made under a {type(made_under).__name__}, but it is used inside "
            f"the scope of another strategy, a {type(here).__name__}.",
            hint="use the model outside of scopes, or build another one inside `with strategy.scope():`",
        )


def check_same_strategy(optimizer: Any, strategy: Any, variables: Sequence[Any] | None) -> None:
    """Refuses an optimizer or variables that belong to another strategy.

    Raises:
        ScopeError: names the strategy that the optimizer or the variable was made under.
    """
    made_under = keras_optimizers.strategy_of_optimizer(optimizer) or strategy
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
        ScopeError: names the variable and the strategy that it was made under.
    """
    made_under = getattr(underlying(variable), "distribute_strategy", None)
    layout = layout_of(strategy)
    if made_under is strategy or (made_under is None and layout is not None and layout.replicas == 1):
        return
    name = getattr(variable, "path", None) or variable.name
    raise ScopeError(
        f"The variable {name!r} was made {_place(made_under)}, but it is used under {_name(strategy)}.",
        hint="build the model and its optimizer inside `with strategy.scope():` of one strategy",
    )


def _place(strategy: Any) -> str:
    if strategy is None or not strategy.extended or type(strategy).__name__ == "_DefaultDistributionStrategy":
        return "outside of any strategy's scope"
    return f"under another {type(strategy).__name__}"


def _name(strategy: Any) -> str:
    return f"{type(strategy).__name__} with {strategy.num_replicas_in_sync} replicas"
