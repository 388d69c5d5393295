"""Limits one process of each test to a share of a core; which one, is given by a seed and the test.

How a process is limited is in `limits`.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from .limits import Groups, Limit
from .processes import Process

SHARE = 0.15
_LOOK = 0.05  # seconds between two looks at what the limited processes have started
_SEARCH = 5  # each so many looks, the processes of the tests are read, which costs more
_SETTLED = 0.5  # seconds without a new process, after which one is chosen from those that there are
_FIRST = 5  # one of so many is chosen: a launcher, its guard and the tasks of a job


class Throttle:
    """Limits one process of each test that runs.

    Args:
        tests: returns the processes of each test that runs, in the order in which they began.
        groups: limits processes.
        seed: determines the choice in each test, with the test's name.
        tell: is called with each process that is limited, and its test.
    """

    def __init__(
        self,
        tests: Callable[[], Mapping[str, Sequence[Process]]],
        groups: Groups,
        *,
        seed: int,
        tell: Callable[[Process, str], None] = lambda process, test: None,
    ) -> None:
        self._tests = tests
        self._groups = groups
        self._seed = seed
        self._tell = tell
        self._running: dict[str, ProcessChoice] = {}
        self._limits: dict[str, Limit] = {}

    def run(self, ended: threading.Event) -> None:
        """Limits processes until `ended` is set; then none is limited any more."""
        try:
            for number in itertools.count():
                if ended.wait(_LOOK):
                    return
                for limit in self._limits.values():
                    limit.keep_alone()
                if number % _SEARCH == 0:
                    self._search()
        finally:
            for limit in self._limits.values():
                limit.end()

    def _search(self) -> None:
        tests = self._tests()
        for test in self._running.keys() - tests.keys():
            del self._running[test]
            if test in self._limits:
                self._limits.pop(test).end()
        for test, processes in tests.items():
            if test in self._limits:
                continue
            running = self._running.setdefault(test, ProcessChoice(choice(self._seed, test)))
            if process := running.chosen(processes, time.monotonic()):
                try:
                    self._limits[test] = self._groups.limit(process.pid, SHARE)
                except OSError:  # it has ended: another look, another process
                    continue
                self._tell(process, test)


class ProcessChoice:
    """Waits for the process of a test that its number chooses, among the first ones or all that there are."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._count = 0
        self._since = 0.0

    def chosen(self, processes: Sequence[Process], now: float) -> Process | None:
        """The process to limit; None until the test has started enough, or no more for a while."""
        if len(processes) != self._count:
            self._count, self._since = len(processes), now
        if not processes or (self._count <= self._number and now - self._since < _SETTLED):
            return None
        return processes[self._number % self._count]


def choice(seed: int, test: str) -> int:
    """Which of its processes a test gives, counted from 0 in the order in which they began."""
    return random.Random(f"{seed} {test}").randrange(_FIRST)
