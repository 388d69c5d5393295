"""Processes in waiting: what becomes a task behaves as if Python had just started it. Without TensorFlow.

In its place stands an empty module, found first, which notes that it was imported.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from processes import alive, wait_until
from restart_jobs import PATIENT, Ended, run, write_program

TENSORFLOW = """
import os
from pathlib import Path
(Path(__file__).parents[1] / f"spare-{os.getpid()}").touch()
"""

BEGIN = """
    import pickle, threading
    tensorflow_was_there = "tensorflow" in sys.modules
    spares = lambda: list(Path(os.environ["FAKES"]).glob("spare-*"))
    class Own:
        pass
    def state():
        of_the_attempt = "DTRAIN_ATTEMPT", "DTRAIN_LAST_FAILURE", "TF_CONFIG"
        variables = {k: v for k, v in os.environ.items() if k not in of_the_attempt}
        variables["DTRAIN_LAUNCH_ID"] = variables["DTRAIN_LAUNCH_ID"].count("/")
        return {
            "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "flags": list(sys.flags),
            "main": [__name__, __file__, str(__spec__), sorted(k for k in globals() if k.startswith("__"))],
            "pickled": pickle.loads(pickle.dumps(Own())).__class__.__module__,
            "variables": variables, "cwd": os.getcwd(), "customized": sys.customized,
            "sitecustomize": sys.modules["sitecustomize"].__file__,
            "threads": threading.active_count(), "priority": os.getpriority(os.PRIO_PROCESS, 0),
            "session": os.getsid(0) == os.getpid(), "stdin": os.readlink("/proc/self/fd/0"),
            "oom": Path("/proc/self/oom_score_adj").read_text(),
            "files": len(os.listdir("/proc/self/fd")), "signals": str(signal.getsignal(signal.SIGINT)),
        }
    (folder.parent / f"state-{attempt}-{index}").write_text(json.dumps(state()))
    print("tensorflow:", tensorflow_was_there, "attempt", attempt, flush=True)
"""


@pytest.fixture
def fakes(tmp_path: Path) -> Path:
    folder = tmp_path / "fakes"
    for name in ("tensorflow", "keras"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(TENSORFLOW if name == "tensorflow" else "")
    (folder / "sitecustomize.py").write_text("import sys\nsys.customized = 'by the user'\n")
    return folder


@pytest.fixture
def launch(tmp_path: Path, fakes: Path) -> Callable[..., Ended]:
    env = {"PYTHONPATH": str(fakes), "FAKES": str(fakes)}
    return functools.partial(run, tmp_path, env=env, workers=1, spares=None)


def states(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("state-*"))]


def test_a_spare_goes_on_as_if_python_had_just_started_it(
    launch: Callable[..., Ended], tmp_path: Path
) -> None:
    ended = launch(
        BEGIN
        + """
    step(1 + attempt)
    if attempt == 0:
        wait_for(lambda: len(spares()) == 1)
        die()
    import atexit
    atexit.register(print, "at exit", flush=True)
    if attempt == 1:
        wait_for(lambda: len(spares()) == 2)  # another has taken its place
        def fails():
            raise ValueError("on purpose")
        fails()
    sys.exit(7)
    """,
        max_restarts=2,
    )
    assert ended.status == 7, ended.err
    assert "tensorflow: False attempt 0" in ended.out
    assert "tensorflow: True attempt 1" in ended.out and "tensorflow: True attempt 2" in ended.out
    first, *others = states(tmp_path)
    assert len(others) == 2
    for other in others:
        assert other == first
    assert first["main"][0] == "__main__" and first["pickled"] == "__main__"
    trace = [line for line in ended.err.splitlines() if line.startswith("[worker 0] ")]
    at = trace.index("[worker 0] Traceback (most recent call last):")
    script = tmp_path / "job.py"
    frames = [line for line in trace[at + 1 :] if "  File " in line]
    assert len(frames) >= 2 and all(f'File "{script}", line ' in line for line in frames), (
        "ours are not shown"
    )
    assert ended.out.count("at exit") == 2


def test_spares_end_with_the_job(launch: Callable[..., Ended], fakes: Path) -> None:
    ended = launch(BEGIN + "    step(1)\n    wait_for(lambda: len(spares()) == 1)\n")
    assert ended.status == 0, ended.err
    pids = [int(path.name.partition("-")[2]) for path in fakes.glob("spare-*")]
    assert len(pids) == 1
    assert f"[dtrain] Process {pids[0]} is a spare" in ended.err
    wait_until(lambda: not any(map(alive, pids)))  # the system takes a moment to end a process


SETS = """
    before = os.environ.get("KERAS_BACKEND")
    os.environ["KERAS_BACKEND"] = "tensorflow"
    os.environ["TF_SET"] = VALUE
    os.environ.pop("XLA_FLAGS", None)
    import tensorflow
    os.environ["TF_LATER"] = "only now"
    step(1)
    print("found:", tensorflow.found, "tensorflow:", tensorflow_was_there, "attempt", attempt, flush=True)
    print("launched with:", before, flush=True)
    if attempt == 0:
        wait_for(lambda: len(spares()) == 2)  # the file of a spare beside its own
        die()
