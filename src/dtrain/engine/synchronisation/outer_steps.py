"""DiLoCo: replicas train alone, and an outer optimizer moves their weights by the mean of what they changed.

Weights are divided into fragments, which are moved in turn. What replicas have changed in a fragment may be
sent while they take their next steps.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from dtrain.base.quantization import Quantization
from dtrain.engine.replica.context import all_reduce_sum, local_update
from dtrain.engine.synchronisation.weight_averages import WeightAverages, wide
from dtrain.errors import ConfigurationError
from dtrain.interfaces.managed_strategy import layout_of, managed
from dtrain.interfaces.replica_layout import ReplicaLayout
from dtrain.telemetry import events
from dtrain.upstream import keras_models, keras_optimizers, tf_tracing
from dtrain.upstream.tf_variables import underlying

_KEPT = 0.5  # of what a replica has while the others' changes arrived late (arXiv 2501.18512)


class Fragment:
    """Some weights of a model, and the state of their outer steps.

    Args:
        weights: Keras' variables.
        outer: the outer optimizer, whose settings count. This fragment's is made in the strategy's scope.

    Attributes:
        optimizer: an outer optimizer for these weights alone.
        due: the steps of the epoch after which the outer step is taken that has begun; None if none has.
    """

    def __init__(self, weights: Sequence[Any], outer: Any) -> None:
        self.weights = list(weights)
        self.optimizer = type(outer).from_config(outer.get_config())
        self.optimizer.build(self.weights)
        self.due: int | None = None
        self._begun = [tf.Variable(weight.value, trainable=False) for weight in weights]
        self._functions: dict[Any, Callable[..., Any]] = {}
        self._total: Callable[[], Any] = lambda: None

    def reset(self, strategy: Any) -> None:
        """The next outer step is taken from the weights as they are; one that has begun is forgotten."""
        self.due, self._total = None, lambda: None
        self._run(strategy, self._remember)

    def begin(self, strategy: Any, bits: int | None) -> None:
        """Begins to sum what the replicas have changed. Workers do it while they compute what follows.

        Args:
            strategy: the strategy.
            bits: of a number that is sent; None for the numbers as they are.
        """
        calls = managed(strategy).calls
        if calls is None:
            total = strategy.experimental_local_results(self._run(strategy, self._summed))[0]
            self._total = lambda: total
            return
        changes = self.changed(strategy)
        how = None if bits is None else Quantization(bits)
        self._total = calls.begin_sum(changes, how, int(self.optimizer.iterations))

    def end(self, strategy: Any, replicas: int, *, late: bool) -> None:
        """Takes the outer step that has begun, when the sum is there.

        Args:
            strategy: the strategy.
            replicas: the number of all replicas.
            late: whether replicas have taken steps meanwhile, of which they keep a part.
        """
        total, self._total, self.due = self._total(), lambda: None, None
        self.take(strategy, total, replicas, late=late)

    def take(self, strategy: Any, total: Any, replicas: int, *, late: bool = False) -> None:
        """Takes an outer step by the sum of what so many replicas have changed; `late` as for `end`."""
        key = replicas, late

        def take(total: Any) -> None:
            self._take(total / replicas, late=late)

        if key not in self._functions:
            self._functions[key] = tf_tracing.made_for_each_model(
                lambda total: strategy.run(take, args=(total,))
            )
        self._functions[key](tf.convert_to_tensor(total))

    def changed(self, strategy: Any) -> np.ndarray:
        """What the first replica of this process has changed, one vector."""
        changes = strategy.experimental_local_results(self._run(strategy, self._changes))
        first: np.ndarray = changes[0].numpy()
        return first

    def begun(self) -> list[Any]:
        """The weights from which the next outer step is taken, TensorFlow's variables."""
        return list(self._begun)

    def _run(self, strategy: Any, function: Callable[[], Any]) -> Any:
        """What a function returns on the replicas of this process."""
        name = function.__name__
        if name not in self._functions:
            self._functions[name] = tf_tracing.made_for_each_model(lambda: strategy.run(function))
        return self._functions[name]()

    def _remember(self) -> None:
        with local_update():
            for weight, begun in zip(self.weights, self._begun, strict=True):
                begun.assign(underlying(weight).read_value())

    def _changes(self) -> tf.Tensor:
        """In a replica: what it has changed, one vector."""
        dtype = tf.float64 if any(begun.dtype == tf.float64 for begun in self._begun) else tf.float32
        changes = [
            tf.cast(begun.read_value(), dtype) - tf.cast(underlying(weight).read_value(), dtype)
            for weight, begun in zip(self.weights, self._begun, strict=True)
        ]
        return tf.concat([tf.reshape(change, [-1]) for change in changes], axis=0)

    def _summed(self) -> tf.Tensor:
        (total,) = all_reduce_sum([self._changes()])
        return total

    def _take(self, mean: tf.Tensor, *, late: bool) -> None:
        """In a replica: the outer step, by the mean of what the replicas have changed."""
        sizes = [begun.shape.num_elements() for begun in self._begun]
        gradients = [
            tf.cast(tf.reshape(part, begun.shape), begun.dtype)
            for part, begun in zip(tf.split(mean, sizes), self._begun, strict=True)
        ]
        mine = [underlying(weight) for weight in self.weights]
        with local_update():
            own = [tf.identity(weight.read_value()) for weight in mine]
            for weight, begun in zip(mine, self._begun, strict=True):
                weight.assign(begun.read_value())
            self.optimizer.apply(gradients, self.weights)
            for weight, begun, had in zip(mine, self._begun, own, strict=True):
                begun.assign(weight.read_value())
                if late:
                    weight.assign(_KEPT * had + (1.0 - _KEPT) * weight.read_value())


