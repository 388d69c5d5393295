"""Rematerialization: keeps only a layer's inputs, and computes its activations again in the backward pass.

The second computation gives the same numbers. `tf.recompute_grad`, which Keras calls, takes no keyword
arguments inside a function, draws other dropout masks the second time and writes moving statistics twice, and
its inner gradients would be all-reduced twice. Which layers are rematerialized is not decided here, but by
Keras' `RematScope`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from dtrain.engine.batches.batch_rows import is_dense
from dtrain.engine.replica.thread_state import thread_state
from dtrain.errors import ConfigurationError
from dtrain.interfaces.managed_strategy import current_layout
from dtrain.upstream import keras_models, keras_variables, layer_calls, tensorflow_names, tf_tracing

_ELSEWHERE = "make this layer outside of the rematerialize context"


class OwnNames(tuple[str, ...]):
    """The layer names of a `RematScope` of dtrain's; the class marks the scope as dtrain's."""

    def __bool__(self) -> bool:
        return True  # Keras replaces a false value with a list of its own


class RecordedSeeds:
    """The random seeds that a computation drew, for its repetition to draw again."""

    def __init__(self) -> None:
        self.seeds: list[Any] = []
        self.place: int | None = None  # the index of the next seed in a repetition; None while recording

    def next(self, draw: Callable[[], Any]) -> Any:
        """Draws a seed and records it; in the repetition, returns the recorded seed of this draw."""
        if self.place is None:
            self.seeds.append(draw())
            return self.seeds[-1]
        self.place += 1
        return self.seeds[self.place - 1]


def drawn(draw: Callable[[], Any]) -> Any:
    """A random seed; in a repetition, the seed of the first computation."""
    draws = thread_state.recorded_seeds
    return draw() if draws is None else draws.next(draw)


def remat(original: Callable[..., Any], f: Callable[..., Any]) -> Any:
    """The replacement of Keras' `remat`, for layers of dtrain's scopes and strategies."""
    owner = f if isinstance(f, keras.layers.Layer) else getattr(f, "__self__", None)
    layer = owner if isinstance(owner, keras.layers.Layer) else None
    if current_layout() is None and not _made_in_own_scope(layer):
        return original(f)
    return lambda *args, **kwargs: _rematerialized(f, layer, args, kwargs)


def rematerialized_call(
    original: Callable[..., Any], self: Any, layer_call: Any, /, *args: Any, **kwargs: Any
) -> Any:
    """A layer's method in which Keras chooses what to rematerialize, by the scope's mode."""
    mode = keras_models.remat_mode_of(self)
    if mode is not None and mode.mode == "activations" and _has_fixed_activation(self):
        return layer_call
    return original(self, layer_call, *args, **kwargs)


def _has_fixed_activation(layer: Any) -> bool:
    """Whether a layer's activation is a read-only property, as an LSTM's, which returns its cell's."""
    activation = getattr(type(layer), "activation", None)
    return isinstance(activation, property) and activation.fset is None


def _made_in_own_scope(layer: Any) -> bool:
    mode = keras_models.remat_mode_of(layer) if layer is not None else layer_calls.current_remat_mode()
    return mode is not None and isinstance(mode.layer_names, OwnNames)


def _rematerialized(f: Callable[..., Any], layer: Any, args: Any, kwargs: Any) -> Any:
    """The outputs of `f`, with a gradient that computes `f` again.

    Inside a rematerialized computation, nothing is rematerialized a second time. The outermost model, a call
    with sparse or ragged inputs, and a call without float inputs are not rematerialized.

    Raises:
        ConfigurationError: under `ParameterServerStrategy`.
    """
    leaves = keras.tree.flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, tf.Tensor) and leaf.dtype.is_floating]
    outermost = thread_state.recorded_seeds is None
    # Rematerializing the outermost model saves nothing: the repetition would keep all activations at once.
    whole = isinstance(layer, keras.Model) and layer_calls.called_first() is layer
    composite = not all(map(is_dense, leaves))
    if not outermost or whole or composite or not places:
        return f(*args, **kwargs)
    if thread_state.block is not None:
        raise ConfigurationError(
            "rematerialize was used under ParameterServerStrategy, whose workers compute with copies of "
            "the weights. TensorFlow's gradient of a second computation does not find these copies.",
            hint="leave rematerialize out, or use another strategy",
        )

    def call(values: list[Any]) -> Any:
        flat = list(leaves)
        for place, value in zip(places, values, strict=True):
            _copy_mask(flat[place], value)
            flat[place] = value
        again, named = keras.tree.pack_sequence_as((args, kwargs), flat)
        return f(*again, **named)

    return _Repeated(call, layer)([leaves[i] for i in places])


