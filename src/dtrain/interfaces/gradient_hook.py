"""The seam between the backward pass and the update: how gradients are sent, and when weights are averaged.

Without a hook, gradients are sent and all-reduced as they are. Who calls a hook: `gradients.py` for
replicas, `block.py` for parameter servers, and `weight_averages.py` for local SGD.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from dtrain.errors import ConfigurationError, known_are


class GradientHook:
    """Changes what happens to gradients before the update; given to a strategy as `gradient_hook=`.

    One object serves all replicas of a process. It is called while a step is traced, so it must compute with
    TensorFlow's operations, and in the same way on all replicas and workers. It gets dense gradients only:
    sparse ones (`tf.IndexedSlices`) are sent as they are.

    Attributes:
        average_every: steps after which the replicas' weights are averaged, instead of an all-reduce of each
            step's gradients (local SGD); then no method is called. 0 all-reduces the gradients.
        outer: the optimizer that moves the weights by the mean of what the replicas changed (DiLoCo); None
            if the weights become their mean.
        bits: of DiLoCo, those of a number that workers send; None for the numbers as they are.
        fragments: of DiLoCo, the groups of weights that are moved in turn.
        overlap: of DiLoCo, the steps that replicas take while what they have changed is sent.
    """

    average_every: int = 0
    outer: Any = None
    bits: int | None = None
    fragments: int = 1
    overlap: int = 0

    def compress(self, gradient: tf.Tensor, variable: Any) -> tf.Tensor:
        """What is sent in place of a gradient; by default the gradient itself.

        Args:
            gradient: of its variable's shape; rows that were looked up in a table, before they are summed,
                have the shape `(rows, *table.shape[1:])`.
            variable: the gradient's variable, as the program names it: Keras' or TensorFlow's.
        """
        return gradient

    def decompress(self, received: tf.Tensor, variable: Any) -> tf.Tensor:
        """The inverse of `compress`, for one gradient or for the sum over the replicas.

        The caller casts the result to the gradient's dtype.

        On parameter servers it runs on the variable's server.
        """
        return received

    def reduce(
        self,
        gradients: list[tf.Tensor],
        variables: list[Any],
        all_reduce: Callable[[list[tf.Tensor]], list[tf.Tensor]],
    ) -> list[tf.Tensor]:
        """Reduces gradients over the replicas; not called on parameter servers.

        It is called in a replica, once for each backward pass whose gradients are reduced. With local
        accumulation that is once for each update.

        Args:
            gradients: this replica's, weighted by its share of the examples, so their sum over the replicas
                is the gradient of the global batch.
            variables: the variable of each gradient.
            all_reduce: returns the sums of tensors over all replicas. The first call gets the
                tensors of all replicas, so every replica must call it equally often, outside of `tf.cond`.

        Returns:
            A tensor of the same shape and dtype for each gradient, in their order. Another number of tensors
            ends the step with a `StepError`.
        """
        sums = all_reduce([self.compress(g, v) for g, v in zip(gradients, variables, strict=True)])
        return [
            tf.cast(self.decompress(total, v), g.dtype)
            for total, v, g in zip(sums, variables, gradients, strict=True)
        ]


class Compressed(GradientHook):
    """Sends gradients in a narrower type of floats.

    Args:
        dtype: such as `tf.float16`; gradients that are not wider are sent as they are.
    """

    def __init__(self, dtype: tf.DType) -> None:
        self._dtype = dtype

    def compress(self, gradient: tf.Tensor, variable: Any) -> tf.Tensor:
        """The narrowed gradient."""
        narrows = gradient.dtype.is_floating and gradient.dtype.size > self._dtype.size
        return tf.cast(gradient, self._dtype) if narrows else gradient


class LocalSGD(GradientHook):
    """Lets each replica update its own weights, and averages them every few steps (Stich, 2019).

    Args:
        average_every: the number of steps (batches) from one averaging to the next.

    Raises:
        ConfigurationError: it is not an integer of at least 1.
    """

    def __init__(self, average_every: int = 8) -> None:
        _check_steps(average_every, "average_every", least=1)
        self.average_every = average_every


_BITS = {"int8": 8, "int4": 4}


class DiLoCo(LocalSGD):
    """Lets each replica train by itself, and moves all of them by an outer optimizer every few steps.

    After so many steps, the mean of what the replicas have changed in a weight is its gradient for the outer
    optimizer. The inner optimizer's state stays each replica's own.

    Args:
        every: the number of steps (batches) from one outer step to the next.
        outer: a Keras optimizer; None for `SGD(0.7, momentum=0.9, nesterov=True)`. Each model gets its own.
        compress: "int8" or "int4" sends what the replicas have changed in so many bits, with a scale for each
            256 numbers, rounded stochastically; None sends it as it is. Within a process nothing is sent.
        fragments: the number of groups of weights that are moved in turn, each once in `every` steps. Then no
            more than one is sent at a time.
        overlap: the steps that replicas take while what they have changed is sent. It is less than
            `every / fragments`. A replica then keeps half of what it has, and takes half of what comes late.

    Raises:
        ConfigurationError: `every` is not an integer of at least 1, `outer` is no optimizer of Keras',
            `compress` is not known, or there are too many fragments or steps of overlap.

    Example:
        ```python
        strategy = dtrain.MirroredStrategy(gradient_hook=dtrain.DiLoCo(every=20))
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile(keras.optimizers.AdamW(1e-3), "mse")
        model.fit(np.ones((64, 4)), np.ones((64, 1)), batch_size=8, verbose=0)
        ```

    Source: Douillard et al. (arXiv 2311.08105); fragments and overlap: (arXiv 2501.18512).
    """

    def __init__(
        self,
        every: int = 50,
        *,
        outer: Any = None,
        compress: str | None = None,
        fragments: int = 1,
        overlap: int = 0,
    ) -> None:
        import keras

        _check_steps(every, "every", least=1)
        _check_steps(fragments, "fragments", least=1)
        _check_steps(overlap, "overlap", least=0)
        if fragments > every or overlap * fragments >= every:
            raise ConfigurationError(
                f"every={every}, fragments={fragments} and overlap={overlap} were set: a fragment begins "
                f"each {every / fragments:g} steps, and must have ended before.",
                hint="set an overlap of less than every / fragments",
            )
        if compress not in (None, *_BITS):
            raise ConfigurationError(
                f"compress={compress!r} is not known.", hint=f"one of {', '.join(_BITS)}, or None"
            )
        super().__init__(every)
        if outer is None:
            outer = keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)
        plain = isinstance(outer, keras.optimizers.Optimizer)
        if not plain or isinstance(outer, keras.optimizers.LossScaleOptimizer):
            raise ConfigurationError(
                f"outer={outer!r} is not an optimizer of Keras' that moves weights by a gradient.",
                hint="give one such as keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)",
            )
        self.outer = outer
        self.fragments, self.overlap = fragments, overlap
        self.bits = None if compress is None else _BITS[compress]


HOOKS: dict[str, Callable[[], GradientHook]] = {
    "float16": lambda: Compressed(tf.float16),
    "bfloat16": lambda: Compressed(tf.bfloat16),
    "local_sgd": LocalSGD,
    "diloco": DiLoCo,
}
"""Makes a hook, by the name that a strategy's `gradient_hook` takes; add your own."""


