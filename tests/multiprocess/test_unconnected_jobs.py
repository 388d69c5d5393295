"""Jobs whose processes never connect: the launcher says so at their end, and what to write instead."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from dtrain.launch import launch_local
from dtrain.launch.supervision.connections import Connections

TRAINS = """
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
"""
FITS = """
    x = np.ones((16, 4), "float32")
    model.fit({data}, verbose=0{options})
"""
OWN = "strategy = tf.distribute.MultiWorkerMirroredStrategy()\n"


def launch(tmp_path: Path, program: str, *options: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "job.py"
    script.write_text(program)
    return subprocess.run(
        [sys.executable, "-m", "dtrain", "launch", "--max-restarts", "0", *options, str(script)],
        capture_output=True,
        text=True,
    )


def program(setup: str = "", *, scope: str = "if True:", data: str = "x, x[:, :1]", options: str = "") -> str:
    parts = ["import os, keras, numpy as np, tensorflow as tf", textwrap.dedent(setup), scope, TRAINS]
    return "\n".join([*parts, textwrap.dedent(FITS).format(data=data, options=options)])


def launched_until(
    patch: pytest.MonkeyPatch, folder: Path, program: str, attribute: str, **options: int
) -> tuple[int, str]:
    """Launches a program whose tasks end only when the launcher has seen something of them.

    Args:
        patch: has the launcher leave a file then.
        folder: for the program and the file.
        program: what the tasks do before.
        attribute: that of `Connections` which becomes true.
        **options: of `launch_local`.

    Returns:
        The exit status, and what the launcher and the tasks wrote to standard error.
    """
    seen, script, check, errors = folder / "seen", folder / "job.py", Connections.check, io.StringIO()

    def noted(connections: Connections, *looked_at: Any) -> None:
        check(connections, *looked_at)
        if getattr(connections, attribute):
            seen.touch()

    patch.setattr(Connections, "check", noted)
    waits = f"import os, time\nwhile not os.path.exists({str(seen)!r}):\n    time.sleep(0.05)\n"
    script.write_text(program + waits)
    status = launch_local([sys.executable, str(script)], max_restarts=0, stderr=errors, **options)
    return status, errors.getvalue()


@pytest.mark.parametrize("options", [{"workers": 2}, {"workers": 1, "ps": 1}])
@pytest.mark.long
def test_a_script_without_a_strategy_gets_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, int]
) -> None:
    status, errors = launched_until(monkeypatch, tmp_path, program(), "tensorflow", **options)
    assert status == 0, errors
    assert "processes of this job never connected to each other" in errors
    name = "parameter_server" if "ps" in options else "multi_worker"
    assert f'strategy = dtrain.strategy("{name}")' in errors


@pytest.mark.long
def test_tensorflows_own_strategy_connects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = f"import tensorflow as tf\n{OWN}strategy.run(lambda: tf.ones([]))\n"
    status, errors = launched_until(monkeypatch, tmp_path, runs, "made", workers=2)
    assert status == 0, errors


@pytest.mark.long
def test_keras_cannot_train_under_tensorflows_own_strategy(tmp_path: Path) -> None:
    done = launch(tmp_path, program(OWN, scope="with strategy.scope():"), "--workers", "2")
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
    assert done.returncode == 0
    assert re.fullmatch(
        r"\[dtrain\] Started: worker 0 \(process \d+\), worker 1 \(process \d+\)\.\n", done.stderr
    )
