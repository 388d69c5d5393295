"""Updates one variable on the servers where the optimizer's own update would be wrong or slow.

It updates a split variable part by part, next to its slots, and updates only the rows with a gradient if the
optimizer leaves other rows unchanged. The formula of the update stays the optimizer's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from dtrain.engine.replica.thread_state import thread_state
from dtrain.engine.variables.local_variable import LocalVariable, variables_replaced
from dtrain.engine.variables.split_variables import is_split, part_of_value, parts_of
from dtrain.upstream import keras_optimizers
from dtrain.upstream.tf_variables import underlying

# With these optimizers, the update of an element depends only on the element, its gradient and its slots.
_BY_ELEMENT = (
    keras.optimizers.SGD,
    keras.optimizers.Adam,
    keras.optimizers.AdamW,
    keras.optimizers.Adamax,
    keras.optimizers.Nadam,
    keras.optimizers.Adagrad,
    keras.optimizers.Adadelta,
    keras.optimizers.RMSprop,
    keras.optimizers.Ftrl,
    keras.optimizers.Lion,
)

Update = Callable[[Any, Callable[..., Any], tuple[Any, ...]], Any]


def updating(optimizer: Any) -> contextlib.AbstractContextManager[Any]:
    """Sets, inside the context, the optimizer whose `apply` runs, so that `update` finds the slots."""
    return thread_state.having(server_optimizer=getattr(optimizer, "inner_optimizer", optimizer))


def update(one: Update, variable: Any, function: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Runs a function that updates a variable.

    Args:
        one: runs a function for a variable that is not split, on that variable's server.
        variable: a TensorFlow variable, split or not.
        function: takes the variable and `args`.
        args: the function's further arguments; a gradient is a tensor or `tf.IndexedSlices` of the variable's
            shape.
    """
    optimizer = thread_state.server_optimizer
    if not is_split(variable):
        return _update_rows(one, optimizer, variable, function, args, _slots(optimizer, variable))
    if _works_by_element(optimizer):
        return _update_parts(one, optimizer, variable, function, args)
    return _update_whole(optimizer, variable, function, args)


def _update_parts(
    one: Update, optimizer: Any, variable: Any, function: Callable[..., Any], args: Sequence[Any]
) -> Any:
    slots = [slot for slot in _slots(optimizer, variable) if is_split(slot)]
    result = None
    for number, part in enumerate(parts_of(variable)):
        own = [part_of_value(arg, variable, number) for arg in args]
        with (
            variables_replaced(slots, [parts_of(slot)[number] for slot in slots]),
            _known_as(optimizer, part, variable),
        ):
            result = _update_rows(one, optimizer, part, function, own, slots)
    return result


def _update_whole(optimizer: Any, variable: Any, function: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Joins the parts of a split variable and its slots, updates the whole, and splits it again.

    For optimizers whose update needs the whole variable.
    """
    slots = [slot for slot in _slots(optimizer, variable) if is_split(slot)]
    reals = [underlying(slot) for slot in slots]
    whole = LocalVariable(tf.convert_to_tensor(variable), real=variable)
    copies = [LocalVariable(tf.convert_to_tensor(real), real=real) for real in reals]
    with variables_replaced(slots, copies):
        result = function(whole, *args)
    for real, copy in zip((variable, *reals), (whole, *copies), strict=True):
        real.assign(copy.read_value())
        copy.destroy()
    return result


def _update_rows(
    one: Update,
    optimizer: Any,
    variable: Any,
    function: Callable[..., Any],
    args: Sequence[Any],
    slots: Sequence[Any],
) -> Any:
    """Updates only the rows that a sparse gradient names, if the optimizer leaves other rows unchanged."""
    sparse = [arg for arg in args if isinstance(arg, tf.IndexedSlices)]
    if len(sparse) != 1 or tf.executing_eagerly() or not moves_touched_rows_only(optimizer):
        return one(variable, function, tuple(args))

    def on_rows(target: Any, *given: Any) -> Any:
        rows, places = tf.unique(sparse[0].indices)
        count = tf.size(rows, out_type=places.dtype)
        shape = tf.concat([[count], tf.cast(tf.shape(sparse[0].values)[1:], places.dtype)], axis=0)
        gradient = tf.IndexedSlices(sparse[0].values, places, shape)
        alike = [slot for slot in slots if underlying(slot).shape == target.shape]
        reals = [target, *(underlying(slot) for slot in alike)]
        copies = [_rows_copy(real, rows) for real in reals]
        with variables_replaced(alike, copies[1:]):
            result = function(copies[0], *(gradient if arg is sparse[0] else arg for arg in given))
        for real, copy in zip(reals, copies, strict=True):
            real.scatter_update(tf.IndexedSlices(copy.read_value(), rows))
            copy.destroy()
        return result

    return one(variable, on_rows, tuple(args))


def _rows_copy(real: Any, rows: tf.Tensor) -> LocalVariable:
    copy = LocalVariable(tf.gather(real, rows), name="rows")
    copy.real = real
    copy._unique_id = real._unique_id
    return copy


def moves_touched_rows_only(optimizer: Any) -> bool:
    """Whether an optimizer leaves rows without a gradient unchanged, although its code computes all rows."""
    return type(optimizer) is keras.optimizers.Adagrad


def _works_by_element(optimizer: Any) -> bool:
    return optimizer is None or type(optimizer) in _BY_ELEMENT or type(optimizer).__name__ == "LazyAdam"


def _slots(optimizer: Any, variable: Any) -> list[Any]:
    return [] if optimizer is None else keras_optimizers.slots_of(optimizer, variable)


@contextlib.contextmanager
def _known_as(optimizer: Any, part: Any, variable: Any) -> Iterator[None]:
    """Lets an optimizer, inside the context, find the slots of a part by the slots of the whole variable."""
    if optimizer is None:
        yield
        return
    with keras_optimizers.known_as(optimizer, part, variable):
        yield
