"""Runs a part of the suite, and each test that failed once more, alone; it passes if they pass then.

    python -m tests.part test --processes 3 tests -m "not long"    # the rest is pytest's

The second run is no cure: the tests that needed it are listed in `build/flaky.md` with their first failures,
and each of them is to be mended. A collection error, a test process that dies, an unlisted skip, a run that
breaks off or more than ten failures fail the part at once.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests import changed

FLAKY = Path("build/flaky.md")
MOST = 10
"""A part with more failures than this has a fault, not tests that lost a race: none is run again."""

_SHOWN_LINES = 60
# Several files at a time, in their order. Pytest-xdist could wait for ever for a process that it put in the
# place of a dead one.
_BY_FILE = ("--dist", "loadfile", "--no-loadscope-reorder", "--max-worker-restart", "0", "--numprocesses")


@dataclass
class Outcomes:
    """What a run of pytest found.

    Attributes:
        status: its exit status; 0 and 1 are those of a run that came to its end.
        failed: the tests that failed in the call or in a fixture, each with the text of its first failure.
        passed: the tests whose call passed.
    """

    status: int
    failed: dict[str, str] = field(default_factory=dict)
    passed: list[str] = field(default_factory=list)


class Recorder:
    """A plugin for pytest that writes the outcomes to a file when the run ends."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._outcomes = Outcomes(0)
        self._incomplete = False

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._incomplete |= report.failed

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, error: object) -> None:
        self._incomplete |= error is not None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._outcomes.failed.setdefault(report.nodeid, report.longreprtext)
        elif report.passed and report.when == "call":
            self._outcomes.passed.append(report.nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._incomplete:  # with several processes pytest would say no more than that something failed
            session.exitstatus = pytest.ExitCode.INTERRUPTED
        outcomes = {"failed": self._outcomes.failed, "passed": self._outcomes.passed}
        self._file.write_text(json.dumps(outcomes), encoding="utf-8")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, help="write which tests failed and passed to this file")


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("outcomes")
    if file is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(file))


def run(*words: str) -> Outcomes:
    """Runs pytest in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "outcomes.json"
        command = [sys.executable, "-m", "pytest", "-p", "tests.part", f"--outcomes={file}", *words]
        status = subprocess.run(command).returncode
        outcomes = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return Outcomes(status, **outcomes)


def options(words: Sequence[str]) -> list[str]:
    """Pytest's arguments without the files and folders."""
    return [word for word in words if not Path(word.partition("::")[0]).exists()]


def still_fails(test: str, words: Sequence[str]) -> bool:
    """Runs one test alone. A test that is skipped now has not passed."""
    again = run(test, *options(words))
    return again.status != 0 or test not in again.passed


def listed(part: str, failures: dict[str, str]) -> None:
    """Adds the tests that passed when they ran again to the list."""
    FLAKY.parent.mkdir(exist_ok=True)
    with FLAKY.open("a", encoding="utf-8") as file:
        for test, text in failures.items():
            shown = "\n".join(text.splitlines()[-_SHOWN_LINES:])
            file.write(f"## {part}: `{test}`\n\n````\n{shown}\n````\n\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.part", allow_abbrev=False, description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("part", help="the name that the list of failures gives it")
    parser.add_argument("--processes", type=int, default=0, help="test processes; 0 runs all tests in one")
    parser.add_argument(
        "--changed", action="store_true", help="leave out the groups of tests of which nothing has changed"
    )
    asked, words = parser.parse_known_args(arguments)
    if asked.changed:
        print("\n".join(changed.report()), flush=True)
        words += [f"--left-out={group.name}" for group in changed.left_out(changed.paths_since_base())]
    first = run(*([*_BY_FILE, str(asked.processes)] if asked.processes else []), *words)
    if first.status != 1 or not 1 <= len(first.failed) <= MOST:
        return first.status
    print(f"\n{len(first.failed)} failed; each runs again, alone.", flush=True)
    lost = {test for test in first.failed if still_fails(test, words)}
    print()
    for test in first.failed:
        print(f"failed again: {test}" if test in lost else f"failed, and passed alone: {test}")
    if lost:
        return 1
    listed(asked.part, first.failed)
    print(f"These tests are to be mended. {FLAKY} has their first failures.", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
