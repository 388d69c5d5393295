"""Runs a function on the parts of several replicas, and on the whole, for comparison."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import tensorflow as tf

from dtrain.partition.communication import Collectives
from dtrain.partition.layouts import PARTIAL, REPLICATED, Layout, RowCount, Sharded
from dtrain.partition.partition import BATCH, Partitioned
from dtrain.partition.replicas import Replicas


def parts_of(array: np.ndarray, layout: Layout, sizes: Sequence[int], seed: int = 0) -> list[np.ndarray]:
    """The parts of a value, by replica."""
    if isinstance(layout, Sharded):
        return np.split(array, np.cumsum(sizes)[:-1] * layout.rows.factor, axis=layout.dim)
    if layout == REPLICATED:
        return [array] * len(sizes)
    assert layout == PARTIAL
    generator = np.random.default_rng(seed)
    parts = [generator.normal(size=array.shape).astype(array.dtype) for _ in sizes[1:]]
    return [array - sum(parts, np.zeros_like(array)), *parts]


def traced(
    function: Callable[..., Any], arrays: Sequence[np.ndarray], layouts: Sequence[Layout], *, static: bool
) -> Any:
    """The function as one device runs it; without `static`, the number of rows is not known."""
    specs = []
    for array, layout in zip(arrays, layouts, strict=True):
        shape: list[int | None] = list(array.shape)
        if isinstance(layout, Sharded) and not static:
            shape[layout.dim] = None
        specs.append(tf.TensorSpec(shape, array.dtype))
    return tf.function(function, autograph=False).get_concrete_function(*specs)


def on_replicas(
    concrete: Any, arrays: Sequence[np.ndarray], layouts: Sequence[Layout], sizes: Sequence[int]
) -> tuple[list[np.ndarray], Partitioned]:
    """The outputs of a function that all replicas of one process compute, and how it was divided.

    A replica without rows gets the last one, which must not count again.
    """
    step = Partitioned(concrete, layouts, Replicas(len(sizes), len(sizes)), some_idle=0 in sizes)
    parts = [parts_of(array, layout, sizes) for array, layout in zip(arrays, layouts, strict=True)]
    for array_parts, array, layout in zip(parts, arrays, layouts, strict=True):
        if isinstance(layout, Sharded):
            row = np.repeat(np.take(array, [-1], axis=layout.dim), layout.rows.factor, axis=layout.dim)
            array_parts[:] = [
                row if size == 0 else part for size, part in zip(sizes, array_parts, strict=True)
            ]
    specs = [
        [tf.TensorSpec(_unknown(array_parts[0], layout), array_parts[0].dtype) for _ in array_parts]
        for array_parts, layout in zip(parts, layouts, strict=True)
    ]
    run = tf.function(lambda rows, given: step(rows, given), autograph=False).get_concrete_function(
        tf.TensorSpec([len(sizes)], tf.int32), specs
    )
    return [output.numpy() for output in run(tf.constant(sizes, tf.int32), parts)], step


def _unknown(array: np.ndarray, layout: Layout) -> list[int | None]:
    shape: list[int | None] = list(array.shape)
    if isinstance(layout, Sharded):
        shape[layout.dim] = None
    return shape


class Processes:
    """Stands for several processes: each is a thread, and what they communicate is exchanged in memory.

    Args:
        number: the number of processes.
        groups: those of each shard group; one group of all by default.
    """

    def __init__(self, number: int, groups: Sequence[Sequence[int]] = ()) -> None:
        self.groups = tuple(map(tuple, groups)) or (tuple(range(number)),)
        self._barrier = threading.Barrier(number, timeout=60)
        self._given: list[Any] = [None] * number

    def member(self, place: int) -> _Member:
        """The communication of one of them."""
        return _Member(self, place)

    def exchange(self, place: int, arrays: list[np.ndarray]) -> list[list[np.ndarray]]:
        """Gives the arrays of all, once all have called it."""
        self._given[place] = arrays
        self._barrier.wait()
        all_arrays = list(self._given)
        self._barrier.wait()
        return all_arrays


class _Member:
    def __init__(self, processes: Processes, place: int) -> None:
        self._processes = processes
        self._group = next(group for group in processes.groups if place in group)
        self._place = self._group.index(place)
        self._every = [*range(sum(map(len, processes.groups)))]
        self._number = place
        self._token = tf.Variable(0.0, trainable=False)  # read and written by each call: they keep one order

    def all_reduce(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return self._call(tensors, sum)

    def all_gather(self, tensors: Sequence[tf.Tensor], *, in_group: bool = False) -> list[tf.Tensor]:
        group = self._group if in_group else self._every
        return self._call(tensors, lambda values: np.concatenate([values[place] for place in group]))

    def reduce_scatter(self, tensors: Sequence[tf.Tensor], rows: Sequence[Sequence[int]]) -> list[tf.Tensor]:
        totals = self.all_reduce(tensors)
        return [tf.split(total, sizes)[self._place] for total, sizes in zip(totals, rows, strict=True)]

    def _call(self, tensors: Sequence[tf.Tensor], combine: Callable[[Any], Any]) -> list[tf.Tensor]:
        def run(*arrays: np.ndarray) -> list[np.ndarray]:
            everyone = self._processes.exchange(self._number, list(arrays))
            return [np.asarray(combine(list(values))) for values in zip(*everyone, strict=True)]

        before = self._token.read_value()
        with tf.control_dependencies([before]):
            outputs = tf.numpy_function(run, list(tensors), [tensor.dtype for tensor in tensors])
        made = list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
        with tf.control_dependencies(made):
            self._token.assign(before, read_value=False)
        return made


class StepOnReplicas:
    """A Keras training step on the parts of each batch, every replica with its own copies of the variables.

    Args:
        model: a compiled and built model.
        replicas: the number of replicas.
        batch: a batch, as examples and targets; others may have more or fewer rows.
        processes: whether each replica stands for a process, or all are in one.
    """

    def __init__(
        self, model: Any, replicas: int, batch: tuple[np.ndarray, np.ndarray], *, processes: bool = False
    ) -> None:
        self.replicas = replicas
        specs = [tf.TensorSpec([None, *array.shape[1:]], array.dtype) for array in batch]
        self.concrete = tf.function(
            lambda x, y: model.train_step((x, y)), autograph=False
        ).get_concrete_function(*specs)
        self.variables = list(self.concrete.graph.variables)
        self.copies = [
            [tf.Variable(variable, trainable=False, shape=variable.shape) for variable in self.variables]
            for _ in range(replicas)
        ]
        places = {id(variable.handle): place for place, variable in enumerate(self.variables)}
        layouts = [Sharded(0, RowCount(BATCH))] * 2
        parts = [[spec] * (1 if processes else replicas) for spec in specs]

        def made(here: int, first: int, communication: Any) -> Any:
            def copies(captured: Any) -> list[Any] | None:
                place = places.get(id(captured))
                if place is None:
                    return None
                return [self.copies[replica][place].handle for replica in range(first, first + here)]

            step = Partitioned(self.concrete, layouts, Replicas(here, replicas, first), copies=copies)
            self.plan = step.plan
            together = Collectives(communication)
            run = tf.function(lambda sizes, given: step(sizes, given, together), autograph=False)
            return run.get_concrete_function(tf.TensorSpec([replicas], tf.int32), parts)

        if processes:
            together = Processes(replicas)
            self.runs = [made(1, place, together.member(place)) for place in range(replicas)]
        else:
            self.runs = [made(replicas, 0, None)]

    def __call__(self, x: np.ndarray, y: np.ndarray, sizes: Sequence[int]) -> None:
        """One step on parts of these sizes."""
        cuts = np.cumsum(sizes)[:-1]
        parts = [np.split(array, cuts) for array in (x, y)]
        rows = tf.constant(sizes, tf.int32)
        if len(self.runs) == 1:
            self.runs[0](rows, parts)
            return
        with ThreadPoolExecutor(len(self.runs)) as pool:
            own = [[[part[place]] for part in parts] for place in range(self.replicas)]
            list(pool.map(lambda run, given: run(rows, given), self.runs, own))

    def on_one_device(self, x: np.ndarray, y: np.ndarray) -> None:
        """The same step by the stock function, on the model's own variables."""
        self.concrete(tf.constant(x), tf.constant(y))
