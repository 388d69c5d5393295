"""Replaces Keras' `fit`, `evaluate`, `predict` and `compile`: makes what a call needs, then calls Keras' own.

The training loop is Keras' own and not part of this module. Mistakes that would give wrong numbers raise an
error here, before training.
"""

from __future__ import annotations

import contextlib
import inspect
import operator
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from dtrain.engine.callbacks.agreement import EpochAgreement, end_of_data, predicted
from dtrain.engine.callbacks.callback_lists import expanded, listed, relisted, session_of, wants_session
from dtrain.engine.callbacks.callback_needs import watched
from dtrain.engine.callbacks.copies import CopiesAfterEpochs
from dtrain.engine.callbacks.loss_alarm import LossAlarm
from dtrain.engine.callbacks.progress_bar import ProgressBar
from dtrain.engine.callbacks.shared_paths import shared_between_workers
from dtrain.engine.callbacks.time_report import TimeReport
from dtrain.engine.callbacks.timed_callbacks import timed
from dtrain.engine.execution.step_function import StepFunction
from dtrain.engine.fit.memory_advice import memory_explained, warn_of_memory
from dtrain.engine.fit.quorum_session import QuorumSession
from dtrain.engine.loops.local_state import LocalState
from dtrain.engine.loops.loop import Loop, loop_of
from dtrain.engine.step.xla_rule import note_compiled
from dtrain.engine.synchronisation.accumulation import MicroBatchSums, abandon, can_sum_locally
from dtrain.engine.synchronisation.outer_steps import OuterSteps, outer_step_of
from dtrain.engine.synchronisation.quorum_rounds import QuorumRounds
from dtrain.engine.synchronisation.steps_without_hook import StepsWithoutHook
from dtrain.engine.synchronisation.weight_averages import WeightAverages
from dtrain.environments import settings
from dtrain.errors import ConfigurationError
from dtrain.interfaces.dataset_parts import datasets_in_place
from dtrain.interfaces.managed_strategy import is_managed, layout_of, managed
from dtrain.interfaces.replica_layout import ReplicaLayout
from dtrain.interfaces.scope_checks import check_model, check_scope, tensorflows_own_explained
from dtrain.process_group.running_operations import current_operation, note_end_of_data, operation
from dtrain.process_group.value_exchange import exchange
from dtrain.telemetry import events
from dtrain.upstream import graph_functions, keras_models, keras_names
from dtrain.upstream.reach import set_methods, unproven

_LEAST_COUNTS = {
    "batch_size": 1,
    "validation_batch_size": 1,
    "steps_per_epoch": 1,
    "validation_steps": 1,
    "steps": 1,
    "epochs": 0,
    "initial_epoch": 0,
}


def fit(original: Callable[..., Any], self: Any, /, *args: Any, **kwargs: Any) -> Any:
    """The replacement of `fit`."""
    call = inspect.signature(original).bind(self, *args, **kwargs)
    call.apply_defaults()
    if datasets_in_place(call.arguments, "fit"):
        call.arguments["shuffle"] = False  # Keras would only warn that it cannot shuffle a dataset
        args, kwargs = call.args[1:], call.kwargs
    if not self.compiled:  # Keras raises an error that says so
        return original(self, *args, **kwargs)
    wanted = wants_session(call.arguments["callbacks"])
    adopt(self, session=wanted)
    if not is_managed(self.distribute_strategy) and not wanted:
        with tensorflows_own_explained(self):
            return original(self, *args, **kwargs)
    if unproven() and is_managed(self.distribute_strategy):
        from dtrain.engine.fit.first_step import check_first_step

        check_first_step(self.distribute_strategy)
    with events.one_fit():
        try:
            layout = layout_of(self.distribute_strategy)
            with memory_explained(self.distribute_strategy, self), operation(layout, "fit"):
                return _fitted(self, original, call, layout)
        except BaseException as error:
            saved = isinstance(error, SystemExit | KeyboardInterrupt)
            events.emit(events.FitEnds("interrupted" if saved else "failed"))
            raise