"""
FOUND = """
found = [os.environ.get(n) for n in ("KERAS_BACKEND", "TF_SET", "XLA_FLAGS", "TF_LATER")]
"""


@pytest.fixture
def told_tensorflow(fakes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module keeps which variables it found."""
    monkeypatch.setenv("XLA_FLAGS", "--of-the-user")
    (fakes / "tensorflow" / "__init__.py").write_text(TENSORFLOW + FOUND)


@pytest.mark.usefixtures("told_tensorflow")
def test_a_spare_imports_with_the_variables_that_its_program_sets_before(
    launch: Callable[..., Ended],
) -> None:
    ended = launch(BEGIN + SETS.replace("VALUE", "'1'"))
    assert ended.status == 0, ended.err
    values = "['tensorflow', '1', None, None]"
    assert f"found: {values} tensorflow: False attempt 0" in ended.out
    assert f"found: {values} tensorflow: True attempt 1" in ended.out
    assert ended.out.count("launched with: None") == 2, "the program itself finds what it was launched with"


@pytest.mark.usefixtures("told_tensorflow")
def test_a_program_that_sets_another_value_begins_anew_without_imports(launch: Callable[..., Ended]) -> None:
    ended = launch(
        BEGIN + SETS.replace("VALUE", "str(attempt)") + "    raise SystemExit(0 if attempt else 1)\n"
    )
    assert ended.status == 0, ended.err
    assert "found: ['tensorflow', '0', None, None] tensorflow: False attempt 0" in ended.out
    assert "tensorflow: True attempt 1" in ended.out, "the spare"
    assert "found: ['tensorflow', '1', None, None] tensorflow: False attempt 1" in ended.out
    assert "found: ['tensorflow', '0', None, None] tensorflow: True" not in ended.out
    assert len(ended.lives) == 2, "it is the same process"


@pytest.mark.usefixtures("told_tensorflow")
def test_a_program_that_sets_no_value_any_more_begins_anew_too(launch: Callable[..., Ended]) -> None:
    only_at_first = SETS.replace('os.environ["TF_SET"] = VALUE', 'attempt or os.environ.update(TF_SET="1")')
    ended = launch(BEGIN + only_at_first)
    assert ended.status == 0, ended.err
    assert "found: ['tensorflow', '1', None, None] tensorflow: False attempt 0" in ended.out
    assert "tensorflow: True attempt 1" in ended.out, "the spare"
    assert "found: ['tensorflow', None, None, None] tensorflow: False attempt 1" in ended.out
    assert "found: ['tensorflow', '1', None, None] tensorflow: True" not in ended.out


def test_a_killed_launcher_leaves_no_spare(tmp_path: Path, fakes: Path) -> None:
    script = write_program(tmp_path, BEGIN + "    step(1)\n    hang()\n")
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "dtrain",
            "launch",
            "--workers",
            "2",
            "--spares",
            "1",
            "--hang-timeout",
            str(PATIENT),
            *script,
        ],
        env={**os.environ, "PYTHONPATH": str(fakes), "FAKES": str(fakes)},
        stdout=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: len([*fakes.glob("spare-*")]) == 1)
        pids = [int(path.name.rpartition("-")[2]) for path in fakes.glob("spare-*")]
        pids += [int(path.name.rpartition("-")[2]) for path in (tmp_path / "lives").iterdir()]
        assert len(pids) == 3 and all(map(alive, pids))
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    wait_until(lambda: not any(map(alive, pids)))
