"""How the replicas of a strategy communicate in a step that is partitioned.

Workers communicate by dtrain's collective calls, where the strategy has them; else in replicas, by
TensorFlow's collectives, as a loop of the user's own does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from dtrain.engine.batches.batch_rows import batch_rows
from dtrain.engine.replica.context import all_reduce_sum, gather_examples
from dtrain.engine.replica.gradient_marks import GradientMarks
from dtrain.engine.replica.gradients import prepare_hook, sum_gradients
from dtrain.errors import StepError
from dtrain.interfaces.managed_strategy import managed
from dtrain.interfaces.replica_layout import ReplicaLayout
from dtrain.partition.communication import Collectives, OneProcess, Parts
from dtrain.upstream import tf_replicas, tf_tracing


class StrategyCollectives(Collectives):
    """The communication of a strategy's replicas.

    Args:
        strategy: the strategy.
        layout: its layout.
        marks: the gradients that its hook reduces.

    Attributes:
        waits: measures how long TensorFlow's collectives between workers take; None where nothing need be
            measured, because a transport of dtrain's does it or there is one worker. `measure` sets a new one
            for each step that is made.
    """

    def __init__(self, strategy: Any, layout: ReplicaLayout, marks: GradientMarks) -> None:
        calls = managed(strategy).calls if layout.workers > 1 else None
        processes = OneProcess() if calls is None else _WorkerCalls(calls)
        super().__init__(processes, tuple(strategy.extended.worker_devices), overlap=layout.overlap)
        self._strategy = strategy
        self._marks = marks
        self._by_tensorflow = layout.workers > 1 and calls is None
        self.waits: Waits | None = None
        self._cross_device = layout.cross_device_sums

    def sums(self, parts: Parts, *, nested: bool) -> Parts:
        """As `Collectives.sums`.

        In loops and branches of one process sums are made in order: devices could begin those of two loops
        the other way.

        Raises:
            StepError: workers would communicate in a loop or branch by TensorFlow's collectives.
        """
        if self._by_tensorflow:
            _check_not(nested)
        elif nested:
            return super().sums(parts, nested=nested)
        elif not self._cross_device:
            return self._in_buckets(parts)
        return self._in_replicas(lambda *own: all_reduce_sum(list(own)), parts)

    def _in_buckets(self, parts: Parts) -> Parts:
        """Sums that workers make in several calls, each as soon as its values are there."""
        totals: dict[int, Sequence[tf.Tensor]] = {}
        for numbers in managed(self._strategy).reduction_groups([values[0] for values in parts]):
            sums = super().sums([parts[number] for number in numbers], nested=False)
            totals.update(zip(numbers, sums, strict=True))
        return [totals[number] for number in range(len(parts))]

    def marked_sums(self, marks: Sequence[int], parts: Parts, *, nested: bool) -> Parts:
        """What the strategy's gradient hook makes of gradients, as in a loop of the user's own."""
        if self._by_tensorflow:
            _check_not(nested)
        variables = self._marks.variables(marks)
        prepare_hook(self._strategy, variables)
        return self._in_replicas(lambda *gradients: sum_gradients(gradients, variables), parts)

    def gathers(self, parts: Parts, *, in_group: bool = False, nested: bool = False) -> Parts:
        """As `Collectives.gathers`; under TensorFlow's collectives, a shard group is one process.

        Raises:
            StepError: as `sums`.
        """
        if in_group or not self._by_tensorflow:
            return super().gathers(parts, in_group=in_group, nested=nested)
        _check_not(nested)
        return self._in_replicas(lambda *own: [gather_examples(tensor) for tensor in own], parts)

    def scattered_sums(
        self,
        rows: Sequence[Sequence[int]],
        bounds: Sequence[Sequence[tuple[int, int]]],
        parts: Parts,
        *,
        nested: bool,
    ) -> Parts:
        """As `Collectives.scattered_sums`; TensorFlow's collectives sum, and each replica takes its rows.

        Raises:
            StepError: as `sums`.
        """
        if not self._by_tensorflow:
            return super().scattered_sums(rows, bounds, parts, nested=nested)
        return [
            [total[begin:end] for total, (begin, end) in zip(totals, own, strict=True)]
            for totals, own in zip(self.sums(parts, nested=nested), bounds, strict=True)
        ]

    def sizes(self, parts: Sequence[Any]) -> tf.Tensor:
        """The rows of the parts of a batch on all replicas, an int32 vector.

        Args:
            parts: of the replicas of this process.
        """
        rows: tf.Tensor = self.gathers([[tf.reshape(batch_rows(part), [1]) for part in parts]])[0][0]
        return rows

    def whole(self, parts: Sequence[Any], sizes: tf.Tensor, first: int) -> Any:
        """The whole of a ragged, sparse or dense value, of which each replica has its own rows.

        Args:
            parts: the values of the replicas of this process.
            sizes: the rows of all replicas.
            first: the number of this process' first replica.
        """
        kind = parts[0]
        if isinstance(kind, tf.RaggedTensor):
            inner = self.whole([part.values for part in parts], sizes, first)
            lengths = self.whole([part.row_lengths() for part in parts], sizes, first)
            return tf.RaggedTensor.from_row_lengths(inner, lengths, validate=False)
        if not isinstance(kind, tf.SparseTensor):
            return self.gathers([parts])[0][0]
        begins = [
            tf.cast(tf.reduce_sum(sizes[:place]), tf.int64) for place in range(first, first + len(parts))
        ]
        columns = [
            tf.one_hot(0, tf.shape(part.indices)[1], on_value=begin)
            for begin, part in zip(begins, parts, strict=True)
        ]
        indices = [part.indices + column for part, column in zip(parts, columns, strict=True)]
        gathered = self.gathers([indices, [part.values for part in parts]])
        rows = tf.cast(tf.reduce_sum(sizes), tf.int64)
        return tf.SparseTensor(
            gathered[0][0], gathered[1][0], tf.concat([[rows], kind.dense_shape[1:]], axis=0)
        )

    def measure(self) -> None:
        """Measures the collectives of the step that is made next, if they are TensorFlow's."""
        if self._by_tensorflow and not tf_tracing.deterministic_operations():
            self.waits = Waits()

    def _in_replicas(self, function: Callable[..., Any], parts: Parts) -> Parts:
        given = tuple(tf_replicas.per_replica(list(values)) for values in parts)

        def communicated() -> Parts:
            results = self._strategy.run(function, args=given)
            return [self._strategy.experimental_local_results(result) for result in results]

        return communicated() if self.waits is None else self.waits.around(parts, communicated)


