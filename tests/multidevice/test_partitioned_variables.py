"""Variables of a partitioned function: copies stay equal, and parts have the value as their sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from dtrain.errors import StepError
from dtrain.partition.local_regions import local_region
from dtrain.partition.partition import Partitioned, by_batch
from dtrain.partition.replicas import Replicas

Function = Callable[[tf.Variable, tf.Tensor], Any]
START = np.arange(8, dtype="float32").reshape(4, 2)
CASES: dict[str, Function] = {}


def case(function: Function) -> Function:
    CASES[function.__name__] = function
    return function


def indices(rows: tf.Tensor) -> tf.Tensor:
    return tf.cast(rows[:, 0], tf.int32) % 4


def scatter(kind: str, variable: tf.Variable, rows: tf.Tensor) -> Any:
    change = getattr(tf.raw_ops, kind)
    return change(resource=variable.handle, indices=indices(rows), updates=rows)


@case
def added_rows(variable: tf.Variable, rows: tf.Tensor) -> None:
    variable.assign_add(tf.reduce_sum(rows, 0) + tf.zeros_like(variable))


@case
def assigned_by_its_value(variable: tf.Variable, rows: tf.Tensor) -> tf.Tensor:
    variable.assign(tf.maximum(variable, tf.reduce_max(rows, 0)))
    variable.assign_sub(variable * 0.25)
    return variable * 2.0


@case
def added_to_its_own_value(variable: tf.Variable, rows: tf.Tensor) -> tf.Tensor:
    for _ in range(2):
        variable.assign(variable + tf.reduce_mean(rows))
    return tf.reduce_sum(variable)


@case
def scattered(variable: tf.Variable, rows: tf.Tensor) -> None:
    scatter("ResourceScatterAdd", variable, rows)
    scatter("ResourceScatterSub", variable, rows * rows)


@case
def updated_by_place(variable: tf.Variable, rows: tf.Tensor) -> None:
    tf.raw_ops.ResourceScatterUpdate(
        resource=variable.handle, indices=[1, 3], updates=tf.stack([tf.reduce_sum(rows, 0), rows[0]])
    )


@case
def entries_by_place(variable: tf.Variable, rows: tf.Tensor) -> None:
    variable.scatter_nd_add([[1, 0]], [tf.reduce_sum(rows)])
    variable.scatter_nd_update(tf.stack([indices(rows)[:1], [1]], 1), rows[:1, 0])
    variable.scatter_nd_sub(indices(rows)[:, None], rows)


@case
def looked_up(variable: tf.Variable, rows: tf.Tensor) -> tf.Tensor:
    return tf.gather(variable, indices(rows)) * rows


@case
def in_one_branch_of_two(variable: tf.Variable, rows: tf.Tensor) -> tf.Tensor:
    tf.cond(
        variable[0, 0] > 0.5,
        lambda: variable.assign_sub(variable * 0.5)[0, 0],
        lambda: variable.assign_add(tf.zeros([4, 2]) + tf.reduce_sum(rows, 0))[0, 0],
    )
    return variable * 2.0


@case
def in_branches_and_loops(variable: tf.Variable, rows: tf.Tensor) -> tf.Tensor:
    total = tf.reduce_sum(rows)
    tf.cond(total > 0.0, lambda: variable.assign_add(tf.fill([4, 2], total)), lambda: variable.value())
    tf.while_loop(
        lambda number: number < 3,
        lambda number: number + tf.cast(variable.assign_add(variable * 0.5)[0, 0] > -1e9, tf.int32),
        [0],
    )
    return variable + total


def on_replicas(
    function: Function, rows: np.ndarray, sizes: list[int], held: str
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The copies of the variable after the function, and its outputs.

    Args:
        function: the function.
        rows: what it is given.
        sizes: the rows of each replica.
        held: whether the replicas have "copies" or "parts" of the variable, or one variable is "shared".
    """
    variable = tf.Variable(START)
    number = len(sizes)
    copies = [tf.Variable(START if place == 0 or held == "copies" else 0 * START) for place in range(number)]
    copies = [variable] if held == "shared" else copies
    concrete = tf.function(lambda rows: function(variable, rows), autograph=False).get_concrete_function(
        tf.TensorSpec([None, 2])
    )
    step = Partitioned(
        concrete,
        [by_batch()],
        Replicas(number, number),
        some_idle=0 in sizes,
        copies=lambda captured: [copy.handle for copy in copies],
        in_parts=lambda captured: held == "parts",
    )
    parts = np.split(rows, np.cumsum(sizes)[:-1])
    parts = [part if len(part) else rows[-1:] for part in parts]
    run = tf.function(lambda sizes, parts: step(sizes, [parts]), autograph=False)
    outputs = run(tf.constant(sizes), [tf.constant(part) for part in parts])
    return [copy.numpy() for copy in copies], [each.numpy() for each in outputs]


