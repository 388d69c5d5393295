"""Ray for tests: nodes of a cluster, each a process of this machine or of one of its hosts.

    with ray_node(cpus=2) as head, ray_node(cpus=2, join=head):
        ...

A node is `ray start --block`, with a small object store and without a dashboard. At the end, it is killed
with all processes that it has started. The clusters are closed: who uses one has the variables `ACCESS`. They
also keep the tests independent of a token in the home folder, as `ray.init` makes one.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from hosts import Host
from processes import alive, wait_until

STORE = 80_000_000  # bytes of the object store, about the least that Ray accepts
ACCESS = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
ENVIRONMENT = {
    **ACCESS,
    "CUDA_VISIBLE_DEVICES": "-1",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # A node that is cut off is given up after three seconds, not half a minute.
    "RAY_health_check_failure_threshold": "3",
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_num_prestart_python_workers": "0",
    "RAY_enable_worker_prestart": "0",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}

MARK = "DTRAIN_TEST_CLUSTER"
"""The variable that all processes of a cluster have, with the name of its head's folder."""

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed (pip install 'dtrain[ray]')"
)


@dataclass
class RayNode:
    """A running node. `address` is the address of the cluster's head; `process` waits for the node's end."""

    address: str
    process: subprocess.Popen[bytes]
    folder: Path
    mark: str

    def processes(self) -> list[psutil.Process]:
        """The processes of the node itself and those that it has started."""
        with contextlib.suppress(psutil.NoSuchProcess):
            main = psutil.Process(self.process.pid)
            return [main, *main.children(recursive=True)]
        return []

    def left(self) -> dict[int, list[str]]:
        """The processes of dtrain that jobs on this cluster have left behind, by process id."""
        commands = {}
        for process in psutil.process_iter(["cmdline", "environ", "status"]):
            own = (process.info["environ"] or {}).get(MARK) == self.mark
            command = process.info["cmdline"] or []
            if own and process.info["status"] != psutil.STATUS_ZOMBIE and any("dtrain" in w for w in command):
                commands[process.pid] = command
        return commands

    def kill(self) -> None:
        """Kill the node at once, with all processes that it has started."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


@contextlib.contextmanager
def ray_node(*, cpus: int, join: RayNode | None = None, host: Host | None = None) -> Iterator[RayNode]:
    """Runs a node with so many CPUs, as the head of a cluster if it joins none, perhaps on a host."""
    folder = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))  # short: Ray makes Unix sockets in it
    mark = folder.name if join is None else join.mark
    own = host.address if host is not None else "127.0.0.1"
    port = _free_port()
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"),
        *(f"--node-ip-address={own}", f"--num-cpus={cpus}", "--num-gpus=0", f"--object-store-memory={STORE}"),
        *("--min-worker-port=0", "--max-worker-port=0", f"--temp-dir={folder}"),
    ]
    if join is not None:
        command += [f"--address={join.address}"]
    else:
        command += [
            "--head",
            f"--port={port}",
            "--include-dashboard=false",
            f"--ray-client-server-port={_free_port()}",
        ]
    log = folder.with_suffix(".log")
    with log.open("wb") as file:
        options = {
            "stdout": file,
            "stderr": subprocess.STDOUT,
            "env": os.environ | ENVIRONMENT | {MARK: mark},
            "cwd": "/tmp",
        }
        process = subprocess.Popen(command, **options) if host is None else host.popen(command, **options)
    node = RayNode(f"{own}:{port}" if join is None else join.address, process, folder, mark)
    try:
        wait_until(lambda: "Ray runtime started" in log.read_text() or process.poll() is not None)
        assert process.poll() is None, log.read_text()
        yield node
    finally:
        left = node.processes()
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)  # for it to end by itself
        for survivor in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                survivor.kill()
        process.wait()
        wait_until(lambda: not any(alive(survivor.pid) for survivor in left))
        shutil.rmtree(folder, ignore_errors=True)
        log.unlink()


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
