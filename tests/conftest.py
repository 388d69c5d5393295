"""What holds for every test: it leaves neither a cluster in the environment nor a process behind."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

# What takes longer than it tells beside its neighbours: `make test-faults` runs it, `make test` does not.
_LONG = (
    "multidevice/test_backup_and_restore.py::test_an_interrupted_fit_ends_as_one_that_was_left_alone[mirrored",
    "multidevice/test_backup_and_restore.py::test_an_interrupted_fit_ends_as_one_that_was_left_alone[central",
    "multidevice/test_guide.py::test_a_program_of_a_page_runs_by_its_commands",
    "multidevice/test_guide.py::test_a_recipe_of_a_page_runs_by_its_command",
    "multidevice/test_guide.py::test_the_blocks_of_a_page_run_as_they_stand[best_practices",
    "multidevice/test_guide.py::test_the_blocks_of_a_page_run_as_they_stand[coming_from",
    "multidevice/test_guide.py::test_the_blocks_of_a_page_run_as_they_stand[index",
    "multidevice/test_guide.py::test_the_blocks_of_a_page_run_as_they_stand[monitoring",
    "multidevice/test_guide.py::test_the_blocks_of_a_page_run_as_they_stand[questions",
    "multidevice/test_guide.py::test_the_blocks_of_a_page_run_as_they_stand[tasks",
    "multidevice/test_many_steps.py::test_evaluate_and_validation_are_those_of_single_steps",
    "multidevice/test_many_steps.py::test_the_numbers_of_a_step_of_ones_own_are_the_last_ones",
    "multidevice/test_many_steps.py::test_what_was_decided_goes_on",
    "multidevice/test_many_steps.py::test_xla_gives_the_same_bits_one_by_one",
    "multidevice/test_passes.py::test_parts_of_passes_are_those_of_whole_batches[batch",
    "multidevice/test_passes.py::test_parts_of_passes_are_those_of_whole_batches[False",
    "multidevice/test_sample_programs.py",
    "multidevice/test_strategies.py::test_a_strategy_survives_a_cleared_session",
    "multidevice/test_strategies.py::test_models_that_are_not_dtrains_train_as_before",
    "multidevice/test_trainer.py::test_a_resumed_run_ends_as_one_that_was_left_alone",
    "multidevice/test_guide.py::test_the_blocks_of_a_page_run_as_they_stand[batches",
    "multidevice/test_guide.py::test_the_blocks_of_a_page_run_as_they_stand[precision",
    "multidevice/test_monitor.py::test_the_parts_add_up_to_the_wall_time[central_storage",
    "multidevice/test_monitor.py::test_a_slow_disk_is_named[epoch",
    "multidevice/test_optim.py::test_divided_state_gives_the_same_bits[adamw",
    "multidevice/test_optim.py::test_layers_that_are_computed_again_give_the_same_numbers",
    "multiprocess/test_batch_finder.py",
    "multiprocess/test_bench.py",
    "multiprocess/test_elastic.py",
    "multiprocess/test_files.py",
    "multiprocess/test_mpi_launch.py::test_a_rank_that_leaves_is_missed_by_the_others",
    "multiprocess/test_pipeline_workers.py",
    "multiprocess/test_positions_workers.py",
    "multiprocess/test_rendezvous.py::test_a_missing_worker_is_named_by_all",
    "multiprocess/test_sample_programs_workers.py",
    "multiprocess/test_tour.py::test_it_runs",
    "multiprocess/test_trainer_workers.py",
    "multiprocess/test_transports.py::test_mpi_is_taken_where_its_starter_started_all",
)

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
# Python's own helpers, which live as long as the interpreter does.
# The contract's workers live as long as its module, which ends them.
_KEPT = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver", b"tests.contract.worker")


_IN_ONE_PROCESS = ("tests/multidevice/", "tests/unit/")


class _FilesInTurn(LoadScopeScheduling):
    """A file's tests stay together; those that share TensorFlow's state are all in one process."""

    def _split_scope(self, nodeid: str) -> str:
        return "one process" if nodeid.startswith(_IN_ONE_PROCESS) else nodeid.split("::", 1)[0]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """What runs beside what, where pytest is told to run two tests at a time."""
    return _FilesInTurn(config, log)


def pytest_configure(config: pytest.Config) -> None:
    """The processes that tests start begin a third sooner."""
    if config.getoption("numprocesses", None):  # those that run the tests do this for themselves
        return
    path = [str(Path(__file__).with_name("quick_start")), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(path)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what is long."""
    long = (*_LONG, "faults/", *(["contract/"] if config.getoption("contract") == "rest" else []))
    for item in items:
        if item.nodeid.removeprefix("tests/").startswith(long) or item.get_closest_marker("soak"):
            item.add_marker(pytest.mark.long)


def _children() -> dict[int, str]:
    """The living child processes of this one, and their command lines."""
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
    """Fail the test that leaves a cluster variable changed or a child process running."""
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
    """The contract's own option; pytest reads options from here, not from the folders below."""
    parser.addoption(
        "--contract",
        choices=("part", "rest", "full"),
        default="part",
        help="run every program under every strategy (full), a part for each strategy (part), or the rest of "
        "the programs, likewise a part for each (rest)",
    )
