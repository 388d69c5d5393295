"""What a spare does before its program begins: it imports the program's libraries and waits for an order.

An order is the set of environment variables that change when the spare becomes a task. Python then continues
as if it had just started. The first tasks reported what to import and with which variables. A spare computes
nothing and touches no device.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
import pkgutil
import random
import select
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from dtrain.environments import settings
from dtrain.launch.local_processes import priority
from dtrain.task import task_hooks

_MODULES = ("numpy", "tensorflow", "keras", "dtrain.task.channel", "dtrain.task.progress")
# All modules of these packages too: programs import most of them late, with a strategy or a checkpoint.
_PACKAGES = ("dtrain.strategies", "dtrain.engine", "dtrain.checkpoint")


def wait_for_order(path: str) -> None:
    """Import, report that the imports are done, wait for the order, and apply its environment variables.

    If the launcher closes the pipe without an order, the job is over and this process exits with 0.

    Args:
        path: the PYTHONPATH with which this process was started.
    """
    pipes = settings.spare()
    if pipes is None:
        return
    order, ready = pipes
    del os.environ["DTRAIN_SPARE"]
    with os.fdopen(order, "rb", buffering=0) as pipe:  # so that an order which has come is still in the pipe
        note = json.loads(pipe.readline())  # the attributes of an ImportsNote
        with _dispensable():
            with _unimportant(pipe):
                imported = _import_all(note)
            os.close(ready)
            text = pipe.read()
            if not text:
                os._exit(0)
    _change(json.loads(text))
    _Watch(imported, note, path).begin()


def _import_all(found: Mapping[str, Any]) -> dict[str, str]:
    """Import the modules with the same variables that the first task's libraries read at their import.

    Returns:
        The variables of this process that libraries may have read.
    """
    own = dict(os.environ)
    numbers = random.getstate()
    _change(found["variables"])
    try:
        imported = task_hooks.library_variables()
        with task_hooks.without_collection():
            for name in itertools.chain(_MODULES, found["modules"], _inside(_PACKAGES)):
                with contextlib.suppress(Exception):  # if the program needs it, its own import will raise
                    importlib.import_module(name)
    finally:
        random.setstate(numbers)
        _change({name: own.get(name) for name in found["variables"]})
    return imported


def _change(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


class _Watch:
    """Notices when the program sets a variable to another value than the one that the imports read.

    Without the spare, libraries would have read the program's value. So the process then starts the program
    again in a fresh Python that has imported nothing. After the task's first message to the launcher, changes
    are no longer checked.

    Args:
        imported: the variables that the libraries of this process read.
        found: the variables that the first task set before and after its imports; see `ImportsNote`.
        path: the PYTHONPATH of the fresh Python.
    """

    def __init__(self, imported: Mapping[str, str], found: Mapping[str, Any], path: str) -> None:
        self._ordered = {**os.environ, "PYTHONPATH": path}
        self._imported = imported
        self._set_before: Sequence[str] = [*found["variables"]]
        self._later: Mapping[str, str | None] = found["later"]

    def begin(self) -> None:
        """Start to watch. `os.environ` calls `os.putenv` and `os.unsetenv` for each change."""
        os.putenv = self._checked(os.putenv)
        os.unsetenv = self._checked(os.unsetenv)
        task_hooks.before_first_message(self._check_all)

    def _checked(self, change: Callable[..., None]) -> Callable[..., None]:
        def checked(name: str | bytes, *value: str | bytes) -> None:
            if not task_hooks.has_reported():
                self._check_variable(os.fsdecode(name), os.fsdecode(value[0]) if value else None)
            change(name, *value)

        return checked

    def _check_all(self) -> None:
        """Check all variables once: the program may not have set one that it set in the first attempt."""
        for name in self._set_before:
            self._check_variable(name, os.environ.get(name))

    def _check_variable(self, name: str, value: str | None) -> None:
        if not task_hooks.is_library_variable(name) or value == self._imported.get(name):
            return
        if name not in self._later or value != self._later[name]:
            os.execve(sys.executable, sys.orig_argv, self._ordered)


def _inside(packages: Sequence[str]) -> Iterator[str]:
    """The names of all modules of packages, and of the packages inside them."""
    for package in packages:
        with contextlib.suppress(Exception):
            path = importlib.import_module(package).__path__
            for module in pkgutil.walk_packages(path, f"{package}.", onerror=lambda name: None):
                yield module.name


@contextlib.contextmanager
def _dispensable() -> Iterator[None]:
    """Make Linux's out-of-memory killer prefer this process to a task inside the `with` block."""
    score = Path("/proc/self/oom_score_adj")
    try:
        own = score.read_text(encoding="ascii")
        score.write_text(f"{min(1000, int(own) + 500)}", encoding="ascii")
    except (OSError, ValueError):
        yield
        return
    yield
    with contextlib.suppress(OSError):
        score.write_text(own, encoding="ascii")


@contextlib.contextmanager
def _unimportant(order: IO[bytes]) -> Iterator[None]:
    """Run at the lowest priority inside the `with` block, so that the tasks keep the processor.

    The process's own priority is lowered only with the privilege to raise it again. It is raised at once
    if the order has come already: the launcher raises it once, right after it has sent the order.

    Args:
        order: the pipe of the order, of which nothing is buffered.
    """
    own = os.getpriority(os.PRIO_PROCESS, 0)
    as_it_was = priority.of_session(os.getpid())
    if _may_rise():
        os.setpriority(os.PRIO_PROCESS, 0, priority.LEAST)
    priority.set_of_session(os.getpid(), priority.LEAST)
    if select.select([order], [], [], 0)[0]:
        priority.restore(os.getpid(), own, as_it_was)
    try:
        yield
    finally:
        priority.restore(os.getpid(), own, as_it_was)


def _may_rise() -> bool:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("CapEff:"):
                return bool(int(line.split()[1], 16) >> 23 & 1)  # CAP_SYS_NICE
    return False
