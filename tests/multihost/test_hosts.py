"""The hosts of these tests are what they promise: apart, connected, limited, and gone afterwards."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hosts import Host, HostProcess, MakeHosts
from processes import processes_with, wait_until

# Receives until the sender closes; prints how many bytes have come.
RECEIVER = """
import socket
with socket.create_server(("", 7000)) as server:
    print("ready", flush=True)
    connection, _ = server.accept()
received = 0
while block := connection.recv(1 << 20):
    received += len(block)
    print(received, flush=True)
"""
# With a file, it waits before the second half until the file is there.
SENDER = """
import os, socket, sys, time
count = int(sys.argv[2])
with socket.create_connection((sys.argv[1], 7000)) as connection:
    for number in range(count):
        while number == count // 2 and sys.argv[3] and not os.path.exists(sys.argv[3]):
            time.sleep(0.02)
        connection.sendall(bytes(1 << 16))
"""
MAKER = """
import signal, sys
from pathlib import Path
from hosts import hosts
with hosts(Path(sys.argv[1]), 2) as (one, other):
    for host in (one, other):
        host.popen(["sleep", sys.argv[2]])
    print("ready", flush=True)
    signal.pause()
"""


def receive(host: Host, log: Path) -> HostProcess:
    with log.open("w") as file:
        process = host.popen([sys.executable, "-c", RECEIVER], stdout=file, stderr=subprocess.STDOUT)
    wait_until(lambda: "ready" in log.read_text())
    return process


def send(host: Host, to: str, blocks: int, waits_for: str | Path = "") -> HostProcess:
    return host.popen([sys.executable, "-c", SENDER, to, str(blocks), str(waits_for)])


def held_back(one: Host, other: Host, log: Path) -> int:
    """How often packets to the other host had to wait for their turn while 8 MiB were sent."""
    process = receive(other, log)
    assert send(one, other.name, 128).wait() == 0
    assert process.wait() == 0, log.read_text()
    assert int(log.read_text().splitlines()[-1]) == 128 << 16
    said = one.run(["tc", "-statistics", "qdisc", "show", "dev", "eth0"]).stdout
    return sum(map(int, re.findall(r"overlimits (\d+)", said)))


def test_hosts_have_names_and_files_of_their_own(make_hosts: MakeHosts, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    one, other = make_hosts(own=[tmp_path / "own"])
    assert [host.run(["hostname"]).stdout for host in (one, other)] == ["host1\n", "host2\n"]
    assert one.run(["touch", str(tmp_path / "own" / "file"), str(tmp_path / "shared")]).returncode == 0
    assert one.path(tmp_path / "own" / "file").exists()
    assert not other.path(tmp_path / "own" / "file").exists() and not (tmp_path / "own" / "file").exists()
    assert other.run(["test", "-e", str(tmp_path / "shared")]).returncode == 0
    processes = [host.popen(["sleep", "600"]) for host in (one, other)]
    assert all(process.process_id for process in processes)  # waits until they are there
    one.run(["sh", "-c", "kill -9 -1"])  # kills all processes of that host
    assert processes[0].wait() == -signal.SIGKILL
    assert processes[1].poll() is None


def test_bandwidth_is_limited(make_hosts: MakeHosts, tmp_path: Path) -> None:
    one, other = make_hosts(rate=1e8)
    assert held_back(one, other, tmp_path / "limited") > 0
    assert "rate 100Mbit" in one.run(["tc", "qdisc", "show", "dev", "eth0"]).stdout
    one.limit(0)
    other.limit(0)
    assert held_back(one, other, tmp_path / "unlimited") == 0


def test_a_cut_link_holds_data_back_until_it_is_healed(make_hosts: MakeHosts, tmp_path: Path) -> None:
    one, other = make_hosts()
    log, go = tmp_path / "log", tmp_path / "go"
    half = f"\n{100 << 16}\n"
    receiver, sender = receive(other, log), send(one, other.name, 200, go)
    wait_until(lambda: half in log.read_text())
    other.cut()
    go.touch()
    # The kernel sends again what is not acknowledged.
    wait_until(lambda: "backoff:" in one.run(["ss", "--tcp", "--info", "dport", "=", ":7000"]).stdout)
    assert log.read_text().endswith(half)
    other.reconnect()
    assert sender.wait() == receiver.wait() == 0
    assert int(log.read_text().splitlines()[-1]) == 200 << 16


@pytest.mark.skipif(shutil.which("nft") is None, reason="nft is not installed")
def test_closed_ports_and_hosts_without_power(make_hosts: MakeHosts, tmp_path: Path) -> None:
    one, other = make_hosts()
    receiver = receive(other, tmp_path / "log")
    # A port that drops packets differs from an open one only in that nothing comes.
    dial = "import socket; socket.create_connection(('host2', 7000), timeout=1)  # wall clock: see the test"
    connect = [sys.executable, "-c", dial]
    other.close_port(7000, "reject")
    assert "ConnectionRefusedError" in one.run(connect).stderr
    other.open_ports()
    other.close_port(7000, "drop")
    assert "TimeoutError" in one.run(connect).stderr
    other.open_ports()
    other.power_off()
    assert receiver.wait() == -signal.SIGKILL
    assert "TimeoutError" in one.run(connect).stderr


def test_ssh_reaches_every_host_without_a_question(with_ssh: None, make_hosts: MakeHosts) -> None:
    made = make_hosts(3)
    for host in made[1:]:
        host.start_ssh_server()
        for name in (host.name, host.address, host.address6):
            done = made[0].run(["ssh", name, "hostname"])
            assert done.stdout == f"{host.name}\n", done.stderr
    refused = made[0].run(["ssh", made[0].address, "true"])
    assert "Connection refused" in refused.stderr


def test_a_signal_reaches_the_process_itself(make_hosts: MakeHosts) -> None:
    (one,) = make_hosts(1)
    with one.popen(["sleep", "600"]) as process:
        process.terminate()
        assert process.wait() == -signal.SIGTERM
    assert not processes_with("sleep 600", str(one.folder))


def test_nothing_is_left_when_the_maker_is_killed(make_hosts: MakeHosts, tmp_path: Path) -> None:
    make_hosts(1)  # skips
    duration = f"{600 + time.time() % 1:.6f}"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", MAKER, str(tmp_path / "killed"), duration]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as maker:
        try:
            assert maker.stdout is not None and maker.stdout.readline() == b"ready\n"
            # Each with its `nsenter`.
            wait_until(lambda: len(processes_with(f"sleep {duration}")) == 2 * 2)
            assert len(processes_with("unshare", str(tmp_path / "killed"))) == 2
        finally:
            maker.kill()
    wait_until(lambda: not processes_with(f"sleep {duration}"))
    wait_until(lambda: not processes_with("unshare", str(tmp_path / "killed")))
