"""Fixtures and hooks of all tests; every test must leave no cluster variable and no process behind."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.zygote import caller

_CLUSTER_VARIABLES = (
    "TF_CONFIG",
    "DTRAIN_ATTEMPT",
    "DTRAIN_CHANNEL_FD",
    "DTRAIN_CHIEF_TIMEOUT",
    "DTRAIN_DEVICES_PER_WORKER",
    "DTRAIN_JOB",
    "DTRAIN_LAUNCHED",
    "DTRAIN_PEER_TIMEOUT",
)
# Python's own helper processes live as long as the interpreter.
# The contract's workers live as long as their test module, which ends them; zygotes as long as this process.
_KEPT = (
    b"multiprocessing.resource_tracker",
    b"multiprocessing.forkserver",
    b"tests.contract.worker",
    b"tests/zygote/",
)


def pytest_configure(config: pytest.Config) -> None:
    """Shortens the start and the end of the processes of tests, by `quick_start` and `zygote`."""
    caller.install()
    if config.getoption("numprocesses", None):  # each worker process of pytest-xdist calls this hook itself
        return
    path = [str(Path(__file__).with_name("quick_start")), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(path)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the tests marked `early` first: they wait for the disk, while other workers' tests compute."""
    items.sort(key=lambda item: item.get_closest_marker("early") is None)


def pytest_collection_finish() -> None:
    """Excludes the imported objects from garbage collection, as in the processes that tests start."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(500_000)


@pytest.fixture
def as_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts the test's processes without `quick_start`, so that they import all that a user's would."""
    quick = str(Path(__file__).with_name("quick_start"))
    kept = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", quick)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(kept))


def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks soak tests, which only `make test-soak` runs, as long tests too; each says why CI may omit it."""
    if soak := item.get_closest_marker("soak"):
        if not soak.args:
            raise pytest.UsageError(f"{item.nodeid}: pytest.mark.soak is given no reason")
        item.add_marker(pytest.mark.long)


def _children() -> dict[int, str]:
    """The living child processes of this process, and their command lines."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if int(parent) == os.getpid() and state != "Z" and not any(kept in command for kept in _KEPT):
            found[int(entry.name)] = command.replace(b"\0", b" ").decode(errors="replace").strip()
    return found


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Fails a test that leaves a cluster variable changed or a child process running."""
    variables = {name: os.environ.get(name) for name in _CLUSTER_VARIABLES}
    before = _children()
    yield
    leaked_variables = {
        name: os.environ.get(name) for name in _CLUSTER_VARIABLES if os.environ.get(name) != variables[name]
    }
    for name in leaked_variables:
        value = variables[name]
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
    deadline = time.monotonic() + 2.0
    while (
        leaked := {p: c for p, c in _children().items() if p not in before}
    ) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not leaked_variables, f"the test left these variables set: {leaked_variables}"
    assert not leaked, f"the test left these processes running: {leaked}"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option of the contract tests; pytest reads options only from this folder's conftest."""
    parser.addoption(
        "--contract",
        choices=("part", "rest", "full"),
        default="part",
        help="run every program under every strategy (full), a part for each strategy (part), or the rest of "
        "the programs, likewise a part for each (rest)",
    )
