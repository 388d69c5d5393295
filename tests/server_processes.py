"""Programs and processes for the tests of jobs with parameter servers. It contains no tests."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

from dtrain.environments.topology import Topology
from processes import wait_until

LIMIT = 240.0

# What dtrain's strategy does when it is made, but with TensorFlow's strategy. The chief's code is appended.
PROGRAM = """
import atexit, os, signal, sys, time
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
from dtrain import environments
from dtrain.process_group import control, serving
import tensorflow as tf
topology = environments.current()
atexit.register(lambda: print("atexit", flush=True))
def connect():
    try:
        if topology.task in topology.servers():
            print("serving", flush=True)
            serving.serve(topology)
        serving.wait_for_servers(topology)
        resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        strategy = tf.distribute.ParameterServerStrategy(resolver)
        control.connect_chief(topology)
        return strategy
    finally:
        print("finally", flush=True)
def status(job, index=0):
    return serving.ask(job, index, {"ask": "status"}, 60.0) or {}
strategy = connect()
print("only the chief goes on", flush=True)
"""

# The chief counts steps in a variable on a server until a condition holds; `work` returns their number.
COUNTING = """
from dtrain.task import channel
from dtrain.environments import settings
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
with strategy.scope():
    counter = tf.Variable(0.0)

@tf.function
def step():
    counter.assign_add(1.0)

def work(until):
    done = 0
    while not until():
        for _ in range(5):
            coordinator.schedule(step)
        coordinator.join()
        done += 5
    return done

def for_times(number):
    left = iter(range(number))
    return lambda: next(left, None) is None

"""


def write_program(folder: Path, chief: str, *, counting: bool = False) -> str:
    """Write a script of PROGRAM, COUNTING (if `counting` is set) and the chief's code; its path."""
    path = folder / "program.py"
    path.write_text(PROGRAM + COUNTING * counting + textwrap.dedent(chief))
    return str(path)


def launch(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `dtrain launch` to its end."""
    return subprocess.run(
        [sys.executable, "-m", "dtrain", "launch", *arguments], capture_output=True, text=True, timeout=LIMIT
    )


class ByHand:
    """Tasks that are started without a launcher; `kill_all` ends them."""

    def __init__(self, cluster: dict[str, list[str]]) -> None:
        self._cluster = cluster
        self._started: list[subprocess.Popen[str]] = []

    def start(self, job: str, script: str, *arguments: str, **env: str) -> subprocess.Popen[str]:
        config = json.dumps({"cluster": self._cluster, "task": {"type": job, "index": 0}})
        process = subprocess.Popen(
            [sys.executable, script, *arguments],
            env={**os.environ, "TF_CONFIG": config, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._started.append(process)
        return process

    def kill_all(self) -> None:
        for process in self._started:
            process.kill()
            process.communicate()


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait for the end of a process; its status and output."""
    out, _ = process.communicate(timeout=LIMIT)
    return process.returncode, out


def listens(address: str) -> bool:
    """Whether a process accepts connections at `host:port`."""
    host, _, port = address.partition(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=60):
        return True
    return False


def wait_until_listening(address: str, process: subprocess.Popen[str]) -> None:
    """Wait until a process accepts connections; fails if it ends before."""

    def serves() -> bool:
        assert process.poll() is None, f"nobody serves at {address}"
        return listens(address)

    wait_until(serves)


def topology(cluster: dict[str, list[str]], job: str = "chief") -> Topology:
    """The topology of a cluster, as the first task of `job` sees it."""
    return Topology({name: tuple(addresses) for name, addresses in cluster.items()}, job, 0)
