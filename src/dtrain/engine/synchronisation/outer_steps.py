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
        began: the steps of the epoch after which its last outer step began; 0 if none has.
        start: the weights from which the next outer step is taken. They are equal on all replicas.
        due: the steps of the epoch after which the outer step is taken that has begun; None if none has.
    """

    def __init__(self, weights: Sequence[Any], outer: Any) -> None:
        self.weights = list(weights)
        self.optimizer = type(outer).from_config(outer.get_config())
        self.optimizer.build(self.weights)
        self.began = 0
        self.due: int | None = None
        self.start = [
            tf.Variable(weight.value, trainable=False, name=f"start_of_{weight.name}") for weight in weights
        ]
        self._functions: dict[Any, Callable[..., Any]] = {}
        self._total: Callable[[], Any] = lambda: None

    def reset(self, strategy: Any) -> None:
        """The next outer step is taken from the weights as they are; one that has begun is forgotten."""
        self.began, self.due, self._total = 0, None, lambda: None
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

    def _run(self, strategy: Any, function: Callable[[], Any]) -> Any:
        """What a function returns on the replicas of this process."""
        name = function.__name__
        if name not in self._functions:
            self._functions[name] = tf_tracing.made_for_each_model(lambda: strategy.run(function))
        return self._functions[name]()

    def _remember(self) -> None:
        with local_update():
            for weight, start in zip(self.weights, self.start, strict=True):
                start.assign(underlying(weight).read_value())

    def _changes(self) -> tf.Tensor:
        """In a replica: what it has changed, one vector."""
        dtype = tf.float64 if any(start.dtype == tf.float64 for start in self.start) else tf.float32
        changes = [
            tf.cast(start.read_value(), dtype) - tf.cast(underlying(weight).read_value(), dtype)
            for weight, start in zip(self.weights, self.start, strict=True)
        ]
        return tf.concat([tf.reshape(change, [-1]) for change in changes], axis=0)

    def _summed(self) -> tf.Tensor:
        (total,) = all_reduce_sum([self._changes()])
        return total

    def _take(self, mean: tf.Tensor, *, late: bool) -> None:
        """In a replica: the outer step, by the mean of what the replicas have changed."""
        sizes = [start.shape.num_elements() for start in self.start]
        gradients = [
            tf.cast(tf.reshape(part, start.shape), start.dtype)
            for part, start in zip(tf.split(mean, sizes), self.start, strict=True)
        ]
        mine = [underlying(weight) for weight in self.weights]
        with local_update():
            own = [tf.identity(weight.read_value()) for weight in mine]
            for weight, start in zip(mine, self.start, strict=True):
                weight.assign(start.read_value())
            self.optimizer.apply(gradients, self.weights)
            for weight, start, had in zip(mine, self.start, own, strict=True):
                start.assign(weight.read_value())
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
        self._apart: Any = None

    @property
    def streams(self) -> bool:
        """Whether replicas differ at the end of a round, because fragments move in turn or late."""
        return self._hook.fragments > 1 or self._hook.overlap > 0

    @property
    def apart(self) -> bool:
        """Whether each replica has weights of its own, with which the next round goes on."""
        return self._apart is not None and bool(self._apart)  # a variable, so that checkpoints say it

    @apart.setter
    def apart(self, value: bool) -> None:
        if self.streams:
            self._apart.assign(value)

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
            self._apart = tf.Variable(False, name="replicas_apart")
        return self._fragments

    @property
    def variables(self) -> list[Any]:
        """The variables that a checkpoint must have. They are equal on all replicas."""
        variables = [variable for fragment in self.fragments for variable in fragment.optimizer.variables]
        if self.streams:
            variables += [*(start for fragment in self.fragments for start in fragment.start), self._apart]
        return variables

    def own_variables(self) -> Iterator[Any]:
        """TensorFlow's variables of each replica alone: the inner state, and weights if `apart`."""
        inner = self._model.optimizer
        if inner is None or not inner.built:
            return
        for weight in self._model.trainable_variables:
            yield from map(underlying, keras_optimizers.slots_of(inner, weight))
        if self.apart:
            yield from map(underlying, self._model.trainable_variables)
            yield from statistics_of(self._model)


