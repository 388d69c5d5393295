"""Sums over replicas have one order, whatever else holds the memory of what is added up at that moment.

TensorFlow's kernel for sums of three and more begins with the first tensor whose memory nobody else holds.
A function that also returns a tensor holds its memory for sure; so each order of time is provoked here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import dtrain
from dtrain.partition.layouts import REPLICATED
from dtrain.upstream.tf_tracing import sum_in_order
from partitioned import on_replicas, traced

SIZE = 4096
PARTS = np.random.default_rng(1).normal(size=(4, SIZE)).astype("float32")
HELD = [held for count in range(4) for held in itertools.combinations(range(3), count)]

STRATEGIES: dict[str, Callable[[], Any]] = {
    "mirrored": dtrain.MirroredStrategy,
    "central_storage": lambda: dtrain.CentralStorageStrategy(["/cpu:0", "/cpu:1"], "/cpu:0"),
}


def computed(values: Sequence[Any]) -> list[Any]:
    """The values in memory of their own, which the graph optimizer cannot foresee."""
    return [tf.math.sign(value) * tf.math.abs(value) for value in values]


def held_sum(sum_of: Callable[[list[Any]], Any], held: Sequence[int]) -> Any:
    """A sum of three tensors, of which some are held beyond it."""

    @tf.function(autograph=False)
    def function(*values: Any) -> Any:
        own = computed(values)
        return sum_of(own), [own[i] for i in held]

    return function(*map(tf.constant, PARTS[:3]))[0].numpy()


def test_why_sums_are_put_in_order() -> None:
    """When TensorFlow's own sum keeps an order, ours is not needed any more."""
    found = {held_sum(tf.add_n, held).tobytes() for held in HELD}
    assert len(found) > 1


@pytest.mark.parametrize("held", HELD, ids=str)
def test_the_order_is_that_of_the_list(held: tuple[int, ...]) -> None:
    np.testing.assert_array_equal(held_sum(sum_in_order, held), (PARTS[0] + PARTS[1]) + PARTS[2])


@pytest.mark.parametrize("held", HELD, ids=str)
@pytest.mark.parametrize("sum_of", [tf.add_n, lambda values: values[0] + values[1] + values[2]])
def test_the_order_in_a_step_is_the_written_one(sum_of: Any, held: tuple[int, ...]) -> None:
    """Workers compute the same weights from the same sums, in functions that TensorFlow optimizes anew."""

    def function(*values: Any) -> Any:
        own = computed(values)
        return sum_of(own), [own[i] for i in held]

    arrays, layouts = PARTS[:3], [REPLICATED] * 3
    found, _ = on_replicas(traced(function, arrays, layouts, static=True), arrays, layouts, [1, 1])
    np.testing.assert_array_equal(found[0], (PARTS[0] + PARTS[1]) + PARTS[2])


def test_a_list_of_one_and_eager_tensors() -> None:
    np.testing.assert_array_equal(sum_in_order([tf.constant(PARTS[0])]), PARTS[0])
    np.testing.assert_array_equal(sum_in_order(list(map(tf.constant, PARTS[:2]))), PARTS[0] + PARTS[1])


def test_tensors_of_other_shapes_are_refused() -> None:
    with pytest.raises(tf.errors.InvalidArgumentError, match="same size and shape"):
        sum_in_order([tf.zeros([3]), tf.zeros([1])])


def accumulated(strategy: Any) -> Callable[[Any], Any]:
    """A function that reduces what replicas add to their sums, and holds all that they add."""

    def in_replica(number: Any) -> Any:
        context = tf.distribute.get_replica_context()
        mine = tf.gather(tf.constant(PARTS.reshape(2, 2, SIZE)), context.replica_id_in_sync_group)
        found, kept = computed(tf.unstack(mine * number))
        total = context.all_reduce(tf.distribute.ReduceOp.SUM, found + kept)
        return total, (found, kept)

    @tf.function(autograph=False)
    def function(number: Any) -> Any:
        return strategy.run(in_replica, args=(number,))

    return function  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", STRATEGIES)
def test_sums_of_replicas_sums_are_not_joined(name: str) -> None:
    strategy = STRATEGIES[name]()
    function = accumulated(strategy)
    expected = (PARTS[0] + PARTS[1]) + (PARTS[2] + PARTS[3])
    for _ in range(20):
        total = strategy.experimental_local_results(function(tf.constant(1.0)))[0][0]
        np.testing.assert_array_equal(total, expected)
