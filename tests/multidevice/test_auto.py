"""What `dtrain.strategy("auto")` chooses, and that it says so in one line."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys

import pytest
import tensorflow as tf

import dtrain
from dtrain.strategies import auto


def cluster(task: str = "worker", index: int = 0, **jobs: int) -> str:
    addresses = {
        job: [f"localhost:{4000 + 100 * n + i}" for i in range(count)]
        for n, (job, count) in enumerate(jobs.items())
    }
    return json.dumps({"cluster": addresses, "task": {"type": task, "index": index}})


@pytest.mark.parametrize(
    ("variables", "name", "reason"),
    [
        ({"TF_CONFIG": cluster(worker=2)}, "multi_worker", "TF_CONFIG has 2 workers"),
        ({"TF_CONFIG": cluster("chief", chief=1, worker=2)}, "multi_worker", "TF_CONFIG has 3 workers"),
        ({"TF_CONFIG": cluster(worker=2, ps=1)}, "parameter_server", "TF_CONFIG has 1 parameter server"),
        ({"TF_CONFIG": cluster(worker=1)}, "mirrored", "2 logical CPUs"),
        ({"TF_CONFIG": cluster("evaluator", worker=2, evaluator=1)}, "mirrored", "2 logical CPUs"),
        ({"TPU_NAME": "my-tpu"}, "tpu", "the environment names a TPU (my-tpu)"),
        ({"TPU_ACCELERATOR_TYPE": "v4-8"}, "tpu", "the environment names a TPU (local)"),
        ({"DTRAIN_DEVICES_PER_WORKER": "2"}, "mirrored", "2 logical CPUs"),
        ({}, "mirrored", "2 logical CPUs"),
    ],
)
def test_what_auto_chooses_and_why(
    environment: pytest.MonkeyPatch, variables: dict[str, str], name: str, reason: str
) -> None:
    for variable, value in variables.items():
        environment.setenv(variable, value)
    choice = auto.choose()
    assert (choice.name, reason in choice.reason) == (name, True), choice


@pytest.mark.parametrize(
    ("gpus", "name", "options"),
    [(1, "one_device", {"device": "/gpu:0"}), (4, "mirrored", {})],
)
def test_what_auto_chooses_for_gpus(
    environment: pytest.MonkeyPatch, gpus: int, name: str, options: dict[str, str]
) -> None:
    environment.setattr(tf.config, "list_physical_devices", lambda kind=None: [None] * gpus)
    choice = auto.choose()
    assert (choice.name, choice.options) == (name, options)
    assert "GPU" in choice.reason


def test_auto_says_in_one_line_what_it_chose(
    environment: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert type(dtrain.strategy()) is dtrain.MirroredStrategy
    assert capsys.readouterr().err == (
        "dtrain: strategy mirrored: no GPU or TPU, but 2 logical CPUs were set up\n"
    )
    with caplog.at_level(logging.INFO, logger="dtrain"):
        dtrain.strategy("auto", memory_growth=False)
    said = [record.getMessage() for record in caplog.records if record.name == "dtrain"]
    assert said == ["strategy mirrored: no GPU or TPU, but 2 logical CPUs were set up"]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("index", "said"), [(0, 1), (1, 0)])
def test_auto_is_announced_once_a_job(
    environment: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], index: int, said: int
) -> None:
    environment.setenv("TF_CONFIG", cluster(index=index, worker=2))
    auto.choose().announce()
    assert len(capsys.readouterr().err.splitlines()) == said


ALONE = """
import dtrain
strategy = dtrain.strategy("auto", **OPTIONS)
print(type(strategy).__name__, strategy.num_replicas_in_sync)
"""


@pytest.mark.parametrize(
    ("variables", "options", "found", "said"),
    [
        pytest.param(
            {},
            "{'memory_growth': False}",
            "_DefaultDistributionStrategy 1",
            "strategy default: no TPU, no TF_CONFIG",
            marks=pytest.mark.long,
        ),
        (
            {"DTRAIN_DEVICES_PER_WORKER": "2"},
            "{}",
            "MirroredStrategy 2",
            "strategy mirrored: no GPU or TPU, but 2",
        ),
        (
            {"TPU_NAME": "grpc://127.0.0.1:1", "DTRAIN_DEVICES_PER_WORKER": "2"},
            "{'fallback': 'mirrored', 'timeout': 0.5}",
            "MirroredStrategy 2",
            "strategy tpu: the environment names a TPU (grpc://127.0.0.1:1)",
        ),
    ],
)
def test_auto_in_a_process_of_its_own(
    environment: pytest.MonkeyPatch, variables: dict[str, str], options: str, found: str, said: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ALONE.replace("OPTIONS", options)],
        env=os.environ | variables,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == found, done.stderr
    assert next(line for line in done.stderr.splitlines() if line.startswith("dtrain: ")).startswith(
        f"dtrain: {said}"
    )
    # The fallback is never silent, also where nobody has set up logging.
    assert ("fallback='mirrored' was set" in done.stderr) == ("fallback" in options)