class Waits:
    """The seconds that a step waits for other workers: in each round, from when its values are there.

    All workers' steps take equally long, because workers wait for each other; without the waiting, the times
    show which worker is slow. No computed value depends on the clocks.
    """

    def __init__(self) -> None:
        self._spans: list[tf.Tensor] = []
        self._last: tf.Tensor | None = None

    def around(self, parts: Parts, communicate: Callable[[], Parts]) -> Parts:
        """What `communicate` returns; time that two rounds have in common counts once."""
        begun = _time_of(parts)
        results = communicate()
        ended = _time_of(results)
        start = begun if self._last is None else tf.maximum(begun, self._last)
        self._spans.append(tf.maximum(ended - start, tf.zeros([], tf.float64)))
        self._last = ended
        return results

    def total(self) -> tf.Tensor:
        """The seconds of all rounds so far, a float64 scalar."""
        return tf.add_n(self._spans) if self._spans else tf.zeros([], tf.float64)


def _time_of(parts: Parts) -> tf.Tensor:
    """The time when all these tensors are computed: seconds since 1970, by the host's clock."""
    tensors = [tensor for values in parts for tensor in values]
    with tf.control_dependencies(tensors), tf.device("CPU:0"):
        return tf.timestamp()


def _check_not(nested: bool) -> None:
    if nested:
        raise StepError(
            "The step communicates between workers inside a condition or a loop, and TensorFlow's "
            "collectives cannot: each of them runs once a step.",
            hint="use one device in each worker, whose values dtrain's own transports can send there, or "
            "move what needs all examples out of the condition or loop",
        )


class _WorkerCalls:
    """What the workers of a job do together, by dtrain's collective calls."""

    def __init__(self, calls: Any) -> None:
        self._calls = calls

    def all_reduce(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """As `ProcessCommunication.all_reduce`."""
        sums: list[tf.Tensor] = self._calls.sums(tensors)
        return sums

    def all_gather(self, tensors: Sequence[tf.Tensor], *, in_group: bool = False) -> list[tf.Tensor]:
        """As `ProcessCommunication.all_gather`."""
        gathered: list[tf.Tensor] = self._calls.gather(tensors, in_group=in_group)
        return gathered

    def reduce_scatter(self, tensors: Sequence[tf.Tensor], rows: Sequence[Sequence[int]]) -> list[tf.Tensor]:
        """As `ProcessCommunication.reduce_scatter`."""
        sums: list[tf.Tensor] = self._calls.scattered_sums(tensors, rows)
        return sums