def _fitted(
    model: Any, original: Callable[..., Any], call: inspect.BoundArguments, layout: ReplicaLayout | None
) -> Any:
    """Runs `fit` for a model under a strategy of dtrain's, or with a session; returns the `History`."""
    report = TimeReport(layout, call.arguments["x"])
    loop = _loop_of_fit(model, call.arguments, layout, report)
    try:
        with loop.running():
            history = original(*call.args, **call.kwargs)
            loop.session.end(history)
    except BaseException:
        loop.session.left()
        abandon(loop.local)
        raise
    finally:
        if isinstance(model.train_function, StepFunction):
            model.train_function.fit_ended()
    if layout is not None:
        report.publish()
        # Waits for all workers: what their callbacks write is complete when fit returns on any of them.
        exchange(layout, None, what="the end of fit")
    events.emit(events.TrainingEnds(history))
    report.ended()
    events.emit(events.FitEnds("finished", history))
    return history


def _loop_of_fit(
    model: Any,
    arguments: dict[str, Any],
    layout: ReplicaLayout | None,
    report: TimeReport,
) -> Loop:
    """Makes all that a `fit` needs, and changes its arguments in place. Every worker must call it."""
    given = arguments["callbacks"]
    callbacks = listed(given)
    is_dtrains = is_managed(model.distribute_strategy)
    # A `CallbackList` gets no callbacks of the engine's: it has its own bar and its own `History`.
    as_list = not isinstance(given, keras.callbacks.CallbackList)
    if is_dtrains:
        _check_counts(arguments)
        _check_quorum(layout)
        callbacks = expanded(callbacks, model, arguments) if as_list else callbacks
        check_model(model)
        warn_of_memory(model, layout)
    if (asynchronous := managed(model.distribute_strategy).asynchronous) is not None:
        callbacks = asynchronous.prepare_fit(arguments, callbacks)
    if layout is not None:
        _check_batch(arguments, layout)
        arguments["verbose"] = _verbose(arguments["verbose"], layout)
        callbacks = shared_between_workers(callbacks, layout)
    agreement = EpochAgreement(layout, callbacks) if layout is not None and layout.workers > 1 else None
    if agreement is not None:
        callbacks = [*callbacks, agreement]
    elif layout is not None and layout.replicas > 1 and as_list:
        callbacks = [*callbacks, CopiesAfterEpochs(layout)]
    if is_dtrains and as_list:
        callbacks += [*_reports(arguments, callbacks, layout), report]
    training, validation = watched(callbacks, layout, "train", "test")
    local = LocalState()
    if layout is not None:
        local = _local_state(model, callbacks, layout, sums=as_list and not training)
    session = session_of(callbacks, model, arguments)
    if isinstance(local, QuorumRounds):
        session = QuorumSession(session, local, epochs=int(arguments["epochs"]))
    prepared = timed(session.callbacks(callbacks), callbacks, agreement and agreement.before)
    arguments["callbacks"] = relisted(given, prepared, model)
    return Loop(
        kind="fit",
        model=model,
        local=local,
        every_batch=training,
        session=session,
        epochs=int(arguments["epochs"]) - int(arguments["initial_epoch"]),
        callbacks=arguments["callbacks"],
        first_epoch=int(arguments["initial_epoch"]) + 1,
        validation=Loop(kind="evaluate", model=model, every_batch=validation, epochs=_validations(arguments)),
    )


def _validations(arguments: Mapping[str, Any]) -> int:
    """How often a `fit` evaluates on its validation data, after epochs whose numbers Keras counts from 1."""
    frequency = arguments["validation_freq"]
    epochs = range(int(arguments["initial_epoch"]) + 1, int(arguments["epochs"]) + 1)
    if isinstance(frequency, list):
        return sum(epoch in frequency for epoch in epochs)
    # Keras reads no other value without validation data, and refuses it with them.
    return sum(epoch % frequency == 0 for epoch in epochs) if _is_count(frequency, 1) else 0


def evaluate(original: Callable[..., Any], self: Any, /, *args: Any, **kwargs: Any) -> Any:
    """The replacement of `evaluate`."""
    return _without_training(original, self, args, kwargs)


def predict(original: Callable[..., Any], self: Any, /, *args: Any, **kwargs: Any) -> Any:
    """The replacement of `predict`."""
    return _without_training(original, self, args, kwargs)


