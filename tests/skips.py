"""A plugin for pytest that fails a run in which a test was skipped that `skips.toml` does not list.

It checks the condition of the list too: where the tool is there that a test asks for, the test has to run. It
skips nothing itself.
"""

from __future__ import annotations

import importlib.util
import os
import pkgutil
import shutil
import sys
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

LIST = Path(__file__).with_suffix(".toml")
STATUS = 6
"""The exit status of a run with an unlisted skip; pytest's own are 0 to 5."""


@dataclass(frozen=True)
class Entry:
    """Tests that may be skipped.

    Attributes:
        tests: pattern of their ids.
        reason: pattern of the reason that they give.
        condition: the name of a condition of `CONDITIONS`.
        value: what must be missing, or as which user.
        run: what runs the tests.
    """

    tests: str
    reason: str
    condition: str
    value: Any
    run: str

    def allows(self, test: str, reason: str) -> bool:
        """Whether the test may be skipped for this reason on this machine."""
        return (
            fnmatchcase(test, self.tests)
            and fnmatchcase(reason, self.reason)
            and CONDITIONS[self.condition](self.value)
        )


def _no_program(name: str) -> bool:
    folders = [os.environ.get("PATH", ""), "/usr/sbin", "/sbin", str(Path(sys.executable).parent)]
    return shutil.which(name, path=os.pathsep.join(folders)) is None


def _no_name(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return True
    return False


def _no_module(name: str) -> bool:
    return importlib.util.find_spec(name) is None


def _one(missing: Callable[[str], bool]) -> Callable[[Sequence[str]], bool]:
    return lambda names: any(map(missing, names))


CONDITIONS: dict[str, Callable[[Any], bool]] = {
    "without_programs": _one(_no_program),
    "without_modules": _one(_no_module),
    "without_names": _one(_no_name),
    "without_variables": _one(lambda name: not os.environ.get(name)),
    "as_root": lambda wanted: (os.geteuid() == 0) is wanted,
    "tried": lambda tried: tried is True,
}


def read(path: Path = LIST) -> list[Entry]:
    """The entries of the list."""
    entries = []
    for entry in tomllib.loads(path.read_text(encoding="utf-8"))["skip"]:
        ((condition, value),) = {key: entry.pop(key) for key in [*entry] if key in CONDITIONS}.items()
        entries.append(Entry(condition=condition, value=value, **entry))
    return entries


class ListedSkips:
    """Collects the skips of a run, and fails it for those that are not listed."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._entries = entries
        self._unlisted: dict[tuple[str, str], None] = {}

    def _check(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if not report.skipped or hasattr(report, "wasxfail"):
            return
        reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        reason = reason.removeprefix("Skipped: ")
        if not any(entry.allows(report.nodeid, reason) for entry in self._entries):
            self._unlisted[report.nodeid, reason] = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._check(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._check(report)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._unlisted and session.exitstatus in (0, 1, 5):
            session.exitstatus = STATUS

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._unlisted:
            terminalreporter.section(f"skipped, which {LIST.parent.name}/{LIST.name} does not allow here")
        for test, reason in self._unlisted:
            terminalreporter.line(f"{test}: {reason}")
