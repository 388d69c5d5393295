"""How often to save a checkpoint, and what failures leave of a job's time, in closed form.

Sources: Young, A first order approximation to the optimum checkpoint interval (CACM 17(9), 1974); Daly, A
higher order estimate of the optimum checkpoint interval (FGCS 22(3), 2006).
"""

from __future__ import annotations

import math

# An interval that takes so many mean times between failures is never completed.
_NO_PROGRESS = 100.0


def young_interval(checkpoint: float, mean_time: float) -> float:
    """Young's interval of work between two checkpoints, in seconds.

    Args:
        checkpoint: the seconds that a checkpoint stops the work.
        mean_time: the mean time between failures of the job, in seconds.
    """
    return math.sqrt(2 * checkpoint * mean_time)


def daly_interval(checkpoint: float, mean_time: float) -> float:
    """Daly's interval, which also holds where failures are frequent; arguments as `young_interval`."""
    if checkpoint >= 2 * mean_time:
        return mean_time
    part = checkpoint / (2 * mean_time)
    return young_interval(checkpoint, mean_time) * (1 + math.sqrt(part) / 3 + part / 9) - checkpoint


def goodput(interval: float, checkpoint: float, recovery: float, mean_time: float) -> float:
    """The part of the time that is work which no failure has undone (Daly's complete model).

    Args:
        interval: seconds of work between two checkpoints.
        checkpoint: the seconds that a checkpoint stops the work.
        recovery: the seconds from a failure until the work goes on.
        mean_time: the mean time between failures of the job; `math.inf` for none.
    """
    if interval <= 0:
        return 0.0
    if math.isinf(mean_time):
        return interval / (interval + checkpoint)
    exponent = (recovery + interval + checkpoint) / mean_time
    if exponent > _NO_PROGRESS:
        return 0.0
    expected = mean_time * math.exp(recovery / mean_time) * math.expm1((interval + checkpoint) / mean_time)
    return interval / expected
