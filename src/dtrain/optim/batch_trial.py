"""Runs one trial of a batch size in the current process, whose memory it limits.

It does not start the process, nor interpret a missing answer; `batch_finder` does.
"""

from __future__ import annotations

import contextlib
import gc
import resource
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dtrain.errors import ConfigurationError

_SLACK = 256 << 20  # bytes that later threads reserve and hardly touch
_OUT_OF_MEMORY = (
    "bad_alloc",
    "Cannot allocate memory",
    "could not create a memory",
    "failed to allocate",
    "MemoryError",
    "mmap error: 12",
    "OOM when allocating",
    "out of memory",
    "pthread_create() failed",
    "Out of memory",
    "ResourceExhaustedError",
    "Status: 1, message: could not",  # oneDNN's out_of_memory
)


@dataclass(frozen=True, kw_only=True)
class BatchTrial:
    """The result of a trial.

    Attributes:
        outcome: "fits"; "too large"; "no start": TensorFlow alone takes more than the limit; or "error": the
            user's code failed.
        resident: the largest number of bytes that the process held.
        reason: the message from which it follows that the size is too large.
        error: the error of the user's code (None if it cannot be pickled), and its traceback as text.
    """

    outcome: Literal["fits", "too large", "no start", "error"]
    resident: int = 0
    reason: str = ""
    error: tuple[BaseException | None, str] = (None, "")


def names_memory(text: str) -> bool:
    """Whether the output of a process, or an error's text, says that memory ran out."""
    return any(sign in text for sign in _OUT_OF_MEMORY)


def run_trial(make: Callable[[int], Any], batch: int, *, steps: int, memory_limit: int) -> BatchTrial:
    """Trains some steps with a batch size. Call it in a process of its own: the memory limit remains.

    Args:
        make: takes the batch size; returns a compiled model and its training data.
        batch: the batch size.
        steps: number of training steps.
        memory_limit: bytes that the process may hold.
    """
    _prefer_oom_kill()
    started = _start_tensorflow(memory_limit)
    if started > memory_limit:
        return BatchTrial(outcome="no start", resident=started)
    _limit_memory(memory_limit)
    try:
        model, data = _made(make, batch)
        model.fit(_dataset(data, batch, steps), steps_per_epoch=steps, epochs=1, verbose=0)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        if isinstance(error, MemoryError) or names_memory(said):
            return BatchTrial(outcome="too large", resident=peak_resident(), reason=said.splitlines()[-1])
        text = "".join(traceback.format_exception(error))
        return BatchTrial(outcome="error", error=(_picklable(error), text))
    resident = peak_resident()
    if resident > memory_limit:
        return BatchTrial(outcome="too large", resident=resident, reason="more than the limit was held")
    return BatchTrial(outcome="fits", resident=resident)


def peak_resident() -> int:
    """The largest number of bytes of memory that this process has held."""
    return _status("VmHWM")


def _start_tensorflow(memory_limit: int) -> int:
    """Makes TensorFlow allocate what it allocates once, and returns the bytes that the process then holds."""
    import keras
    import tensorflow as tf

    for device in tf.config.list_physical_devices("GPU"):
        limit = tf.config.LogicalDeviceConfiguration(memory_limit=memory_limit >> 20)
        tf.config.set_logical_device_configuration(device, [limit])
    # TensorFlow starts threads and allocates arenas at the first real step.
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(tf.zeros((1, 1)), tf.zeros((1, 1)), verbose=0)
    del model
    keras.backend.clear_session()
    gc.collect()
    return _status("VmRSS")


def _limit_memory(limit: int) -> None:
    """Makes Linux refuse memory beyond the limit, so that a trial cannot take the memory of other programs.

    Memory that is reserved but untouched, such as threads' stacks, must not count, so the limit is raised by
    it.
    """
    shared = _status("VmRSS") - _status("RssAnon")
    untouched = max(0, _status("VmData") - _status("RssAnon"))
    most = max(limit - shared, _status("RssAnon")) + untouched + _SLACK
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (most if hard < 0 else min(most, hard), hard))


def _prefer_oom_kill() -> None:
    """Makes Linux prefer to kill this process, not the user's, if the machine runs out of memory."""
    with contextlib.suppress(OSError):  # not Linux, or not allowed
        Path("/proc/self/oom_score_adj").write_text("1000")


def _status(name: str) -> int:
    """A number of bytes from /proc/self/status; without /proc, the largest number of bytes held so far."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields[name].split()[0]) * 1024


def _made(make: Callable[[int], Any], batch: int) -> tuple[Any, Any]:
    made = make(batch)
    if not (isinstance(made, tuple) and len(made) == 2 and hasattr(made[0], "fit")):
        raise ConfigurationError(
            f"make({batch}) returned {type(made).__name__}, not a compiled model and its data.",
            hint="Return (model, (x, y)) with a batch of that size, or (model, dataset) of such batches.",
        )
    return made


def _dataset(data: Any, batch: int, steps: int) -> Any:
    """A dataset of `steps` batches: the given dataset or batch, repeated."""
    import tensorflow as tf

    if not isinstance(data, tf.data.Dataset):
        data = tf.data.Dataset.from_tensors(data)
    first = next((leaf for leaf in tf.nest.flatten(next(iter(data), None)) if leaf is not None), None)
    examples = 0 if first is None else int(first.shape[0])
    if examples != batch:
        raise ConfigurationError(
            f"make({batch}) gave a batch of {examples} examples.",
            hint="What make returns must follow its argument.",
        )
    return data.repeat().take(steps)


def _picklable(error: BaseException) -> BaseException | None:
    import pickle

    import cloudpickle

    try:
        pickle.loads(cloudpickle.dumps(error))
    except Exception:
        return None
    return error
