"""What happens around Keras' own `fit`, `evaluate`, `predict` and `compile`: checks, scope, who shows what.

The loop itself is Keras'. Mistakes that would give wrong numbers are named here, before training.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from dtrain.keras_engine.accumulation import KeptApart, left_by_error, may_keep_apart
from dtrain.keras_engine.asynchronous.fitting import prepare_evaluate, prepare_fit, prepare_predict, watches
from dtrain.keras_engine.between_steps import at_steps_of_training, begin_session, reported, wants_session
from dtrain.keras_engine.callbacks import NanAlarm, shared_between_workers
from dtrain.keras_engine.protocol import ReplicaLayout, layout_of, servers_of
from dtrain.keras_engine.scope import check_model, check_scope
from dtrain.keras_engine.steps import step_is_stock
from dtrain.keras_engine.talk import exchange
from dtrain.upstream import keras as upstream_keras


def make_fit(original: Callable[..., Any]) -> Callable[..., Any]:
    """The replacement of `fit`."""
    signature = inspect.signature(original)

    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = signature.bind(self, *args, **kwargs)
        call.apply_defaults()
        layout, servers = _layout(self), servers_of(self.distribute_strategy)
        if layout is None and servers is None and not wants_session(call.arguments["callbacks"]):
            return original(self, *args, **kwargs)
        if servers is not None:
            check_model(self)
            prepare_fit(self, call.arguments)
        elif layout is not None:
            check_model(self)
            _check_batch(call.arguments, layout)
            call.arguments["verbose"] = _verbose(call.arguments["verbose"], layout)
            call.arguments["callbacks"] = _callbacks(call.arguments["callbacks"], layout, self)
        session = begin_session(self, call.arguments)
        try:
            with reported("fit"), at_steps_of_training(session):
                history = original(*call.args, **call.kwargs)
            session.end(history)
        except BaseException:
            session.left()
            if layout is not None:
                left_by_error(self)
            raise
        if layout is not None:
            # What callbacks wrote is complete when fit returns, whichever worker wrote it.
            exchange(layout, None)
        return history

    return fit


def make_evaluate(original: Callable[..., Any]) -> Callable[..., Any]:
    """The replacement of `evaluate`."""
    return _prepared_for_servers(original, prepare_evaluate)


def make_predict(original: Callable[..., Any]) -> Callable[..., Any]:
    """The replacement of `predict`."""
    return _prepared_for_servers(original, prepare_predict)


def make_compile(original: Callable[..., Any]) -> Callable[..., Any]:
    """The replacement of `compile`: what it makes, it makes in the model's scope."""

    def compile(self: Any, *args: Any, **kwargs: Any) -> Any:
        strategy: Any = upstream_keras.strategy_of(self)
        if layout_of(strategy) is None and servers_of(strategy) is None:
            return original(self, *args, **kwargs)
        if tf.distribute.in_cross_replica_context() and tf.distribute.get_strategy() is strategy:
            return original(self, *args, **kwargs)
        check_scope(self, strategy)
        with strategy.scope():
            return original(self, *args, **kwargs)

    return compile


def _layout(model: Any) -> ReplicaLayout | None:
    return layout_of(model.distribute_strategy)


def _check_batch(arguments: dict[str, Any], layout: ReplicaLayout) -> None:
    size = arguments["batch_size"]
    if size is not None and size < layout.replicas:
        warnings.warn(
            f"batch_size={size} is the global batch, but there are {layout.replicas} replicas: "
            f"{layout.replicas - size} of them have nothing to do. The numbers are right all the same. "
            f"Hint: set batch_size to a multiple of {layout.replicas}.",
            stacklevel=3,
        )


def _verbose(verbose: Any, layout: ReplicaLayout) -> Any:
    """One progress bar for the job: the first worker's."""
    return 0 if layout.worker > 0 and verbose in ("auto", 1, True) else verbose


def _callbacks(callbacks: Any, layout: ReplicaLayout, model: Any) -> Any:
    if isinstance(callbacks, upstream_keras.callback_list()):
        callbacks.callbacks = [*shared_between_workers(callbacks.callbacks, layout)]
        return callbacks
    given = [] if callbacks is None else list(keras.tree.flatten(callbacks))
    found = [*shared_between_workers(given, layout), NanAlarm()]
    if may_keep_apart(model, layout) and step_is_stock(model, "train_step"):
        seen = any(watches(each, "train") for each in found if not getattr(each, "async_safe", False))
        # Workers do so together or not at all.
        if not any(exchange(layout, seen)):
            return [KeptApart(model, layout), *found]
    return found


def _prepared_for_servers(
    original: Callable[..., Any], prepare: Callable[[Any, dict[str, Any]], None]
) -> Callable[..., Any]:
    """Under parameter servers with its arguments made ready; elsewhere with one progress bar for the job."""
    quiet = _quiet_on_followers(original)
    signature = inspect.signature(original)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if servers_of(self.distribute_strategy) is None:
            return quiet(self, *args, **kwargs)
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        prepare(self, bound.arguments)
        with reported(original.__name__):
            return original(*bound.args, **bound.kwargs)

    return call


def _quiet_on_followers(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        layout = _layout(self)
        if layout is None:
            return original(self, *args, **kwargs)
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        bound.arguments["verbose"] = _verbose(bound.arguments["verbose"], layout)
        with reported(original.__name__):
            return original(*bound.args, **bound.kwargs)

    return call
