"""Finds out whether a metric's `update_state` is additive over examples.

The update is traced once, apart from the training, and run on random examples of the same kinds: on all of
them, and on their parts, including an empty one. A metric that cannot be tried counts as not additive. No
trial uses the training data or changes the metric.
"""

from __future__ import annotations

import contextlib
import inspect
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from dtrain.base.log import logger
from dtrain.engine.batches.batch_rows import map_leaves
from dtrain.engine.replica.metric_arguments import Arguments, Number, Rows
from dtrain.upstream import keras_models, layer_calls

_FEW, _MANY = 12, 600  # rows in a trial, unless the rows are large
_LEAST = 4  # the fewest rows in a trial
_ELEMENTS = 2**20  # at most in the widest argument of a trial, unless the fewest rows have more
_NEAR = 1e-3  # the relative difference between sums of floats that counts as equal,
_ROUNDINGS = 64  # and how many times their precision is allowed beyond it
_KINDS = 2  # kinds of random numbers that are tried
_FAR = 1000  # the factor by which a state is multiplied, to detect metrics that stop counting somewhere
_WEIGHT = "sample_weight"

Values = list[np.ndarray]


def is_additive(metric: Any, arguments: Arguments) -> bool:
    """Whether an update is additive: the changes by parts of the examples sum to the change by all of them.

    The metric must also be reset to zeros, because all replicas but the first begin with zeros.

    Args:
        metric: a metric whose variables exist; neither these nor its attributes change.
        arguments: of a call. If none of them has rows, whole calls must be additive (`calls_are_additive`).
    """

    def test() -> bool:
        trial = _MetricTrial(metric, arguments)
        if not (trial.begins_from_zeros() and trial.is_additive()):
            return False
        other = _otherwise_weighted(metric, arguments)
        return other is None or other.is_additive()

    return _result_of(metric, test)


def calls_are_additive(metric: Any, arguments: Arguments) -> bool:
    """Whether a call changes a metric's variables by the same amounts, whatever values these have.

    Args:
        metric, arguments: as for `is_additive`.
    """
    return _result_of(metric, lambda: _MetricTrial(metric, arguments).calls_are_additive())


def _result_of(metric: Any, test: Callable[[], bool]) -> bool:
    """Runs a test in a thread of its own, outside of the strategy and of the graph that is being traced.

    Returns:
        The test's result; False if the test raised an error or changed attributes of the metric.
    """
    results: list[bool] = []

    def run() -> None:
        try:
            with _attributes_kept(metric) as kept:
                result = test()
            results.append(result and not kept.changed)
        except Exception as error:
            logger.debug("the metric %r cannot be tried out: %s", metric.name, error, exc_info=True)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return results == [True]


