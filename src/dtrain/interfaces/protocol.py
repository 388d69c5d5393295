"""The interface between the engine and strategies or datasets, so that the engine names none of them.

A strategy of dtrain's has an attribute `dtrain_layout`: a `ReplicaLayout`, or a `ServerLayout` if its weights
are on parameter servers. A strategy without it is left to Keras and TensorFlow. A strategy also tells the
engine when it is made and when its scope is entered; the checks here refuse models, optimizers and variables
that were made outside of their strategy's scope, before they train to wrong results. A dataset may carry its
own way to read one worker's part of its batches, or to begin at a position. No strategy is implemented here.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from dtrain.base.log import logger
from dtrain.errors import ScopeError
from dtrain.upstream import keras as upstream_keras
from dtrain.upstream.tensorflow import underlying

if TYPE_CHECKING:
    from dtrain.interfaces.gradient_hook import GradientHook

# Describes this process' strategy of several workers; never reset, as a process cannot leave its job.
_with_workers = ""
# The last strategy over this process' devices or over parameter servers, until any scope is entered.
_never_entered: weakref.ref[Any] | None = None
_loop_noted = False


@dataclass(frozen=True, kw_only=True)
class ReplicaLayout:
    """How the replicas of a strategy are distributed over workers.

    Attributes:
        workers: the number of processes that train together.
        worker: this process' number among them, from 0.
        local_replicas: the number of replicas in this process.
        central: whether weights and optimizer state exist once for all replicas.
        sums: names what all-reduces between workers (`Transport.sums`). Results of different ones may differ
            in their last bits. "" with one worker.
        gradient_hook: changes how gradients are reduced; None for a plain all-reduce.
        cross_device_sums: whether the strategy's `CrossDeviceOps` make the sums of a step.
    """

    workers: int = 1
    worker: int = 0
    local_replicas: int = 1
    central: bool = False
    sums: str = ""
    gradient_hook: GradientHook | None = None
    cross_device_sums: bool = False

    @property
    def replicas(self) -> int:
        """The number of all replicas of the job."""
        return self.workers * self.local_replicas

    @property
    def average_every(self) -> int:
        """Steps after which the replicas average their weights (local SGD); 0 if they reduce gradients."""
        hook = self.gradient_hook
        return 0 if hook is None or self.replicas == 1 else hook.average_every

    @property
    def first_replica(self) -> int:
        """The global number of this process' first replica."""
        return self.worker * self.local_replicas


def is_managed(strategy: Any) -> bool:
    """Whether the engine trains the models of a strategy; if not, they are left to Keras and TensorFlow."""
    return getattr(strategy, "dtrain_layout", None) is not None


def is_asynchronous(strategy: Any) -> bool:
    """Whether a strategy's weights are on parameter servers, so that it has a `ServerLayout`."""
    return isinstance(getattr(strategy, "dtrain_layout", None), ServerLayout)


def layout_of(strategy: Any) -> ReplicaLayout | None:
    """A strategy's replica layout; None for TensorFlow's strategies, parameter servers and TPUs."""
    layout = getattr(strategy, "dtrain_layout", None)
    return layout if isinstance(layout, ReplicaLayout) else None


def waiting_clock(strategy: Any) -> Callable[[], float] | None:
    """A function: the seconds that this process has waited for others so far; None if not measured."""
    return getattr(strategy, "dtrain_waited", None)


def communication_clock(strategy: Any) -> Callable[[], float] | None:
    """A function that returns the seconds of this process' communication so far, including the waiting.

    None for a strategy whose transport does not measure them.
    """
    return getattr(strategy, "dtrain_communicated", None)


def reduction_groups(strategy: Any, tensors: Sequence[Any]) -> Sequence[Sequence[int]]:
    """Which dense tensors one call of the transport all-reduces together, in the order of the calls.

    All together, unless the strategy sends gradients while others are still computed (`dtrain_buckets`).
    """
    groups = getattr(strategy, "dtrain_buckets", None)
    return [range(len(tensors))] if groups is None else groups(tensors)


def _distribute() -> Any:
    """`tf.distribute`, imported late: processes that only exchange small values need no TensorFlow."""
    import tensorflow as tf

    return tf.distribute


