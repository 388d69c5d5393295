"""The contexts in which a step is traced as one device's program, to be partitioned afterwards.

Variables that the code makes meanwhile, such as those of a layer that is first called in the step, are made
under the strategy, as others are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from dtrain.engine.replica.thread_state import thread_state
from dtrain.upstream.one_device_tracing import as_on_one_device, as_under_a_strategy

_PUBLIC = (
    "initial_value",
    "trainable",
    "validate_shape",
    "name",
    "dtype",
    "constraint",
    "synchronization",
    "aggregation",
    "shape",
)


@contextlib.contextmanager
def making_variables(strategy: Any) -> Iterator[None]:
    """A context in which a single program's variables are made under a strategy.

    A function that is traced needs it inside and outside: layers leave the function to make variables, and
    metrics do not. A variable with an initial value of the function's is left to TensorFlow.
    """

    def make(create: Callable[..., Any], **given: Any) -> Any:
        if not thread_state.single_program or tf.is_symbolic_tensor(given.get("initial_value")):
            return create(**given)
        with under_strategy(strategy):
            return tf.Variable(**{name: given[name] for name in _PUBLIC if given.get(name) is not None})

    with tf.variable_creator_scope(make):
        yield


@contextlib.contextmanager
def as_single_program() -> Iterator[None]:
    """A context for code that is traced as the program of one device."""
    with thread_state.having(single_program=True), as_on_one_device():
        yield


@contextlib.contextmanager
def under_strategy(strategy: Any) -> Iterator[None]:
    """Within a single program, a context outside of it and in the strategy's scope."""
    with thread_state.having(single_program=False), as_under_a_strategy(), strategy.scope():
        yield
