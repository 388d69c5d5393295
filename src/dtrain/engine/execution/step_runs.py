"""Runs many steps in one call of TensorFlow: a loop in the graph, which also reads the batches.

The step in the loop is one function, traced once for any number of rounds, so the number of steps per call
changes no result. What a step computes is not decided here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from dtrain.engine.batches.batch_rows import rows_of, split_of
from dtrain.engine.feed.batch_buffer import BatchBuffer
from dtrain.engine.feed.row_reader import traced_read
from dtrain.engine.feed.split_datasets import SplitIterator
from dtrain.task import channel
from dtrain.task.progress import reporter
from dtrain.upstream import tf_tracing, tf_variables

TracedStep = Callable[..., Any]
"""A traced step: takes the parts of a batch and their sizes; returns what `Program.run` returns."""


class RunResult(NamedTuple):
    """The result of a run of steps.

    Attributes:
        steps: the steps that were made; fewer than requested if the data ended.
        outputs: the outputs of the last step.
        waiting: seconds in which the steps waited for other workers; None if not measured.
        reading: seconds spent on reading the batches; None if not measured.
        examples: the examples in the batches, over all workers; None if batches have no leading dimension.
        has_results: whether the outputs are the metrics' results after the last step.
    """

    steps: int
    outputs: Any
    waiting: float | None
    reading: float | None
    examples: int | None
    has_results: bool = False


class Run:
    """A loop over steps, traced for one kind of iterator.

    Args:
        step: the traced step.
        iterator: an iterator to trace the loop for. A call takes any iterator of the same specs.
        exact: whether every call asks for no more batches than are left. Else the loop detects the end of the
            data.
        results: computes the metrics' results; they are then the outputs, in place of the last step's. In the
            loop's own function they cost about a millisecond less than in a call of their own.
    """

    def __init__(
        self,
        step: TracedStep,
        iterator: SplitIterator,
        *,
        exact: bool,
        results: Callable[[], Any] | None = None,
    ) -> None:
        self._one = step
        self._results = results
        self._whole = iterator.whole  # the iterator itself is not kept, so that it can be deleted
        self._outputs, self._waited = step.structured_outputs  # type: ignore[attr-defined]
        self._reading = _ReadingFlag() if channel.connected() else None
        self._timed = not tf_tracing.deterministic_operations()  # then `tf.timestamp` is an error
        self._reader = iterator.reader
        loop: Callable[..., Any] = self._counted if exact else self._until_end
        if self._reader:
            loop = self._buffered

        def run(*given: Any) -> Any:
            done, buffer, outputs, *times = loop(*given)
            return done, buffer, outputs if results is None else results(), *times

        made = tf_tracing.made_for_each_model(run)
        self._function = made.get_concrete_function(*iterator.specs, tf.TensorSpec([], tf.int32))

    def __call__(self, iterator: SplitIterator, steps: int) -> RunResult:
        """Makes this many steps; without `exact`, fewer if the data ends."""
        with _reading_shown(self._reading):
            done, buffer, outputs, waited, reading, rows = self._function(
                *iterator.tensors(), tf.constant(steps)
            )
        waiting = None if self._waited is None else float(waited)
        steps = int(done)
        iterator.note(steps, buffer)
        examples = int(rows)
        return RunResult(
            steps,
            outputs,
            waiting,
            float(reading) if self._timed else None,
            examples if examples >= 0 else None,
            has_results=self._results is not None,
        )

    def _counted(self, source: Any, buffer: BatchBuffer | None, steps: Any) -> Any:
        def body(done: Any, reading: Any, waited: Any, rows: Any, outputs: Any, buffer: Any) -> Any:
            batch, read = self._read(source.get_next)
            split = split_of(batch, whole=self._whole)
            outputs, more = self._one(*split)
            waited = waited if more is None else waited + more
            return done + 1, reading + read, waited, rows + tf.cast(rows_of(split), tf.int64), outputs, buffer

        state = self._loop(lambda done, *_: done < steps, body, (*self._start(), ()), ())
        done, reading, waited, rows, outputs, _ = state
        return done, buffer, outputs, waited, reading, rows

    def _buffered(self, source: Any, buffer: BatchBuffer, steps: Any) -> Any:
        """As `_counted`, with an inner loop over the batches of a buffer.

        A step of the inner loop neither reads nor takes times, so that small steps cost about a third less.
        """
        scalar = tf.TensorShape([])
        known = tf.nest.map_structure(lambda spec: spec.shape, self._outputs)

        def body(done: Any, reading: Any, waited: Any, rows: Any, outputs: Any, buffer: Any) -> Any:
            buffer, read = self._ready(source, buffer)
            first = buffer.next
            last = tf.minimum(buffer.size(), first + steps - done)

            def step(number: Any, waited: Any, outputs: Any) -> Any:
                outputs, more = self._one(*split_of(buffer.at(number), whole=self._whole))
                return number + 1, waited if more is None else waited + more, outputs

            _, waited, outputs = tf.while_loop(
                lambda number, *_: number < last, step, (first, waited, outputs),
                shape_invariants=(scalar, scalar, known), parallel_iterations=1,
            )  # fmt: skip
            count = last - first
            size = rows_of(split_of(buffer.at(first), whole=self._whole))
            rows += tf.cast(count, tf.int64) * tf.cast(size, tf.int64)
            return done + count, reading + read, waited, rows, outputs, buffer._replace(next=last)

        invariants = tf.nest.map_structure(lambda leaf: leaf.shape, buffer)
        state = self._loop(lambda done, *_: done < steps, body, (*self._start(), buffer), invariants)
        done, reading, waited, rows, outputs, buffer = state
        return done, buffer, outputs, waited, reading, rows

    def _ready(self, data: Any, buffer: BatchBuffer) -> tuple[BatchBuffer, Any]:
        """The buffer, read anew if no batch is left in it; and the seconds of reading."""

        def another() -> Any:
            return self._read(lambda: BatchBuffer.read(traced_read(self._reader), data, buffer.place))

        ready: tuple[BatchBuffer, Any]
        ready = tf.cond(buffer.left(), lambda: (buffer, tf.zeros([], tf.float64)), another)
        return ready

    def _until_end(self, source: Any, buffer: None, steps: Any) -> Any:
        """As `_counted`, for data of unknown length: reads optionals, and stops at the first empty one."""
        first, read = self._read(source.get_next_as_optional)

        def body(done: Any, reading: Any, waited: Any, rows: Any, outputs: Any, batch: Any) -> Any:
            split = split_of(batch.get_value(), whole=self._whole)
            outputs, more = self._one(*split)
            done += 1
            rows += tf.cast(rows_of(split), tf.int64)
            following, read = tf.cond(
                done < steps,
                lambda: self._read(source.get_next_as_optional),
                lambda: (batch, tf.zeros([], tf.float64)),
            )
            waited = waited if more is None else waited + more
            return done, reading + read, waited, rows, outputs, following

        done, reading, waited, rows, outputs, _ = self._loop(
            lambda done, *rest: tf.logical_and(done < steps, rest[-1].has_value()),
            body,
            (*self._start(read), first),
            tf.type_spec_from_value(first),
        )
        return done, None, outputs, waited, reading, rows

    def _start(self, reading: Any = None) -> tuple[Any, ...]:
        nothing = tf.zeros([], tf.float64)
        outputs = tf.nest.map_structure(_blank, self._outputs)
        rows = tf.zeros([], tf.int64)
        return tf.constant(0), nothing if reading is None else reading, nothing, rows, outputs

    def _loop(self, condition: Any, body: Any, state: tuple[Any, ...], last: Any) -> Any:
        """The loop's last state; `last` is the shape invariant of the last element of the state."""
        scalar = tf.TensorShape([])
        known = tf.nest.map_structure(lambda spec: spec.shape, self._outputs)
        invariants = (scalar, scalar, scalar, scalar, known, last)
        # One iteration at a time: a step begins when the previous step is done.
        return tf.while_loop(condition, body, state, shape_invariants=invariants, parallel_iterations=1)

    def _read(self, read: Callable[[], Any]) -> tuple[Any, Any]:
        """A batch, and the seconds that reading it took; 0 without a clock."""
        begun, noted = self._noted(1)
        with tf.control_dependencies(noted):
            batch = read()
        leaves = [leaf for leaf in tf.nest.flatten(batch, expand_composites=True) if tf.is_tensor(leaf)]
        with tf.control_dependencies(leaves):
            ended, noted = self._noted(0)
        # The step depends on the clock: with one thread, TensorFlow could otherwise read the clock last.
        with tf.control_dependencies(noted):
            return tf.nest.map_structure(_same, batch, expand_composites=True), ended - begun

    def _noted(self, reads: int) -> tuple[Any, list[Any]]:
        """The time now, and the operations that read it and note whether the loop now waits for a batch."""
        now = tf.timestamp() if self._timed else tf.zeros([], tf.float64)
        flag = [] if self._reading is None else [self._reading.set(reads)]
        return now, [*([now] if self._timed else []), *flag]


