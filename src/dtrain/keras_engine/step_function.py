"""The function that `fit` and `evaluate` call: some steps at a time, from an iterator.

The contract is Keras': `function(iterator) -> logs`, and `StopIteration` when there is no data. What a
step does is `steps.py`'s.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from dtrain import events
from dtrain.errors import CompilationError
from dtrain.keras_engine import metrics
from dtrain.keras_engine.accumulation import ADD, GROUP, UPDATE, MicroBatchSums, SparseGradients, sums_of
from dtrain.keras_engine.feed.calls import Call
from dtrain.keras_engine.groups import GroupIterator
from dtrain.keras_engine.input import (
    Split,
    SplitIterator,
    local_parts,
    local_specs,
    rows_of,
    split_batch,
    to_tensors,
)
from dtrain.keras_engine.protocol import ReplicaLayout, communication_clock, waiting_clock
from dtrain.keras_engine.runs import Run, can_loop
from dtrain.keras_engine.steps import Program
from dtrain.log import logger
from dtrain.upstream import keras as upstream_keras

Untraceable = (SparseGradients, CompilationError)
"""What tracing a step may find, upon which it is traced otherwise."""


class StepFunction:
    """Trains or tests on the next batches of an iterator: as many as that says, or `steps_per_execution`.

    Args:
        model: compiled.
        layout: how the replicas of its strategy are spread.
        program: the step.
        training: whether it is the train step.
    """

    def __init__(self, model: Any, layout: ReplicaLayout, program: Program, *, training: bool) -> None:
        self._model = model
        self._layout = layout
        self._training = training
        self._program = program
        self._began = False  # whether steps have been made: what the first ones do once is no part of a step
        self._retraced = 0  # times that all was to be traced anew
        self._sparse = False  # whether gradients that name rows were found where micro-batches are summed up
        self._functions: dict[str, Callable[..., Any]] = {}
        self._runs: dict[str, Run] = {}
        self._communicated = _Since(communication_clock(model.distribute_strategy))
        self._waited = _Since(waiting_clock(model.distribute_strategy) if training else None)
        self._results: Callable[..., Any] = self._program.results
        if not self._model.run_eagerly:
            self._results = tf.function(self._results, autograph=False)

    @property
    def findings(self) -> dict[str, Any] | None:
        """What was found out of the user's own losses (`StepProgram.findings`), for those who go on later."""
        return self._program.findings

    @findings.setter
    def findings(self, found: dict[str, Any]) -> None:
        self._program.findings = found

    def __call__(self, iterator: Any) -> Any:
        """Runs the steps; returns the logs.

        Raises:
            StopIteration: if the iterator has no batch left.
        """
        planned = isinstance(iterator, Call)
        call = iterator if planned else Call(iterator, self._model.steps_per_execution)
        iterator = call.iterator
        outputs, call.ran = None, 0
        self._communicated(), self._waited()  # from here on
        usual, traced, begun = self._began, self._traced, time.perf_counter()
        while call.ran < call.steps:
            steps, found = self._next_steps(iterator, call.steps - call.ran, exact=planned)
            if not steps:
                break
            outputs = found
            call.ran += steps
        if not call.ran:
            self._count_failed_call(iterator)
            events.emit(events.PartChanges("callbacks"))
            raise StopIteration
        usual = usual and self._traced == traced
        call.seconds = time.perf_counter() - begun if usual else None
        outputs = self._results() if self._program.stock else outputs
        events.emit(events.CallEnds(self._training, usual, self._communicated() or 0.0))
        return outputs

    @property
    def _traced(self) -> int:
        return self._retraced + len(self._functions) + len(self._runs) + self._program.traced

    def _next_steps(self, iterator: Any, most: int, *, exact: bool) -> tuple[int, Any]:
        """Some of the next steps, at least one: how many there were, and what the last returned.

        Args:
            iterator: to read from.
            most: how many there may be.
            exact: whether so many batches are left where their number was known beforehand.
        """
        traced = self._traced
        events.emit(events.InputBegins(iterator))
        if isinstance(iterator, GroupIterator):
            return self._in_xla(iterator, most, traced)
        looped = isinstance(iterator, SplitIterator) and not self._model.run_eagerly
        if looped and not self._program.wants_part() and self._can_loop(iterator):
            if iterator.left is not None:
                exact, most = True, min(most, iterator.left)
            return self._loop(iterator, most, traced, exact=exact and iterator.exact) if most else (0, None)
        try:
            batch = next(iterator)
        except (StopIteration, tf.errors.OutOfRangeError):
            events.emit(events.StepBegins())
            return 0, None
        events.emit(events.StepBegins())
        parts, total, specs = self._parts(iterator, batch)
        self._program.learn(parts[0])
        outputs, waited = self._step(parts, total, specs)
        waiting = None if waited is None else float(waited)
        examples = self._count(parts, total)
        self._step_ends(1, waiting, traced=traced, examples=examples)
        return 1, outputs

    def _in_xla(self, iterator: GroupIterator, most: int, traced: int) -> tuple[int, Any]:
        """The same in one XLA program."""
        part = iterator.take(most)
        events.emit(events.StepBegins())
        if part is None:
            return 0, None
        self._program.run_group(part)
        examples = part.size * part.steps
        self._step_ends(part.steps, None, traced=traced, examples=examples)
        return part.steps, None

    def metrics(self) -> dict[str, Any] | None:
        """All metrics of the model over all replicas, by one reduction; None where Keras must find them."""
        quicker = self._program.stock and self._layout.replicas > 1 and not self._model.run_eagerly
        return dict(self._results()) if quicker and metrics.follow_from_variables(self._model) else None

    def fit_ended(self) -> None:
        """What was restored for a `fit` does not hold for the next one."""
        self._program.forget_restored()

    def in_xla(self, steps: int | None, batch: int | None) -> bool:
        """Whether the steps of a `fit` are made in XLA (`Program.in_xla`)."""
        return self._program.in_xla(steps, batch)

    def _loop(self, iterator: SplitIterator, most: int, traced: int, *, exact: bool) -> tuple[int, Any]:
        """The same, read and made in the graph."""
        events.emit(events.StepBegins())
        sums = self._sums()
        self._program.learn(None)
        phase, rounds = (None, most) if sums is None else sums.next_run(most, grouped=exact)
        try:
            run = self._run(iterator, phase, exact=exact)
        except Untraceable as found:
            self._trace_otherwise(found, sums)
            return self._loop(iterator, most, traced, exact=exact)
        ran = run(iterator, rounds)
        if sums is not None and phase is not None and ran.steps:
            sums.note(phase)
        if ran.steps:
            self._step_ends(ran.steps, ran.waiting, traced=traced, inside=ran.reading, examples=ran.examples)
        return ran.steps, ran.outputs

    def _can_loop(self, iterator: SplitIterator) -> bool:
        """Whether what the step returns can go through a loop; Keras' own returns nothing there."""
        return bool(self._program.stock) or can_loop(self._traced_step(iterator.element_spec, None))

    def _run(self, iterator: SplitIterator, phase: str | None, *, exact: bool) -> Run:
        specs = iterator.element_spec
        key = f"{specs} {phase} {exact} {iterator.buffered}"
        if key not in self._runs:
            rounds: list[tuple[Any, int]] = [(phase, 1)]
            if phase == GROUP:
                rounds = [(ADD, self._model.optimizer.gradient_accumulation_steps - 1), (UPDATE, 1)]
            traced = [(self._traced_step(specs, each), times) for each, times in rounds]
            with events.part("start", doing="compute"):
                self._runs[key] = Run(traced, iterator, exact=exact)
        return self._runs[key]

    def _traced_step(self, specs: Any, phase: str | None) -> Any:
        """The step, traced once for data of these specs: a short last batch must not change its shapes."""
        key = f"{specs} {phase}"
        if key not in self._functions:
            program = self._program

            def run(parts: Any, total: Any) -> Any:
                return program.run(parts, total, phase)

            function = tf.function(run, autograph=False)
            with events.part("start", doing="compute"):
                self._functions[key] = function.get_concrete_function(*specs)
        return self._functions[key]

    def _parts(self, iterator: Any, batch: Any) -> tuple[Any, Any, Any]:
        """A batch for each local replica, how many examples they all have if known, and the specs of both."""
        strategy = self._model.distribute_strategy
        if isinstance(iterator, SplitIterator):
            return batch.parts, batch.total, iterator.element_spec
        if isinstance(iterator, tf.distribute.DistributedIterator):
            # The whole batch's size is found in the step: TensorFlow made the split.
            specs = (local_specs(strategy, iterator.element_spec), None)
            return local_parts(strategy, batch), None, specs
        if self._layout.replicas == 1:
            return (to_tensors(batch),), None, None
        return (*split_batch(to_tensors(batch), self._layout), None)

    def _count(self, parts: Any, total: Any) -> int | None:
        """Examples in a global batch that is there; None where a worker knows its own part only."""
        if total is None and self._layout.replicas > 1:
            return None
        rows = int(rows_of(Split(tuple(parts), total)))
        return rows if rows >= 0 else None

    def _step_ends(
        self,
        steps: int,
        waited: float | None,
        *,
        traced: int,
        inside: float = 0.0,
        examples: int | None = None,
    ) -> None:
        """Notes some steps; `traced` is what had been traced when they began."""
        usual, self._began = self._began and self._traced == traced, True
        since = self._waited()
        events.emit(
            events.StepsEnd(
                steps,
                self._training,
                usual,
                inside,
                waiting=waited if since is None else since,
                communication=self._communicated(),
                examples=examples,
            )
        )

    def _sums(self) -> MicroBatchSums | None:
        return sums_of(self._model) if self._training and self._program.stock and not self._sparse else None

    def _step(self, parts: Any, total: Any, specs: Any) -> tuple[Any, Any]:
        """The outputs of one step, and the seconds that it waited for other workers, or None."""
        sums = self._sums()
        phase = None if sums is None else sums.next_run(1, grouped=False)[0]
        try:
            outputs = self._function(specs, phase)(parts, total)
        except Untraceable as found:
            self._trace_otherwise(found, sums)
            return self._step(parts, total, specs)
        if sums is not None and phase is not None:
            sums.note(phase)
        return outputs

    def _trace_otherwise(self, found: Exception, sums: MicroBatchSums | None) -> None:
        """A step cannot be what it was to be: found while tracing, before anything ran."""
        if isinstance(found, SparseGradients):
            self._sparse = True
            if sums is not None:
                sums.close()
            return
        if not self._program.compiled:
            raise found  # what is compiled is a function of the user's
        # Replicas must meet inside forward or backward.
        logger.warning(
            "jit_compile=True was set, but this model's replicas must talk to each other inside the "
            "step (a masked or whole-batch loss, a metric that does not add up, synchronized "
            "BatchNormalization), which XLA cannot "
            "compile; it runs without XLA."
        )
        self._program.compiled = False
        self._retraced += 1 + len(self._functions) + len(self._runs)
        self._functions.clear()
        self._runs.clear()

    def _function(self, specs: Any, phase: str | None) -> Callable[..., Any]:
        """What makes one step outside of a loop; the same function as in one."""

        def run(parts: Any, total: Any) -> Any:
            return self._program.run(parts, total, phase)

        if self._model.run_eagerly:
            return run
        if specs is not None:
            traced: Callable[..., Any] = self._traced_step(specs, phase)
            return traced
        key = f"anything {phase}"
        if key not in self._functions:
            self._functions[key] = tf.function(run, autograph=False, reduce_retracing=True)
        return self._functions[key]

    def _count_failed_call(self, iterator: Any) -> None:
        """On one device the call that finds the data at its end still counts as an iteration.

        There the counter is raised beside the failing read. Schedules and Adam's bias correction read the
        counter, so it must be the same here.
        """
        model = self._model
        uncounted = not getattr(iterator, "counted", True)
        if not (uncounted and self._training and model.steps_per_execution == 1 and not model.run_eagerly):
            return
        optimizer = model.optimizer
        if self._program.stock and not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            upstream_keras.iterations_of(optimizer).assign_add(1)


class _Since:
    """How far a clock has gone since it was asked last.

    Args:
        clock: gives seconds; None for what the transport does not know.
    """

    def __init__(self, clock: Callable[[], float] | None) -> None:
        self._clock = clock
        self._before = 0.0

    def __call__(self) -> float | None:
        """Seconds; None without a clock."""
        if self._clock is None:
            return None
        before, self._before = self._before, self._clock()
        return self._before - before
