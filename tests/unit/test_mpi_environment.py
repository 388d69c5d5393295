"""What the environment of an MPI start says, and the commands that start one; no process is started."""

from __future__ import annotations

import os

import pytest

from dtrain import environments
from dtrain.environments import mpi_start
from dtrain.environments.detected_job import ENVIRONMENTS
from dtrain.environments.shown_variables import schedulers
from dtrain.environments.topology import Topology
from dtrain.errors import MPIError
from dtrain.launch.job.task_environment import task_environment
from dtrain.launch.mpi.mpi_starter import Starter
from engine_variables import OPEN_MPI_RANK
from refusals import refused

OPEN_MPI = OPEN_MPI_RANK | {"OMPI_COMM_WORLD_SIZE": "4"}
STEP = {"SLURM_PROCID": "2", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "3"}


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in {*os.environ} - {*mpi_start.MPIStart().without(os.environ)}:
        monkeypatch.delenv(name)
    for name in ("DTRAIN_MPI", "TF_CONFIG"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("env", "found"),
    [
        (OPEN_MPI, (1, 4)),
        ({"PMI_RANK": "0", "PMI_SIZE": "2", "PMI_FD": "9"}, (0, 2)),
        ({**STEP, "PMIX_RANK": "2"}, (2, 3)),
        ({"SLURM_NTASKS": "8", "PMIX_RANK": "2"}, (2, 8)),
        (STEP, None),  # a step without MPI
        ({"PMIX_RANK": "0"}, None),
        ({"PMI_RANK": "2", "PMI_SIZE": "2"}, None),
        ({"PMI_RANK": "", "PMI_SIZE": "two"}, None),
        ({}, None),
    ],
)
def test_rank_and_size(env: dict[str, str], found: tuple[int, int] | None) -> None:
    assert mpi_start.start_in(env) == found


@pytest.mark.parametrize(
    ("env", "kind"),
    [
        (OPEN_MPI, "Open MPI"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "PMI"),
        ({**STEP, "PMIX_RANK": "2"}, "PMIx"),
        ({}, None),
    ],
)
def test_kind(monkeypatch: pytest.MonkeyPatch, env: dict[str, str], kind: str | None) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert mpi_start.kind() == kind


def test_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (mpi_start.started_by_mpi(), mpi_start.rank(), mpi_start.size()) == (False, 0, 1)
    assert not mpi_start.MPIStart().detected() and environments.current() is None
    for name, value in OPEN_MPI.items():
        monkeypatch.setenv(name, value)
    assert (mpi_start.started_by_mpi(), mpi_start.rank(), mpi_start.size()) == (True, 1, 4)
    monkeypatch.setenv("DTRAIN_MPI", "0")
    assert (mpi_start.started_by_mpi(), mpi_start.rank(), mpi_start.size()) == (False, 0, 1)
    assert environments.current() is None


