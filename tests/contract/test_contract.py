"""Every strategy trains every program of the contract to one device's numbers.

All programs of a strategy run in one set of processes, two strategies at a time; each program is then a test
of its own, so that a failure names it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from tests.programs.registry import Listed, listed
from tests.programs.strategies import HELD

from . import harness

ENTRIES = listed(*harness.HELD_KINDS)
Runs = dict[str, "Future[dict[str, harness.Report]]"]

# The first test waits for whole runs; a program that hangs is cut off by the harness, and named, long before.
pytestmark = [pytest.mark.timeout(7200), pytest.mark.long]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Iterator[Runs]:
    """The runs that the chosen tests need, started together; the slowest first."""
    chosen = [item.callspec.params for item in request.session.items if item.path == request.path]
    wanted: dict[str, list[str]] = {}
    for params in chosen:
        if "strategy" in params:
            wanted.setdefault(params["strategy"], []).append(params["entry"].name)
    needed = {name for names in wanted.values() for name in names}
    ended = threading.Event()

    def tell(name: str, report: harness.Report) -> None:
        if ended.is_set():
            raise RuntimeError("the tests have ended before this run")

    with ThreadPoolExecutor(max_workers=2) as pool:
        made: Runs = {
            "default": pool.submit(harness.reference, [e for e in ENTRIES if e.name in needed]),
            **{s: pool.submit(harness.run_strategy, s, wanted[s], tell=tell) for s in reversed(wanted)},
        }
        yield made
        ended.set()
        for future in made.values():
            future.cancel()


@pytest.mark.parametrize(
    ("strategy", "entry"),
    [
        pytest.param(strategy, entry, id=f"{strategy}-{entry.name}")
        for strategy in HELD
        for entry in ENTRIES
        if entry.runs_under(strategy) and (strategy, entry.name) not in harness.LIMITS
    ],
)
def test_program(strategy: str, entry: Listed, runs: Runs) -> None:
    report = runs[strategy].result()[entry.name]
    expected = None if entry.is_property else runs["default"].result()[entry.name]
    verdict = harness.judge(entry, report, expected)
    if not verdict.ok:
        pytest.fail(f"{verdict.text}\n{report['traceback']}", pytrace=False)
