"""Slurm's variables and batch scripts, without Slurm; on a real one is `tests/multihost/test_slurm.py`."""

from __future__ import annotations

import argparse
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from dtrain.cli import main
from dtrain.cli.slurm_nodes import from_slurm
from dtrain.environments import cores, settings, slurm_step
from dtrain.environments.topology import Topology
from dtrain.errors import ClusterConfigError, ConfigurationError
from dtrain.process_group.secret import job_secret
from dtrain.submit.slurm import SlurmOptions, batch_script
from dtrain.submit.target import JobRequest
from engine_variables import SLURM_NO_STEP, SLURM_STEPS
from refusals import refused


@pytest.fixture(autouse=True)
def outside_of_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("SLURM", "TF_NUM_"))]:
        monkeypatch.delenv(name)


def enter(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("host[1-3,07]", ["host1", "host2", "host3", "host07"]),
        ("host[08-11]", ["host08", "host09", "host10", "host11"]),
        ("r[1-2]n[1-2]-ib,login", ["r1n1-ib", "r1n2-ib", "r2n1-ib", "r2n2-ib", "login"]),
        ("a,b-1,c.example", ["a", "b-1", "c.example"]),
    ],
)
def test_a_list_of_hosts_is_expanded(text: str, hosts: list[str]) -> None:
    assert slurm_step.expand_hosts(text) == hosts


@pytest.mark.parametrize(
    "text", ["h[1-", "h[a-b]", "h]1[", "h[3-1]", "h[[1]]", "h[]", "[0-99999999]", "h[0-999]r[0-999]"]
)
def test_a_malformed_list_of_hosts_is_a_typed_error(text: str) -> None:
    with refused(ClusterConfigError, "Slurm's variables of this task cannot be used"):
        slurm_step.expand_hosts(text)


def test_counts_are_expanded() -> None:
    assert slurm_step.expand_counts("2(x3),1") == [2, 2, 2, 1]
    for text in ("", "2(x", "two", "1,,2", "-1"):
        with refused(ClusterConfigError, "not a list of counts"):
            slurm_step.expand_counts(text)


@pytest.mark.parametrize(
    ("command", "hosts"),
    [
        ("srun -N2 -n3", ["host1:10200", "host1:10201", "host2:10200"]),
        ("srun -N2 -n4 -m cyclic", ["host1:10100", "host2:10100", "host1:10101", "host1:10102"]),
        (
            "srun -N2 -n6 -m plane=2",
            ["host1:10200", "host1:10201", "host2:10200", "host2:10201", "host1:10202", "host1:10203"],
        ),
        ("srun -w host2 -n1 : -w host1 -n2", ["host2:10500", "host1:10500", "host1:10501"]),
        ("salloc -N2 -n4 -c2 srun", ["host1:10500", "host1:10501", "host2:10500", "host2:10501"]),
    ],
)
def test_recorded_variables_give_the_step(command: str, hosts: Sequence[str]) -> None:
    step = slurm_step.read_step(SLURM_STEPS[command])
    assert (step.rank, step.addresses) == (len(hosts) - 1, tuple(hosts))


@pytest.mark.parametrize("command", SLURM_NO_STEP)
def test_recorded_variables_of_one_process_are_no_job(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    enter(monkeypatch, SLURM_NO_STEP[command])
    assert not slurm_step.SlurmStep().detected()
    assert slurm_step.launchers() is None


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"SLURMD_NODENAME": "host1"}, "Task 2 of the Slurm step runs on host1"),
        ({"SLURM_STEP_TASKS_PER_NODE": "1,1"}, "a sum of 2, and 3 tasks"),
        ({"SLURM_STEP_NODELIST": "host1"}, "1 nodes"),
        ({"SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST is not set"),
        ({"SLURM_PROCID": "3"}, "of which this is 3"),
    ],
)
def test_what_contradicts_itself_is_a_typed_error(changed: dict[str, str], named: str) -> None:
    with refused(ClusterConfigError, named):
        slurm_step.read_step(SLURM_STEPS["srun -N2 -n3"] | changed)


