"""What a spare does before its program begins: import what the program will import, and wait for its order.

Nothing is computed and no device is touched; an order is what changes in the environment, and then Python
goes on as if it had just been started. What to import, and with which variables, the first tasks have told.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
import pkgutil
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dtrain import task_hooks
from dtrain.cluster import settings
from dtrain.launch import priority

_MODULES = ("numpy", "tensorflow", "keras", "dtrain.channel", "dtrain.progress")
# All modules of these too: most are imported only where a strategy is made or a checkpoint is kept.
_PACKAGES = ("dtrain.strategies", "dtrain.keras_engine", "dtrain.checkpoint")


def wait_for_order(path: str) -> None:
    """Import, say that it is done, and return with the environment that was ordered.

    It does not return where no order comes: then the job is over.

    Args:
        path: the PYTHONPATH with which this process was started.
    """
    pipes = settings.spare()
    if pipes is None:
        return
    order, ready = pipes
    del os.environ["DTRAIN_SPARE"]
    with os.fdopen(order, "rb") as pipe:
        found = json.loads(pipe.readline())  # the attributes of an ImportsNote
        with _dispensable():
            with _unimportant():
                imported = _import_all(found)
            os.close(ready)
            text = pipe.read()
            if not text:
                os._exit(0)
    _change(json.loads(text))
    _Watch(imported, found, path).begin()


def _import_all(found: Mapping[str, Any]) -> dict[str, str]:
    """Import, with the variables that the task's libraries found; which they are."""
    own = dict(os.environ)
    numbers = random.getstate()
    _change(found["variables"])
    try:
        imported = task_hooks.library_variables()
        for name in itertools.chain(_MODULES, found["modules"], _inside(_PACKAGES)):
            with contextlib.suppress(Exception):  # the program will say so itself, where it needs it
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
    """Notices that the program, once it runs, sets a variable to another value than the imports have found.

    Libraries would have read that value: so the program is begun anew, by a Python that has imported nothing.
    From a task's first message on, its variables are its own business.

    Args:
        imported: the variables that libraries found.
        found: what the first tasks set before and after their imports, as in an `ImportsNote`.
        path: the PYTHONPATH for the new beginning.
    """

    def __init__(self, imported: Mapping[str, str], found: Mapping[str, Any], path: str) -> None:
        self._ordered = {**os.environ, "PYTHONPATH": path}
        self._imported = imported
        self._set_before: Sequence[str] = [*found["variables"]]
        self._later: Mapping[str, str | None] = found["later"]

    def begin(self) -> None:
        """Watch from now on: `os.environ` calls these functions for each change."""
        os.putenv = self._checked(os.putenv)
        os.unsetenv = self._checked(os.unsetenv)
        task_hooks.before_first_message(self._look_at_all)

    def _checked(self, change: Callable[..., None]) -> Callable[..., None]:
        def checked(name: str | bytes, *value: str | bytes) -> None:
            if not task_hooks.told():
                self._look(os.fsdecode(name), os.fsdecode(value[0]) if value else None)
            change(name, *value)

        return checked

    def _look_at_all(self) -> None:
        """The program may also have left out what it set in the first attempt."""
        for name in self._set_before:
            self._look(name, os.environ.get(name))

    def _look(self, name: str, value: str | None) -> None:
        if not task_hooks.is_library_variable(name) or value == self._imported.get(name):
            return
        if name not in self._later or value != self._later[name]:
            os.execve(sys.executable, sys.orig_argv, self._ordered)


def _inside(packages: Sequence[str]) -> Iterator[str]:
    for package in packages:
        with contextlib.suppress(Exception):
            for found in pkgutil.iter_modules(importlib.import_module(package).__path__):
                yield f"{package}.{found.name}"


@contextlib.contextmanager
def _dispensable() -> Iterator[None]:
    """Where the machine runs out of memory meanwhile, let it take this process and not a task."""
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
def _unimportant() -> Iterator[None]:
    """Leave the processor to the tasks meanwhile: take what they do not use, where the way back is open."""
    own = os.getpriority(os.PRIO_PROCESS, 0)
    as_it_was = priority.of_session(os.getpid())
    if _may_rise():
        os.setpriority(os.PRIO_PROCESS, 0, priority.LEAST)
    priority.set_of_session(os.getpid(), priority.LEAST)
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
