"""With which specs a function is traced where the shapes of batches change."""

from __future__ import annotations

import pytest
import tensorflow as tf

from dtrain.engine.batches.traced_specs import TracedSpecs, common_spec


def spec(*shape: int | None, dtype: str = "float32") -> tf.TensorSpec:
    return tf.TensorSpec(shape, dtype)


def test_the_second_shape_makes_a_trace_for_all() -> None:
    specs = TracedSpecs()
    given = [spec(8, 3), spec(8, 3), spec(5, 3), spec(8, 3), spec(7, 3)]
    found = [specs.of((each, None)) for each in given]
    assert found == [(spec(*shape), None) for shape in [(8, 3), (8, 3), (None, 3), (8, 3), (None, 3)]]


def test_what_differs_in_more_than_shapes_is_traced_by_itself() -> None:
    specs = TracedSpecs()
    given = [(spec(8, 3), None), (spec(8, 3), spec(2)), (spec(8, 3, dtype="int32"), None), {"x": spec(8, 3)}]
    assert [specs.of(each) for each in given] == given
    assert specs.of((spec(5, 3), None)) == (spec(None, 3), None)
    assert specs.of((spec(5, 3), None), "another phase") == (spec(5, 3), None)


@pytest.mark.parametrize(
    ("first", "second"),
    [(None, spec(2)), (spec(2), None), (spec(2), [spec(2)]), (tf.RaggedTensorSpec([None, None]), spec(2, 2))],
)
def test_these_have_no_common_spec(first: object, second: object) -> None:
    assert common_spec(first, second) is None
