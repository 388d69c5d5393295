"""What the launcher adds to the Python of a task, so that it hears how the task began and why it ended.

`launch/task_start/` calls `begin` before the program's first line. It is imported in every task, so it
imports next to nothing itself.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

# Variables that libraries read when they are imported: with other values they may compute other numbers.
_READ_AT_IMPORT = ("TF_", "XLA_", "KERAS_", "OMP_", "KMP_", "MKL_", "OPENBLAS_", "CUDA_", "GRPC_", "TPU_")

# What programs use beside TensorFlow, and what starts nothing when it is imported (MPI would).
_HARMLESS = {"h5py", "matplotlib", "numpy", "pandas", "PIL", "scipy", "sklearn", "tqdm", "yaml"}

# What an exception says in whose process another task is gone: TensorFlow's and dtrain's types, then words of
# TensorFlow's connections and of MPI libraries.
_LOST_PEER_TYPES = {
    "UnavailableError",
    "AbortedError",
    "CancelledError",
    "DeadlineExceededError",
    "PeerMissingError",
}
_LOST_PEER_WORDS = (
    *_LOST_PEER_TYPES,
    "Connection reset",
    "Socket closed",
    *(f"MPI_ERR_{name}" for name in ("OTHER", "INTERN", "UNKNOWN", "PROC_FAILED", "REVOKED")),
)

# What Keras 3 says where a model is trained under one of TensorFlow's own strategies.
_INSTEAD = {
    "distribute.values.PerReplica'>) to a Tensor": "MultiWorkerMirroredStrategy",
    "pass this dataset to ClusterCoordinator.create_per_worker_dataset": "ParameterServerStrategy",
}

Variables = Mapping[str, str | None]

_at_start: dict[str, str] | None = None  # None where nobody asks: in a spare, or without a launcher
_at_import: dict[str, str] | None = None
_told = False
_check: Callable[[], None] | None = None


def is_library_variable(name: str) -> bool:
    """Whether libraries may read a variable when they are imported. TF_CONFIG is read later."""
    return name.startswith(_READ_AT_IMPORT) and name != "TF_CONFIG"


def library_variables() -> dict[str, str]:
    """The variables of this process that libraries may read when they are imported."""
    return {name: value for name, value in os.environ.items() if is_library_variable(name)}


def begin(tell_failure: Callable[[BaseException], None], *, spare: bool) -> None:
    """Report an uncaught exception, and note the environment now and when TensorFlow is imported.

    Args:
        tell_failure: tells the launcher of an exception.
        spare: whether that is known, as this process is to import it before its program begins.
    """
    global _at_start
    if not spare:
        _at_start = library_variables()
        sys.meta_path.insert(0, _ImportWatch)
    show = sys.excepthook

    def on_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with contextlib.suppress(Exception):
            tell_failure(error)
        show(kind, error, trace)

    sys.excepthook = on_exception


class _ImportWatch:
    """Asked by Python where a module is; finds none, but learns when TensorFlow is imported."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        global _at_import
        if name == "tensorflow":
            _at_import = library_variables()


def imports() -> dict[str, Any] | None:
    """What a task tells the launcher first, `task_messages.ImportsNote`'s attributes; None afterwards.

    None too where no launcher has begun this process, or knows it all, as of a spare.
    """
    global _told
    first, _told = not _told, True
    if first and _check is not None:
        _check()
    if not first or _at_start is None:
        return None
    now = library_variables()
    found = now if _at_import is None else _at_import
    # Packages and what lies directly in them: that brings the rest.
    names = [".".join(name.split(".")[:2]) for name in [*sys.modules] if name.partition(".")[0] in _HARMLESS]
    return {
        "variables": _changes(_at_start, found),
        "later": _changes(found, now),
        "modules": [name for name in dict.fromkeys(names) if "._" not in name],
    }


def before_first_message(check: Callable[[], None]) -> None:
    """Have this called before this process tells the launcher anything."""
    global _check
    _check = check


def told() -> bool:
    """Whether the program has come so far that it has told the launcher something."""
    return _told


def _changes(before: Mapping[str, str], after: Mapping[str, str]) -> Variables:
    return {name: after.get(name) for name in {**before, **after} if before.get(name) != after.get(name)}


def describe(error: BaseException) -> dict[str, Any]:
    """What the launcher is told of an exception, `task_messages.FailureNote`'s attributes."""
    kind, text = type(error), str(error)
    line = text.partition("\n")[0]
    name = (
        kind.__qualname__
        if kind.__module__ in ("builtins", "__main__")
        else f"{kind.__module__}.{kind.__qualname__}"
    )
    types = {each.__name__ for each in kind.__mro__}
    return {
        "exception": f"{name}: {line}" if line else name,
        "lost_peer": bool(types & _LOST_PEER_TYPES) or any(words in text for words in _LOST_PEER_WORDS),
        "hint": next((_hint(ours) for found, ours in _INSTEAD.items() if found in text), ""),
    }


def _hint(name: str) -> str:
    return (
        f"Hint: Keras 3 cannot train under tf.distribute.{name}; write `strategy = dtrain.{name}()` instead."
    )
