"""Finds, by training, the largest batch that a replica can train on within a memory limit.

Each size is tried in a separate process, so that a trial that runs out of memory does not end the caller's
process. This module does not run a trial itself; `batch_trial` does.
"""

from __future__ import annotations

import io
import signal
from collections.abc import Callable
from typing import Any

from dtrain.base.free_memory import free_memory
from dtrain.base.log import logger
from dtrain.base.words import check_seconds, whole_number
from dtrain.environments.topology import Task
from dtrain.errors import ConfigurationError, TaskFailedError, TaskTimeoutError
from dtrain.launch.job.task_environment import task_environment
from dtrain.launch.spawn import make_calls
from dtrain.launch.supervision.reports import describe_exit
from dtrain.optim.batch_trial import BatchTrial, names_memory, run_trial

_TASK = Task("worker", 0)
_SHARE = 0.95  # the default limit as a share of the free memory: other programs keep running meanwhile
_GROWTH = 4  # of the sizes that are tried until one does not fit
_FRACTION = 16  # by default, the gap between fitting and not fitting is at most 1/16 of the answer


def largest_batch(
    make: Callable[[int], tuple[Any, Any]],
    *,
    memory_limit: int | None = None,
    start: int | None = None,
    limit: int = 1 << 20,
    granularity: int | None = None,
    steps: int = 3,
    timeout: float = 600.0,
) -> int:
    """The largest per-replica batch whose training steps fit into memory.

    Each trial runs some real steps of `fit` in a new process. A size fits if the process, including
    TensorFlow itself, never held more than the limit. Beyond the limit, Linux refuses memory to the process,
    so that neither the caller nor the machine runs out of memory. Sizes grow fourfold until one does not
    fit, then the gap is halved. A trial takes the seconds that TensorFlow needs to start, plus its steps.

    Args:
        make: takes a batch size and returns `(model, data)`: a compiled model, and one batch of that size
            (such as `(x, y)`) or a `tf.data.Dataset` of such batches. It is sent to the process by
            cloudpickle, as with `dtrain.spawn`, so it must make everything that it uses. To train on several
            replicas, make the model and the batch of one replica.
        memory_limit: bytes that a process may hold in total. By default 95% of the memory that is free on the
            machine and in its cgroup. On GPUs it is also the limit of each device.
        start: the first size to try, by default 1; the next ones are four times as large as long as they fit.
        limit: the largest size to try.
        granularity: the answer is the largest multiple of it that fits. By default it is a power of two, at
            most a sixteenth of the answer.
        steps: training steps in each trial.
        timeout: seconds that a trial may take.

    Returns:
        The size, between 1 and `limit`.

    Raises:
        ConfigurationError: an argument is out of range; `make` cannot be pickled, or does not return a model
            and a batch of the requested size; TensorFlow alone, or a batch of size `granularity`, takes more
            than the limit.
        TaskTimeoutError: a trial took longer than `timeout`.
        TaskFailedError: a trial's process died for another reason than memory.
        Exception: any error that `make` or the training raised, with the trial's traceback as a note.

    Example:
        ```python
        def make(size):
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
            return model, (np.ones((size, 4)), np.ones((size, 1)))

        batch = dtrain.optim.largest_batch(make, start=64, limit=64)
        ```
    """
    unit = whole_number(1 if granularity is None else granularity, "granularity", 1)
    for name, value in {"start": 1 if start is None else start, "limit": limit, "steps": steps}.items():
        whole_number(value, name, 1)
    check_seconds("timeout", timeout)
    if limit < unit:
        raise ConfigurationError(f"limit is {limit}, below the granularity, which is {unit}.")
    if memory_limit is None:
        try:
            memory_limit = int(free_memory() * _SHARE)
        except OSError as error:
            raise ConfigurationError(
                f"The amount of free memory cannot be read: {error}.", hint="Give memory_limit, in bytes."
            ) from error
    memory_limit = whole_number(memory_limit, "memory_limit", 1)
    finder = Finder(make, memory_limit=memory_limit, steps=steps, timeout=timeout)
    return search(finder, start=start, limit=limit, granularity=granularity)