def hook_of(given: str | GradientHook | None, *, shared_weights: str = "") -> GradientHook | None:
    """The hook that a strategy's `gradient_hook` argument means.

    Args:
        given: the argument.
        shared_weights: where the weights are, in a strategy whose replicas have no weights of their own; ""
            in others.

    Raises:
        ConfigurationError: it is neither a registered name nor a `GradientHook`; its `average_every` is not a
            number of steps; or it averages weights that exist only once.
    """
    if isinstance(given, str) and given in HOOKS:
        given = HOOKS[given]()
    if given is not None and not isinstance(given, GradientHook):
        raise ConfigurationError(
            f"gradient_hook={given!r} is neither the name of a hook nor a GradientHook.",
            hint=known_are(HOOKS, str(given)),
        )
    if given is not None:
        _check_steps(given.average_every, "average_every", least=0)
    if given is not None and given.average_every and shared_weights:
        raise ConfigurationError(
            f"gradient_hook={type(given).__name__} averages the replicas' weights, but here they exist once, "
            f"{shared_weights}.",
            hint="use MirroredStrategy or MultiWorkerMirroredStrategy, or another gradient hook",
        )
    return given


def _check_steps(value: Any, name: str, *, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigurationError(
            f"{name} is {value!r}, not an integer of at least {least}.",
            hint="it is a number of steps; 1 averages the weights after each step",
        )


def server_hook_of(given: str | GradientHook | None) -> GradientHook | None:
    """As `hook_of`, for parameter servers.

    Raises:
        ConfigurationError: as `hook_of`, or the hook only has a `reduce` of its own.
    """
    hook = hook_of(given, shared_weights="on the servers")
    if hook is None:
        return None
    kind, plain = type(hook), GradientHook
    own = kind.compress is not plain.compress or kind.decompress is not plain.decompress
    if kind.reduce is not plain.reduce and not own:
        raise ConfigurationError(
            f"gradient_hook={kind.__name__} has only a `reduce` of its own, but on parameter servers no "
            "gradients are reduced.",
            hint="write `compress` and `decompress`, or use a synchronous strategy",
        )
    return hook
