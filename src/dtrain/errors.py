"""Every exception that dtrain raises on purpose, and the hint of those about an unknown word.

Each says what was set, what was found and, in its hint, what to do. All derive from `DtrainError`
and from the built-in class that a caller would expect, so `except ValueError` keeps working.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping


def known_are(known: Iterable[str], word: str, meanings: Mapping[str, str] | None = None) -> str:
    """The hint for a word that is not known: the nearest known one, if any is near, and all of them.

    Args:
        known: the words to list.
        word: what was set instead.
        meanings: where more words are understood than are listed, what each of them stands for.
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
    """

    # Raised inside a `tf.function` of the user's, TensorFlow would put an error of its own in its place.
    ag_pass_through = True

    def __init__(self, message: str, *, hint: str = "") -> None:
        self.message = message
        self.hint = hint
        super().__init__(f"{message}\nHint: {hint}" if hint else message)


class ConfigurationError(DtrainError, ValueError):
    """An argument, option or setting that cannot be used as given."""


class UnknownStrategyError(ConfigurationError):
    """A strategy name that is not known."""


class ClusterConfigError(ConfigurationError):
    """`TF_CONFIG` (or what stands for it) is malformed or contradicts itself."""


class PeerMissingError(DtrainError, TimeoutError):
    """A process of the job did not report within the time limit."""


class PeerMismatchError(DtrainError, RuntimeError):
    """The processes of a job disagree about what the job is."""


class AuthenticationError(DtrainError, RuntimeError):
    """What is said in a job's name was not signed with its secret, or processes have different secrets."""


class PortInUseError(DtrainError, OSError):
    """The address that this task must serve on is taken by another process."""


class TPUNotFoundError(DtrainError, RuntimeError):
    """No TPU could be resolved, reached or initialised."""


class DeviceError(ConfigurationError):
    """A device was named that this machine does not have."""


class UnsupportedVersionError(DtrainError, ImportError):
    """TensorFlow or Keras is missing, or of a version that dtrain was not built for."""


class BackendError(DtrainError, RuntimeError):
    """Keras runs on a backend other than TensorFlow."""


class ScopeError(DtrainError, ValueError):
    """Objects made outside the strategy's scope, or in two different ones, were mixed."""


class StepError(DtrainError, ValueError):
    """A model's own step does what several replicas cannot do as one device does it."""


class CompilationError(ConfigurationError):
    """A function that XLA compiles would have to talk to other replicas."""


class DataError(DtrainError, ValueError):
    """The data cannot be trained on as given: batch, shape, or length."""


class CheckpointError(DtrainError, RuntimeError):
    """A checkpoint is torn, cut off or changed, or could not be written."""


class TaskFailedError(DtrainError, RuntimeError):
    """A process of a launched job ended with an error.

    Attributes:
        task: its name, such as `worker 1`.
        exit_code: the status it ended with; negative for a signal.
    """

    def __init__(self, message: str, *, task: str, exit_code: int, hint: str = "") -> None:
        self.task = task
        self.exit_code = exit_code
        super().__init__(message, hint=hint)


class TaskTimeoutError(TaskFailedError, TimeoutError):
    """A process of a launched job still ran when the time given to the job was over."""


class MPIError(DtrainError, RuntimeError):
    """MPI was asked for, and is not there or cannot be used."""
