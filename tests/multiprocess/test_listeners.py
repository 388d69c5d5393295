"""On which interfaces the processes of a job listen, by the kernel's list of sockets, from start to end."""

from __future__ import annotations

import ipaddress
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

PROGRAM = """
import json, os, pathlib, socket, sys, time
import keras, numpy as np
import dtrain

def wait_for(file):
    while not pathlib.Path(__file__).with_name(file).exists():
        time.sleep(0.05)

# The first worker listens until the second one comes, which is after the test has looked.
if json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {}).get("index") == 1:
    wait_for("seen")
strategy = dtrain.strategy("multi_worker")
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.ones((64, 4), "float32")
model.fit(x, x[:, :1], epochs=2, batch_size=8, verbose=0)
first = strategy.cluster_resolver.cluster_spec().as_dict()["worker"][0]
try:
    socket.create_connection(("127.0.0.1", int(first.rpartition(":")[2]))).close()
    print("open")
except ConnectionRefusedError:
    print("refused")
model.fit(x, x[:, :1], epochs=2, batch_size=8, verbose=0)
pathlib.Path(__file__).with_name(f"trained-{dtrain.rank()}").touch()
wait_for("seen-trained")
dtrain.barrier()
"""


SECURITY = Path(__file__).parents[2] / "docs" / "security.md"


def listeners(process: psutil.Process) -> set[tuple[str, str]]:
    """The addresses on which a process and all that it has started listen now, and the programs' names."""
    addresses: set[tuple[str, str]] = set()
    try:
        everyone = [process, *process.children(recursive=True)]
    except psutil.Error:
        return addresses
    for member in everyone:
        try:
            name, sockets = member.name(), member.net_connections("inet")
        except (psutil.Error, OSError):
            continue
        addresses.update((sock.laddr.ip, name) for sock in sockets if sock.status == psutil.CONN_LISTEN)
    return addresses


@pytest.mark.parametrize(
    ("options", "closed"),
    [
        pytest.param((), True, id="sockets"),
        pytest.param(("--mpi",), True, id="mpi", marks=pytest.mark.long),
        # Several replicas in a worker use TensorFlow's collectives, and so its servers.
        pytest.param(("--devices-per-worker", "2"), False, id="servers", marks=pytest.mark.long),
    ],
)
def test_who_listens_where(options: tuple[str, ...], closed: bool, tmp_path: Path) -> None:
    script, output = tmp_path / "job.py", tmp_path / "output"
    script.write_text(textwrap.dedent(PROGRAM))
    command = [sys.executable, "-m", "dtrain", "launch", "--workers", "2", *options, str(script)]
    seen: set[tuple[str, str]] = set()
    with output.open("w") as log, subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT) as job:
        process = psutil.Process(job.pid)
        try:
            while job.poll() is None:
                trained = all(script.with_name(f"trained-{rank}").exists() for rank in range(2))
                seen |= listeners(process)
                if seen:
                    script.with_name("seen").touch()
                if trained:
                    script.with_name("seen-trained").touch()
                time.sleep(0.002)
        finally:
            job.terminate()
    assert job.returncode == 0, output.read_text()
    beyond = {name for address, name in seen if not ipaddress.ip_address(address).is_loopback}
    assert seen, "not even the rendezvous was seen"
    if options == ("--mpi",):  # whose starter cannot be bound to an interface
        assert all(f"`{name}` listens" in SECURITY.read_text(encoding="utf-8") for name in beyond), beyond
    else:
        assert bool(beyond) != closed, beyond
    assert output.read_text().count("refused") == (2 if closed else 0)
