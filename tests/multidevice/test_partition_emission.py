"""How a partitioned function is made: sums that the caller makes, and what XLA compiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtrain
from dtrain.engine.step.partitioned_steps import DividedFunction, copies_of, traced_as_one_device
from dtrain.interfaces.managed_strategy import layout_of
from dtrain.partition.communication import Collectives, Parts
from dtrain.partition.layouts import REPLICATED
from dtrain.partition.marks import marked
from dtrain.partition.nodes import LOOP
from dtrain.partition.partition import Partitioned, by_batch
from dtrain.partition.replicas import Replicas
from partitioned import Processes

RANDOM = np.random.default_rng(2)
X = RANDOM.normal(size=(7, 3)).astype("float32")
W = RANDOM.normal(size=(3, 4)).astype("float32")
SIZES = (3, 4)


def partitioned(function: Callable[..., Any]) -> tuple[Partitioned, Any]:
    """A function of rows and of weights, divided over two replicas, and as one device runs it."""
    specs = tf.TensorSpec([None, 3], tf.float32), tf.TensorSpec([3, 4], tf.float32)
    whole = tf.function(function, autograph=False).get_concrete_function(*specs)
    return Partitioned(whole, [by_batch(), REPLICATED], Replicas(2, 2)), whole


def called(step: Partitioned, *rest: Any, **how: Any) -> tuple[list[np.ndarray], Any]:
    """What the divided function returns, and the function that was traced."""
    rows = [tf.TensorSpec([None, 3], tf.float32)] * 2, [tf.TensorSpec([3, 4], tf.float32)] * 2
    made = tf.function(
        lambda sizes, given: step(sizes, given, *rest, **how), autograph=False
    ).get_concrete_function(tf.TensorSpec([2], tf.int32), list(rows))
    found = made(tf.constant(SIZES), [np.split(X, [SIZES[0]]), [W, W]])
    return [each.numpy() for each in found], made


def test_the_caller_gets_marked_sums_before_anything_is_computed_from_them() -> None:
    seen: list[Any] = []

    def function(x: Any, w: Any) -> Any:
        total = marked(tf.reduce_sum(x @ w, axis=0), 5)
        other = tf.reduce_sum(x @ w, axis=0)
        return 2.0 * total, total + tf.reduce_sum(x), tf.sqrt(tf.abs(total)), 3.0 * other

    class Tenfold(Collectives):
        def marked_sums(self, marks: Sequence[int], parts: Parts, *, nested: bool) -> Parts:
            seen.append((list(marks), [[tuple(each.shape) for each in part] for part in parts]))
            return [[10.0 * tf.add_n(each)] * 2 for each in parts]

    step, whole = partitioned(function)
    found, _ = called(step, Tenfold())
    # Once for all that is computed from it; a sum that is added to it is made first.
    assert seen == [([5], [[(4,), (4,)]])]
    total = (X @ W).sum(axis=0)
    np.testing.assert_allclose(found[0], 20.0 * total, rtol=1e-5)
    np.testing.assert_allclose(found[2], np.sqrt(np.abs(10.0 * total)), rtol=1e-5)
    np.testing.assert_allclose(found[3], whole(X, W)[3], rtol=1e-5)


def test_marks_change_nothing_without_a_caller_that_makes_them() -> None:
    step, whole = partitioned(lambda x, w: 2.0 * marked(tf.reduce_sum(x @ w, axis=0), 0))
    np.testing.assert_allclose(called(step)[0][0], whole(X, W), rtol=1e-5)


def mean_and_weights(x: Any, w: Any) -> Any:
    """A mean over the rows, what a gradient is added to, and constants that each row has."""
    with tf.GradientTape() as tape:
        tape.watch(w)
        scale = tf.sqrt(tf.fill([7, 1], 2.0)) if x.shape[0] else 1.0
        loss = tf.reduce_mean(scale * (x @ w) ** 2)
    return loss, tape.gradient(loss, w) + w, tf.shape(x)[0]


@pytest.mark.parametrize("rows", [None, 7])
def test_what_follows_from_the_rows_is_computed_on_each_device(rows: int | None) -> None:
    """Sending a scalar to another device takes longer than computing it there."""
    devices = ["/cpu:0", "/cpu:1"]
    specs = tf.TensorSpec([rows, 3], tf.float32), tf.TensorSpec([3, 4], tf.float32)
    whole = tf.function(mean_and_weights, autograph=False).get_concrete_function(*specs)
    step = Partitioned(whole, [by_batch(), REPLICATED], Replicas(2, 2, 0, tuple(devices)))

    def run(sizes: Any, first: Any, second: Any, w: Any) -> Any:
        given = []
        for device in devices:
            with tf.device(device):
                given.append(tf.identity(w))
        return step(sizes, [[first, second], given], Collectives(devices=devices))

    parts = [tf.TensorSpec([None, 3], tf.float32)] * 2
    made = tf.function(run, autograph=False).get_concrete_function(
        tf.TensorSpec([2], tf.int32), *parts, tf.TensorSpec([3, 4], tf.float32)
    )
    found = made(tf.constant(SIZES), *map(tf.constant, np.split(X, [SIZES[0]])), tf.constant(W))
    for one, other in zip(found, whole(tf.constant(X), tf.constant(W)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    sent = {
        tensor.op.type
        for op in made.graph.get_operations()
        for tensor in op.inputs
        if tensor.op.device.endswith("CPU:0") and op.device.endswith("CPU:1")
    }
    assert not sent


def compiled_calls(function: Any) -> int:
    return sum("_XlaMustCompile" in each.node_def.attr for each in function.graph.get_operations())


def two_rounds(x: Any, w: Any) -> Any:
    y = tf.tanh(x @ w)
    return tf.reduce_sum(y * tf.sqrt(1.0 + tf.reduce_sum(y) ** 2)), y


def list_across_a_round(x: Any, w: Any) -> Any:
    """A list of tensors is made before a round of communication, and read after it."""
    listed = tf.TensorArray(tf.float32, 2, element_shape=[None, 4]).write(0, x @ w).write(1, tf.tanh(x @ w))
    total = tf.reduce_sum(x @ w)
    return tf.cond(total > 1e9, lambda: listed, lambda: listed.write(1, total * (x @ w))).stack()


def loop(x: Any, w: Any) -> Any:
    return tf.reduce_sum(tf.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, tf.tanh(y)), (0, x @ w))[1])


def loop_over_a_list(x: Any, w: Any) -> Any:
    """The list is without elements before the loop, so it is the same for all replicas."""
    listed = tf.TensorArray(tf.float32, 3, element_shape=[None, 4])
    y = x @ w
    found = tf.while_loop(lambda i, _: i < 3, lambda i, t: (i + 1, t.write(i, tf.tanh(y))), (0, listed))[1]
    return tf.reduce_sum(found.stack(), axis=[0, 1])


def text(x: Any, w: Any) -> Any:
    y = x @ w
    return tf.reduce_sum(y) + 0.0 * tf.cast(tf.strings.length(tf.strings.as_string(y[0, 0])), tf.float32)


@pytest.mark.parametrize(
    ("function", "calls"), [(two_rounds, 4), (list_across_a_round, 2), (loop, 2), (text, 3)]
)
def test_xla_compiles_what_a_replica_computes_between_two_rounds(function: Any, calls: int) -> None:
    """In a call of each replica for each round; lists, text, and few numbers stay outside of them."""
    step, whole = partitioned(function)
    found, made = called(step, compiled=True)
    for one, other in zip(found, tf.nest.flatten(whole(X, W)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert compiled_calls(made) == calls
    assert compiled_calls(called(step)[1]) == 0


def test_xla_compiles_loops_that_fill_a_list() -> None:
    step, whole = partitioned(loop_over_a_list)
    found, made = called(step, compiled=True)
    np.testing.assert_allclose(found[0], whole(X, W), rtol=1e-5, atol=1e-6)
    assert compiled_calls(made) == 2
    assert not [op.name for op in made.graph.get_operations() if "While" in op.type]


def test_xla_compiles_no_branch_in_which_processes_communicate() -> None:
    def sum_in_a_branch(x: Any, w: Any) -> Any:
        y = x @ w
        return tf.cond(tf.reduce_sum(y) > -1e9, lambda: tf.reduce_sum(tf.tanh(y)) ** 2, lambda: 0.0)

    specs = tf.TensorSpec([None, 3], tf.float32), tf.TensorSpec([3, 4], tf.float32)
    whole = tf.function(sum_in_a_branch, autograph=False).get_concrete_function(*specs)
    together, members = Processes(2), [0, 1]

    def run(place: int, part: np.ndarray, communication: Collectives) -> float:
        step = Partitioned(whole, [by_batch(), REPLICATED], Replicas(1, 2, place, ("/cpu:0",)))
        made = tf.function(lambda sizes, *given: step(sizes, given, communication, compiled=True))
        return float(made(tf.constant(SIZES), [tf.constant(part)], [tf.constant(W)])[0])

    with ThreadPoolExecutor(2) as pool:
        communications = [Collectives(together.member(place), ["/cpu:0"]) for place in members]
        found = list(pool.map(run, members, np.split(X, [SIZES[0]]), communications))
    np.testing.assert_allclose(found, [whole(X, W)] * 2, rtol=1e-5)


def compiled_step(units: int) -> list[Any]:
    """The calls of functions that XLA compiles in a step of two replicas."""
    strategy = dtrain.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(units)])
        model.compile("adam", "mse")
        model.optimizer.build(model.trainable_variables)
    batch = tf.TensorSpec([8, 3]), tf.TensorSpec([8, units])
    divided = DividedFunction(model.train_step, batch, strategy, layout_of(strategy), compiled=True)
    parts = [(tf.TensorSpec([None, 3]), tf.TensorSpec([None, units]))] * 2
    made = tf.function(lambda *parts: divided(parts), autograph=False).get_concrete_function(*parts)
    return [op for op in made.graph.get_operations() if op.type.endswith("PartitionedCall")]


def test_a_compiled_function_gets_the_batch_the_sums_and_variables() -> None:
    """XLA compares the numbers of a shape in each call, and copies a variable's value that it returns."""
    calls = compiled_step(5000)
    given = [sorted(str(each.shape) for each in op.inputs if each.dtype != tf.resource) for op in calls]
    rows, sums = ["(None, 3)", "(None, 5000)"], ["(3, 5000)", "(5000,)"]
    # The first replica also computes the mean loss, of the sums of losses and of their weights.
    assert given == [rows, rows, ["()", "()", *sums], sums]
    # Beside them each call returns what shows that it has ended.
    assert [len(op.outputs) - 1 for op in calls] == [4, 4, 1, 0]


