"""The launcher's hooks in a task: they report what failed, and let TensorFlow be imported faster.

`launch/local_processes/task_start/` calls `begin` before the program's first line. Every task imports this
module, so it imports almost nothing itself. It sends no messages; `channel` does.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import ModuleType, TracebackType
from typing import Any

# The prefixes of variables that libraries read at their import; with other values, results may differ.
_READ_AT_IMPORT = ("TF_", "XLA_", "KERAS_", "OMP_", "KMP_", "MKL_", "OPENBLAS_", "CUDA_", "GRPC_", "TPU_")

# Common libraries beside TensorFlow whose import has no side effects (importing mpi4py may start MPI).
_HARMLESS = {"h5py", "matplotlib", "numpy", "pandas", "PIL", "scipy", "sklearn", "tqdm", "yaml"}

# What shows that an exception was caused by a lost peer: TensorFlow's and dtrain's types, then words from the
# messages of TensorFlow's connections and of MPI libraries.
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

# Errors of Keras 3 under TensorFlow's own strategies, and the dtrain strategy to use instead.
_INSTEAD = {
    "distribute.values.PerReplica'>) to a Tensor": "MultiWorkerMirroredStrategy",
    "pass this dataset to ClusterCoordinator.create_per_worker_dataset": "ParameterServerStrategy",
}

_STDERR = 2  # the descriptor, because a deadlock may hold the lock of the file object

Variables = Mapping[str, str | None]

_at_start: dict[str, str] | None = None  # the variables at start; None in a spare or without a launcher
_at_import: dict[str, str] | None = None
_reported = False
_check: Callable[[], None] | None = None


def is_library_variable(name: str) -> bool:
    """Whether libraries may read a variable at their import; not TF_CONFIG, which is read later."""
    return name.startswith(_READ_AT_IMPORT) and name != "TF_CONFIG"


def library_variables() -> dict[str, str]:
    """The variables of this process that libraries may read at their import."""
    return {name: value for name, value in os.environ.items() if is_library_variable(name)}


def begin(report_failure: Callable[[BaseException], None], *, spare: bool) -> None:
    """Report uncaught exceptions, answer the launcher's signal, and record the environment.

    The environment is recorded now, and at TensorFlow's import.

    Args:
        report_failure: sends an exception to the launcher.
        spare: whether this process is a spare; then the environment is not recorded, because the launcher
            already knows it.
    """
    global _at_start
    if signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL:
        # The launcher asks for the stacks of a task that does not come to the others, whatever it does.
        faulthandler.register(signal.SIGUSR2, file=_STDERR, all_threads=True)
    if not spare:
        _at_start = library_variables()
        sys.meta_path.insert(0, _ImportWatch)
    show = sys.excepthook

    def on_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with contextlib.suppress(Exception):
            report_failure(error)
        if show is sys.__excepthook__:  # otherwise the user's `sitecustomize` has set another one
            with contextlib.suppress(Exception):
                sys.stderr.write(_as_shown(error))
                return
        show(kind, error, trace)

    sys.excepthook = on_exception


def _as_shown(error: BaseException) -> str:
    # Imported only on a failure, because the imports take a while.
    from dtrain.environments import settings
    from dtrain.task.user_traceback import format_exception

    return format_exception(error, complete=settings.complete_traceback())


class _ImportWatch:
    """A finder in `sys.meta_path` that notices the imports of TensorFlow and Keras; others find the modules.

    It records the variables at TensorFlow's import, and lets both be imported without garbage collection.
    """

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        global _at_import
        if name not in ("tensorflow", "keras"):
            return None
        if name == "tensorflow":
            _at_import = library_variables()
        for finder in sys.meta_path:
            if finder is not _ImportWatch and (spec := finder.find_spec(name, path, target)) is not None:
                if isinstance(spec.loader, SourceFileLoader):
                    _execute_without_collection(spec.loader)
                return spec
        return None


def _execute_without_collection(loader: SourceFileLoader) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        del vars(loader)["exec_module"]
        with without_collection():
            execute(module)

    vars(loader)["exec_module"] = exec_module


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Collect no garbage inside the `with` block.

    An import of TensorFlow makes a million objects, of which none is garbage. To look at them again and again
    takes a quarter of its time. Tracing a step makes enough that all of them are looked at once more.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def imports() -> dict[str, Any] | None:
    """The attributes of the `ImportsNote` that a task sends before its first message.

    It is None after the first call, in a spare, and in a process without a launcher.
    """
    global _reported
    first, _reported = not _reported, True
    if first and _check is not None:
        _check()
    # A new list: another thread may iterate over the old one.
    sys.meta_path = [finder for finder in sys.meta_path if finder is not _ImportWatch]
    if not first or _at_start is None:
        return None
    now = library_variables()
    at_import = now if _at_import is None else _at_import
    # Only packages and their direct modules, whose import brings the rest.
    names = [".".join(name.split(".")[:2]) for name in [*sys.modules] if name.partition(".")[0] in _HARMLESS]
    return {
        "variables": changes(_at_start, at_import),
        "later": changes(at_import, now),
        "modules": [name for name in dict.fromkeys(names) if "._" not in name],
    }


def before_first_message(check: Callable[[], None]) -> None:
    """Register a function that is called before this process sends its first message to the launcher."""
    global _check
    _check = check


def has_reported() -> bool:
    """Whether this process has begun to send its first message to the launcher."""
    return _reported


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> Variables:
    """The variables that differ, with their values in `after`; None for a deleted variable."""
    return {name: after.get(name) for name in {**before, **after} if before.get(name) != after.get(name)}


def describe(error: BaseException) -> dict[str, Any]:
    """The attributes of the `FailureNote` for an exception, except the task."""
    kind, text = type(error), str(error)
    line = text.partition("\n")[0]
    name = (
        kind.__qualname__
        if kind.__module__ in ("builtins", "__main__")
        else f"{kind.__module__}.{kind.__qualname__}"
    )
    types = {base.__name__ for base in kind.__mro__}
    return {
        "exception": f"{name}: {line}" if line else name,
        "lost_peer": bool(types & _LOST_PEER_TYPES) or any(words in text for words in _LOST_PEER_WORDS),
        "hint": next((_hint(ours) for theirs, ours in _INSTEAD.items() if theirs in text), ""),
    }


def _hint(name: str) -> str:
    return (
        f"Hint: Keras 3 cannot train under tf.distribute.{name}; write `strategy = dtrain.{name}()` instead."
    )
