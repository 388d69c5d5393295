"""The processes of the first node of a job of two nodes: its launcher is stopped, its agent is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from dtrain.launch.hosts.control_plane import LOST
from dtrain.launch.local_processes.ports import reserve_ports
from processes import wait_until

# A worker without TensorFlow, which ends when it is told to.
WORKS = """
import json, os, sys, time
from pathlib import Path
folder, index = Path(sys.argv[1]), json.loads(os.environ["TF_CONFIG"])["task"]["index"]
started = folder / f"started-{os.environ['DTRAIN_ATTEMPT']}-{index}"
(folder / f"new-{index}").write_text(str(os.getpid()))
(folder / f"new-{index}").rename(started)
while not (folder / "go").exists():
    time.sleep(0.05)
"""


class TwoNodes:
    """A job of two nodes on this machine, with a worker each."""

    def __init__(self, folder: Path, launchers: list[subprocess.Popen[bytes]]) -> None:
        self.folder, self.launchers = folder, launchers

    def started(self, attempt: int) -> list[int]:
        """The process ids of the workers of an attempt, when they have started."""
        files = [self.folder / f"started-{attempt}-{index}" for index in range(2)]
        wait_until(lambda: all(file.exists() for file in files))
        return [int(file.read_text()) for file in files]

    def end(self) -> list[int]:
        """Let the workers end; returns the exit statuses of the nodes."""
        (self.folder / "go").touch()
        return [launcher.wait() for launcher in self.launchers]

    def log(self, node: int) -> str:
        return (self.folder / f"log-{node}").read_text()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[TwoNodes]:
    (tmp_path / "job.py").write_text(WORKS)
    launchers = []
    with contextlib.ExitStack() as stack:
        with reserve_ports(1) as (port,):
            place = ["--nnodes", "2", "--rendezvous", f"127.0.0.1:{port}", "--max-restarts", "1"]
        for node in range(2):
            own = ["--node-rank", str(node), str(tmp_path / "job.py"), str(tmp_path)]
            log = stack.enter_context((tmp_path / f"log-{node}").open("w"))
            command = [sys.executable, "-m", "dtrain", "launch", *place, *own]
            launchers.append(subprocess.Popen(command, stdout=log, stderr=log))
            stack.callback(launchers[-1].wait)
            stack.callback(launchers[-1].kill)
        yield TwoNodes(tmp_path, launchers)


def test_a_killed_agent_of_the_first_node_is_started_again(nodes: TwoNodes) -> None:
    nodes.started(0)
    first = psutil.Process(nodes.launchers[0].pid)
    (agent,) = [child for child in first.children() if "dtrain.launch.hosts.agent" in child.cmdline()]
    agent.kill()
    nodes.started(1)
    assert nodes.end() == [0, 0], nodes.log(0)
    assert "The agent of node 0 is started again" in nodes.log(0)
    assert "worker 0 was killed by signal 9" in nodes.log(0)


@pytest.mark.long
def test_a_stopped_launcher_takes_its_own_pause_for_nobodys_silence(nodes: TwoNodes) -> None:
    workers = nodes.started(0)
    os.kill(nodes.launchers[0].pid, signal.SIGSTOP)
    (nodes.folder / "go").touch()
    wait_until(lambda: not any(map(psutil.pid_exists, workers)))
    stopped = time.monotonic()
    # wall clock: longer than an agent may be silent, by the clock of real processes
    wait_until(lambda: time.monotonic() - stopped > LOST + 5.0)
    os.kill(nodes.launchers[0].pid, signal.SIGCONT)
    assert nodes.end() == [0, 0], nodes.log(0) + nodes.log(1)
    assert "lost" not in nodes.log(0)
