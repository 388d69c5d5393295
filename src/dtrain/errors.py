"""Every exception that dtrain raises on purpose, and the hint for an unknown word.

A message says what was set and what was found; its hint says what to do. All classes but `ProcessEnd` and its
subclasses derive from `DtrainError` and from the built-in class that a caller would expect, so
`except ValueError` keeps working. This module raises nothing itself.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping


def known_are(known: Iterable[str], word: str, meanings: Mapping[str, str] | None = None) -> str:
    """The hint for an unknown word: the nearest known word, if any is near, and the list of known words.

    Args:
        known: the words to list.
        word: the unknown word.
        meanings: further words that may have been meant, each with the known word to suggest for it.
    """
    known = list(known)
    meanings = {each: each for each in known} | dict(meanings or {})
    near = difflib.get_close_matches(word.lower(), meanings, n=1)
    question = f"Did you mean {meanings[near[0]]!r}? " if near else ""
    return f"{question}Choose from {', '.join(known)}."


class DtrainError(Exception):
    """Base of all dtrain errors.

    Args:
        message: what was set and what was found.
        hint: what the user can do about it; shown on a line of its own.

    Example:
        ```python
        try:
            dtrain.strategy("horovod")
        except dtrain.DtrainError as error:
            print(error.hint)  # Choose from default, one_device, ...
        ```
    """

    # Without this, TensorFlow would replace an error that is raised inside a user's `tf.function`.
    ag_pass_through = True

    def __init__(self, message: str, *, hint: str = "") -> None:
        self.message = message
        self.hint = hint
        super().__init__(f"{message}\nHint: {hint}" if hint else message)


class ConfigurationError(DtrainError, ValueError):
    """An argument, option or setting that cannot be used as given."""


class UnknownStrategyError(ConfigurationError):
    """A strategy name that is not known.

    Example:
        ```python
        try:
            dtrain.strategy("mirored")
        except dtrain.errors.UnknownStrategyError as error:
            print(error.hint)  # Did you mean 'mirrored'? Choose from ...
        ```
    """


class ClusterConfigError(ConfigurationError):
    """`TF_CONFIG`, or another description of the cluster, is malformed or contradicts itself."""


class PeerMissingError(DtrainError, TimeoutError):
    """A process of the job did not report within the time limit."""


class PeerMismatchError(DtrainError, RuntimeError):
    """The processes of a job disagree about what the job is."""


class OperationMismatchError(PeerMismatchError):
    """The workers of a job are at different operations, such as one in `evaluate` and the others in `fit`."""


class ReplicaMismatchError(DtrainError, RuntimeError):
    """The replicas' copies of a model's weights differ."""


class AuthenticationError(DtrainError, RuntimeError):
    """A message was not signed with the job's secret, or the processes of a job have different secrets."""


class PortInUseError(DtrainError, OSError):
    """Another process uses the address on which this task must serve."""


class UnsafeFileError(DtrainError, OSError):
    """A file is no regular file, is a symbolic link, or is larger than any file of its kind.

    Args:
        path: the file.
        reason: why it is not used; also `strerror`, as of any `OSError`.
        hint: what the user can do about it.
    """

    def __init__(self, path: str | os.PathLike[str], reason: str, *, hint: str = "") -> None:
        super().__init__(f"{os.fspath(path)} cannot be used: {reason}.", hint=hint)
        self.strerror = reason


class TPUNotFoundError(DtrainError, RuntimeError):
    """No TPU could be resolved, reached or initialised."""


class DeviceError(ConfigurationError):
    """A device does not exist or is named twice, or the number of logical CPUs cannot be changed any more.

    Example:
        ```python
        try:
            strategy = dtrain.MirroredStrategy(["GPU:97"])
        except dtrain.errors.DeviceError as error:
            print(error)  # with the devices that there are
        ```
    """


class UnsupportedVersionError(DtrainError, ImportError):
    """TensorFlow or Keras is missing, or of a version that dtrain was not built for."""


class BackendError(DtrainError, RuntimeError):
    """Keras runs on a backend other than TensorFlow."""


class ScopeError(DtrainError, ValueError):
    """Objects made outside the strategy's scope, or in two different ones, were mixed.

    Example:
        ```python
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])  # move it into the scope
        model.compile("sgd", "mse")
        try:
            with dtrain.OneDeviceStrategy("/cpu:0").scope():
                model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0)
        except dtrain.errors.ScopeError as error:
            print(error)
        ```
    """


class StepError(DtrainError, ValueError):
    """A user's step, layer, metric or gradient hook cannot give one device's results on several replicas."""


class CompilationError(ConfigurationError):
    """A function that XLA compiles would have to communicate with other replicas."""


class DataError(DtrainError, ValueError):
    """The data is missing, cannot be read, or cannot be trained on because of its batch, shape or length."""


class CheckpointError(DtrainError, RuntimeError):
    """A checkpoint is damaged or of another model, cannot be read or written, or its folder is in use."""


class TaskFailedError(DtrainError, RuntimeError):
    """A process of a launched job ended with an error.

    Attributes:
        task: the name of the process's task, such as `worker 1`.
        exit_code: its exit status; negative for a death by signal.
    """

    def __init__(self, message: str, *, task: str, exit_code: int, hint: str = "") -> None:
        self.task = task
        self.exit_code = exit_code
        super().__init__(message, hint=hint)


class TaskTimeoutError(TaskFailedError, TimeoutError):
    """A process of a launched job still ran when the job's time limit expired."""


class SchedulerError(DtrainError, RuntimeError):
    """A scheduler has refused a job, or does not answer; the message quotes it."""


class MPIError(DtrainError, RuntimeError):
    """MPI was asked for, but is not installed or cannot be used."""


class RayError(DtrainError, RuntimeError):
    """Ray was asked for, but does not answer, has ended, or cannot be used."""


class ProcessEnd(SystemExit):
    """This process has done its part of the job, and must end without a traceback; nothing has failed.

    It is a `SystemExit`, because only a `SystemExit` ends a plain script with a chosen status, and because
    `except Exception` must not catch it: a worker whose chief has ended would go on and train alone.

    Attributes:
        code: the exit status.
    """


class ServingEnded(ProcessEnd):
    """The chief's program has ended well, so this worker or parameter server ends with status 0."""

    def __init__(self) -> None:
        super().__init__(0)


class RunAgain(ProcessEnd):
    """Training was saved after a preemption notice; status 75 (EX_TEMPFAIL) means "run me again"."""

    STATUS = 75

    def __init__(self) -> None:
        super().__init__(self.STATUS)