def test_ports_are_the_users_or_reserved_or_the_jobs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    step = SLURM_STEPS["srun -N2 -n3"]
    reserved = step | {"SLURM_STEP_RESV_PORTS": "12000-12001"}
    assert slurm_step.read_step(reserved).first_port == 12000
    assert (
        slurm_step.read_step(step | {"SLURM_STEP_RESV_PORTS": "12000-12000"}).first_port == 10200
    )  # too few
    assert slurm_step.read_step(step | {"SLURM_STEP_ID": "1"}).first_port == 10207
    found = {
        slurm_step.read_step(step | {"SLURM_JOB_ID": f"{job}"}).first_port for job in range(900_000, 900_200)
    }
    assert len(found) == 200 and all(10_000 <= port < 32_000 for port in found)
    monkeypatch.setenv("DTRAIN_PORT", "29400")
    assert slurm_step.read_step(reserved).first_port == 29400
    monkeypatch.setenv("DTRAIN_PORT", "0")
    with refused(ConfigurationError, "DTRAIN_PORT", "'0'"):
        settings.first_port()


@pytest.mark.parametrize(
    ("command", "given"),
    [("srun -N2 -n3", 1), ("salloc -N2 -n4 -c2 srun", 2), ("srun -N2 -n6 -m plane=2", 1)],
)
def test_a_task_uses_the_cores_that_slurm_gives_it(
    command: str, given: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {*range(8)})
    assert (cores.usable_cores(), cores.threads(0)) == (8, 8)
    enter(monkeypatch, SLURM_STEPS[command])
    assert cores.usable_cores() == given
    for name in ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    cores.limit_threads()
    assert cores.threads(0) == given
    assert cores.threads(5) == 5  # what the program has configured


def test_tasks_share_a_secret_in_the_home_folder_that_only_this_user_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter(monkeypatch, SLURM_STEPS["srun -N2 -n3"] | {"HOME": str(tmp_path)})
    job = Topology({"worker": ("host1:1", "host2:1")}, "worker", 0)
    one, other = job_secret(job), job_secret(job)
    assert one is not None and other is not None and other.has_signed(one.sign("a"), "a")
    file = tmp_path / ".dtrain" / "secret"
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    file.parent.chmod(0o755)
    with refused(ConfigurationError, file.parent, "755"):
        job_secret(job)


def options_of(*words: str) -> argparse.Namespace:
    from dtrain.cli import launch

    parser = argparse.ArgumentParser()
    launch.add_arguments(parser)
    return parser.parse_args([*words, "train.py"])


def test_launchers_of_a_step_get_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    assert from_slurm(options_of()) == {}
    enter(monkeypatch, SLURM_STEPS["srun -N2 -n3"])
    monkeypatch.setattr(slurm_step, "_check_name", lambda host: None)
    place = {"nnodes": 3, "node_rank": 2, "rendezvous": "host1:10200"}
    assert from_slurm(options_of()) == place
    assert from_slurm(options_of("--nproc-per-node", "2")) == place
    assert "nnodes" not in from_slurm(options_of("--nnodes", "2:3"))
    by_hand = ["--nnodes", "2", "--node-rank", "0", "--rendezvous", "a:1"]
    assert from_slurm(options_of(*by_hand)) == {}
    for words in (["--workers", "2"], ["--mpi"]):
        with refused(ConfigurationError, words[0], "srun has started 3 launchers"):
            from_slurm(options_of(*words))
    monkeypatch.setenv("DTRAIN_SLURM", "0")
    assert from_slurm(options_of("--workers", "2")) == {}


def test_launchers_that_see_the_same_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    enter(monkeypatch, SLURM_STEPS["salloc -N2 -n4 -c2 srun"])
    monkeypatch.setattr(slurm_step, "_check_name", lambda host: None)
    monkeypatch.setattr("dtrain.cli.slurm_nodes.visible_gpus", lambda: ["0", "1"])
    with refused(ConfigurationError, "all see the same GPUs", "--gpus-per-task=1"):
        from_slurm(options_of())
    monkeypatch.setenv("SLURM_GPUS_PER_TASK", "1")
    assert from_slurm(options_of())["nnodes"] == 4


def test_a_new_job_gets_no_variables_of_the_job_that_submits_it() -> None:
    kept = {"PATH": "/bin", "SLURM_CONF": "/etc/slurm.conf"}
    assert slurm_step.outside_job(kept | SLURM_STEPS["srun -N2 -n3"]) == kept
    assert slurm_step.outside_job(kept | {"SLURM_TIME_FORMAT": "%s"}) == kept | {"SLURM_TIME_FORMAT": "%s"}


def script(workers: int | None = None, command: Sequence[str] = ("train.py",), **options: object) -> str:
    request = JobRequest(command=command, name="train", workers=workers)
    return batch_script(request, SlurmOptions(**options))  # type: ignore[arg-type]


