"""The contract of environments: every one in the registry, and the example of the guide, in real processes.

To add an environment, add a `Start` to `STARTS`: how two processes of one job are started in it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import guide
from contract.mpi_starter import mpi_command, mpi_environment, mpi_missing
from dtrain import environments
from dtrain.environments.detected_job import ENVIRONMENTS
from dtrain.environments.topology import Topology
from dtrain.errors import ClusterConfigError, ConfigurationError, PeerMissingError
from dtrain.process_group.rendezvous import run_rendezvous
from engine_variables import OPEN_MPI_RANK, assert_as_recorded
from refusals import refused

JOB = {"worker": ("127.0.0.1:2221", "127.0.0.1:2222")}
(EXAMPLE,) = (
    block.text
    for block in guide.files((guide.DOCS / "extending.md").read_text(encoding="utf-8"))
    if block.title == "acme_environment.py"
)
JOBSET = {
    "JOBSET_NAME": "digits",
    "REPLICATED_JOB_NAME": "worker",
    "JOB_INDEX": "0",
    "DTRAIN_JOBSET_TASKS": "worker=2",
}
TRAINJOB = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "1",
    "PET_MASTER_ADDR": "digits-node-0-0.digits",
    "PET_MASTER_PORT": "29500",
}
TORCHRUN = {
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "digits-node-0",
    "MASTER_PORT": "29500",
}
SAYS = """
import json, os
from dtrain import environments
print(json.dumps([environments.describe(), {**os.environ}]))
"""


@dataclass(frozen=True)
class Start:
    """How a job of two processes is started in an environment.

    Attributes:
        variables: those of the process of each rank; by MPI, as its starter would set them.
        program: what each process runs first.
        by_mpi: whether an MPI starter starts the processes.
        invalid: variables that describe no valid job.
        jobs: the addresses of the job's tasks.
    """

    variables: Sequence[dict[str, str]] = ({}, {})
    program: str = ""
    by_mpi: bool = False
    invalid: dict[str, str] = field(default_factory=dict)
    jobs: dict[str, tuple[str, ...]] = field(default_factory=lambda: JOB)


STARTS = {
    "tf_config": Start(
        [{"TF_CONFIG": Topology(JOB, "worker", rank).to_tf_config()} for rank in (0, 1)],
        invalid={"TF_CONFIG": '{"cluster": {}}'},
    ),
    "joined": Start(
        program="import sys\nfrom dtrain import environments\nfrom dtrain.environments import topology\n"
        f"environments.join(topology.Topology({JOB!r}, 'worker', int(sys.argv[1])), by_program=True)\n"
    ),
    "ray": Start(
        program="import sys\nfrom dtrain.environments.ray_workers import RAY\n"
        f"RAY.join({JOB['worker']!r}, int(sys.argv[1]), b'0' * 32, run='first', attempt=0, cpus=1)\n"
    ),
    "mpi": Start(
        ({"PMI_RANK": "0", "PMI_SIZE": "2", "PMI_FD": "9"}, {"PMI_RANK": "1", "PMI_SIZE": "2"}), by_mpi=True
    ),
    "slurm": Start(
        [
            {
                "SLURM_PROCID": f"{rank}",
                "SLURM_STEP_ID": "0",
                "SLURM_STEP_NODELIST": "localhost",
                "SLURM_STEP_NUM_TASKS": "2",
                "SLURM_STEP_TASKS_PER_NODE": "2",
            }
            for rank in (0, 1)
        ],
        invalid={"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"},
    ),
    "jobset": Start(
        [JOBSET | {"JOB_COMPLETION_INDEX": f"{rank}"} for rank in (0, 1)],
        invalid=JOBSET | {"JOB_COMPLETION_INDEX": "2"},
        jobs={"worker": ("digits-worker-0-0.digits:2222", "digits-worker-0-1.digits:2222")},
    ),
    "kubeflow": Start(
        [TRAINJOB | {"PET_NODE_RANK": f"{rank}"} for rank in (0, 1)],
        invalid=TRAINJOB | {"PET_NODE_RANK": "2"},
        jobs={"worker": ("digits-node-0-0.digits:29500", "digits-node-0-1.digits:29500")},
    ),
    "torchrun": Start(
        [TORCHRUN | {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}"} for rank in (0, 1)],
        invalid=TORCHRUN | {"RANK": "2", "LOCAL_RANK": "2"},
        jobs={"worker": ("127.0.0.1:29501", "127.0.0.1:29502")},
    ),
    "tpu_vm": Start(
        [{"TPU_WORKER_ID": f"{rank}", "TPU_WORKER_HOSTNAMES": "t-w-0,t-w-1"} for rank in (0, 1)],
        invalid={"TPU_WORKER_ID": "2", "TPU_WORKER_HOSTNAMES": "t-w-0,t-w-1"},
        jobs={"worker": ("t-w-0:2222", "t-w-1:2222")},
    ),
    "acme": Start(
        [{"ACME_RANK": f"{rank}", "ACME_HOSTS": ",".join(JOB["worker"])} for rank in (0, 1)],
        program="import acme_environment\n",
        invalid={"ACME_RANK": "2", "ACME_HOSTS": "127.0.0.1:2221"},
    ),
}
WITH_VARIABLES = [name for name, start in STARTS.items() if start.variables[0]]


@pytest.fixture(autouse=True)
def the_example_is_registered() -> Iterator[None]:
    exec(EXAMPLE, {"__name__": "acme_environment"})
    yield
    del ENVIRONMENTS["acme"]


def clear(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in {*os.environ} - {*environments.without_task(os.environ)}:
        monkeypatch.delenv(name)


def test_every_environment_is_tested_here() -> None:
    assert {*STARTS} == {*ENVIRONMENTS}
    for name, kind in ENVIRONMENTS.items():
        assert kind.name == name and kind.label


@pytest.mark.parametrize("name", STARTS)
def test_two_processes_find_the_same_job_and_their_own_tasks(name: str, tmp_path: Path) -> None:
    start = STARTS[name]
    (tmp_path / "acme_environment.py").write_text(EXAMPLE, encoding="utf-8")
    program = tmp_path / "program.py"
    program.write_text(start.program + SAYS, encoding="utf-8")
    env = environments.without_task(os.environ)
    if start.by_mpi:
        if why := mpi_missing():
            pytest.skip(why)
        commands = [([*mpi_command(2), sys.executable, str(program)], env | mpi_environment())]
    else:
        commands = [
            ([sys.executable, str(program), f"{rank}"], env | variables)
            for rank, variables in enumerate(start.variables)
        ]
    said = []
    for command, variables in commands:
        done = subprocess.run(command, env=variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        said += [json.loads(line) for line in done.stdout.splitlines()]
    answers = [about for about, _ in said]
    assert [answer["environment"] for answer in answers] == [name, name]
    assert sorted(answer["task"] for answer in answers) == ["worker 0", "worker 1"]
    assert answers[0]["jobs"] == answers[1]["jobs"] and len({*answers[0]["jobs"]["worker"]}) == 2
    if start.by_mpi:
        (second,) = (variables for about, variables in said if about["task"] == "worker 1")
        assert_as_recorded(second, OPEN_MPI_RANK)
    elif name != "slurm":
        assert answers[0]["jobs"] == {job: [*addresses] for job, addresses in start.jobs.items()}


@pytest.mark.parametrize("name", WITH_VARIABLES)
def test_it_is_detected_by_its_variables_which_a_helper_process_does_not_get(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clear(monkeypatch)
    assert not any(kind.detected() for kind in ENVIRONMENTS.values())
    others = {"PATH": os.environ["PATH"], "OMPI_MCA_btl": "self", "SLURM_JOB_ID": "7"}
    for variable, value in {**STARTS[name].variables[1], **others}.items():
        monkeypatch.setenv(variable, value)
    assert [kind.name for kind in ENVIRONMENTS.values() if kind.detected()] == [name]
    left = ENVIRONMENTS[name].without(os.environ)
    assert {variable: left[variable] for variable in others} == others
    assert not any(variable in left for variable in STARTS[name].variables[1])
    clear(monkeypatch)
    assert not ENVIRONMENTS[name].detected()


@pytest.mark.parametrize("name", [name for name in STARTS if STARTS[name].invalid])
def test_an_invalid_description_is_a_typed_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clear(monkeypatch)
    for variable, value in STARTS[name].invalid.items():
        monkeypatch.setenv(variable, value)
    assert ENVIRONMENTS[name].detected()
    with pytest.raises(ConfigurationError):
        environments.current()


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"LOCAL_WORLD_SIZE": None}, ["LOCAL_WORLD_SIZE"]),
        ({"WORLD_SIZE": None}, ["WORLD_SIZE"]),
        ({"MASTER_PORT": "http"}, ["MASTER_PORT", "'http'"]),
        ({"MASTER_PORT": "65535"}, ["65536"]),
        ({"LOCAL_RANK": "0"}, ["RANK is 1 of 2", "LOCAL_RANK is 0 of 2"]),
        ({"WORLD_SIZE": "4"}, ["WORLD_SIZE is 4", "MASTER_ADDR", "dtrain launch --nnodes"]),
    ],
)
def test_variables_of_torchrun_that_cannot_be_used_are_named(
    changed: dict[str, str | None], named: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clear(monkeypatch)
    for variable, value in (STARTS["torchrun"].variables[1] | changed).items():
        if value is not None:
            monkeypatch.setenv(variable, value)
    with refused(ClusterConfigError, *named):
        environments.current()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert environments.current() is None


def test_the_first_of_two_names_the_job_and_the_rule_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    clear(monkeypatch)
    for name in ("acme", "tf_config"):
        for variable, value in STARTS[name].variables[1].items():
            monkeypatch.setenv(variable, value)
    about = environments.describe()
    assert (about["environment"], about["also_found"]) == ("tf_config", ["acme"])
    after = ["mpi", "slurm", "jobset", "kubeflow", "torchrun", "tpu_vm"]
    assert about["precedence"] == ["tf_config", "joined", "ray", "acme", *after]
    assert environments.origin() == "TF_CONFIG, which precedes an ACME job,"


def test_a_name_is_registered_once_and_before_a_known_one() -> None:
    known = [*ENVIRONMENTS]
    for environment, before in ((ENVIRONMENTS["mpi"], "tf_config"), (ENVIRONMENTS["acme"], "nowhere")):
        with pytest.raises(ConfigurationError, match="cannot be registered before"):
            environments.register(environment, before=before)
    assert [*ENVIRONMENTS] == known


def test_a_peer_whose_name_does_not_resolve_yet_is_waited_for_and_named() -> None:
    topology = Topology({"worker": ("train-0.invalid:2222", "127.0.0.1:22222")}, "worker", 1)
    said: list[str] = []
    with pytest.raises(
        PeerMissingError, match=r"train-0\.invalid:2222, a name that does not resolve here yet"
    ):
        run_rendezvous(topology, timeout=0.5, log=said.append, secret=b"")
