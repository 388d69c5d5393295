"""Every public name has an example in its docstring, and the example runs as it stands.

Those of one process run in this one, with the imports that the reference's pages state; programs, which name
their command in their first line, run by that command.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtrain
import public_names
import small_archives

NAMES = [*public_names.names(), *public_names.errors_with_examples()]
PROGRAM = re.compile(r"# (?P<file>\w+\.py), to be run by: dtrain (?P<arguments>.*)\n")
# They start processes that import TensorFlow.
LONG = {
    "dtrain.MultiWorkerMirroredStrategy",
    "dtrain.ParameterServerStrategy",
    "dtrain.data.distribute",
    "dtrain.optim.largest_batch",
}


def test_names_that_are_long_are_public() -> None:
    assert {*NAMES} >= LONG


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in LONG else name for name in NAMES]
)
def test_the_example_of_a_public_name_runs(
    name: str, tmp_path: Path, environment: pytest.MonkeyPatch
) -> None:
    if name.startswith("dtrain.ray."):
        pytest.importorskip("ray")
    found = public_names.examples(name)
    assert found, f"the docstring of {name} has no Example"
    environment.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    small_archives.write_cifar10(tmp_path / "data")
    small_archives.write_imdb(tmp_path / "data")
    environment.delenv("DTRAIN_DATA_DIR", raising=False)
    policy = keras.config.dtype_policy()
    for code in found:
        if program := PROGRAM.match(code):
            Path(program["file"]).write_text(code, encoding="utf-8")
            command = [sys.executable, "-m", "dtrain", *shlex.split(program["arguments"])]
            quiet = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "2"}
            done = subprocess.run(command, env=quiet, timeout=240, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[-4000:]
        else:
            imported = {"dtrain": dtrain, "keras": keras, "np": np, "tf": tf, "__name__": "__main__"}
            exec(compile(code, f"the example of {name}", "exec"), imported)
    assert keras.config.dtype_policy() == policy