def current_layout() -> ReplicaLayout | None:
    """The layout of the current strategy, if it is dtrain's and has several replicas; else None."""
    layout = layout_of(_distribute().get_strategy())
    return layout if layout is not None and layout.replicas > 1 else None


@dataclass(frozen=True, kw_only=True)
class ServerLayout:
    """What the engine needs to know of a strategy whose weights are on parameter servers.

    Attributes:
        workers: the number of tasks that compute steps.
        max_staleness: the most updates that may come between a step's read and its write; None for no bound.
        servers: the servers' lock and clock, an `engine.parameter_server.exchange.Servers`.
        overlap: whether a step computes while the previous step's update is still being sent.
        gradient_hook: changes how gradients are sent; None to send them as they are.
    """

    workers: int
    max_staleness: int | None
    servers: Any
    overlap: bool = False
    gradient_hook: GradientHook | None = None

    @property
    def most_of_others(self) -> int | None:
        """The most updates of other workers that a step may miss; None for no bound.

        With overlap, one of the missed updates is its own worker's.
        """
        return self.max_staleness - self.overlap if self.max_staleness is not None else None


def own_split(dataset: Any, layout: ReplicaLayout) -> Any | None:
    """A dataset of this worker's part of each batch, if the source dataset can read it; else None.

    A `tf.data.Dataset` may have an attribute `dtrain_split`, a function `layout -> tf.data.Dataset | None`.
    It returns a dataset of `(parts, sizes)`: a batch for each local replica, and the numbers of rows of the
    parts of all replicas of the job (an int32 vector). The dataset has the same number of elements on every
    worker; a part may have no rows. None means that global batches are read and cut. Every worker must call
    it.

    Args:
        dataset: the dataset that `fit` was given.
        layout: how the replicas are distributed; with one worker the result is None.
    """
    split = getattr(dataset, "dtrain_split", None)
    return None if split is None or layout.workers == 1 else split(layout)


def datasets_in_place(arguments: dict[str, Any], used_by: str) -> bool:
    """Replaces objects that make a dataset (by a method `dtrain_dataset`) with the dataset, in place.

    Args:
        arguments: of `fit`, `evaluate` or `predict`, by name.
        used_by: the name of that method.

    Returns:
        Whether anything was replaced.
    """
    found = False
    for name in ("x", "validation_data"):
        make = getattr(type(arguments.get(name)), "dtrain_dataset", None)
        if make is not None:
            arguments[name] = make(arguments[name], "evaluate" if name == "validation_data" else used_by)
            found = True
    return found


class Positions(Protocol):
    """The interface of the attribute `dtrain_positions` of a dataset that can begin at any batch.

    Attributes:
        epoch: the number of the epoch that the next iteration over the dataset yields.
        fingerprint: the facts that decide the order of the dataset, by their names in messages.
    """

    @property
    def epoch(self) -> int:  # noqa: D102
        ...

    @property
    def fingerprint(self) -> dict[str, Any]:  # noqa: D102
        ...

    def seek(self, epoch: int) -> None:
        """Makes the next iteration over the dataset yield this epoch."""

    def rest(self, epoch: int, step: int) -> Any:
        """A dataset of the epoch's batches from a step to the end of the epoch."""


def own_positions(dataset: Any) -> Positions | None:
    """A dataset's `Positions`, or None; a dataset that is derived from it, as by `map`, has none."""
    return getattr(dataset, "dtrain_positions", None)


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
    _never_entered = None


def check_left_out(model: Any) -> None:
    """Refuses, or warns of, a model about to train outside of every scope in a process with a strategy.

    If several workers run the program, each would train its own model: that is an error. With devices of one
    process, or a chief's workers, the result is right but devices stay idle: that is a warning, given once
    and only if no scope was ever entered.

    Raises:
        ScopeError: the process made a strategy of several workers that each run the program.
    """
    global _never_entered
    if upstream_keras.strategy_of(model) is not None or _distribute().has_strategy():
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
    own = upstream_keras.strategy_of_optimizer(optimizer)
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
    """Refuses a model whose variables, optimizer or metrics were made outside of its strategy's scope.

    Raises:
        ScopeError: names the object, and where it was made.
    """
    import keras  # imported here, because strategies import this module before they check Keras' backend

    strategy = model.distribute_strategy
    check_scope(model, made_under := upstream_keras.strategy_of(model))
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
        ScopeError: names the variable and the strategy that it was made under.
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