def test_where_the_job_was_found_and_the_rule_if_there_are_two(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Topology({"worker": tuple(f"127.0.0.1:{port}" for port in range(1, 5))}, "worker", 1)
    assert environments.origin() == environments.how_to_disable() == "" and environments.known_to_tensorflow()
    for name, value in OPEN_MPI.items():
        monkeypatch.setenv(name, value)
    assert (environments.origin(), environments.how_to_disable()) == ("an MPI start", "set DTRAIN_MPI=0")
    assert not environments.known_to_tensorflow()
    monkeypatch.setenv("TF_CONFIG", job.to_tf_config())
    assert environments.origin() == "TF_CONFIG, which precedes an MPI start,"
    assert environments.how_to_disable() == "unset TF_CONFIG" and environments.known_to_tensorflow()
    assert environments.current() == job, "TF_CONFIG comes first, and nobody has to talk"
    assert environments.describe() == {
        "environment": "tf_config",
        "also_found": ["mpi"],
        "precedence": [*ENVIRONMENTS],
        "schedulers": schedulers(),
        "mpi": "Open MPI",
        "task": "worker 1",
        "jobs": {"worker": [f"127.0.0.1:{port}" for port in range(1, 5)]},
    }


def test_no_world_without_a_start() -> None:
    with refused(MPIError, "no MPI starter", "dtrain launch --mpi"):
        mpi_start.world()


def test_no_world_of_another_size(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in OPEN_MPI.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TF_CONFIG", Topology({"worker": ("a:1", "b:1")}, "worker", 0).to_tf_config())
    with refused(MPIError, "TF_CONFIG", "job of 2", "worker 0", "4 ranks"):
        mpi_start.world()


def test_no_world_without_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in OPEN_MPI.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(__import__("sys").modules, "mpi4py", None)
    with refused(MPIError, "mpi4py", "pip install 'dtrain[mpi]'", "DTRAIN_MPI=0"):
        mpi_start.world()


def test_a_step_that_srun_started_for_mpi_is_slurms_without_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**STEP, "PMIX_RANK": "2"}.items():
        monkeypatch.setenv(name, value)
    assert (mpi_start.kind(), mpi_start.rank(), mpi_start.size()) == ("PMIx", 2, 3)
    monkeypatch.setitem(__import__("sys").modules, "mpi4py", None)
    assert (mpi_start.kind(), mpi_start.started_by_mpi(), mpi_start.size()) == (None, False, 1)
    monkeypatch.setenv("DTRAIN_SLURM", "0")
    assert mpi_start.kind() == "PMIx", "nothing else describes the job"
    monkeypatch.delenv("DTRAIN_SLURM")
    for name, value in OPEN_MPI.items():
        monkeypatch.setenv(name, value)
    assert mpi_start.kind() == "Open MPI", "mpirun in an allocation"


def test_the_tasks_of_a_rank_are_not_that_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    users = {"OMPI_MCA_btl": "self,tcp", "PMIX_MCA_gds": "hash", "SLURM_JOB_ID": "7"}
    for name, value in {**OPEN_MPI, **users, "PMIX_SERVER_URI4": "a", "PMI_FD": "3"}.items():
        monkeypatch.setenv(name, value)
    env = task_environment(None, None, None)
    assert mpi_start.start_in(env) is None
    assert {name: env.get(name) for name in users} == users
    assert not any(name.startswith(("PMIX_S", "PMI_", "OMPI_COMM")) for name in env)


def test_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    opened = Starter(("/usr/bin/mpirun", "--quiet"), "openmpi")
    assert " ".join(opened.start(3, ["python"])) == (
        "/usr/bin/mpirun --quiet --allow-run-as-root --host localhost:3 --bind-to none -n 3 python"
    )
    assert opened.environment({"SLURM_JOB_ID": "1", "A": "b"}) == {"A": "b"}
    assert opened.for_ranks() == {
        "MPI4PY_RC_FINALIZE": "0",
        "OMPI_MCA_btl": "self,sm",
        "OMPI_MCA_mpi_yield_when_idle": "1",
    }
    assert " ".join(opened.start_on({"10.0.0.1": 2, "10.0.0.2": 1}, ["python"])) == (
        "/usr/bin/mpirun --quiet --allow-run-as-root --host 10.0.0.1:2,10.0.0.2:1 --map-by slot "
        "--bind-to none -n 3 python"
    )
    assert opened.for_ranks(of_one_host=False)["OMPI_MCA_btl"] == "self,sm,tcp"
    hydra = Starter(("mpiexec",), "hydra")
    assert "-genvnone" in hydra.start_on({"a": 1}, ["python"])
    assert hydra.for_ranks() == {"MPI4PY_RC_FINALIZE": "0"}
    assert "-pmi-port -n 3 python" in " ".join(hydra.start(3, ["python"]))
    slurm = Starter(("srun",), "slurm")
    assert " ".join(slurm.start(3, ["python"])) == (
        "srun --mpi=pmix --nodes=1 --nodelist=n7 --overlap --ntasks=3 python"
    )
    assert "--mpi=pmix" not in Starter(("srun", "--mpi=pmi2"), "slurm").start(3, ["python"])
    assert slurm.environment({"SLURM_JOB_ID": "1"}) == {"SLURM_JOB_ID": "1"}
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "--allow-run-as-root" not in opened.start(3, ["python"])