def test_the_batch_script_says_what_was_asked(tmp_path: Path) -> None:
    text = script(
        8,
        ["train.py", "--note", "two words"],
        nodes="2",
        tasks_per_node=4,
        cpus_per_task=6,
        gpus_per_task=1,
        mem="64G",
        time="4:00:00",
        partition="gpu",
        account="lab",
        qos="high",
        array="0-3%2",
        sbatch_option=["--constraint=a100|h100", "--mail-user=me@example.org"],
        launch_option=["--max-restarts 5", "--hang-timeout=60"],
        output_dir="out/100%",
        notice=300,
    )
    for line in (
        "--job-name=train", "--nodes=2", "--ntasks=8", "--ntasks-per-node=4", "--cpus-per-task=6",
        "--gpus-per-task=1", "--mem=64G", "--time=4:00:00", "--partition=gpu", "--account=lab", "--qos=high",
        "--array=0-3%2", "--output=out/100%%/train-%A_%a.out", "--open-mode=append", "--signal=B:USR1@300",
        "--requeue", "'--constraint=a100|h100'", "--mail-user=me@example.org",
    ):  # fmt: skip
        assert f"\n#SBATCH {line}\n" in text, line
    assert "srun --cpus-per-task=6 " in text
    launched = "--nproc-per-node 1 --grace 280 --max-restarts 5 --hang-timeout=60 train.py --note 'two words'"
    assert f" launch {launched} &\n" in text
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


@pytest.mark.parametrize(
    ("workers", "options", "tasks", "launched"),
    [
        (None, {}, 1, "--workers 1"),
        (3, {}, 3, "--nproc-per-node 1"),
        (None, {"nodes": "2"}, 2, "--nproc-per-node 1"),
        (None, {"nodes": "2", "tasks_per_node": 3}, 6, "--nproc-per-node 1"),
        (8, {"nodes": "2-4"}, 8, "--nproc-per-node 1"),
        (None, {"gpus_per_task": 4}, 1, "--workers 4"),
        (None, {"nodes": "2", "gpus_per_task": 4}, 2, "--nproc-per-node 4"),
    ],
)
def test_each_task_is_a_launcher(
    workers: int | None, options: dict[str, object], tasks: int, launched: str
) -> None:
    text = script(workers, **options)
    assert f"#SBATCH --ntasks={tasks}\n" in text and f"launch {launched} " in text


@pytest.mark.parametrize(
    ("workers", "options", "named"),
    [
        (4, {"nodes": "2", "tasks_per_node": 3}, "--nodes 2 with --tasks-per-node 3 makes 6"),
        (None, {"nodes": "2-4"}, "'2-4'"),
        (None, {"nodes": "two"}, "'two'"),
        (None, {"partition": "a\n#SBATCH --exclusive"}, "cannot be an option of sbatch"),
        (None, {"sbatch_option": ["rm -rf /"]}, "cannot be an option of sbatch"),
    ],
)
def test_what_cannot_be_written_is_refused(
    workers: int | None, options: dict[str, object], named: str
) -> None:
    with refused(ConfigurationError, named):
        script(workers, **options)


def test_the_command_without_slurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["submit", "--slurm", "--dry-run", "--workers", "2", "-m", "lab.train", "--epochs", "3"]) == 0
    assert "#SBATCH --job-name=lab.train\n" in (said := capsys.readouterr().out)
    assert "-m lab.train --epochs 3 &" in said
    assert main(["submit", "--slurm", "train.py"]) == 2
    assert "There is no script 'train.py'" in capsys.readouterr().err
    Path("train.py").touch()
    assert main(["submit", "--slurm", "train.py"]) == 2
    assert "There is no sbatch in PATH" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("says", "quoted", "remedy"),
    [
        (
            "echo 'error: Unable to contact slurm controller' >&2; exit 1",
            "Unable to contact",
            "scontrol ping",
        ),
        ("echo 'error: Invalid account' >&2; exit 1", "Invalid account", "sacctmgr"),
        ("echo gibberish", "gibberish", "--dry-run"),
        ("exit 3", "it said nothing", "--dry-run"),
    ],
)
def test_what_sbatch_says_is_quoted(
    says: str,
    quoted: str,
    remedy: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    Path("sbatch").write_text(f"#!/bin/sh\n{says}\n")
    Path("sbatch").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert main(["submit", "--slurm", "train.py"]) == 2
    said = capsys.readouterr().err
    assert quoted in said and remedy in said
