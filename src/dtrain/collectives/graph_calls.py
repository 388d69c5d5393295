"""A launcher for TensorFlow's strategies that runs dtrain's collective calls as operations of the graph.

All operations of a strategy are chained, so that every worker makes the calls in the same order, in loops and
branches too: each operation reads a variable before its call and writes it afterwards. The calls are in
`calls`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import tensorflow as tf

from dtrain.base.quantization import Quantization
from dtrain.collectives import reduction_rules
from dtrain.collectives.calls import Calls, is_narrow
from dtrain.errors import DataError
from dtrain.partition.shard_groups import ShardGroups
from dtrain.upstream import array_functions, tensorflow_names, tf_tracing, tf_variables

_Launcher: Any = tensorflow_names.LAUNCHER.resolve()


class CallOperations:
    """Collective calls as operations of TensorFlow graphs.

    Args:
        calls: the collective calls.
        shard_groups: which workers divide weights among them; None if all do.
    """

    def __init__(self, calls: Calls, shard_groups: ShardGroups | None = None) -> None:
        self._calls = self._in_group = calls
        self._counterparts: Calls | None = None
        if shard_groups is not None and shard_groups.several:
            self._in_group = calls.among(shard_groups.own)
            self._counterparts = calls.among(shard_groups.counterparts)
        self._seconds = 0.0
        self._token = tf_variables.variable_on("CPU:0", 0.0, tf.float32, "communication_token")
        self._sums, self._gather, self._gather_in_group, self._broadcast = (
            array_functions.ArrayFunction(self._counted(call))
            for call in (
                lambda *arrays: calls.sums(arrays),
                lambda *arrays: _gathered(calls, arrays),
                lambda *arrays: _gathered(self._in_group, arrays),
                lambda array: [calls.broadcast(array)],
            )
        )

    def waited(self) -> float:
        """How many seconds this worker has waited for others, in all calls so far."""
        return self._calls.waited

    def communicated(self) -> float:
        """How many seconds this worker has spent in calls so far, including the waiting for others."""
        return self._seconds

    def sum(self, value: Any) -> Any:
        """All-reduces a tensor: returns the sum over all workers, rounded once to the tensor's dtype."""
        (total,) = self.sums([value])
        return total

    def sums(self, values: Sequence[Any]) -> list[Any]:
        """All-reduces several tensors as `sum` does, with one barrier for all of them.

        Large ones go as they are, small ones as one vector for each dtype.
        """
        groups = TensorGroups(values)
        small = [[values[i] for i in numbers] for numbers in groups.small]
        # The small ones first: they are exchanged together with a large one that follows.
        with tf.device("CPU:0"):
            given = [*map(_packed, small), *(values[i] for i in groups.large)]
        results = iter(self._operation(self._sums, given) if given else ())
        totals = groups.empty
        with tf.device("CPU:0"):
            for numbers, tensors in zip(groups.small, small, strict=True):
                totals.update(zip(numbers, _unpacked(next(results), tensors), strict=True))
        totals.update(zip(groups.large, results, strict=True))
        for i, value in enumerate(values):
            totals[i].set_shape(value.shape)
        return [totals[i] for i in range(len(values))]

    def gather(self, values: Sequence[Any], *, in_group: bool = False) -> list[Any]:
        """Gathers the rows of all workers of each tensor, numbers or text, in the workers' order.

        Args:
            values: the tensors.
            in_group: whether only the workers of this one's shard group gather theirs.

        Raises:
            DataError: a tensor is of another kind, such as a variant.
        """
        for value in values:
            if not value.dtype.is_numpy_compatible:
                raise DataError(
                    f"Values of {value.dtype.name} cannot be gathered from several workers.",
                    hint="gather numbers or text",
                )
        gathered = self._operation(self._gather_in_group if in_group else self._gather, values)
        for tensor, value in zip(gathered, values, strict=True):
            tensor.set_shape(tf.TensorShape([None]).concatenate(value.shape[1:]))
        return gathered

    def scattered_sums(self, values: Sequence[Any], rows: Sequence[Sequence[int]]) -> list[Any]:
        """Sums tensors over all workers, of which each worker gets its rows, rounded once to their dtype.

        Args:
            values: the tensors.
            rows: for each, the numbers of rows of the workers of a shard group, one after another.
        """
        function = array_functions.ArrayFunction(
            self._counted(lambda *arrays: self._scattered_sums(arrays, rows))
        )
        results = self._operation(function, values)
        for tensor, value, of_all in zip(results, values, rows, strict=True):
            tensor.set_shape([of_all[self._in_group.rank], *value.shape[1:]])
        return results

    def _scattered_sums(
        self, arrays: Sequence[np.ndarray], rows: Sequence[Sequence[int]]
    ) -> list[np.ndarray]:
        """Sums in the shard groups, and then what each worker got there over its counterparts."""
        if self._counterparts is None:
            return self._in_group.scattered_sums(arrays, rows)
        wide = [array.astype(np.float32) if is_narrow(array) else array for array in arrays]
        sums = self._counterparts.sums(self._in_group.scattered_sums(wide, rows))
        return [total.astype(array.dtype, copy=False) for total, array in zip(sums, arrays, strict=True)]

    def broadcast(self, value: Any) -> Any:
        """Returns the first worker's value of a tensor."""
        (result,) = self._operation(self._broadcast, [value])
        result.set_shape(value.shape)
        return result

    def quantized_sum(self, value: Any, how: Quantization, number: Any) -> Any:
        """All-reduces a vector of float32 in few bits.

        Args:
            value: the vector.
            how: as for `Calls.quantized_sum`.
            number: a scalar, on which the rounding depends; the same on all workers.
        """
        function = array_functions.ArrayFunction(
            # An operation returns as many tensors as it is given.
            self._counted(lambda array, at: [self._calls.quantized_sum(array, how, int(at)), at])
        )
        total, _ = self._operation(function, [value, number])
        total.set_shape(value.shape)
        return total

    def begin_sum(self, value: np.ndarray, how: Quantization | None, number: int) -> Callable[[], np.ndarray]:
        """Begins to all-reduce a vector beside what this process computes.

        No other call comes before it, so that all workers make their calls in one order: another one waits
        until this one ends. Only the seconds in which this process waits for the sum count as communication.

        Args:
            value: the vector, which must not be changed.
            how: the bits in which it is sent; None for the numbers as they are.
            number: what the rounding depends on, the same on all workers.

        Returns:
            A function that waits for the sum, and returns it: float32 if it was sent in few bits, else of the
            vector's dtype. It raises what the call raised.
        """
        result: Future[np.ndarray] = Future()
        begun = threading.Event()

        def run() -> None:
            try:
                with self._calls.alone():
                    begun.set()
                    if how is None:
                        result.set_result(self._calls.sum(value))
                    else:
                        result.set_result(self._calls.quantized_sum(value, how, number))
            except BaseException as error:
                result.set_exception(error)

        threading.Thread(target=run, daemon=True, name="dtrain-sum").start()
        begun.wait()
        waiting = self._counted(lambda: [result.result()])
        return lambda: waiting()[0]

    def scatter(self, value: Any, dim: int, bounds: Sequence[tuple[int, int]]) -> Any:
        """Returns this worker's entries of the first worker's value; outside of graphs only.

        Args:
            value: a tensor; on other workers also a `tf.TensorSpec`, which takes no memory.
            dim, bounds: as for `Calls.scatter`.
        """
        if isinstance(value, tf.TensorSpec):
            array = np.broadcast_to(np.empty((), value.dtype.as_numpy_dtype), value.shape)
        else:
            array = np.asarray(value)
        (part,) = self._counted(lambda: [self._calls.scatter(array, dim, bounds)])()
        with tf.device("CPU:0"):
            return array_functions.tensor_in(part)

    def _counted(self, call: Callable[..., list[np.ndarray]]) -> Callable[..., list[np.ndarray]]:
        def run(*arrays: np.ndarray) -> list[np.ndarray]:
            begun = time.perf_counter()
            results = call(*arrays)
            self._seconds += time.perf_counter() - begun
            return results

        return run

    def _operation(self, function: Any, values: Sequence[Any]) -> list[Any]:
        kinds = [value.dtype for value in values]
        with tf_tracing.not_recording(), tf.device("CPU:0"):
            before = self._token.read_value()
            with tf.control_dependencies([before]):
                results = function(values, kinds)
            with tf.control_dependencies(results):
                self._token.assign(before, read_value=False)
        return list(results)