def search(finder: Finder, *, start: int | None, limit: int, granularity: int | None) -> int:
    """The largest size whose trial fits; the arguments are those of `largest_batch`."""
    unit = 1 if granularity is None else granularity
    most = limit // unit * unit
    first = unit if start is None else max(unit, min(start, most) // unit * unit)
    low, high = _bracket(finder, first, unit=unit, most=most)
    return _narrow(finder, low, high, None if granularity is None else unit)


def _bracket(finder: Finder, first: int, *, unit: int, most: int) -> tuple[int, int | None]:
    """A size that fits, and a larger one that does not, or None if `most` fits."""
    low, high, size = 0, None, first
    while True:
        trial = finder.trial(size)
        if trial.outcome == "fits":
            low = size
        else:
            high = size
        if low == most or (low and high is not None):
            return low, high
        if low:
            size = min(most, _GROWTH * low)
        elif size == unit:
            raise finder.nothing_fits(unit, trial)
        else:
            size = max(unit, size // _GROWTH // unit * unit)


def _narrow(finder: Finder, low: int, high: int | None, granularity: int | None) -> int:
    """Halves the gap between the size that fits and the one that does not, down to the granularity."""
    while high is not None:
        step = granularity or max(1, 1 << (low // _FRACTION).bit_length() >> 1)
        if high - low <= step:
            break
        size = max(low + step, (low + high) // 2 // step * step)
        if finder.trial(size).outcome == "fits":
            low = size
        else:
            high = size
    return low


class Finder:
    """Runs trials, each in a separate process.

    Args:
        make: as for `largest_batch`.
        memory_limit: bytes that a trial's process may hold.
        steps: training steps in each trial.
        timeout: seconds that a trial may take.
        run: the function that a trial's process calls.
    """

    def __init__(
        self,
        make: Callable[[int], Any],
        *,
        memory_limit: int,
        steps: int = 3,
        timeout: float = 600.0,
        run: Callable[..., BatchTrial] = run_trial,
    ) -> None:
        self._make = make
        self._call = run
        self._steps = steps
        self._timeout = timeout
        self.memory_limit = memory_limit

    def trial(self, batch: int) -> BatchTrial:
        """Try a batch size; the trial's outcome is "fits" or "too large".

        Raises:
            ConfigurationError: `make` cannot be pickled, or TensorFlow alone takes more than the limit.
            TaskTimeoutError: the trial took longer than the timeout.
            TaskFailedError: the trial's process died for another reason than memory.
            Exception: any error of the user's code.
        """
        options = {"steps": self._steps, "memory_limit": self.memory_limit}
        output = io.StringIO()
        try:
            (trial,) = make_calls(
                (self._call, (self._make, batch), options),
                {_TASK: task_environment(None, None, None)},
                problem="make cannot be sent",
                timeout=self._timeout,
                output=output,
            )
        except TaskTimeoutError as error:
            raise TaskTimeoutError(
                f"The trial of a batch of {batch} still ran after {self._timeout:g} s, and was ended.",
                task=error.task,
                exit_code=error.exit_code,
                hint="Give a longer timeout, fewer steps, or a limit to the sizes that are tried.",
            ) from None
        except TaskFailedError as error:
            # The message has the last lines only: after an `abort`, many more may follow what says why.
            of_memory = error.exit_code == -signal.SIGKILL or names_memory(error.message + output.getvalue())
            # Otherwise, the process was ended because of a signal to the caller.
            by_itself = error.message.startswith(f"{_TASK} ")
            if not (by_itself and of_memory):
                error.add_note(f"In the trial of a batch of {batch}.")
                raise
            trial = BatchTrial(outcome="too large", reason=f"the process {describe_exit(error.exit_code)}")
        if trial.outcome == "error":
            _raise(batch, *trial.error)
        if trial.outcome == "no start":
            raise ConfigurationError(
                f"TensorFlow alone holds {_gb(trial.resident)}; memory_limit is {_gb(self.memory_limit)}.",
                hint="Give a higher memory_limit, or end other programs that use the machine's memory.",
            )
        held = f"it held {_gb(trial.resident)} of {_gb(self.memory_limit)}"
        if trial.outcome == "fits":
            logger.info("batch %d fits: %s", batch, held)
        else:
            logger.info("batch %d does not fit: %s", batch, trial.reason or held)
        return trial

    def nothing_fits(self, unit: int, trial: BatchTrial) -> ConfigurationError:
        """The error for a smallest size that does not fit."""
        smallest = "Not even a batch of one example" if unit == 1 else f"Not even a batch of {unit} examples"
        held = f"; it held {_gb(trial.resident)}" if trial.resident else ""
        return ConfigurationError(
            f"{smallest} fits into {_gb(self.memory_limit)}{held}. The trial said: {trial.reason}.",
            hint="Give a higher memory_limit, or make the model or its inputs smaller.",
        )


def _raise(batch: int, error: BaseException | None, trace: str) -> None:
    """Raises the error that the user's code raised in a trial."""
    if error is None:
        raise TaskFailedError(
            f"The trial of a batch of {batch} failed:\n{trace}", task=str(_TASK), exit_code=1
        )
    error.add_note(f"In the trial of a batch of {batch}:\n{trace}")
    raise error


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
