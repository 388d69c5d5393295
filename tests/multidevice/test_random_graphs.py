"""Programs of many operations, drawn at random: replicas compute what one device computes."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.partitioned import on_replicas, traced
from tests.random_graphs import arrays_of, program

from dtrain.partition.layouts import REPLICATED
from dtrain.partition.partition import by_batch

EXAMPLES = 40
LAYOUTS = [by_batch(), by_batch(), by_batch(), REPLICATED]


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate, Phase.shrink],
)
@given(
    numbers=st.lists(st.integers(0, 2**16 - 1), min_size=20, max_size=80),
    sizes=st.lists(st.integers(0, 3), min_size=1, max_size=4).filter(any),
    static=st.booleans(),
)
def test_a_program_has_the_numbers_of_one_device(numbers: list[int], sizes: list[int], static: bool) -> None:
    arrays = arrays_of(sum(sizes), seed=len(numbers))
    said: list[str] = []
    try:
        concrete = traced(program(numbers, said), arrays, LAYOUTS, static=static)
        right = [each.numpy() for each in concrete(*map(tf.constant, arrays))]
    except (ValueError, tf.errors.InvalidArgumentError):
        return  # it cannot run on one device either, such as a slice of no rows
    found, _ = on_replicas(concrete, arrays, LAYOUTS, sizes)
    for name, a, b in zip(said, right, found, strict=True):
        assert a.shape == b.shape, (name, said)
        most = np.max(np.abs(a), initial=1.0, where=np.isfinite(a))
        np.testing.assert_allclose(b, a, rtol=1e-6, atol=1e-8 * most, err_msg=f"{name} of {said}")
