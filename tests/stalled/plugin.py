"""The part of a run that is in pytest: it chooses the tests, tells which one runs, and keeps the results.

It freezes and limits nothing. The variable that marks the processes of a run names its folder.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtrain.launch.launchers import LAUNCHERS
from dtrain.strategies.registry import STRATEGIES

from .kinds import kinds_of, named_kinds, one_for_each_kind
from .processes import MARK

FOLDER = Path(os.environ[MARK])
# Those of the runs themselves: they stop and limit processes, and would see those of the run.
_NOT_UNDER_ITSELF = ("test_stalled",)
_WORDS = frozenset(LAUNCHERS) | frozenset(STRATEGIES)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps the tests of files that start processes, for pytest's own process may be frozen too.

    One for each kind of start is enough of the long tests of a file, and of the parameters of a test.
    """
    if (FOLDER / "as-named").exists():
        return
    kinds = {item: _kinds(item) for item in items if not item.path.name.startswith(_NOT_UNDER_ITSELF)}
    starting = {item.path for item, found in kinds.items() if found}
    alike: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in kinds:
        if item.path in starting:
            name = "" if item.get_closest_marker("long") else item.originalname
            alike.setdefault((item.path, name), []).append(item)
    kept: set[pytest.Item] = set()
    for tests in alike.values():
        kept |= {tests[number] for number in one_for_each_kind([kinds[item] for item in tests])}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]
    lines = [f"{item.nodeid}  ({', '.join(sorted(kinds[item])) or 'no process'})\n" for item in items]
    _replace(FOLDER / "selection.txt", "".join(lines))


def _kinds(item: pytest.Item) -> frozenset[str]:
    """The kinds of start of one test, by its source and the names among its parameters."""
    assert isinstance(item, pytest.Function)
    uses = {(item.path, item.cls.__name__ if item.cls else item.originalname)}
    for definitions in item._fixtureinfo.name2fixturedefs.values():
        for definition in definitions:
            function = inspect.unwrap(definition.func)
            uses.add((Path(inspect.getsourcefile(function) or ""), function.__name__))
    found = kinds_of(frozenset(uses))
    params = item.callspec.params if hasattr(item, "callspec") else {}
    if found and (named := named_kinds(params, _WORDS)):
        return (found - _WORDS) | named
    return found


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Tells the run which test this process of pytest runs."""
    now = FOLDER / "now" / str(os.getpid())
    _replace(now, item.nodeid)
    try:
        return (yield)
    finally:
        now.unlink()


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Results())


class _Results:
    """Writes a line for each test that has ended, with all that its failures say; not in pytest's workers."""

    def __init__(self) -> None:
        self._failures: dict[str, str] = {}
        self._skipped: set[str] = set()
        self._seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = report.nodeid
        self._seconds[test] = self._seconds.get(test, 0.0) + report.duration
        if report.failed:
            sections = "".join(f"\n--- {title}\n{text}" for title, text in report.sections)
            self._failures[test] = f"{self._failures.get(test, '')}{report.longreprtext}\n{sections}\n"
        elif report.skipped:
            self._skipped.add(test)
        if report.when not in ("setup", "call", "teardown"):  # the process of pytest has crashed
            self.pytest_runtest_logfinish(test)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        failure = self._failures.pop(nodeid, "")
        outcome = "failed" if failure else "skipped" if nodeid in self._skipped else "passed"
        result = {
            "test": nodeid,
            "outcome": outcome,
            "seconds": round(self._seconds.pop(nodeid, 0.0), 1),
            "failure": failure,
        }
        with (FOLDER / "results.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")


def _replace(path: Path, text: str) -> None:
    """Writes a file as a whole: the run reads it at any time, and each process of pytest writes it."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
