"""What a task tells its launcher of an exception that ended it, and of how it began."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import dtrain
from dtrain.errors import PeerMissingError
from dtrain.task import task_hooks

SOURCE = str(Path(dtrain.__file__).parents[1])


class UnavailableError(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "exception", "lost_peer"),
    [
        (ValueError("no such thing\nmore"), "ValueError: no such thing", False),
        (KeyboardInterrupt(), "KeyboardInterrupt", False),
        (KeyError("a"), "KeyError: 'a'", False),
        (PeerMissingError("gone", hint="x"), "dtrain.errors.PeerMissingError: gone", True),
        (OSError("Connection reset by peer"), "OSError: Connection reset by peer", True),
        (RuntimeError("MPI_ERR_PROC_FAILED: process failed"), None, True),
        (RuntimeError("MPI_ERR_TYPE: invalid datatype"), None, False),
        (UnavailableError("aborted"), None, True),
    ],
)
def test_the_message_about_an_exception(error: BaseException, exception: str | None, lost_peer: bool) -> None:
    found = task_hooks.describe(error)
    assert exception in (None, found["exception"])
    assert found["lost_peer"] is lost_peer
    assert found["hint"] == ""


def test_what_to_write_instead_of_tensorflows_own_strategies() -> None:
    text = "unsupported type (<class 'tensorflow.python.distribute.values.PerReplica'>) to a Tensor."
    assert (
        "write `strategy = dtrain.MultiWorkerMirroredStrategy()`"
        in task_hooks.describe(ValueError(text))["hint"]
    )


PROGRAM = """
import json, os, sys
from dtrain.task import task_hooks
task_hooks.begin(print, spare=False)
os.environ["TF_BEFORE"] = "1"
del os.environ["KERAS_OLD"]
os.environ["MY_OWN"] = os.environ["TF_CONFIG"] = "{}"
sys.path.insert(0, sys.argv[1])
import tensorflow, yaml
os.environ["XLA_AFTER"] = "2"
assert not task_hooks.has_reported()
print(json.dumps([task_hooks.imports(), task_hooks.has_reported(), task_hooks.imports()]))
"""


def test_what_the_libraries_of_a_task_found(tmp_path: Path) -> None:
    for name in ("tensorflow", "yaml"):
        (tmp_path / f"{name}.py").touch()
    env = {**os.environ, "KERAS_OLD": "x", "PYTHONPATH": SOURCE}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], env=env, capture_output=True, text=True, check=True
    )
    first, reported, second = json.loads(done.stdout)
    assert first["variables"] == {"TF_BEFORE": "1", "KERAS_OLD": None}
    assert first["later"] == {"XLA_AFTER": "2"}
    assert "yaml" in first["modules"] and "tensorflow" not in first["modules"]
    assert reported and second is None


COLLECTIONS = """
import gc, json, sys
from dtrain.task import task_hooks
if sys.argv[1] == "task":
    task_hooks.begin(print, spare=False)
if sys.argv[2] == "disabled":
    gc.disable()
gc.set_threshold(700)  # Python's own; that of the other tests' processes is larger
seen = []
gc.callbacks.append(lambda phase, info: seen.append(phase))
import keras
during = len(seen)
import tensorflow
loaders = [module.__spec__.loader for module in (keras, tensorflow)]
print(json.dumps([during, gc.isenabled(), [vars(loader).keys() <= {"name", "path"} for loader in loaders]]))
"""


@pytest.mark.parametrize(
    ("process", "collector", "collects", "enabled"),
    [
        ("plain", "enabled", True, True),
        ("task", "enabled", False, True),
        ("task", "disabled", False, False),
    ],
)
def test_a_task_imports_tensorflow_without_garbage_collection(
    as_installed: None, process: str, collector: str, collects: bool, enabled: bool
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", COLLECTIONS, process, collector],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([SOURCE, os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        check=True,
    )
    during, is_enabled, unchanged = json.loads(done.stdout)
    assert during > 100 if collects else during < 10
    assert is_enabled == enabled
    assert unchanged == [True, True]


def test_an_import_that_fails_leaves_the_collector_on(tmp_path: Path) -> None:
    (tmp_path / "tensorflow.py").write_text(
        "import gc\nassert not gc.isenabled()\nraise ImportError('broken')\n"
    )
    program = """
import gc, sys
from dtrain.task import task_hooks
task_hooks.begin(print, spare=False)
sys.path.insert(0, sys.argv[1])
try:
    import tensorflow
except ImportError as error:
    print(error, gc.isenabled())
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": SOURCE},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "broken True\n"


def test_a_process_that_no_launcher_began_tells_nothing() -> None:
    assert task_hooks.imports() is None


FAILS = """
import json
from dtrain.task import task_hooks
task_hooks.begin(lambda error: None, spare=False)
import keras

def mine():
    raise LookupError("the cause")

def outer():
    try:
        keras.calls(mine)
    except LookupError as error:
        raise ValueError("the error") from error

{call}
"""


@pytest.mark.parametrize(
    ("call", "complete", "shown", "note"),
    [
        # Of the cause first: outer, Keras, mine; then the module and outer.
        ("outer()", "", ["program", "program", "program", "program"], "dtrain: 2 frames of libraries"),
        ("outer()", "1", ["program", "keras", "keras", "program", "program", "program"], ""),
        ("json.loads('')", "", ["program"], "dtrain: "),
    ],
)
def test_a_task_that_fails_shows_the_users_own_frames(
    call: str, complete: str, shown: list[str], note: str, tmp_path: Path
) -> None:
    (tmp_path / "keras").mkdir()
    (tmp_path / "keras" / "__init__.py").write_text(
        "def calls(f):\n    return again(f)\ndef again(f):\n    return f()\n"
    )
    program = tmp_path / "program.py"
    program.write_text(FAILS.format(call=call))
    done = subprocess.run(
        [sys.executable, str(program)],
        env={**os.environ, "PYTHONPATH": SOURCE, "DTRAIN_TRACEBACK": complete},
        capture_output=True,
        text=True,
    )
    files = [line.split('"')[1] for line in done.stderr.splitlines() if line.startswith("  File ")]
    assert [Path(file).relative_to(tmp_path).parts[0].removesuffix(".py") for file in files] == shown
    assert done.stderr.startswith(note or "Traceback") and done.returncode == 1
    assert ("LookupError: the cause" in done.stderr) == ("outer" in call)
