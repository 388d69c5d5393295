"""`dtrain env` reports an installation, hides secrets, and describes TensorFlow that cannot be imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dtrain import environments
from dtrain.diagnosis import installation
from dtrain.environments.shown_variables import HIDDEN, schedulers, shown_variables
from engine_variables import RAY_ACTOR


def env_command(*arguments: str, **variables: str) -> str:
    command = [sys.executable, "-m", "dtrain", "env", *arguments]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, env=os.environ | variables, timeout=200
    ).stdout


def broken_tensorflow(folder: Path, body: str) -> str:
    (folder / "tensorflow.py").write_text(body)
    return os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])


def test_tensorflow_that_cannot_be_imported_is_described(tmp_path: Path) -> None:
    path = broken_tensorflow(tmp_path, "raise ImportError('libbroken.so is not there')")
    found: dict[str, Any] = json.loads(env_command("--json", PYTHONPATH=path, SLURM_JOB_ID="7"))
    assert not found["tensorflow"]["imports"]
    assert "libbroken.so is not there" in found["tensorflow"]["problem"]
    assert found["versions"]["python"] == sys.version.split()[0]
    assert found["versions"]["dtrain"] and found["versions"]["keras"]
    assert found["schedulers"] == ["Slurm"]
    text = env_command(PYTHONPATH=path, DTRAIN_SECRET_FILE="/not/shown")
    assert "libbroken.so is not there" in text and "ring: yes" in text
    assert f"DTRAIN_SECRET_FILE: {HIDDEN}" in text and "/not/shown" not in text


def test_tensorflow_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", broken_tensorflow(tmp_path, "import signal; signal.pause()"))
    found = installation.describe_installation(probe_seconds=1.0)
    assert "took more than 1 seconds" in found["tensorflow"]["problem"]


def test_secrets_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "DTRAIN_SECRET_FILE": "/a/secret",
        "SLURM_JWT": "abc",
        "TF_PROXY": "http://user:word@host/",
        "TF_CONFIG": "{}",
        "HOME_TOKEN": "none of ours",
        "OMPI_ARGV": "--password word",
        "OMPI_MCA_orte_precondition_transports": "0123-4567",
        "TF_STORE": "https://host/path?version=1&X-Amz-Signature=abc",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    shown = shown_variables()
    assert shown["DTRAIN_SECRET_FILE"] == shown["SLURM_JWT"] == HIDDEN
    assert shown["OMPI_ARGV"] == shown["OMPI_MCA_orte_precondition_transports"] == HIDDEN
    assert shown["TF_STORE"] == HIDDEN
    assert shown["TF_PROXY"] == "http://host/" and shown["TF_CONFIG"] == "{}"
    assert "HOME_TOKEN" not in shown


@pytest.mark.parametrize("variables", [RAY_ACTOR, {"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"}])
def test_ray_is_named_where_it_runs_the_process(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")  # of a user, who may be outside of the cluster
    assert schedulers() == []
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert schedulers() == environments.describe()["schedulers"] == ["Ray"]
    monkeypatch.setenv("RAY_AUTH_TOKEN", "word")
    # The variables of a submitted job's runtime environment, among them the user's secrets.
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", '{"runtime_env": {"env_vars": {"A": "word"}}}')
    assert "word" not in f"{shown_variables()}"
    assert shown_variables()["RAY_ADDRESS"] == "head:6379"


def test_aws_batch_is_named_and_the_credentials_of_its_job_are_not_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "word")
    monkeypatch.setenv("AWS_BATCH_JOB_ID", "1f2e:0#1")
    monkeypatch.setenv("AWS_BATCH_JOB_NODE_INDEX", "1")
    assert schedulers() == ["AWS Batch"]
    shown = {name: value for name, value in shown_variables().items() if name.startswith("AWS_")}
    assert shown == {"AWS_BATCH_JOB_ID": "1f2e:0#1", "AWS_BATCH_JOB_NODE_INDEX": "1"}
