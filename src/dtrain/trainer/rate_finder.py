"""Finds a learning rate by a short training in which the rate grows from step to step (a range test).

It trains by Keras' own `fit`, and puts back what that has changed. It draws no picture.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from dtrain.base.log import logger
from dtrain.base.words import is_number, whole_number
from dtrain.checkpoint.variables import TrainingVariables
from dtrain.engine.callbacks.loss_alarm import SilentAlarm
from dtrain.errors import ConfigurationError
from dtrain.optim.optimizers import rate_of

_KEPT = 0.9  # the share of the smoothed loss that stays in each step
_DIVERGED = 4.0  # times the lowest smoothed loss
_FIRST = 10  # the first steps, in which the smoothed loss follows single batches
_FEWEST = 20


@dataclass(frozen=True)
class LearningRates:
    """What `find_learning_rate` has seen.

    Attributes:
        rates: the learning rate of each step, in ascending order.
        losses: the loss of each step, on its own batch.
        smoothed: the exponential moving average of the losses; each is that of the steps so far.
        suggestion: the rate at which the smoothed loss falls most steeply over the logarithm of the rate;
            None if it falls nowhere.

    Example:
        ```python
        found = dtrain.LearningRates(np.array([0.1, 1.0]), np.array([2.0, 1.0]), np.array([2.0, 1.5]), 0.1)
        print(dict(zip(found.rates, found.smoothed)))
        ```
    """

    rates: NDArray[np.float64]
    losses: NDArray[np.float64]
    smoothed: NDArray[np.float64]
    suggestion: float | None


def find_learning_rate(
    model: keras.Model,
    x: Any,
    y: Any = None,
    *,
    batch_size: int | None = None,
    lowest: float = 1e-7,
    highest: float = 10.0,
    steps: int = 100,
) -> LearningRates:
    """Suggest a learning rate by a sweep: each step of training has a higher rate than the one before.

    This is the range test of Smith (arXiv:1506.01186) with exponential growth. The sweep ends when the
    smoothed loss is four times its lowest value, or not finite. It takes as long as `steps` steps of training
    with an epoch each, under every strategy; with several workers, all of them must call it.

    Nothing of it stays: the weights, the optimizer's state and learning rate, the metrics, and the states of
    the random generators of Keras, Python and NumPy are those from before the call, to the last bit. A model
    that was not built is built. The next `fit` of a `tf.data` dataset that shuffles without a seed has
    another order than it would have had.

    Args:
        model: a compiled model, whose optimizer has a number as its learning rate.
        x: the data, as for `fit`; data that end before the sweep does begin anew.
        y: the labels, as for `fit`.
        batch_size: as for `fit`.
        lowest: the rate of the first step.
        highest: the rate of the last step.
        steps: how many steps to make; at least 20.

    Returns:
        The rates, the losses and the suggestion.

    Raises:
        ConfigurationError: an argument is out of range, the model is not compiled or its learning rate is a
            schedule, or its own step returns no loss.

    Example:
        ```python
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        x = np.random.default_rng(0).normal(size=(256, 2))
        y = x.sum(axis=1, keepdims=True)
        found = dtrain.find_learning_rate(model, x, y, lowest=1e-4, steps=30)
        model.optimizer.learning_rate = found.suggestion
        ```
    """
    steps = whole_number(steps, "steps", _FEWEST)
    for name, value in (("lowest", lowest), ("highest", highest)):
        if not (is_number(value) and 0 < value < math.inf):
            raise ConfigurationError(f"{name}={value!r} was set.", hint="it is a positive, finite number")
    if lowest >= highest:
        raise ConfigurationError(
            f"lowest={lowest!r} and highest={highest!r} were set.", hint="lowest must be less than highest"
        )
    _check_optimizer(model)
    sweep = _Sweep(np.geomspace(lowest, highest, steps))
    history, numbers = getattr(model, "history", None), (random.getstate(), np.random.get_state())
    try:
        model.fit(
            x,
            y,
            batch_size=batch_size,
            epochs=steps,
            steps_per_epoch=1,
            verbose=0,
            callbacks=[sweep, SilentAlarm()],
        )
    finally:
        sweep.put_back()
        if history is not None:
            model.history = history
        random.setstate(numbers[0])
        np.random.set_state(numbers[1])
    return sweep.found()


class _Sweep(keras.callbacks.Callback):  # type: ignore[misc]
    """Sets the rate of each epoch, which is one step, and notes its loss: every strategy reports it there."""

    def __init__(self, rates: NDArray[np.float64]) -> None:
        super().__init__()
        self._rates = rates
        self._losses: list[float] = []
        self._smoothed: list[float] = []
        self._average = 0.0
        self.put_back: Callable[[], None] = _nothing

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self.put_back = TrainingVariables(self.model).hold()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.model.optimizer.learning_rate = self._rates[epoch]

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        loss = (logs or {}).get("loss")
        if loss is None:
            raise ConfigurationError("The step of this model returns no loss.", hint="return it as 'loss'")
        self._average = _KEPT * self._average + (1 - _KEPT) * float(loss)
        smoothed = self._average / (1 - _KEPT ** (epoch + 1))
        if not math.isfinite(smoothed):
            self.model.stop_training = True
            return
        self._losses.append(float(loss))
        self._smoothed.append(smoothed)
        lowest = min(self._smoothed)
        if epoch >= _FIRST and smoothed - lowest > (_DIVERGED - 1) * abs(lowest):
            self.model.stop_training = True

    def found(self) -> LearningRates:
        """The steps that were made, and the rate of the steepest descent among them."""
        smoothed = np.array(self._smoothed)
        rates = self._rates[: len(smoothed)]
        suggestion = None
        if len(smoothed) >= _FIRST + 2:
            slopes = np.gradient(smoothed, np.log(rates))[_FIRST:]
            if slopes.min() < 0:
                suggestion = float(rates[_FIRST + slopes.argmin()])
        if suggestion is None:
            logger.warning(
                "The loss falls at no learning rate from %g to %g: no rate is suggested.",
                rates[0] if len(rates) else self._rates[0],
                rates[-1] if len(rates) else self._rates[0],
            )
        return LearningRates(rates, np.array(self._losses), smoothed, suggestion)


def _nothing() -> None:
    """Puts nothing back: the sweep has not begun."""


def _check_optimizer(model: keras.Model) -> None:
    """Checks that the model has an optimizer whose learning rate can be set."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        raise ConfigurationError("The model is not compiled.", hint="call model.compile first")
    rate = rate_of(optimizer)
    if not isinstance(rate, float):
        raise ConfigurationError(
            f"The learning rate is a {type(rate).__name__}, which cannot be set from outside.",
            hint="compile the model with a number, find the rate, then compile it with the schedule",
        )
