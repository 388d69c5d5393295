"""The function that `fit` and `evaluate` call: it runs several steps on the batches of an iterator.

The contract is Keras': `function(iterator) -> logs`, and `StopIteration` when there is no data. What a step
computes is not decided here, but in `steps.py`.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from dtrain.engine.batches.batch_rows import any_rows, map_leaves
from dtrain.engine.batches.traced_specs import TracedSpecs
from dtrain.engine.execution.single_batches import SingleBatches
from dtrain.engine.execution.step_runs import Run, RunResult, can_loop
from dtrain.engine.feed.groups import GroupIterator
from dtrain.engine.feed.split_datasets import SplitIterator
from dtrain.engine.loops.local_state import LocalState
from dtrain.engine.loops.loop import loop_of
from dtrain.engine.loops.step_calls import Call
from dtrain.engine.replica.gradients import check_first_steps
from dtrain.engine.replica.replica_metrics import follow_from_variables
from dtrain.engine.step.step_plan import as_record, warn_of_much
from dtrain.engine.step.steps import Program
from dtrain.errors import ConfigurationError
from dtrain.interfaces.managed_strategy import managed
from dtrain.interfaces.replica_layout import ReplicaLayout
from dtrain.partition.plan import Plan
from dtrain.process_group.running_operations import inside_step, note_end_of_data, operation
from dtrain.task.task_hooks import without_collection
from dtrain.telemetry import events
from dtrain.upstream import graph_functions, tf_tracing

_NO_STEPS = RunResult(0, None, None, 0.0, None)


@contextlib.contextmanager
def _tracing() -> Iterator[None]:
    """A scope in which functions are traced, which makes objects that stay."""
    with without_collection(), events.part("start", doing="compute"):
        yield


class StepFunction:
    """Trains or tests on the next batches of an iterator.

    The number of steps is that of the `Call` it is given, or else `steps_per_execution`.

    Args:
        model: a compiled model.
        layout: how the replicas of the model's strategy are distributed.
        program: computes the step.
        training: whether it is the train step.
    """

    def __init__(self, model: Any, layout: ReplicaLayout, program: Program, *, training: bool) -> None:
        self._model = model
        self._layout = layout
        self._training = training
        self._program = program
        self._began = False  # whether steps were made before; the first ones' times include one-time work
        self._functions: dict[str, Callable[..., Any]] = {}
        self._specs = TracedSpecs()
        self._runs: dict[str, Run] = {}
        self._batches = SingleBatches(model, layout)
        self._ends: dict[Any, Any] = {}  # by a step's function, what it writes without data
        self._communicated = _Stopwatch(managed(model.distribute_strategy).communicated)
        self._waited = _Stopwatch(managed(model.distribute_strategy).waited if training else None)
        self._results: Callable[..., Any] = self._program.results
        self._own_results: Callable[..., Any] = self._program.own_results
        if not self._model.run_eagerly:
            self._results = tf_tracing.made_for_each_model(self._results)
            self._own_results = tf_tracing.made_for_each_model(self._own_results)
        self._returned: Any = None  # by the last step, where it has no results

    @property
    def findings(self) -> dict[str, Any] | None:
        """What the program has found out or decided (`Program.findings`), for a checkpoint; None before."""
        return self._program.findings

    @findings.setter
    def findings(self, found: dict[str, Any]) -> None:
        self._program.findings = found

    def __call__(self, iterator: Any) -> Any:
        """Runs the steps; returns the logs.

        Raises:
            StopIteration: if the iterator has no batch left.
        """
        layout = None if loop_of(self._model).reads(iterator) else self._layout
        with operation(layout, "train_on_batch" if self._training else "test_on_batch"), inside_step():
            return self._call(iterator)

    def _call(self, iterator: Any) -> Any:
        planned = isinstance(iterator, Call)
        call = iterator if planned else Call(iterator, self._model.steps_per_execution)
        iterator, ran, call.ran = call.iterator, _NO_STEPS, 0
        self._communicated(), self._waited()  # both clocks count from here on
        usual, traced, begun = self._began, self._traced, time.perf_counter()
        while (
            call.ran < call.steps
            and (now := self._next_steps(iterator, call.steps - call.ran, exact=planned)).steps
        ):
            ran = now
            call.ran += ran.steps
        if not call.ran:
            note_end_of_data(self._layout)
            self._at_the_end(iterator)
            events.emit(events.PartChanges("callbacks"))
            raise StopIteration
        usual = usual and self._traced == traced
        call.seconds = time.perf_counter() - begun if usual else None
        if self._program.stock:
            outputs = ran.outputs if ran.has_results else self._own_results()
        else:
            self._returned = ran.outputs
            outputs = self._program.outputs(ran.outputs)
        events.emit(events.CallEnds(self._training, usual, self._communicated() or 0.0))
        return outputs

    @property
    def _traced(self) -> int:
        return len(self._functions) + len(self._runs) + self._program.traced

    def _next_steps(self, iterator: Any, most: int, *, exact: bool) -> RunResult:
        """Runs one or more of the next steps; none if the data has ended.

        Args:
            iterator: the iterator to read from.
            most: the most steps to run.
            exact: whether `most` batches are certainly left, if the iterator's number of batches is certain.
        """
        traced = self._traced
        events.emit(events.InputBegins(iterator))
        if isinstance(iterator, GroupIterator):
            ran = self._in_xla(iterator, most)
        elif self._loops(iterator):
            ran = self._loop(iterator, most, exact=exact)
        else:
            ran = self._one_step(iterator)
        if ran.steps:
            self._steps_end(ran, traced=traced)
        return ran

    def _loops(self, iterator: Any) -> bool:
        """Whether a loop in the graph reads the batches and runs the steps."""
        if not isinstance(iterator, SplitIterator) or self._model.run_eagerly:
            return False
        # A loop must carry the step's outputs; Keras' own step has none there.
        return self._program.stock or can_loop(
            self._traced_step(iterator.element_spec, iterator.batch_spec, None, filled=iterator.filled)
        )

    def _in_xla(self, iterator: GroupIterator, most: int) -> RunResult:
        """As `_next_steps`, with all steps in one XLA program."""
        part = iterator.take(most)
        events.emit(events.StepBegins())
        if part is None:
            return _NO_STEPS
        self._program.run_group(part)
        return RunResult(part.steps, None, None, 0.0, part.size * part.steps)

    def _loop(self, iterator: SplitIterator, most: int, *, exact: bool) -> RunResult:
        """As `_next_steps`, with a loop in the graph."""
        if iterator.left is not None:
            exact, most = True, min(most, iterator.left)
        exact = exact and iterator.exact
        if not most:
            return _NO_STEPS
        events.emit(events.StepBegins())

        def run(phase: str | None, steps: int) -> RunResult:
            return self._run(iterator, phase, exact=exact, last=steps == most)(iterator, steps)

        return self._in_phase(most, run)

    def _one_step(self, iterator: Any) -> RunResult:
        """As `_next_steps`, with one step on a batch that is read outside of the graph."""
        try:
            batch = next(iterator)
        except (StopIteration, tf.errors.OutOfRangeError):
            events.emit(events.StepBegins())
            return _NO_STEPS
        events.emit(events.StepBegins())
        parts, sizes, specs, whole = self._batches.divided(iterator, batch)

        def run(phase: str | None, steps: int) -> RunResult:
            outputs, waited = self._function(specs, whole, phase, sizes)(parts, sizes)
            waiting = None if waited is None else float(waited)
            count = self._batches.count(parts, sizes)
            has_results = specs is None and self._program.stock and not self._model.run_eagerly
            return RunResult(steps, outputs, waiting, 0.0, count, has_results=has_results)

        return self._in_phase(1, run)

    def _in_phase(self, most: int, run: Callable[[str | None, int], RunResult]) -> RunResult:
        """Runs the steps of the next phase (`LocalState.next_run`).

        Args:
            most: the most steps to run.
            run: runs a number of steps in a phase.
        """
        local = self._local()
        ran = run(*local.next_run(most))
        local.count(ran.examples)
        local.note(ran.steps)
        return ran

    def metrics(self) -> dict[str, Any] | None:
        """All metrics over all replicas, by one all-reduce; None if Keras must compute them itself.

        Of a step of the user's own, what it returned last, where each replica had only its own.
        """
        if not self._program.stock:
            returned, self._returned = self._returned, None
            whole = None if returned is None else self._program.whole_outputs(returned)
            return whole if isinstance(whole, dict) else None
        quicker = self._program.stock and self._layout.replicas > 1 and not self._model.run_eagerly
        return dict(self._results()) if quicker and follow_from_variables(self._model) else None

    def fit_ended(self) -> None:
        """Forgets findings that were restored for the `fit` that ends; they do not apply to the next one."""
        self._program.forget_restored()

    def in_xla(self, steps: int | None, batch: int | None) -> bool:
        """Whether the planned steps run in XLA (`Program.in_xla`); not where outer steps come between."""
        outer = self._training and self._layout.average_every
        return not outer and self._program.in_xla(steps, batch)

    def _run(self, iterator: SplitIterator, phase: str | None, *, exact: bool, last: bool) -> Run:
        """The loop over steps of a phase; the last loop of a call computes the metrics' results too."""
        specs = iterator.element_spec
        how = f"{exact} {last} {iterator.reader}"
        key = f"{_kind(specs, iterator.batch_spec, phase, filled=iterator.filled)} {how}"
        if key not in self._runs:
            traced = self._traced_step(specs, iterator.batch_spec, phase, filled=iterator.filled)
            made = f"{specs} {id(traced)} {how}"
            if made not in self._runs:
                with _tracing():
                    results = self._program.own_results if last and self._program.stock else None
                    self._runs[made] = Run(traced, iterator, exact=exact, results=results)
            self._runs[key] = self._runs[made]
        return self._runs[key]

    def _traced_step(self, specs: Any, batch_spec: Any, phase: str | None, *, filled: bool = False) -> Any:
        """The step, traced once for the iterator's specs, so that a short last batch does not retrace it.

        Args:
            specs: of the parts of a batch, and of the numbers of their examples.
            batch_spec: of a global batch.
            phase, filled: as in `Program.prepare`.
        """
        specs, batch_spec = self._specs.of((specs, batch_spec), _kind("", "", phase))
        key = _kind(specs, batch_spec, phase, filled=filled)
        if key not in self._functions:
            program = self._program
            with _tracing():
                own = program.prepare(batch_spec, phase, filled=filled)
            made = _kind(specs, batch_spec, phase, filled=own)

            def run(parts: Any, sizes: Any) -> Any:
                return program.run(parts, sizes, phase)

            if made not in self._functions:
                with _tracing():
                    self._functions[made] = tf_tracing.made_for_each_model(run).get_concrete_function(*specs)
            self._functions[key] = self._functions[made]
        return self._functions[key]

    def _steps_end(self, ran: RunResult, *, traced: int) -> None:
        """Emits that steps have ended.

        Args:
            ran: the steps.
            traced: the value of `_traced` when they began.
        """
        usual, self._began = self._began and self._traced == traced, True
        if not usual and (plan := self._program.plan) is not None:
            self._note_plan(plan, None if ran.examples is None else ran.examples // ran.steps)
        since = self._waited()
        events.emit(
            events.StepsEnd(
                ran.steps,
                self._training,
                usual,
                ran.reading,
                waiting=ran.waiting if since is None else since,
                communication=self._communicated(),
                examples=ran.examples,
            )
        )

    def _note_plan(self, plan: Plan, rows: int | None) -> None:
        """Emits what a step communicates that was made for the first time.

        Args:
            plan: the plan.
            rows: the rows of a global batch; None if they are not known.
        """
        if self._layout.first_replica == 0:
            warn_of_much(plan, rows)
        events.emit(events.StepDivided(self._training, functools.partial(as_record, plan, rows)))

    def _local(self) -> LocalState:
        """What the replicas hold by themselves in the `fit` that runs.

        Raises:
            ConfigurationError: the weights would not be averaged, because no `fit` runs.
        """
        loop = loop_of(self._model)
        if not self._training:
            return LocalState()
        if self._layout.average_every and loop.kind != "fit":
            raise ConfigurationError(
                "Local SGD and DiLoCo move the weights in fit, and train_on_batch was called.",
                hint="train with fit, or leave out gradient_hook",
            )
        if self._layout.replicas > 1 and loop.kind != "fit":
            check_first_steps(self._layout.gradient_hook)
        loop.local.functions = self._functions
        return loop.local

    def _function(self, specs: Any, batch_spec: Any, phase: str | None, sizes: Any) -> Callable[..., Any]:
        """The function that makes one step outside of a loop; a loop of the same specs uses the same one.

        Args:
            specs, batch_spec, phase: as in `_traced_step`.
            sizes: the examples of each part, or None.
        """

        def run(parts: Any, sizes: Any) -> Any:
            return self._program.run(parts, sizes, phase)

        if self._model.run_eagerly:
            return run
        if specs is not None:
            traced: Callable[..., Any] = self._traced_step(specs, batch_spec, phase)
            return traced

        def run_with_results(parts: Any, sizes: Any) -> Any:
            # One function instead of two: calling a function takes as long as a small model's step.
            outputs, waited = run(parts, sizes)
            return self._program.own_results() if self._program.stock else outputs, waited

        key = _kind(f"single, {sizes is None}", batch_spec, phase)
        if key not in self._functions:
            self._program.prepare(batch_spec, phase)
            made = tf_tracing.made_for_each_model(run_with_results, reduce_retracing=True)
            if batch_spec is not None:
                # Traced once for parts of any size: of uneven parts there would be a trace for each.
                part = map_leaves(any_rows, batch_spec)
                counts = None if sizes is None else tf.type_spec_from_value(sizes)
                made = made.get_concrete_function((part,) * self._layout.local_replicas, counts)
            self._functions[key] = made
        return self._functions[key]

    def _at_the_end(self, iterator: Any) -> None:
        """Does what Keras' call that finds the end of data of unknown length does on one device.

        That call has begun a step. What needs no data is done: an iteration is counted, weights decay, seeds
        are drawn. XLA does nothing of a step before it has the data.
        """
        model = self._model
        if getattr(iterator, "counted", True) or model.steps_per_execution > 1 or self._program.compiled:
            return
        specs, whole = (getattr(iterator, name, None) for name in ("element_spec", "batch_spec"))
        step = self._functions.get(_kind(specs, whole, None))
        if hasattr(step, "graph") and step not in self._ends:
            self._ends[step] = graph_functions.writes_without_inputs(step)
        if (write := self._ends.get(step)) is not None:
            write()


def _kind(specs: Any, batch_spec: Any, phase: str | None, *, filled: bool = False) -> str:
    """The key of a traced step; one that reads clocks is an error once operations are deterministic."""
    return f"{specs} {batch_spec} {phase} {filled} {tf_tracing.deterministic_operations()}"


class _Stopwatch:
    """Seconds that a clock has counted since the last call.

    Args:
        clock: returns seconds; None if the transport does not measure them.
    """

    def __init__(self, clock: Callable[[], float] | None) -> None:
        self._clock = clock
        self._before = 0.0

    def __call__(self) -> float | None:
        """The seconds since the last call; None without a clock."""
        if self._clock is None:
            return None
        before, self._before = self._before, self._clock()
        return self._before - before