class OuterStep:
    """The state of a model's outer steps.

    Args:
        model: a compiled model.
        hook: the strategy's gradient hook, with the outer optimizer and the number of fragments.
    """

    def __init__(self, model: Any, hook: Any) -> None:
        self._model = weakref.proxy(model)
        self._hook = hook
        self._fragments: list[Fragment] = []

    @property
    def fragments(self) -> list[Fragment]:
        """The fragments. They are made at first, and anew where other weights have become trainable.

        Raises:
            ConfigurationError: the model has no weights yet.
        """
        weights = self._model.trainable_variables
        known = [weight for fragment in self._fragments for weight in fragment.weights]
        if not known or [*map(id, known)] != [*map(id, weights)]:
            if not self._model.built or not weights:
                raise ConfigurationError(
                    "DiLoCo needs the weights before the first step, and the model is not built.",
                    hint="begin the model with keras.Input, or call model.build before fit",
                )
            with self._model.distribute_strategy.scope():
                self._fragments = [
                    Fragment(some, self._hook.outer) for some in fragments_of(weights, self._hook.fragments)
                ]
        return self._fragments

    @property
    def variables(self) -> list[Any]:
        """The variables that a checkpoint must have. They are equal on all replicas."""
        return [variable for fragment in self.fragments for variable in fragment.optimizer.variables]

    def own_variables(self) -> Iterator[Any]:
        """TensorFlow's variables of the inner optimizer's state, which each replica has for itself."""
        inner = self._model.optimizer
        if inner is None or not inner.built:
            return
        for weight in self._model.trainable_variables:
            yield from map(underlying, keras_optimizers.slots_of(inner, weight))


def fragments_of(weights: Sequence[Any], number: int) -> list[list[Any]]:
    """Weights, in their order, in at most so many groups of about the same size."""
    ends = np.cumsum([int(np.prod(weight.shape)) for weight in weights])
    # A weight belongs to the group in which its middle lies.
    middles = ends - np.diff(ends, prepend=0) / 2
    groups: list[list[Any]] = [[] for _ in range(number)]
    for weight, middle in zip(weights, middles, strict=True):
        groups[min(int(middle * number / max(ends[-1], 1)), number - 1)].append(weight)
    return [group for group in groups if group]


_steps: weakref.WeakKeyDictionary[Any, OuterStep] = weakref.WeakKeyDictionary()


