"""Wraps Keras' own `fit`, `evaluate`, `predict` and `compile`: checks, scope, callbacks, progress.

The training loop is Keras' own and not part of this module. Mistakes that would give wrong numbers raise an
error here, before training.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from dtrain import events
from dtrain.keras_engine.accumulation import LocalSums, abandon_sums, can_sum_locally
from dtrain.keras_engine.alarms import LossAlarm
from dtrain.keras_engine.asynchronous.fitting import prepare_evaluate, prepare_fit, prepare_predict, watches
from dtrain.keras_engine.between_steps import begin_session, listed, reported, wants_session
from dtrain.keras_engine.callbacks import shared_between_workers
from dtrain.keras_engine.feed.settings import FeedSettings, feeding
from dtrain.keras_engine.input_report import InputReport
from dtrain.keras_engine.noted_function import steps_counted
from dtrain.keras_engine.numbers import check_numbers
from dtrain.keras_engine.progress_bar import ProgressBar
from dtrain.keras_engine.protocol import (
    ReplicaLayout,
    ServerLayout,
    datasets_in_place,
    layout_of,
    servers_of,
)
from dtrain.keras_engine.scope import check_model, check_scope, tensorflows_own_explained
from dtrain.keras_engine.step_function import StepFunction
from dtrain.keras_engine.steps import step_is_stock
from dtrain.keras_engine.talk import exchange
from dtrain.keras_engine.time_report import TimeReport
from dtrain.keras_engine.timed_callbacks import timed
from dtrain.keras_engine.xla_rule import note_compiled
from dtrain.upstream import keras as upstream_keras
from dtrain.upstream.reach import replaces


@replaces(upstream_keras.FIT, inside=True)
def fit(original: Callable[..., Any], self: Any, /, *args: Any, **kwargs: Any) -> Any:
    """The replacement of `fit`."""
    call = inspect.signature(original).bind(self, *args, **kwargs)
    call.apply_defaults()
    if datasets_in_place(call.arguments, "fit"):
        call.arguments["shuffle"] = False  # Keras would only warn that it cannot shuffle a dataset
        args, kwargs = call.args[1:], call.kwargs
    if not self.compiled:  # Keras raises an error that says so
        return original(self, *args, **kwargs)
    layout, servers = _layout(self), servers_of(self.distribute_strategy)
    if layout is None and servers is None and not wants_session(call.arguments["callbacks"]):
        with tensorflows_own_explained(self):
            return original(self, *args, **kwargs)
    with events.one_fit():
        try:
            return _fitted(self, original, call, layout, servers)
        except BaseException as error:
            saved = isinstance(error, SystemExit | KeyboardInterrupt)
            events.emit(events.FitEnds("interrupted" if saved else "failed"))
            raise


def _fitted(
    self: Any,
    original: Callable[..., Any],
    call: inspect.BoundArguments,
    layout: ReplicaLayout | None,
    servers: ServerLayout | None,
) -> Any:
    """Runs `fit` for a model under a strategy of dtrain's, or with a session; returns the `History`."""
    report = TimeReport(layout)
    own = _prepared(self, call.arguments, layout, servers, report)
    watched = _watched(call.arguments["callbacks"], layout, "train", "test")
    session = begin_session(self, call.arguments)
    try:
        epochs = int(call.arguments["epochs"]) - int(call.arguments["initial_epoch"])
        training = FeedSettings(every_batch=watched[0], session=session, model=self, epochs=epochs)
        with reported("fit", lambda: steps_counted(self)):
            with timed(own), feeding(training, FeedSettings(every_batch=watched[1])):
                history = original(*call.args, **call.kwargs)
            session.end(history)
    except BaseException:
        session.left()
        if layout is not None:
            abandon_sums(self)
        raise
    finally:
        if isinstance(self.train_function, StepFunction):
            self.train_function.fit_ended()
    published = [0]
    if layout is not None:
        # Waits for all workers: what their callbacks write is complete when fit returns on any of them.
        published = exchange(layout, report.publish())
    events.emit(events.Trained(history))
    report.ended(published)
    events.emit(events.FitEnds("finished", history))
    return history


def _prepared(
    self: Any,
    arguments: dict[str, Any],
    layout: ReplicaLayout | None,
    servers: ServerLayout | None,
    report: TimeReport,
) -> list[Any]:
    """Prepares the arguments of a `fit`, in place; returns the user's callbacks."""
    if layout is None and servers is None:
        return _not_of_the_engine(arguments["callbacks"])
    check_numbers(arguments)
    _expand(self, arguments)
    check_model(self)
    if servers is not None:
        prepare_fit(self, arguments)
    elif layout is not None:
        _check_batch(arguments, layout)
        arguments["verbose"] = _verbose(arguments["verbose"], layout)
        arguments["callbacks"] = _callbacks(arguments["callbacks"], layout, self)
    own = _not_of_the_engine(arguments["callbacks"])
    _add_own(arguments, layout, report)
    return own


@replaces(upstream_keras.EVALUATE)
def evaluate(original: Callable[..., Any], self: Any, /, *args: Any, **kwargs: Any) -> Any:
    """The replacement of `evaluate`."""
    return _without_training(original, prepare_evaluate, self, args, kwargs)


@replaces(upstream_keras.PREDICT)
def predict(original: Callable[..., Any], self: Any, /, *args: Any, **kwargs: Any) -> Any:
    """The replacement of `predict`."""
    return _without_training(original, prepare_predict, self, args, kwargs)