class _ReadingFlag:
    """A variable that is 1 while the loop waits for a batch; another thread reads it."""

    def __init__(self) -> None:
        with tf.init_scope(), tf.device("CPU:0"):
            self._handle = tf_variables.unnamed_variable_handle(tf.int32, [])
            self.set(0)

    def set(self, value: int) -> Any:
        with tf.device("CPU:0"):
            return tf.raw_ops.AssignVariableOp(resource=self._handle, value=tf.constant(value))

    def reads(self) -> bool:
        return bool(tf.raw_ops.ReadVariableOp(resource=self._handle, dtype=tf.int32).numpy())


class _reading_shown:  # noqa: N801
    """A context in which the process' progress reporter can ask whether the run waits for a batch."""

    def __init__(self, clock: _ReadingFlag | None) -> None:
        self._reading = clock

    def __enter__(self) -> None:
        if self._reading is not None:
            reporter.reads = self._reading.reads

    def __exit__(self, *_: object) -> None:
        if self._reading is not None:
            reporter.reads = None


def can_loop(one: Any) -> bool:
    """Whether a loop can carry the outputs of a traced step: dense tensors of known rank."""
    return all(
        isinstance(leaf, tf.TensorSpec) and leaf.shape.rank is not None
        for leaf in tf.nest.flatten(one.structured_outputs[0])
    )


def _blank(spec: tf.TensorSpec) -> Any:
    shape = [0 if size is None else size for size in spec.shape]
    return tf.fill(shape, "") if spec.dtype == tf.string else tf.zeros(shape, spec.dtype)


def _same(leaf: Any) -> Any:
    return tf.identity(leaf) if tf.is_tensor(leaf) else leaf
