"""Jobs by hand, with and without a secret: what is unpickled, and what the first worker says."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from dtrain.base.tcp import bind_everywhere
from dtrain.environments.topology import Topology
from dtrain.launch.local_processes.ports import reserve_ports
from dtrain.strategies import common

pytestmark = pytest.mark.long

PROGRAM = """
import dtrain
from dtrain.errors import ConfigurationError

dtrain.MultiWorkerMirroredStrategy()
print("heard", dtrain.broadcast({"a": (1, b"x")} if dtrain.is_chief() else None))
try:
    print("object", dtrain.broadcast((lambda: 7) if dtrain.is_chief() else None)())
except ConfigurationError as error:
    print("no object:", error)
dtrain.barrier()
"""


def workers(folder: Path, environments: Sequence[dict[str, str]]) -> list[tuple[int, str]]:
    """The exit status and the output of a worker with each of these variables."""
    program = folder / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    workers = [
        subprocess.Popen(
            [sys.executable, str(program)],
            env=os.environ | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for variables in environments
    ]
    try:
        outputs = [worker.communicate()[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    return [(worker.returncode, output) for worker, output in zip(workers, outputs, strict=True)]


def by_hand(folder: Path, secret: str) -> list[tuple[int, str]]:
    """Two workers at an address of this machine that others reach; their exit status and output."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no address but the loopback's")
        host = probe.getsockname()[0]
    with reserve_ports(2) as ports:
        cluster = {"worker": [f"{host}:{port}" for port in ports]}
        tasks = [json.dumps({"cluster": cluster, "task": {"type": "worker", "index": n}}) for n in (0, 1)]
        return workers(folder, [{"TF_CONFIG": task, "DTRAIN_SECRET_FILE": secret} for task in tasks])


def test_without_a_secret_nothing_is_unpickled_and_a_warning_says_so(tmp_path: Path) -> None:
    ended = by_hand(tmp_path, "")
    for status, output in ended:
        assert status == 0, output
        assert "heard {'a': (1, b'x')}" in output
        assert (
            "no object: broadcast was given a value that must be pickled (a function is no plain "
            "value)" in output
        )
        assert "Hint: Name one file of mode 600 with a secret in DTRAIN_SECRET_FILE" in output
    assert "share no secret, so others in the network can take a worker's place" in ended[0][1]


@pytest.mark.parametrize(("host", "warned"), [("127.0.0.1", False), ("[::1]", False), ("10.1.2.3", True)])
def test_tensorflows_servers_are_warned_of_beyond_loopback(
    host: str, warned: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common.logger, "propagate", True)
    common.warn_of_servers(Topology({"ps": (f"{host}:1",), "worker": ("127.0.0.1:2",)}, "ps", 0))
    assert ("listen on all interfaces, without authentication" in caplog.text) == warned


def test_with_a_secret_in_a_file_objects_may_be_sent(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.touch(mode=0o600)
    file.write_text("a secret of thirty-two bytes, more or less")
    for status, output in by_hand(tmp_path, str(file)):
        assert status == 0, output
        assert "object 7" in output
        assert "thirty-two" not in output


@contextlib.contextmanager
def two_ports_in_a_row() -> Iterator[int]:
    """The first of two free ports, below those that the system gives to programs that ask for any."""
    for port in range(10_000 + os.getpid() % 10_000, 32_000, 2):
        with contextlib.ExitStack() as held:
            try:
                for each in (port, port + 1):
                    held.enter_context(bind_everywhere(each))
            except OSError:
                continue
            yield port
            return


def test_processes_of_torchrun_are_a_job(tmp_path: Path) -> None:
    with two_ports_in_a_row() as port:
        shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": f"{port}", "DTRAIN_PORT": f"{port}"}
        shared |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        ended = workers(tmp_path, [shared | {"RANK": rank, "LOCAL_RANK": rank} for rank in "01"])
    for status, output in ended:
        assert status == 0, output
        assert "heard {'a': (1, b'x')}" in output and "object 7" in output