@pytest.mark.parametrize("sizes", [[5], [3, 2], [2, 0, 3], [4, 1, 0]], ids=str)
@pytest.mark.parametrize("held", ["copies", "parts", "shared"])
@pytest.mark.parametrize("name", CASES)
def test_a_variable_has_the_value_of_one_device(name: str, held: str, sizes: list[int]) -> None:
    rows = np.random.default_rng(0).uniform(0, 4, [5, 2]).astype("float32")
    variable = tf.Variable(START)
    outputs_of_one = tf.nest.flatten(tf.function(CASES[name], autograph=False)(variable, tf.constant(rows)))
    right = variable.numpy()
    copies, outputs = on_replicas(CASES[name], rows, sizes, held)
    if held == "parts":
        np.testing.assert_allclose(sum(copies), right, rtol=2e-5)
    else:
        for copy in copies:
            np.testing.assert_array_equal(copy, copies[0])
        np.testing.assert_allclose(copies[0], right, rtol=2e-5)
    for found, expected in zip(outputs, [each for each in outputs_of_one if each is not None], strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-5)


def test_a_change_that_no_sum_of_parts_can_follow_is_an_error() -> None:
    def multiplied(variable: tf.Variable, rows: tf.Tensor) -> None:
        scatter("ResourceScatterMul", variable, rows)

    rows = np.ones([4, 2], "float32")
    with pytest.raises(StepError, match="each replica holds a part"):
        on_replicas(multiplied, rows, [2, 2], "parts")


@pytest.mark.parametrize("whole", [False, True], ids=["divided gradients", "whole gradients"])
@pytest.mark.parametrize("sizes", [[3, 2], [2, 0, 3]], ids=str)
def test_a_local_region_sees_its_replicas_rows_only(sizes: list[int], whole: bool) -> None:
    """Its outputs and gradients are its own, and what it writes is the mean of the replicas', by rows.

    An operation without a rule gives its gradient whole.
    """

    def normalized(variable: tf.Variable, rows: tf.Tensor) -> Any:
        def centred(rows: tf.Tensor) -> tf.Tensor:
            mean = tf.reduce_mean(rows, 0)
            variable.assign(tf.zeros([4, 2]) + mean)
            return (rows - mean) * scale

        scale = tf.constant([2.0, 3.0])
        with tf.GradientTape() as tape:
            tape.watch([rows, scale])
            found = local_region(centred, rows)
            cubes = tf.reverse(tf.reverse(found, [0]), [0]) ** 3 if whole else found**3
            loss = tf.reduce_sum(cubes)
        return found, *tape.gradient(loss, [rows, scale])

    rows = np.random.default_rng(0).normal(size=[5, 2]).astype("float32")
    copies, (found, of_rows, of_scale) = on_replicas(normalized, rows, sizes, "copies")
    expected, gradient, total = [], [], np.zeros(2)
    for part in (each for each in np.split(rows, np.cumsum(sizes)[:-1]) if len(each)):
        centred = part - part.mean(0)
        expected.append(centred * [2.0, 3.0])
        by_row = 3 * expected[-1] ** 2 * [2.0, 3.0]
        gradient.append(by_row - by_row.mean(0))
        total += (3 * expected[-1] ** 2 * centred).sum(0)
    np.testing.assert_allclose(found, np.concatenate(expected), rtol=2e-4, atol=1e-6)
    np.testing.assert_allclose(of_rows, np.concatenate(gradient), rtol=2e-4, atol=1e-5)
    np.testing.assert_allclose(of_scale, total, rtol=2e-4)
    for copy in copies:
        np.testing.assert_array_equal(copy, copies[0])
    np.testing.assert_allclose(copies[0][0], rows.mean(0), rtol=2e-4, atol=1e-6)