def statistics_of(model: Any) -> list[Any]:
    """TensorFlow's variables of a model's moving statistics."""
    variables = map(underlying, model.non_trainable_variables)
    return [variable for variable in variables if variable.dtype.is_floating]


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
    replicas are equal then. At a round's end, a checkpoint holds the weights of each replica if they differ.
    """

    def __init__(self, model: Any, layout: ReplicaLayout, callbacks: Sequence[Any]) -> None:
        super().__init__(model, layout, callbacks)
        self._step: Any = outer_step_of(model)
        self._hook: Any = layout.gradient_hook
        self._fragments: list[Fragment] = []  # made when the first epoch opens
        self._resumed = False

    @property
    def savable(self) -> bool:  # type: ignore[override]
        """Whether a round has ended: then no sum is sent, or one that has just begun and can begin again."""
        return self.round_begins

    @property
    def _equal(self) -> bool:
        """Whether all replicas have the same weights now."""
        return self._since == 0 or (self.round_begins and not self._step.streams)

    def restore(self, *, apart: bool) -> None:
        """Notes that a checkpoint was restored, which the end of a round may have saved."""
        self._resumed = self._step.apart

    def open(self) -> None:
        """Begins with the weights as they are, which a callback may have set."""
        self._fragments = self._fragments or self._step.fragments
        if self._equal and not self._resumed:
            self._since, self._step.apart = 0, False
            for fragment in self._fragments:
                fragment.reset(self._model.distribute_strategy)

    def next_run(self, most: int) -> tuple[str | None, int]:
        """The usual way to treat gradients, at most until a fragment's outer step begins or ends."""
        if self._resumed:
            self._go_on()
        return None, min(most, *(after - self._since for after in self._events()))

    def _go_on(self) -> None:
        """Goes on after a round whose end was saved: what began then begins again."""
        self._resumed, self._since = False, self._every
        for fragment, after in zip(self._fragments, self._offsets(), strict=True):
            fragment.began = after
        if self._hook.overlap:
            self._begin(self._fragments[-1])

    def note(self, steps: int) -> None:
        """Counts the steps, and begins and takes the outer steps whose time it is."""
        self._since += steps
        for fragment in self._fragments:
            if fragment.due == self._since:
                self._end(fragment)
        for fragment, after in zip(self._fragments, self._offsets(), strict=True):
            if self._since % self._every == after % self._every and fragment.due is None:
                self._begin(fragment)
                if not self._hook.overlap:
                    self._end(fragment)
        if self.round_begins:
            if self._step.streams:
                self._step.apart = True
            else:
                self._statistics()

    def close(self) -> None:
        """Moves all fragments that have changed since they began to be moved, and counts the steps anew."""
        if self._equal:
            self._since = 0
            return
        strategy, replicas = self._model.distribute_strategy, self._layout.replicas
        with events.waiting_for_others():  # no step runs whose time includes this waiting
            for fragment in self._fragments:
                if fragment.began < self._since:
                    if fragment.due is not None:
                        self._end(fragment)
                    self._begin(fragment)
                if fragment.due is not None:
                    fragment.end(strategy, replicas, late=False)
            self._statistics()
        self._since, self._step.apart = 0, False

    def _events(self) -> list[int]:
        """The numbers of steps, counted as `_since`, after which fragments' outer steps begin or end next."""
        begins = [self._since + (after - self._since - 1) % self._every + 1 for after in self._offsets()]
        return begins + [fragment.due for fragment in self._fragments if fragment.due is not None]

    def _offsets(self) -> list[int]:
        """For each fragment, the number of steps of a round after which its outer step begins."""
        number = len(self._fragments)
        return [self._every * (place + 1) // number for place in range(number)]

    def _begin(self, fragment: Fragment) -> None:
        fragment.began, fragment.due = self._since, self._since + self._hook.overlap
        fragment.begin(self._model.distribute_strategy, self._hook.bits)

    def _end(self, fragment: Fragment) -> None:
        late = bool(self._hook.overlap)
        fragment.end(self._model.distribute_strategy, self._layout.replicas, late=late)

    def _statistics(self) -> None:
        """Moving statistics become their mean over the replicas."""
        if statistics_of(self._model):
            self._average()()

    def _in_replica(self) -> None:
        mine = statistics_of(self._model)
        sums = all_reduce_sum([tf.cast(variable.read_value(), wide(variable.dtype)) for variable in mine])
        with local_update():
            for variable, total in zip(mine, sums, strict=True):
                variable.assign(tf.cast(total / self._layout.replicas, variable.dtype))
