"""Learning-rate schedules: a warm-up before any schedule, and cosine decay with restarts.

They are Keras schedules, which count the optimizer's calls. They do not scale a rate to a batch size;
`rates.py` does.
"""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import keras
from keras import ops
from keras.optimizers.schedules import CosineDecayRestarts, LearningRateSchedule

from dtrain.errors import ConfigurationError


@keras.saving.register_keras_serializable(package="dtrain")
class WarmUp(LearningRateSchedule):  # type: ignore[misc]
    """A rate that rises linearly from `start` to the first rate of `after`, and then follows `after`.

    This is the gradual warm-up of Goyal et al. (arXiv:1706.02677, section 2.2): `start` is the rate before
    scaling, and `after` begins with the scaled rate. `after` begins with its own step 0 when the warm-up
    ends, so a decay over 1000 steps still takes 1000 steps.

    A step is one call of the optimizer. With `gradient_accumulation_steps=K`, Keras counts micro-batches, K
    in an update.

    To load a model that was saved with this schedule, import `dtrain.optim` first.

    Args:
        after: a rate, or a Keras schedule.
        steps: number of steps of the warm-up; 0 for no warm-up.
        start: the rate of the first step.

    Raises:
        ConfigurationError: a number is negative or not finite, or `after` is neither rate nor schedule.

    Example:
        ```python
        rate = dtrain.optim.WarmUp(0.4, steps=500, start=0.1)
        optimizer = keras.optimizers.SGD(rate, momentum=0.9)
        ```
    """

    def __init__(self, after: float | LearningRateSchedule, steps: int, start: float = 0.0) -> None:
        super().__init__()
        if not isinstance(after, LearningRateSchedule):
            _check_rate("after", after)
        _check_rate("start", start)
        if not _is_count(steps):
            raise ConfigurationError(
                f"steps={steps!r} was set for the warm-up.", hint="a whole number of steps, or 0 for none"
            )
        self.after = after if isinstance(after, LearningRateSchedule) else float(after)
        self.steps = int(steps)
        self.start = float(start)

    def __call__(self, step: Any) -> Any:
        """The rate of a step: a float32 scalar."""
        step = ops.convert_to_tensor(step)
        # Subtracted as integers: a float32 cannot distinguish steps above 16 million.
        later = ops.cast(self._later(ops.maximum(step - self.steps, 0)), "float32")
        if self.steps == 0:
            return later
        first = ops.cast(self._later(0), "float32")
        done = ops.cast(step, "float32") / float(self.steps)
        return ops.where(step < self.steps, self.start + (first - self.start) * done, later)

    def _later(self, step: Any) -> Any:
        if isinstance(self.after, LearningRateSchedule):
            return self.after(step)
        return ops.convert_to_tensor(self.after, dtype="float32")

    def get_config(self) -> dict[str, Any]:
        """The configuration from which `from_config` makes the schedule."""
        after = self.after
        if isinstance(after, LearningRateSchedule):
            after = keras.saving.serialize_keras_object(after)
        return {"after": after, "steps": self.steps, "start": self.start}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> WarmUp:
        """Make the schedule from the result of `get_config`."""
        after = config["after"]
        if isinstance(after, dict):
            after = keras.saving.deserialize_keras_object(after)
        return cls(after, config["steps"], config["start"])


def cosine_restarts(
    rate: float,
    first_steps: int,
    *,
    growth: float = 2.0,
    decay: float = 1.0,
    lowest: float = 0.0,
    warmup: int = 0,
    start: float = 0.0,
) -> LearningRateSchedule:
    """Cosine decay with restarts (SGDR: Loshchilov and Hutter, arXiv:1608.03983).

    Args:
        rate: the rate at the start of the first decay.
        first_steps: number of steps of the first decay.
        growth: the length of each decay divided by the length of the one before.
        decay: the start rate of each decay divided by the start rate of the one before, if `lowest` is 0.
        lowest: the end rate as a share of `rate`, from 0 to 1.
        warmup: number of warm-up steps before the first decay, in addition to `first_steps`.
        start: the rate at the start of the warm-up.

    Returns:
        Keras' `CosineDecayRestarts`, in a `WarmUp` if `warmup` is not 0.

    Raises:
        ConfigurationError: a number is out of range.

    Example:
        ```python
        rate = dtrain.optim.cosine_restarts(0.1, first_steps=1000, warmup=100)
        optimizer = keras.optimizers.SGD(rate)
        ```
    """
    _check_rate("rate", rate)
    if not _is_count(first_steps) or not (first_steps > 0 and growth > 0 and decay >= 0 and 0 <= lowest <= 1):
        raise ConfigurationError(
            f"first_steps={first_steps}, growth={growth}, decay={decay} and lowest={lowest} were set.",
            hint="whole first_steps above 0, growth above 0, decay not negative, lowest between 0 and 1",
        )
    cosine = CosineDecayRestarts(
        float(rate), int(first_steps), t_mul=float(growth), m_mul=float(decay), alpha=float(lowest)
    )
    return WarmUp(cosine, warmup, start) if warmup else cosine


def _is_count(steps: Any) -> bool:
    """Whether it is a whole number of steps, or 0; a float may be one."""
    if isinstance(steps, bool) or not isinstance(steps, Real):
        return False
    return float(steps) >= 0 and float(steps).is_integer()


def _check_rate(name: str, rate: Any) -> None:
    if isinstance(rate, bool) or not isinstance(rate, Real) or not math.isfinite(rate) or rate < 0:
        raise ConfigurationError(
            f"{name}={rate!r} was set as a learning rate.",
            hint="a number that is not negative"
            + (", or a keras.optimizers.schedules schedule" if name == "after" else ""),
        )
