"""What TensorFlow has no public API for about tracing a step as one device runs it, under any strategy."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

# Of this thread: the strategies whose scopes the code was in when it began to be traced as on one device.
_left = threading.local()


@contextlib.contextmanager
def as_on_one_device() -> Iterator[None]:
    """A context for tracing code as without a strategy: a distributed variable is its first copy.

    TensorFlow reads and writes the first copy, and no other, while it traces what is exported, since an
    exported program has one device. The strategies whose scopes the code is in are left.
    """
    import tensorflow as tf
    from tensorflow.python.saved_model import save_context

    graph = tf.compat.v1.get_default_graph()
    outer, graph._distribution_strategy_stack = graph._distribution_strategy_stack, []
    before, _left.strategies = getattr(_left, "strategies", []), outer
    try:
        with save_context.save_context(tf.saved_model.SaveOptions()):
            yield
    finally:
        graph._distribution_strategy_stack = outer
        _left.strategies = before


@contextlib.contextmanager
def as_under_a_strategy() -> Iterator[None]:
    """A context in which `as_on_one_device` has no effect, outside of the function that is being traced.

    The graph stays the default one, with its creators of variables. A strategy whose scope the code was in
    has its creator there already, and its scope adds none if it is known to be entered.
    """
    import tensorflow as tf
    from tensorflow.python.saved_model import save_context

    state = save_context._save_context
    inside, options = state._in_save_context, state._options
    state.exit_save_context()
    try:
        with tf.init_scope():
            graph = tf.compat.v1.get_default_graph()
            own, graph._distribution_strategy_stack = graph._distribution_strategy_stack, _left.strategies
            try:
                yield
            finally:
                graph._distribution_strategy_stack = own
    finally:
        if inside:
            state.enter_save_context(options)
