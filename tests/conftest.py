"""Fixtures and hooks of all tests; every test must leave no cluster variable and no process behind."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.zygote import caller

import changed
import skips

_CLUSTER_VARIABLES = (
    "TF_CONFIG",
    "DTRAIN_ATTEMPT",
    "DTRAIN_CHANNEL_FD",
    "DTRAIN_CHIEF_TIMEOUT",
    "DTRAIN_DEVICES_PER_WORKER",
    "DTRAIN_JOB",
    "DTRAIN_JOB_BEGAN",
    "DTRAIN_LAST_FAILURE",
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
    """Checks skips; shortens start and end of the processes of tests, by `quick_start` and `zygote`."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(skips.ListedSkips(skips.read()))
    caller.install()
    if config.getoption("numprocesses", None):  # each worker process of pytest-xdist calls this hook itself
        return
    path = [str(Path(__file__).with_name("quick_start")), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(path)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out groups of tests, and puts the tests marked `early` first.

    Those wait for the disk, while other workers' tests compute.
    """
    groups = [group for group in changed.GROUPS if group.name in config.option.left_out]
    if left := [item for item in items if any(group.has(item.nodeid) for group in groups)]:
        config.hook.pytest_deselected(items=left)
        gone = set(left)
        items[:] = [item for item in items if item not in gone]
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
    children = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if int(parent) == os.getpid() and state != "Z" and not any(kept in command for kept in _KEPT):
            children[int(entry.name)] = command.replace(b"\0", b" ").decode(errors="replace").strip()
    return children


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
    deadline = time.monotonic() + 60.0
    while (
        leaked := {p: c for p, c in _children().items() if p not in before}
    ) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not leaked_variables, f"the test left these variables set: {leaked_variables}"
    assert not leaked, f"the test left these processes running: {leaked}"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options; pytest reads those of the contract tests only from this folder's conftest too."""
    parser.addoption("--left-out", action="append", default=[], help="leave out a group of tests/changed.py")
    parser.addoption(
        "--contract",
        choices=("full", *"0123456789"),
        help="run every program of the contract under every strategy (full), or under the one that it has at "
        "this place of the cycle; the number of commits decides by default",
    )


def pytest_report_header(config: pytest.Config) -> str:
    """Says which strategy each program of the contract runs under, so that a failure can be repeated."""
    from tests.contract.rotation import place_of_this_commit

    asked = config.getoption("contract")
    return f"contract: --contract {place_of_this_commit() if asked is None else asked}"