def _gathered(calls: Calls, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """As `Calls.gather`; text is sent as its bytes and the number of each."""
    sent: list[np.ndarray] = []
    for array in arrays:
        if array.dtype == object:
            lengths = np.array([len(text) for text in array.flat], np.int64).reshape(array.shape)
            sent += [lengths, np.frombuffer(b"".join(array.flat), np.uint8)]
        else:
            sent.append(array)
    gathered = iter(calls.gather(sent))
    return [
        _texts(next(gathered), next(gathered)) if array.dtype == object else next(gathered)
        for array in arrays
    ]


def _texts(lengths: np.ndarray, joined: np.ndarray) -> np.ndarray:
    """The texts of the given numbers of bytes, which follow each other."""
    whole, ends = joined.tobytes(), np.cumsum(lengths)
    texts = np.empty(lengths.size, object)
    texts[:] = [whole[end - length : end] for length, end in zip(lengths.flat, ends, strict=True)]
    return texts.reshape(lengths.shape)


def buckets(tensors: Sequence[Any]) -> list[list[int]]:
    """Which gradients are all-reduced together; as `reduction_rules.in_buckets`.

    Args:
        tensors: the gradients, in the order of the forward pass.
    """
    return reduction_rules.in_buckets([*map(_bytes_of, tensors)])


def _bytes_of(tensor: Any) -> int | None:
    """The bytes of a tensor; None if its shape is not known."""
    count: int | None = tensor.shape.num_elements()
    return None if count is None else count * int(tensor.dtype.size)


class TensorGroups:
    """Which of several tensors are all-reduced as they are, and which are packed.

    Attributes:
        large: the numbers of the large tensors, and of those whose size is not known.
        small: the numbers of the small tensors, a list for each dtype.
        empty: the tensors without elements, by number; TensorFlow's ring would end the process.
    """

    def __init__(self, tensors: Sequence[Any]) -> None:
        sizes = reduction_rules.by_size([*map(_bytes_of, tensors)], [tensor.dtype for tensor in tensors])
        self.large, self.small = sizes.large, sizes.small
        self.empty: dict[int, Any] = {number: tf.identity(tensors[number]) for number in sizes.empty}


class CallLauncher(_Launcher):  # type: ignore[misc]
    """Launches one device's collectives through dtrain's collective calls.

    Args:
        operations: the collective operations of this process.
        rest: the arguments of TensorFlow's launcher.
    """

    def __init__(self, operations: CallOperations, *rest: Any) -> None:
        super().__init__(*rest)
        self._operations = operations

    def all_reduce(self, input_tensor: Any, control_input: Any = None, options: Any = None) -> Any:
        """All-reduces one tensor over all workers."""
        with tf.device(self._device):
            return tf.identity(self._operations.sum(tf.convert_to_tensor(input_tensor)))

    def batch_all_reduce(self, input_tensor_packs: Any, options: Any = None) -> list[Any]:
        """All-reduces many tensors, as `CallOperations.sums`."""
        tensors = [tf.convert_to_tensor(t) for pack in input_tensor_packs for t in pack]
        with tf.device(self._device):
            return [tf.identity(total) for total in self._operations.sums(tensors)]

    def all_gather(self, input_tensor: Any, axis: Any, options: Any = None) -> Any:
        """Gathers the values of all workers along an axis, in which their sizes may differ."""
        value = tf.convert_to_tensor(input_tensor)
        known = tf.get_static_value(axis)
        with tf.device(self._device):
            if known is not None and int(known) == 0:
                return self._all_gather(value, options)
            order = tf.range(tf.rank(value))
            there = tf.concat([[axis], order[:axis], order[axis + 1 :]], axis=0)
            gathered = self._all_gather(tf.transpose(value, there), options)
            return tf.transpose(gathered, tf.math.invert_permutation(there))

    def all_reduce_indexed_slices(self, input_slices: Any, options: Any = None) -> Any:
        """Gathers the rows of all workers; the optimizer sums rows of the same index when it applies them."""
        with tf.device(self._device):
            values, indices = self._operations.gather([input_slices.values, input_slices.indices])
            return tf.IndexedSlices(tf.identity(values), tf.identity(indices), input_slices.dense_shape)

    def _all_gather(self, input_tensor: Any, options: Any) -> Any:
        (gathered,) = self._operations.gather([input_tensor])
        return gathered


def _packed(tensors: Sequence[Any]) -> Any:
    """One tensor that holds all values of several tensors of known shape."""
    return tensors[0] if len(tensors) == 1 else tf.concat([tf.reshape(t, [-1]) for t in tensors], axis=0)


def _unpacked(flat: Any, tensors: Sequence[Any]) -> list[Any]:
    """The values in `flat`, with the shapes of the tensors that were packed."""
    if len(tensors) == 1:
        return [flat]
    parts = tf.split(flat, [t.shape.num_elements() for t in tensors])
    return [tf.reshape(part, t.shape) for part, t in zip(parts, tensors, strict=True)]