class _MetricTrial:
    """A metric's update, traced for any number of rows, as a function of the variables' values."""

    def __init__(self, metric: Any, arguments: Arguments) -> None:
        self._metric = metric
        self._variables = list(metric.variables)
        if not self._variables:
            raise TypeError("it has no variables")
        self._inputs = [leaf for leaf in arguments.leaves if isinstance(leaf, Rows | Number)]
        dtypes = [tf.as_dtype(v.dtype) for v in self._variables]
        if not all(dtype.is_floating or dtype.is_integer for dtype in dtypes):
            raise TypeError("a variable holds no numbers")
        self._zeros = [
            np.zeros(v.shape, dtype.as_numpy_dtype) for v, dtype in zip(self._variables, dtypes, strict=True)
        ]
        self._precision = [_precision(dtype) for dtype in dtypes]
        self._moved = [False] * len(dtypes)

        def update(states: Any, *given: Any) -> Any:
            rest = iter(given)
            values = [_taken(leaf, rest) for leaf in arguments.leaves]
            args, kwargs = arguments.filled(values)
            return metric.stateless_update_state(states, *args, **kwargs)

        states = [tf.TensorSpec(v.shape, dtype) for v, dtype in zip(self._variables, dtypes, strict=True)]
        self._update = _traced(update, states, *(spec for leaf in self._inputs for spec in _specs(leaf)))
        if len(metric.variables) != len(self._variables):
            raise TypeError("the update makes variables")

    def begins_from_zeros(self) -> bool:
        """Whether `reset_state` sets all variables to zero."""
        reset = _traced(self._metric.stateless_reset_state)
        return not any(np.any(np.asarray(value)) for value in reset())

    def run_once(self) -> None:
        """Runs the update on some examples.

        Raises:
            Exception: whatever the update raises.
        """
        self._run(self._zeros, self._data(_LEAST, 0))

    def is_additive(self) -> bool:
        """Whether the update was additive in all runs, and changed each variable in at least one of them.

        A variable that never changed proves nothing.
        """
        widest = max((leaf.elements for leaf in self._inputs if isinstance(leaf, Rows)), default=0)
        if not widest:
            return self.calls_are_additive()
        most = _ELEMENTS // widest
        if most < _LEAST:
            return self._is_additive_for(_LEAST, 0, cuts=[0, _LEAST // 2]) is True and all(self._moved)
        few, many = min(_FEW, most), min(_MANY, most)
        tried = [
            self._is_additive_for(rows, kind, cuts=[0, 1, rows // 2, rows])
            for rows in dict.fromkeys((few, many))
            for kind in range(_KINDS)
        ]
        return False not in tried and True in tried and all(self._moved)

    def _is_additive_for(self, rows: int, kind: int, *, cuts: list[int]) -> bool | None:
        """Whether the update is additive for these cuts; None if it does not accept such numbers."""
        data = self._data(rows, kind)
        for states in self._states(rows, kind):
            try:
                whole = self._change(states, data)
            except Exception:
                if kind == 0:
                    raise
                return None
            if kind and not all(np.all(np.isfinite(change)) for change in whole):
                return None
            self._moved = [
                had or bool(np.any(change)) for had, change in zip(self._moved, whole, strict=True)
            ]
            for cut in cuts:
                parts = [self._change(states, self._cut(data, *rows_)) for rows_ in ((0, cut), (cut, rows))]
                if not self._equal(whole, parts, states):
                    return False
        return True

    def calls_are_additive(self) -> bool:
        """Whether a call changes all variables, and by the same amounts from every state."""
        data, states = self._data(_LEAST, 0), self._states(_LEAST, 0)
        changes = [self._change(state, data) for state in states]
        moved = all(np.any(amount) for amount in changes[0])
        same = (
            self._equal(changes[0], [change], state) for change, state in zip(changes, states, strict=True)
        )
        return moved and all(same)

    def _cut(self, data: Values, start: int, end: int) -> Values:
        """The rows from `start` to `end`; scalars stay as they are."""
        return [value if value.ndim == 0 else value[start:end] for value in data]

    def _states(self, rows: int, kind: int) -> list[Values]:
        """States to begin with: zeros, the state after some examples, and that state times `_FAR`."""
        states = [self._zeros]
        with contextlib.suppress(Exception):
            some = self._run(self._zeros, self._data(rows, kind, seed=1))
            states += [some, [np.asarray(value * _FAR, value.dtype) for value in some]]
        return states

    def _data(self, rows: int, kind: int, seed: int = 0) -> Values:
        random = np.random.default_rng(seed)
        return [
            _random(random, spec.dtype, [rows if n is None else n for n in spec.shape], kind)
            for leaf in self._inputs
            for spec in _specs(leaf)
        ]

    def _run(self, states: Values, data: Values) -> Values:
        return [np.asarray(value) for value in self._update(states, *data)]

    def _change(self, states: Values, data: Values) -> Values:
        after = self._run(states, data)
        return [_wide(new) - _wide(old) for new, old in zip(after, states, strict=True)]

    def _equal(self, whole: Values, parts: Sequence[Values], states: Values) -> bool:
        """Whether the changes by the parts sum to the whole change, up to rounding; NaN equals nothing."""
        for i, (change, state) in enumerate(zip(whole, states, strict=True)):
            part_changes = [part[i] for part in parts]
            size = np.abs(change) + sum(np.abs(part) for part in part_changes)
            near = _ROUNDINGS * self._precision[i] * (np.abs(_wide(state)) + size)
            if self._precision[i]:
                near = near + _NEAR * size
            if not np.all(np.abs(change - sum(part_changes)) <= near):
                return False
        return True


def _traced(function: Callable[..., Any], *specs: Any) -> Callable[..., Any]:
    """Traces a function as a graph without side effects.

    Raises:
        TypeError: the function uses other variables, prints, calls Python or draws random numbers.
    """
    concrete = tf.function(function, autograph=False).get_concrete_function(*specs)
    if any(tensor.dtype in (tf.resource, tf.variant) for tensor in concrete.captured_inputs):
        raise TypeError("it uses variables that are not the metric's")
    touching = {op.type for op in concrete.graph.get_operations() if op.op_def.is_stateful} - {"Assert"}
    if touching:  # such as printing, calling Python or drawing random numbers
        raise TypeError(f"it does {', '.join(sorted(touching))}")

    def run(*values: Any) -> Any:
        return concrete(*map_leaves(tf.convert_to_tensor, values))

    return run


def _otherwise_weighted(metric: Any, arguments: Arguments) -> _MetricTrial | None:
    """A trial of the same update with `sample_weight` if the call has none, or without it if it has one.

    Validation data may have weights where training data has none, or the reverse.

    Returns:
        The trial; None if the update takes no weights, or cannot run with these.
    """
    try:
        signature = inspect.signature(metric.update_state)
        if _WEIGHT not in signature.parameters or not arguments.have_rows:
            return None
        bound = signature.bind(*arguments.structure[0], **arguments.structure[1])
        place = bound.arguments.get(_WEIGHT)
        given = isinstance(place, int) and arguments.leaves[place] is not None
        bound.arguments[_WEIGHT] = len(arguments.leaves)
        leaves = (*arguments.leaves, None if given else Rows(tf.float32))
        trial = _MetricTrial(metric, Arguments(leaves, (bound.args, bound.kwargs)))
        trial.run_once()
    except Exception as error:
        logger.debug("the metric %r takes no other weights: %s", metric.name, error)
        return None
    return trial


class _AttributeChange:
    """Whether a trial has changed attributes of a metric; known when `_attributes_kept` ends."""

    changed = False


@contextlib.contextmanager
def _attributes_kept(metric: Any) -> Iterator[_AttributeChange]:
    """Restores the attributes of a metric, and of the metrics inside it, that a trial has changed."""
    objects = [metric, *keras_models.metrics_inside(metric)]
    before = [(owner, dict(vars(owner)), _contents(owner)) for owner in objects]
    kept = _AttributeChange()
    try:
        yield kept
    finally:
        for owner, attributes, contents in before:
            now = vars(owner)
            if now.keys() != attributes.keys() or any(now[name] is not v for name, v in attributes.items()):
                kept.changed = True
                now.clear()
                now.update(attributes)
            for container, content in contents:
                had, has = _elements(content), _elements(container)
                if len(had) != len(has) or any(map(operator.is_not, had, has)):
                    kept.changed = True
                    container.clear()
                    (container.extend if isinstance(container, list) else container.update)(content)


def _contents(each: Any) -> list[tuple[Any, Any]]:
    """The plain lists and dicts that are attributes of an object, each with a copy of it."""
    return [(value, value.copy()) for value in vars(each).values() if type(value) in (list, dict)]


def _elements(container: Any) -> list[Any]:
    return [*container, *container.values()] if isinstance(container, dict) else container


def _taken(leaf: Any, given: Iterator[Any]) -> Any:
    """The next given tensor for a leaf, with its mask; a leaf that is no tensor is returned as it is."""
    if not isinstance(leaf, Rows | Number):
        return leaf
    value = next(given)
    if isinstance(leaf, Rows) and leaf.mask is not None:
        layer_calls.set_mask(value, next(given))
    return value


def _specs(leaf: Rows | Number) -> list[tf.TensorSpec]:
    """The specs of the tensors that are given for a leaf: its values, and its mask if it has one."""
    if isinstance(leaf, Number):
        return [tf.TensorSpec([], leaf.dtype)]
    if not leaf.dense:
        raise TypeError("an argument is no plain tensor")
    specs = [tf.TensorSpec([None, *leaf.shape], leaf.dtype)]
    return specs if leaf.mask is None else [*specs, tf.TensorSpec([None, *leaf.mask], tf.bool)]


def _random(random: Any, dtype: tf.DType, shape: Sequence[int], kind: int) -> np.ndarray:
    if dtype == tf.bool:
        return np.asarray(random.integers(0, 2, shape), bool)
    if dtype.is_integer:
        return np.asarray(random.integers(0, (2, 10)[kind], shape), dtype.as_numpy_dtype)
    if not dtype.is_floating:
        raise TypeError(f"no examples can be made of {dtype.name}")
    numbers = random.random(shape) if kind == 0 else 3 * random.normal(size=shape)
    return np.asarray(numbers, dtype.as_numpy_dtype)


def _precision(dtype: tf.DType) -> float:
    """The relative distance between neighbouring numbers of a dtype; 0 for integers."""
    if not dtype.is_floating:
        return 0.0
    return {tf.float64: 2.0**-52, tf.float32: 2.0**-23}.get(dtype, 2.0**-8)


def _wide(value: np.ndarray) -> np.ndarray:
    return np.asarray(value, np.float64)