def _without_training(original: Callable[..., Any], self: Any, args: Any, kwargs: Any) -> Any:
    """Runs `evaluate` or `predict` on all workers, with one progress bar for the job.

    An argument that makes a dataset (`dtrain_dataset`) is replaced by the dataset.
    """
    kind = original.__name__
    call = inspect.signature(original).bind(self, *args, **kwargs)
    datasets_in_place(call.arguments, kind)
    adopt(self)
    if not is_managed(self.distribute_strategy):
        return original(*call.args, **call.kwargs)
    layout, every_batch = layout_of(self.distribute_strategy), True
    with operation(layout, kind):
        call.apply_defaults()
        _check_counts(call.arguments)
        if (asynchronous := managed(self.distribute_strategy).asynchronous) is not None:
            asynchronous.prepare_without_training(call.arguments)
        else:
            call.arguments["verbose"] = _verbose(call.arguments["verbose"], layout)
        callbacks = call.arguments["callbacks"]
        if kind == "evaluate" or (layout is not None and layout.replicas == 1):
            (every_batch,) = watched(callbacks, layout, "test" if kind == "evaluate" else "predict")
        loop = Loop(kind=kind, model=self, every_batch=every_batch, epochs=1, callbacks=callbacks)
        with loop.running():
            results = original(*call.args, **call.kwargs)
            return predicted(layout, results) if kind == "predict" else results


def trainer_init(original: Callable[..., Any], self: Any) -> None:
    """The replacement of the constructor of Keras' trainer, which sees each model that is made."""
    original(self)
    adopt(self)


def adopt(model: Any, *, session: bool = False) -> None:
    """Sets on a model what it needs to train under its strategy, or in a `fit` with a session.

    A model outside of any scope is watched, because it may have been left out by mistake.
    """
    if session or is_managed(model.distribute_strategy):
        set_methods(model)
    elif not tf.distribute.has_strategy():
        set_methods(model, keras_names.MAKE_FUNCTION, keras_names.MAKE_PREDICT_FUNCTION)


def compile(original: Callable[..., Any], self: Any, /, *args: Any, **kwargs: Any) -> Any:
    """A model's `compile`: it runs in the scope of the model's strategy."""
    strategy: Any = keras_models.strategy_of(self)
    # The first read of this property resolves "auto", whatever the caller of `compile` asks for, and Keras
    # reads it while it compiles. It is read here before, so that only an "auto" of the caller is noted later.
    _ = self.jit_compile
    note_compiled(self, auto=False)
    inside = tf.distribute.in_cross_replica_context() and tf.distribute.get_strategy() is strategy
    enters = is_managed(strategy) and not inside
    if enters:
        check_scope(self, strategy)
    with strategy.scope() if enters else contextlib.nullcontext():
        result = original(self, *args, **kwargs)
    if isinstance(self.optimizer, keras.optimizers.Optimizer):
        set_methods(self.optimizer)
    return result


def auto_jit_compile(original: Callable[..., Any], self: Any) -> Any:
    """A model's answer to `jit_compile="auto"`, which `compile` asks for.

    Under any strategy Keras answers False. One replica computes as without a strategy, so it gets the answer
    for that: True on a machine with a GPU, if XLA can compile the model. Weights in central storage may be on
    another device than the replica, where XLA cannot read them.
    """
    note_compiled(self, auto=True)
    layout = layout_of(self.distribute_strategy)
    alone = layout is not None and layout.replicas == 1 and not layout.central
    with graph_functions.without_strategy(self) if alone else contextlib.nullcontext():
        return original(self)


def epoch_logs(original: Callable[..., Any], self: Any, logs: Any) -> Any:
    """A model's method that computes an epoch's logs from the logs of its last step.

    A resumed epoch may have no step in this process; its logs are then the results of the restored metrics.
    """
    loop = loop_of(self)
    resumed, loop.epoch_resumed = loop.epoch_resumed, False
    layout = layout_of(self.distribute_strategy)
    together = layout is not None and layout.workers > 1
    note_end_of_data(layout)
    # Under several workers, computing the metrics waits until every worker has contributed its own.
    with events.waiting_for_others() if together else contextlib.nullcontext():
        results: Any
        alike = False  # whether all workers have the same logs anyway
        if resumed and not logs:
            results = dict(self.get_metrics_result())
        else:
            whole = getattr(self.train_function or self.test_function, "metrics", None)
            results = None if whole is None else whole()
            if results is None:
                results = original(self, logs)
            elif not (isinstance(logs, dict) and set(logs) == set(results)):
                # As in Keras: if a custom step returned logs of other names than the metrics', its are kept.
                results = logs
            else:
                alike = True
        if loop.kind == "fit":
            results = loop.local.whole_logs(results)
    if alike and loop.kind == "fit" and managed(self.distribute_strategy).waited is not None:
        running = current_operation()
        if running is not None and running.epoch > loop.first_epoch:
            return results  # `EpochAgreement` compares the data; dtrain's transports compare the operations
    return end_of_data(layout, results)


