"""`dtrain launch --ray` as far as it needs no Ray: its arguments, and a Ray that is missing or too old."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from dtrain import cli
from dtrain.cli import launch as command
from dtrain.cli.parser import Parser
from dtrain.errors import ConfigurationError, UnsupportedVersionError
from dtrain.launch import launch_local
from dtrain.launch.hosts import ray_launcher as launcher
from dtrain.launch.job.ray_cluster import RayCluster


@pytest.mark.parametrize(
    ("words", "address", "script", "rest"),
    [
        (["--ray", "train.py", "--ray", "x"], "auto", "train.py", ["--ray", "x"]),
        (["--ray", "-n", "2", "train.py"], "auto", "train.py", []),
        (["-n", "2", "--ray", "10.0.0.1:6379", "train.py"], "10.0.0.1:6379", "train.py", []),
        (["--ray", "ray://head.local:10001", "-m", "mod"], "ray://head.local:10001", "mod", []),
        (["--ray=[fd77::1]:6379", "train.py"], "[fd77::1]:6379", "train.py", []),
        (["--ray", "auto", "train.py"], "auto", "train.py", []),
    ],
)
def test_the_address_may_be_left_out(words: list[str], address: str, script: str, rest: list[str]) -> None:
    parser = Parser(prog="dtrain launch")
    command.add_arguments(parser)
    found = parser.parse_args(words)
    assert (found.ray, found.script, found.args) == (address, script, rest)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ray=10.0.0.1"], "'10.0.0.1' is not an address such as HOST:PORT"),
        (["--ray-cpus", "2"], "--ray-cpus is only for a job on Ray"),
        (["--ray", "--ray-cpus", "0"], "'0' is not an integer of at least 1"),
        (["--ray", "--ray-gpus", "-1"], "'-1' is not a number of GPUs"),
        (["--ray", "--ray-placement", "spred"], "Did you mean 'spread'?"),
        (["--ray", "--hosts", "a:2"], "--ray and --hosts exclude each other"),
        (["--ray", "--nnodes", "2"], "--ray and --nnodes exclude each other"),
        (["--ray", "--mpi"], "--ray and --mpi exclude each other"),
    ],
)
def test_what_cannot_be_is_said(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").touch()
    assert cli.main(["launch", *words, str(tmp_path / "train.py")]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("version", [None, "2.9.3", "2.50.1"])
def test_a_ray_that_is_missing_or_too_old(version: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", found)
    with pytest.raises(UnsupportedVersionError, match=version or "not installed") as caught:
        launch_local([sys.executable, "-c", ""], workers=1, launcher="ray", ray=RayCluster())
    assert caught.value.hint == launcher.INSTALL


def test_a_cluster_is_needed_and_threads_are_those_of_the_cpus() -> None:
    with pytest.raises(ConfigurationError, match=r"JobSpec\.ray is not set"):
        launch_local([sys.executable, "-c", ""], workers=1, launcher="ray")
    assert launcher.threads(3) == {"OMP_NUM_THREADS": "3", "TF_NUM_INTRAOP_THREADS": "3"}


def test_the_package_is_there_without_ray() -> None:
    code = "import sys\nsys.modules['ray'] = None\nimport dtrain.ray\n" + (
        "try:\n    dtrain.ray.TensorflowTrainer\nexcept dtrain.errors.UnsupportedVersionError as error:\n"
        "    print(error.hint)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == launcher.INSTALL, done.stderr