class _Repeated:
    """One computation and its repetition.

    Args:
        call: computes the outputs from a list of float tensors.
        layer: the layer that `call` computes, or None.

    Raises:
        ConfigurationError: the layer adds a loss, or writes to a trainable weight, while it is computed.
    """

    def __init__(self, call: Callable[[list[Any]], Any], layer: Any) -> None:
        self._call = call
        self._layer = layer
        self._draws = RecordedSeeds()
        self._surroundings = layer_calls.call_surroundings()
        self._state = [] if layer is None else [(v, _value(v)) for v in layer.non_trainable_variables]

    def __call__(self, inputs: list[Any]) -> Any:
        first: list[Any] = []

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def compute(*values: Any) -> Any:
            with (
                thread_state.having(recorded_seeds=self._draws),
                tf_tracing.not_recording(),
                _no_losses_added(self._layer),
            ):
                outputs = self._call(list(values))
            first[:] = keras.tree.flatten(outputs)
            self._places = [i for i, leaf in enumerate(first) if _differentiable(leaf)]
            self._structure = outputs
            # `tf.custom_gradient` passes variables only to a function with a parameter `variables`.
            return [first[i] for i in self._places], lambda *above, variables=(): self._gradients(
                list(values), above, list(variables)
            )

        outputs = compute(*inputs)
        for place, value in zip(self._places, outputs, strict=True):
            _copy_mask(first[place], value)
            first[place] = value
        return keras.tree.pack_sequence_as(self._structure, first)

    def _gradients(self, inputs: list[Any], above: Any, variables: list[Any]) -> Any:
        """The gradients of the inputs and of the variables, from the outputs' gradients `above`."""
        again = _after(inputs, above)
        with tf.GradientTape() as tape:
            tape.watch(again)
            tape.watch(variables)
            with self._repeating():
                outputs = keras.tree.flatten(self._call(again))
        # TensorFlow's own `gradient`: only the step's own call of it may all-reduce.
        gradients = tensorflow_names.TAPE_GRADIENT.original()(
            tape,
            [outputs[i] for i in self._places],
            [*again, *variables],
            list(above),
            tf.UnconnectedGradients.ZERO,
        )
        mine, theirs = gradients[: len(inputs)], gradients[len(inputs) :]
        return (mine, theirs) if variables else mine

    @contextlib.contextmanager
    def _repeating(self) -> Iterator[None]:
        """Repeats with the seeds and the state of the first computation, and discards what is written."""
        self._draws.place = 0
        with (
            thread_state.having(recorded_seeds=self._draws),
            layer_calls.in_surroundings(self._surroundings),
            keras.StatelessScope(state_mapping=self._state) as scope,
        ):
            yield
        weights = [] if self._layer is None else self._layer.trainable_variables
        for weight in weights:
            if scope.get_current_value(weight) is not None:
                raise ConfigurationError(
                    f"The layer {self._layer.name!r} is to be rematerialized, but it writes to its weight "
                    f"{weight.path!r} while it is computed, so it cannot be computed a second time.",
                    hint=_ELSEWHERE,
                )


@contextlib.contextmanager
def _no_losses_added(layer: Any) -> Iterator[None]:
    """Refuses a layer that adds a loss while it is computed, because the loss would have no gradient."""
    before = 0 if layer is None else layer_calls.count_added_losses(layer)
    yield
    if layer is not None and layer_calls.count_added_losses(layer) > before:
        raise ConfigurationError(
            f"The layer {layer.name!r} is to be rematerialized, but it adds a loss (add_loss or an activity "
            "regularizer) while it is computed, whose gradient would be lost.",
            hint=_ELSEWHERE,
        )


def _after(inputs: list[Any], above: Any) -> list[Any]:
    """The inputs, made to depend on the outputs' gradients.

    Otherwise TensorFlow would merge the repetition with the equal first computation and keep its activations.
    """
    if tf.executing_eagerly():
        return [tf.identity(value) for value in inputs]
    some = tf.reshape(above[0], [-1])[:1]
    never = tf.reduce_any(tf.logical_and(tf.math.is_nan(some), tf.math.is_finite(some)))
    return [value + tf.cast(never, value.dtype) for value in inputs]


def _copy_mask(source: Any, target: Any) -> None:
    """Copies the Keras mask of one tensor to another, if it has one."""
    mask = layer_calls.mask_of(source)
    if source is not target and mask is not None:
        layer_calls.set_mask(target, mask)


def _differentiable(value: Any) -> bool:
    return isinstance(value, tf.Tensor) and value.dtype.is_floating


def _value(variable: Any) -> Any:
    """A variable's value before the layer writes to it."""
    value = keras_variables.value_of(variable)
    return tf.convert_to_tensor(variable.value if value is None else value)