def _check_counts(arguments: Mapping[str, Any]) -> None:
    """Checks that each count among the arguments of a call is whole and not too small; None is allowed.

    Keras treats some invalid counts as not given: `batch_size=0` trains with 32.

    Raises:
        ConfigurationError: a count is not; it names the argument, its value and the least allowed value.
    """
    for name, least in _LEAST_COUNTS.items():
        value = arguments.get(name)
        if value is not None and not _is_count(value, least):
            hint = f"set {name} to a whole number of at least {least}"
            raise ConfigurationError(
                f"{name}={value!r} was set, which is not a valid number.",
                hint=hint if name in ("epochs", "initial_epoch") else f"{hint}, or leave it out",
            )


def _is_count(value: Any, least: int) -> bool:
    if isinstance(value, bool):
        return False
    if isinstance(value, float):
        return value.is_integer() and value >= least  # such as `len(x) / 32` without a remainder
    try:
        return operator.index(value) >= least
    except TypeError:
        return False


def _check_batch(arguments: dict[str, Any], layout: ReplicaLayout) -> None:
    size = arguments["batch_size"]
    if size is not None and size < layout.replicas:
        warnings.warn(
            f"batch_size={size} is the global batch, but there are {layout.replicas} replicas: "
            f"{layout.replicas - size} of them have nothing to do. The results are still "
            f"correct. Hint: set batch_size to a multiple of {layout.replicas}.",
            stacklevel=7,
        )


def _check_quorum(layout: ReplicaLayout | None) -> None:
    """Checks that a worker of a job with a quorum takes part in rounds.

    Raises:
        ConfigurationError: its strategy has none, so it would train alone.
    """
    if settings.quorum() is not None and (layout is None or layout.members == 1):
        raise ConfigurationError(
            "The job was started with --quorum, but the strategy of this model has no rounds: each worker "
            "would train alone.",
            hint='use dtrain.MultiWorkerMirroredStrategy(gradient_hook="diloco"), or leave out --quorum',
        )


def _verbose(verbose: Any, layout: ReplicaLayout | None) -> Any:
    """The `verbose` of this worker: only the first worker of a job shows a progress bar."""
    return verbose if layout is None or layout.leads else 0


def _local_state(model: Any, callbacks: list[Any], layout: ReplicaLayout, *, sums: bool) -> LocalState:
    """What each replica holds by itself in a `fit`.

    Args:
        model: a compiled model.
        callbacks: the callbacks of the `fit`.
        layout: the layout of its strategy.
        sums: whether replicas may sum their own gradients of micro-batches.
    """
    if layout.average_every:
        # A callback of another `fit` of this model may have called this `fit`: average what that one holds.
        loop_of(model).local.close()
        if (quorum := managed(model.distribute_strategy).quorum) is not None:
            return QuorumRounds(model, layout, callbacks, quorum)
        kind = WeightAverages if outer_step_of(model) is None else OuterSteps
        return kind(model, layout, callbacks)
    hook = layout.gradient_hook
    if hook is not None and hook.start and layout.replicas > 1:
        return StepsWithoutHook(model, hook.start)
    accumulates = bool(getattr(model.optimizer, "gradient_accumulation_steps", None))
    if sums and accumulates and can_sum_locally(model, layout):
        return MicroBatchSums(model.optimizer, model.distribute_strategy, layout)
    return LocalState()


def _reports(arguments: dict[str, Any], callbacks: list[Any], layout: ReplicaLayout | None) -> list[Any]:
    """The engine's own callbacks for the data, the loss and the progress of a `fit`."""
    reports: list[Any] = []
    if not any(isinstance(callback, LossAlarm) for callback in callbacks):
        reports.append(LossAlarm(reports=layout is None or layout.leads))
    given_bar = any(isinstance(callback, keras.callbacks.ProgbarLogger) for callback in callbacks)
    if arguments["verbose"] not in (0, False) and not given_bar:
        reports.append(ProgressBar())
    return reports
