"""Jobs whose processes never connect: the launcher says so at their end, and what to write instead."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

LIMIT = 120.0
TRAINS = """
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
"""
FITS = """
    x = np.ones((16, 4), "float32")
    model.fit({data}, verbose=0{options})
"""


def launch(tmp_path: Path, program: str, *options: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "job.py"
    script.write_text(program)
    return subprocess.run(
        [sys.executable, "-m", "dtrain", "launch", "--max-restarts", "0", *options, str(script)],
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )


def program(setup: str = "", *, scope: str = "if True:", data: str = "x, x[:, :1]", options: str = "") -> str:
    parts = ["import os, keras, numpy as np, tensorflow as tf", textwrap.dedent(setup), scope, TRAINS]
    return "\n".join([*parts, textwrap.dedent(FITS).format(data=data, options=options)])


@pytest.mark.parametrize("options", [("--workers", "2"), ("--workers", "1", "--ps", "1")])
@pytest.mark.long
def test_a_script_without_a_strategy_gets_advice(tmp_path: Path, options: tuple[str, ...]) -> None:
    done = launch(tmp_path, program(), *options)
    assert done.returncode == 0, done.stderr
    assert "processes of this job never connected to each other" in done.stderr
    name = "parameter_server" if "--ps" in options else "multi_worker"
    assert f'strategy = dtrain.strategy("{name}")' in done.stderr


@pytest.mark.long
def test_tensorflows_own_strategy_connects_but_keras_cannot_train_under_it(tmp_path: Path) -> None:
    strategy = "strategy = tf.distribute.MultiWorkerMirroredStrategy()\n"
    loop = f"import tensorflow as tf, time\n{strategy}strategy.run(lambda: tf.ones([]))\ntime.sleep(2)\n"
    done = launch(tmp_path, loop, "--workers", "2")
    assert done.returncode == 0 and "never connected" not in done.stderr, done.stderr
    done = launch(tmp_path, program(strategy, scope="with strategy.scope():"), "--workers", "2")
    assert done.returncode == 1
    assert "write `strategy = dtrain.MultiWorkerMirroredStrategy()` instead" in done.stderr


@pytest.mark.long
def test_tensorflows_own_parameter_servers(tmp_path: Path) -> None:
    setup = """
        found = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        if found.task_type in ("worker", "ps"):
            tf.distribute.Server(
                found.cluster_spec(), job_name=found.task_type, task_index=found.task_id, protocol="grpc"
            ).join()
        strategy = tf.distribute.ParameterServerStrategy(found)
    """
    data = "tf.data.Dataset.from_tensors((x, x[:, :1])).repeat()"
    text = program(setup, scope="with strategy.scope():", data=data, options=", steps_per_epoch=2")
    done = launch(tmp_path, text, "--workers", "1", "--ps", "1")
    assert done.returncode == 1
    assert "write `strategy = dtrain.ParameterServerStrategy()` instead" in done.stderr


def test_a_job_that_is_no_training_gets_no_advice(tmp_path: Path) -> None:
    done = launch(tmp_path, "print('hello')\n", "--workers", "2")
    assert (done.returncode, done.stderr) == (0, "")