def test_an_update_of_few_weights_is_not_compiled() -> None:
    assert len(compiled_step(1)) == 2


def test_each_replica_has_loops_of_its_own() -> None:
    """One loop for both, of the gradients for example, would send what each iteration computes."""
    strategy = dtrain.MirroredStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((5, 3)), keras.layers.LSTM(4), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        model.optimizer.build(model.trainable_variables)
    step = traced_as_one_device(model.train_step, (tf.TensorSpec([8, 5, 3]), tf.TensorSpec([8, 1])), strategy)
    copies = copies_of(step)
    divided = Partitioned(
        step, [by_batch(), by_batch()], Replicas(2, 2), copies=lambda captured: copies.get(id(captured))
    )
    assert [node.replica for node in divided.block.nodes if node.type == LOOP] == [0, 1, 0, 1]


def test_a_replica_waits_for_its_own_operations_alone() -> None:
    """A control edge between devices is sent as a tensor is."""
    strategy = dtrain.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((3,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
        )
        model.compile("sgd", "mse")
        model.optimizer.build(model.trainable_variables)
    step = traced_as_one_device(model.train_step, (tf.TensorSpec([8, 3]), tf.TensorSpec([8, 1])), strategy)
    copies = copies_of(step)
    divided = Partitioned(
        step, [by_batch(), by_batch()], Replicas(2, 2), copies=lambda captured: copies.get(id(captured))
    )
    own = [node for node in divided.block.nodes if not node.communicates]
    waits = {(before.replica, node.replica) for node in own for before in node.control}
    assert waits == {(0, 0), (1, 1)}


def test_what_has_an_effect_outside_runs_once_with_the_whole() -> None:
    seen: list[np.ndarray] = []

    def count(rows: Any) -> np.ndarray:
        seen.append(rows)
        return np.float32(len(seen))

    def function(x: Any, w: Any) -> Any:
        return x * tf.numpy_function(count, [x], tf.float32)

    step, _ = partitioned(function)
    (found,), _ = called(step)
    assert len(seen) == 1
    np.testing.assert_array_equal(seen[0], X)
    np.testing.assert_array_equal(found, X)