def outer_step_of(model: Any) -> OuterStep | None:
    """The outer step of a model; None if its strategy asks for none."""
    layout = layout_of(keras_models.strategy_of(model))
    hook = None if layout is None else layout.gradient_hook
    if hook is None or hook.outer is None:
        return None
    if model not in _steps:
        _steps[model] = OuterStep(model, hook)
    return _steps[model]


class OuterSteps(WeightAverages):
    """The outer steps of one `fit`.

    The rounds of an epoch have `every` steps. Of P fragments, the one of number p, from 0, begins when
    (p + 1) / P of a round have passed, and ends `overlap` steps later. The epoch's end moves all, so that all
    replicas are equal then.
    """

    def __init__(self, model: Any, layout: ReplicaLayout, callbacks: Sequence[Any]) -> None:
        super().__init__(model, layout, callbacks)
        self._step: Any = outer_step_of(model)
        self._hook: Any = layout.gradient_hook
        self._fragments: list[Fragment] = []  # made when the first epoch opens
        self._moved = 0  # the last step after which all replicas were equal

    @property
    def savable(self) -> bool:  # type: ignore[override]
        """Whether all replicas have the same weights now."""
        return self._moved == self._since

    def open(self) -> None:
        """Begins with the weights as they are, which a callback may have set."""
        self._fragments = self._fragments or self._step.fragments
        if self.savable:
            self._since = self._moved = 0
            for fragment in self._fragments:
                fragment.reset(self._model.distribute_strategy)

    def next_run(self, most: int) -> tuple[str | None, int]:
        """The usual way to treat gradients, at most until a fragment's outer step begins or ends."""
        return None, min(most, *(after - self._since for after in self._events()))

    def note(self, steps: int) -> None:
        """Counts the steps, and begins and takes the outer steps whose time it is."""
        self._since += steps
        for fragment in self._fragments:
            if fragment.due == self._since:
                self._end(fragment)
        for fragment, after in zip(self._fragments, self._offsets(), strict=True):
            if self._since % self._every == after % self._every and fragment.due is None:
                fragment.due = self._since + self._hook.overlap
                fragment.begin(self._model.distribute_strategy, self._hook.bits)
                if not self._hook.overlap:
                    self._end(fragment)
        if len(self._fragments) == 1 and not self._hook.overlap and self._since % self._every == 0:
            self._statistics()
            self._moved = self._since

    def close(self) -> None:
        """Moves all fragments, unless the replicas are equal already, and counts the steps anew."""
        if self.savable:
            return
        with events.waiting_for_others():  # no step runs whose time includes this waiting
            strategy = self._model.distribute_strategy
            for fragment in self._fragments:
                if fragment.due is not None:
                    self._end(fragment)
            for fragment in self._fragments:
                fragment.begin(strategy, self._hook.bits)
                fragment.end(strategy, self._layout.replicas, late=False)
            self._statistics()
        self._since = self._moved = 0

    def _events(self) -> list[int]:
        """The numbers of steps, counted as `_since`, after which fragments' outer steps begin or end next."""
        begins = [self._since + (after - self._since - 1) % self._every + 1 for after in self._offsets()]
        return begins + [fragment.due for fragment in self._fragments if fragment.due is not None]

    def _offsets(self) -> list[int]:
        """For each fragment, the number of steps of a round after which its outer step begins."""
        number = len(self._fragments)
        return [self._every * (place + 1) // number for place in range(number)]

    def _end(self, fragment: Fragment) -> None:
        late = bool(self._hook.overlap)
        fragment.end(self._model.distribute_strategy, self._layout.replicas, late=late)

    def _statistics(self) -> None:
        """Moving statistics become their mean over the replicas."""
        if any(underlying(v).dtype.is_floating for v in self._model.non_trainable_variables):
            self._average()()

    def _in_replica(self) -> None:
        mine = [
            variable
            for variable in map(underlying, self._model.non_trainable_variables)
            if variable.dtype.is_floating
        ]
        sums = all_reduce_sum([tf.cast(variable.read_value(), wide(variable.dtype)) for variable in mine])
        with local_update():
            for variable, total in zip(mine, sums, strict=True):
                variable.assign(tf.cast(total / self._layout.replicas, variable.dtype))