@replaces(upstream_keras.COMPILE)
def compile(original: Callable[..., Any], self: Any, /, *args: Any, **kwargs: Any) -> Any:
    """The replacement of `compile`: it runs in the scope of the model's strategy."""
    strategy: Any = upstream_keras.strategy_of(self)
    call = inspect.signature(original).bind(self, *args, **kwargs)
    call.apply_defaults()
    note_compiled(self, auto=call.arguments["jit_compile"] == "auto")
    if layout_of(strategy) is None and servers_of(strategy) is None:
        return original(self, *args, **kwargs)
    if tf.distribute.in_cross_replica_context() and tf.distribute.get_strategy() is strategy:
        return original(self, *args, **kwargs)
    check_scope(self, strategy)
    with strategy.scope():
        return original(self, *args, **kwargs)


def _expand(model: Any, arguments: dict[str, Any]) -> None:
    """Replaces each callback that has `dtrain_callbacks` by the callbacks that this method returns."""
    given = arguments["callbacks"]
    if isinstance(given, keras.callbacks.CallbackList):
        return
    found: list[Any] = []
    for each in listed(given):
        several = getattr(each, "dtrain_callbacks", None)
        found += [each] if several is None else several(model, arguments)
    if given is not None:
        arguments["callbacks"] = found


def _not_of_the_engine(callbacks: Any) -> list[Any]:
    """The callbacks that are not the engine's own, so the user's."""
    package = __name__.rpartition(".")[0]
    return [each for each in listed(callbacks) if not type(each).__module__.startswith(package)]


def _add_own(arguments: dict[str, Any], layout: ReplicaLayout | None, report: TimeReport) -> None:
    """Adds the engine's own callbacks to those of `fit`: for its data, its loss, its time and its progress.

    A `CallbackList` is left alone, so such a `fit` has no reports.
    """
    if isinstance(arguments["callbacks"], keras.callbacks.CallbackList):
        return
    given = listed(arguments["callbacks"])
    shown = arguments["verbose"] not in (0, False) and not any(
        isinstance(each, keras.callbacks.ProgbarLogger) for each in given
    )
    first = layout is None or layout.worker == 0
    own: list[Any] = []
    if layout is not None:
        worker = layout.worker if layout.workers > 1 else None
        own.append(InputReport(arguments["x"], worker=worker))
    if not any(isinstance(each, LossAlarm) for each in given):
        own.append(LossAlarm(reports=first))
    if shown:
        own.append(ProgressBar())
    arguments["callbacks"] = [*given, *own, report]


def _layout(model: Any) -> ReplicaLayout | None:
    return layout_of(model.distribute_strategy)


def _check_batch(arguments: dict[str, Any], layout: ReplicaLayout) -> None:
    size = arguments["batch_size"]
    if size is not None and size < layout.replicas:
        warnings.warn(
            f"batch_size={size} is the global batch, but there are {layout.replicas} replicas: "
            f"{layout.replicas - size} of them have nothing to do. The numbers are right all the same. "
            f"Hint: set batch_size to a multiple of {layout.replicas}.",
            stacklevel=7,
        )


def _verbose(verbose: Any, layout: ReplicaLayout | None) -> Any:
    """The `verbose` of this worker: only the first worker of a job shows a progress bar."""
    return 0 if layout is not None and layout.worker > 0 else verbose


def _callbacks(callbacks: Any, layout: ReplicaLayout, model: Any) -> Any:
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks.callbacks = [*shared_between_workers(callbacks.callbacks, layout)]
        return callbacks
    found = shared_between_workers(listed(callbacks), layout)
    apart = can_sum_locally(model, layout) and step_is_stock(model, "train_step")
    if apart and not _watched(found, layout, "train")[0]:
        return [LocalSums(model, layout), *found]
    return found


def _watched(callbacks: Any, layout: ReplicaLayout | None, *kinds: str) -> list[bool]:
    """For each kind ("train", "test"), whether a callback on any worker watches every batch.

    Every worker must call it.
    """
    if layout is None:
        return [True for _ in kinds]
    seen = [any(watches(one, kind) for one in listed(callbacks)) for kind in kinds]
    return [any(found) for found in zip(*exchange(layout, seen), strict=True)]


def _without_training(
    original: Callable[..., Any],
    prepare_for_servers: Callable[[Any, dict[str, Any]], None],
    self: Any,
    args: Any,
    kwargs: Any,
) -> Any:
    """Runs `evaluate` or `predict`, with one progress bar for the job.

    An argument that makes a dataset (`dtrain_dataset`) is replaced by the dataset.
    """
    name = original.__name__
    call = inspect.signature(original).bind(self, *args, **kwargs)
    datasets_in_place(call.arguments, name)
    layout, servers = _layout(self), servers_of(self.distribute_strategy)
    if layout is None and servers is None:
        return original(*call.args, **call.kwargs)
    call.apply_defaults()
    check_numbers(call.arguments)
    if servers is not None:
        prepare_for_servers(self, call.arguments)
        with reported(name):
            return original(*call.args, **call.kwargs)
    call.arguments["verbose"] = _verbose(call.arguments["verbose"], layout)
    watched = [True] if name == "predict" else _watched(call.arguments["callbacks"], layout, "test")
    with reported(name), feeding(FeedSettings(every_batch=watched[0])):
        return original(*call.args, **call.kwargs)
