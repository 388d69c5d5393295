"""Weights that an outer optimizer moves every few steps, by the mean of what replicas have changed."""

from __future__ import annotations

from typing import Any

from dtrain.errors import ConfigurationError
from dtrain.gradient_hooks.local_sgd import LocalSGD
from dtrain.interfaces.gradient_hook import check_steps

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
        quorum: as for `LocalSGD`.

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
        quorum: int | None = None,
    ) -> None:
        import keras

        check_steps(every, "every", least=1)
        check_steps(fragments, "fragments", least=1)
        check_steps(overlap, "overlap", least=0)
        if fragments > every or overlap * fragments >= every:
            raise ConfigurationError(
                f"every={every}, fragments={fragments} and overlap={overlap} were set: a fragment begins "
                f"each {every / fragments:g} steps, and must have ended before.",
                hint="set at most `every` fragments, and an overlap of less than every / fragments",
            )
        if compress not in (None, *_BITS):
            raise ConfigurationError(
                f"compress={compress!r} is not known.", hint=f"one of {', '.join(_BITS)}, or None"
            )
        super().__init__(every, quorum=quorum)
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
