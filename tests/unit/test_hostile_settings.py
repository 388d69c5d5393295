"""Variables, options and files that somebody else has set: counts have limits, errors are typed and short."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dtrain import cli
from dtrain.data.archives import open_archive
from dtrain.data.record_writers import write_tfrecords
from dtrain.data.records import array_records, tfrecords
from dtrain.data.synthetic import synthetic_values
from dtrain.data.text_csv import load_text_csv
from dtrain.environments import mpi_start, settings, slurm_step
from dtrain.environments.jobset import JobSet
from dtrain.environments.kubeflow import KubeflowTrainJob
from dtrain.environments.tf_config import TFConfig
from dtrain.environments.topology import MOST_TASKS, Topology
from dtrain.environments.tpu_vm import TPUHosts
from dtrain.errors import ClusterConfigError, ConfigurationError, DtrainError
from dtrain.launch.hosts.host_list import parse_hosts, read_hostfile
from dtrain.launch.job.spec import JobSpec
from hostile_files import is_untouched, put, victim

DIGITS = "9" * 5000
LABEL = "a" * 1000
LONGEST_TEXT = 1000  # characters of an error


def is_short(error: DtrainError) -> bool:
    return len(str(error)) < LONGEST_TEXT


@pytest.mark.parametrize(
    "text",
    [
        "n[1-99999][1-99999]",
        "n[1-99999]" * 1000,
        "n" + "[1-9]" * 30,
        "n[1-99999],m[1-99999]",
        "[1-99999,1-99999]",
        f"n[1-{DIGITS}]",
        f"n[{DIGITS}]",
        LABEL,
        f"{LABEL}[1-3]",
        "a..b",
        "[" * 10_000,
        "n[1-3]]" * 100,
    ],
    ids=lambda text: text[:20],
)
def test_lists_of_slurms_hosts(text: str) -> None:
    with pytest.raises(ClusterConfigError) as caught:
        slurm_step.expand_hosts(text)
    assert is_short(caught.value)


@pytest.mark.parametrize(
    "text", ["2(x999999),2(x999999)", "1(x100001)", DIGITS, f"1(x{DIGITS})", "1," * 200_000]
)
def test_lists_of_slurms_tasks(text: str) -> None:
    with pytest.raises(ClusterConfigError) as caught:
        slurm_step.expand_counts(text)
    assert is_short(caught.value)


def step(**variables: str) -> dict[str, str]:
    given = {"PROCID": "0", "STEP_NUM_TASKS": "4", "STEP_NODELIST": "n[1-2]", "STEP_TASKS_PER_NODE": "2(x2)"}
    return {f"SLURM_{name}": value for name, value in {**given, **variables}.items()}


def test_slurms_steps() -> None:
    assert slurm_step.read_step(step()).hosts == ["n1", "n1", "n2", "n2"]
    with pytest.raises(ClusterConfigError, match="SLURM_HET_SIZE is 99999999999"):
        slurm_step.read_step(step(HET_SIZE="9" * 11))
    with pytest.raises(ClusterConfigError, match="999999 tasks"):
        slurm_step.read_step(step(STEP_NUM_TASKS="999999", STEP_NODELIST="n1", STEP_TASKS_PER_NODE="999999"))
    for variables in ({"HET_SIZE": DIGITS}, {"JOB_ID": DIGITS}, {"DIST_PLANESIZE": DIGITS}):
        assert len(slurm_step.read_step(step(**variables)).hosts) == 4
    # One node has nearly all tasks: the others must not be visited for each of them.
    many = {
        "STEP_NUM_TASKS": "100000",
        "STEP_NODELIST": "n[1-50000]",
        "STEP_TASKS_PER_NODE": "50001,1(x49999)",
    }
    assert slurm_step.read_step(step(**many, DISTRIBUTION="cyclic")).hosts[-1] == "n1"


@pytest.mark.parametrize(
    "text",
    [
        "a slots=999999999",
        f"a slots={DIGITS}",
        f"{LABEL} slots=2",
        "a slots=²",
        "a slots=99999\nb slots=99",
    ],
    ids=lambda text: text[:20],
)
def test_hostfiles(tmp_path: Path, text: str) -> None:
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        read_hostfile(tmp_path / "hosts")
    assert is_short(caught.value) and str(tmp_path / "hosts") in str(caught.value)


@pytest.mark.parametrize("text", ["a:999999999", f"a:{DIGITS}", LABEL, f"me@{LABEL}:2", f"{'a.' * 200}a"])
def test_hosts(text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_hosts(text)
    assert is_short(caught.value)


@pytest.mark.parametrize("kind", ["fifo", "socket", "directory", "zeros", "sparse", "device"])
def test_files_of_options(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "file"
    put(kind, path, tmp_path)
    with pytest.raises(ConfigurationError):
        read_hostfile(path)
    assert cli.main(["launch", f"--config={path}", "train.py"]) == 2
    assert f"{path}, cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        "workers = " + "[" * 100_000,
        "workers = " + "{a=" * 50_000,
        f"workers = {DIGITS}",
        "workers = 0x" + "f" * 50_000,
        f'workers = "{DIGITS}"',
        "workers." + "a." * 50_000 + "a = 1",
        "workers = 1e308",
        "workers = inf",
        "workers = -1",
        "workers = 999999999",
        "hang_timeout = nan",
        "[" + "a." * 1000 + "a]",
        "workers = {" + "a." * 1000 + "a = 1}",
        "workers = {" + "a.a." * 100 + "a = 1}",
    ],
    ids=lambda text: text[:20],
)
def test_files_of_config(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.toml"
    path.write_text(text)
    assert cli.main(["launch", f"--config={path}", "train.py"]) == 2
    said = capsys.readouterr().err
    assert str(path) in said and len(said) < 2 * LONGEST_TEXT


@pytest.mark.parametrize("option", ["--workers", "--ps", "--spares", "--max-restarts", "--nnodes"])
def test_options(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    for text in (DIGITS, "²", "1" * 30):
        assert cli.main(["launch", option, text, "train.py"]) == 2
        assert len(capsys.readouterr().err) < 3 * LONGEST_TEXT


def test_times_have_an_end(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("1e308", "1e10", DIGITS):
        for option in ("--hang-timeout", "--grace"):
            assert cli.main(["launch", option, text, "-m", "this"]) == 2
            assert "positive number of seconds" in capsys.readouterr().err
        monkeypatch.setenv("DTRAIN_REJOIN_SECONDS", text)
        with pytest.raises(ConfigurationError) as caught:
            settings.rejoin_seconds()
        assert is_short(caught.value)
    with pytest.raises(ConfigurationError):
        JobSpec(command=["true"], workers=1, grace=1e308)


def test_jobs_have_a_largest_size() -> None:
    for sizes in ({"workers": 999_999_999}, {"workers": 1, "ps": MOST_TASKS}):
        with pytest.raises(ConfigurationError, match="more than 100000 tasks"):
            JobSpec(command=["true"], **sizes)


def tf_config(address: Any, index: Any = 0) -> str:
    return json.dumps({"cluster": {"worker": ["a:1", address]}, "task": {"type": "worker", "index": index}})


@pytest.mark.parametrize(
    "text",
    [
        tf_config(f"{LABEL}:1"),
        tf_config(f"{'a.' * 500}a:1"),
        tf_config("a..b:1"),
        tf_config("é" * 80 + ":1"),
        tf_config("\udcff:1"),
        tf_config(f"b:{DIGITS}"),
        tf_config("b:²"),
        tf_config("b:1", index=10**400),
        tf_config("b:1", index=1e308),
        '{"cluster":' + "[" * 100_000,
        tf_config("b:1").replace("0", DIGITS),
    ],
    ids=lambda text: text[-30:],
)
def test_tf_config(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("TF_CONFIG", text)
    with pytest.raises(ClusterConfigError) as caught:
        TFConfig().topology()
    assert is_short(caught.value)


def test_names_of_hosts_that_can_be() -> None:
    for host in (
        "a",
        "A-1.example.",
        "_x",
        "x" * 63,
        "10.0.0.1",
        "[fd77::2]",
        "[fe80::1%eth0]",
        "bücher.example",
    ):
        assert Topology({"worker": (f"{host}:1",)}, "worker", 0)


@pytest.mark.parametrize(
    ("environment", "variables"),
    [
        (JobSet, {"DTRAIN_JOBSET_TASKS": "worker=999999"}),
        (JobSet, {"DTRAIN_JOBSET_TASKS": ",".join(f"w{n}=99999" for n in range(10_000))}),
        (JobSet, {"DTRAIN_JOBSET_TASKS": f"worker={DIGITS}"}),
        (JobSet, {"JOB_COMPLETION_INDEX": DIGITS}),
        (JobSet, {"JOBSET_NAME": LABEL}),
        (KubeflowTrainJob, {"PET_NNODES": DIGITS}),
        (KubeflowTrainJob, {"PET_NNODES": "999999"}),
        (KubeflowTrainJob, {"PET_NODE_RANK": "-1"}),
        (KubeflowTrainJob, {"PET_MASTER_PORT": "99999"}),
        (KubeflowTrainJob, {"PET_MASTER_ADDR": f"{LABEL}-0-0.x"}),
        (TPUHosts, {"TPU_WORKER_ID": DIGITS}),
        (TPUHosts, {"TPU_WORKER_HOSTNAMES": f"a,{LABEL}"}),
    ],
)
def test_variables_of_schedulers(
    monkeypatch: pytest.MonkeyPatch, environment: Callable[[], Any], variables: dict[str, str]
) -> None:
    usual = {
        **{"DTRAIN_JOBSET_TASKS": "worker=2", "JOBSET_NAME": "j", "REPLICATED_JOB_NAME": "worker"},
        **{"JOB_COMPLETION_INDEX": "0", "PET_NNODES": "2", "PET_NODE_RANK": "0"},
        **{"PET_MASTER_ADDR": "j-node-0-0.j", "TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "a,b"},
    }
    for name, value in usual.items():
        monkeypatch.setenv(name, value)
    assert environment().topology()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ClusterConfigError) as caught:
        environment().topology()
    assert is_short(caught.value)


def test_variables_of_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DTRAIN_CHANNEL_FD", "DTRAIN_SPARE"):
        monkeypatch.setenv(name, f"{DIGITS}:{DIGITS}")
    monkeypatch.setenv("DTRAIN_LOCAL_RANK", DIGITS)
    monkeypatch.setenv("DTRAIN_DEVICES_PER_WORKER", DIGITS)
    assert settings.channel() is settings.spare() is settings.local_rank() is None
    with pytest.raises(ConfigurationError) as caught:
        settings.devices_per_worker()
    assert is_short(caught.value)
    for size in (DIGITS, "999999999", "²"):
        assert mpi_start.start_in({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": size}) is None


@pytest.mark.parametrize("kind", ["fifo", "socket", "zeros", "directory"])
def test_files_of_data(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "data.tfrecord"
    put(kind, path, tmp_path)
    for read in (
        lambda: tfrecords([path], lambda record: record),
        lambda: array_records([path], lambda record: record),
        lambda: load_text_csv(str(path), text="a", label="b"),
    ):
        with pytest.raises(DtrainError):
            read()
    with pytest.raises(OSError), open_archive(path):
        pass


def test_records_are_written_to_no_other_file(tmp_path: Path) -> None:
    somebody = victim(tmp_path / "victim")
    path = tmp_path / "data.tfrecord"
    for name in (path, tmp_path / "data.tfrecord.partial"):
        name.symlink_to(somebody / "authorized_keys")
    write_tfrecords(synthetic_values(3), path)
    assert is_untouched(somebody) and path.is_file() and not path.is_symlink()
    assert {each.name for each in tmp_path.iterdir()} == {"victim", "data.tfrecord", "data.tfrecord.partial"}
