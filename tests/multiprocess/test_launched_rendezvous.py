"""The rendezvous of launched tasks: living ones are waited for, and one that does not come is named."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

SECONDS = 240.0

# What a strategy does first, without TensorFlow. Worker 1 does what the argument says before.
_PROGRAM = """
import os, sys, time
from pathlib import Path
from dtrain import environments
from dtrain.environments import settings
from dtrain.task import channel
from dtrain.process_group.rendezvous import run_rendezvous
from dtrain.base.tcp import answers_at
topology = environments.current()

def first_waits():
    return answers_at(topology.address_of(topology.training_tasks()[0]))

def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

if topology.rank == 1:
    exec(sys.argv[1])
    Path("worker 1").write_text(f"{os.getpid()}")
print("patience", settings.peer_timeout(), flush=True)
with channel.rendezvous():
    run_rendezvous(topology)
channel.report_connected()
print("met", flush=True)
if topology.rank == 0:
    while runs(Path("worker 1").read_text()):  # it ends well, and nobody waits for it any more
        time.sleep(0.02)
"""


def _launch(
    folder: Path, program: str, *args: str, options: Sequence[str] = (), limit: int | None = None
) -> tuple[int, str]:
    (folder / "program.py").write_text(program, encoding="utf-8")
    command = [sys.executable, "-m", "dtrain", "launch", "--workers", "2", *options, "program.py", *args]
    if limit is not None:
        command = ["bash", "-c", f'ulimit -n {limit}; exec "$@"', "bash", *command]
    done = subprocess.run(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        env={name: value for name, value in os.environ.items() if name != "DTRAIN_PEER_TIMEOUT"},
    )
    return done.returncode, done.stdout


def test_a_task_that_lives_is_waited_for(tmp_path: Path) -> None:
    status, output = _launch(tmp_path, _PROGRAM, "while not first_waits(): time.sleep(0.02)")
    assert status == 0, output
    assert output.count("patience inf") == 2 and output.count("met") == 2


def test_a_task_that_never_comes_shows_its_stacks_and_all_are_restarted(tmp_path: Path) -> None:
    """It has imported nothing of dtrain's when it gets stuck."""
    stuck = """
import threading
def reads_for_ever():
    threading.Event().wait()
if os.environ["DTRAIN_ATTEMPT"] == "0":
    reads_for_ever()
while not first_waits():
    time.sleep(0.02)
"""
    status, output = _launch(tmp_path, _PROGRAM, stuck, options=("--start-timeout", "5", "--spares", "none"))
    assert status == 0, output
    assert "worker 1 had not met the other tasks after" in output and "(--start-timeout)" in output
    assert "in reads_for_ever" in output and "run_rendezvous" in output
    assert output.count("met\n") == 2


def test_a_task_that_ends_well_before_the_meeting_is_the_one_that_is_named(tmp_path: Path) -> None:
    status, output = _launch(tmp_path, _PROGRAM, "print('nothing to do'); sys.exit(0)")
    assert status == 1, output
    assert "worker 1 failed: it ended with exit status 0 before it had met the other tasks" in output
    assert "The last lines of worker 1" in output and "worker 0 failed" not in output
    assert "is not started again" in output


def test_a_chief_does_not_wait_for_a_server_that_has_ended(tmp_path: Path) -> None:
    program = """
import sys
from dtrain import environments
from dtrain.task import channel
from dtrain.process_group import serving
topology = environments.current()
if topology.task_type == "worker":
    sys.exit(0)
if topology.task_type == "ps":
    serving.serve(topology)
with channel.rendezvous():
    serving.wait_for_servers(topology)
"""
    (tmp_path / "program.py").write_text(program, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "dtrain", "launch", "--workers", "1", "--ps", "1", "program.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 1
    assert "worker 0 failed: it ended with exit status 0 before it had met" in done.stdout


@pytest.mark.skipif(
    shutil.which("unshare") is None or shutil.which("ip") is None, reason="needs a network namespace"
)
def test_a_machine_that_has_only_the_new_loopback_address(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(_PROGRAM, encoding="utf-8")
    space = ["unshare", "--net", *(["--map-root-user"] if os.geteuid() else [])]
    if subprocess.run([*space, "true"], stderr=subprocess.DEVNULL).returncode:
        pytest.skip("this user may make no network namespace")
    script = 'ip link set lo up && ip addr del 127.0.0.1/8 dev lo && exec "$@"'
    launch = [sys.executable, "-m", "dtrain", "launch", "--workers", "2", "program.py", "pass"]
    done = subprocess.run(
        [*space, "sh", "-c", script, "sh", *launch],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0 and done.stdout.count("met") == 2, done.stdout


@pytest.mark.parametrize("limit", [10, 12, 14, 16, 18])
def test_the_error_at_the_limit_of_open_files(tmp_path: Path, limit: int) -> None:
    status, output = _launch(tmp_path, "print('runs')\n", limit=limit)
    if status:
        assert "Too many open files" in output and "ulimit -n" in output, output
        assert "Traceback" not in output
    else:
        assert output.count("runs") == 2
    assert status != -signal.SIGKILL
