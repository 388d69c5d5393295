"""Hosts with several networks, with IPv6, and with names that only one of them knows; no test trains."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from hosts import Host, HostProcess, MakeHosts
from processes import wait_until

# The workers run the rendezvous of `dtrain.strategy`, and print the addresses of all.
RENDEZVOUS = """
import json, os
import dtrain
from dtrain import environments
from dtrain.process_group.rendezvous import run_rendezvous
from dtrain.process_group import peers
topology = environments.current()
run_rendezvous(topology, timeout=600)
print("all:", topology.jobs["worker"], "local rank", dtrain.local_rank())
print("nccl:", os.environ.get("NCCL_SOCKET_IFNAME"))
"""


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "dtrain", "launch", *words]


def run_nodes(
    made: Sequence[Host],
    folder: Path,
    rendezvous: str,
    *options: str,
    arguments: Sequence[str] = (),
    status: int = 0,
) -> str:
    """Runs the job with a node on each host, which end with this status; the output of all nodes."""
    secret = folder / "secret"
    secret.touch(mode=0o600)
    secret.write_text("0123456789abcdef" * 2)
    env = os.environ | {"DTRAIN_SECRET_FILE": str(secret)}
    started: list[HostProcess] = []
    for rank, host in enumerate(made):
        place = ["--nnodes", str(len(made)), "--node-rank", str(rank), "--rendezvous", rendezvous]
        words = command(*place, *options, str(folder / "job.py"), *arguments)
        with (folder / f"log-{rank}").open("w") as log:
            started.append(host.popen(words, stdout=log, stderr=subprocess.STDOUT, env=env))
    try:
        statuses = [process.wait() for process in started]
    finally:
        for process in started:
            process.kill()
    output = "".join((folder / f"log-{rank}").read_text() for rank in range(len(made)))
    assert statuses == [status] * len(made), output
    return output


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "job.py").write_text(RENDEZVOUS)
    return tmp_path / "job.py"


def test_nodes_meet_over_ipv6_and_on_the_network_that_is_named(
    make_hosts: MakeHosts, tmp_path: Path, job: Path
) -> None:
    made = make_hosts(2, second_network=True)
    output = run_nodes(made, tmp_path, f"[{made[0].address6}]:20500")
    assert output.count("'[fd77::1]:") == output.count("'[fd77::2]:") == 2, output
    names = made[1].path("/etc/hosts")
    names.write_text("127.0.0.1 localhost\n10.77.0.1 head\n")  # neither host knows the other's name for it
    output = run_nodes(made, tmp_path, f"{made[0].address}:20501", "--interface", "eth1")
    assert output.count("'10.78.0.1:") == output.count("'10.78.0.2:") == 2, output
    assert output.count("nccl: =eth1") == 2 and output.count("local rank 0") == 2


def test_ssh_brings_the_workers_to_the_network_that_is_named(
    with_ssh: None, make_hosts: MakeHosts, tmp_path: Path, job: Path
) -> None:
    made = make_hosts(3, second_network=True)
    for host in made[1:]:
        host.start_ssh_server()
        host.path("/etc/hosts").write_text("127.0.0.1 localhost\n")  # names that only host1 knows
    words = command("--hosts", "host2:2,host3", "--interface", "eth1", str(job))
    done = made[0].run(words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("'10.78.0.2:") == 6 and done.stdout.count("'10.78.0.3:") == 3, done.stdout
    made[2].run(["ip", "link", "set", "eth1", "down"])
    made[2].run(["ip", "link", "set", "eth1", "name", "lan"])
    refused = made[0].run(words)
    assert refused.returncode == 2 and "There is no network interface 'eth1' on host3" in refused.stderr
    assert "lan" in refused.stderr and "Traceback" not in refused.stderr


READS = """
import signal, sys
from pathlib import Path
Path(sys.argv[1], "data").read_text()
signal.pause()
"""


def test_data_that_one_host_lacks_ends_the_job_before_training_and_names_the_host(
    make_hosts: MakeHosts, tmp_path: Path
) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "job.py").write_text(READS)
    made = make_hosts(2, own=[tmp_path / "disk"])
    made[0].path(tmp_path / "disk" / "data").touch()
    output = run_nodes(
        made, tmp_path, f"{made[0].address}:20502", arguments=[str(tmp_path / "disk")], status=1
    )
    assert "worker 1 ran on host2: FileNotFoundError: [Errno 2] No such file or directory" in output
    assert "Does host2 have the files that the other hosts have" in output


WAITS = """
import os, sys, time
from pathlib import Path
from dtrain.task import channel
folder, place = Path(sys.argv[1]), os.environ["DTRAIN_PLACE"]
channel.report_progress(1, "step", train=True, done=1)
name = f"{os.environ['DTRAIN_ATTEMPT']}-{place}"
(unfinished := folder / f"unfinished-{name}").write_text(os.uname().nodename)
unfinished.rename(folder / name)
while not (folder / "end").exists():
    time.sleep(0.05)
"""


def test_the_tasks_of_a_lost_ssh_host_go_to_a_spare_or_are_left_out(
    with_ssh: None, make_hosts: MakeHosts, tmp_path: Path
) -> None:
    """The fourth host named has no SSH server, and the job does without it."""
    made = make_hosts(4)
    for host in made[1:3]:
        host.start_ssh_server()
    (tmp_path / "job.py").write_text(WAITS)
    words = command(
        "--hosts", "host1,host2,host3,host4", "--nnodes", "1:2", "--log-dir", str(tmp_path / "logs")
    )
    with (tmp_path / "log").open("w") as log:
        process = made[0].popen(
            [*words, str(tmp_path / "job.py"), str(tmp_path)], stdout=log, stderr=subprocess.STDOUT
        )
    try:
        wait_until((tmp_path / "0-1").exists)
        assert (tmp_path / "0-1").read_text() == "host2"
        made[1].run(["pkill", "-KILL", "sshd"])
        wait_until((tmp_path / "1-1").exists)
        assert (tmp_path / "1-1").read_text() == "host3"
        made[2].run(["pkill", "-KILL", "sshd"])
        wait_until((tmp_path / "2-0").exists)
        wait_until(lambda: "There is room for 1 of 2 workers" in (tmp_path / "log").read_text())
        (tmp_path / "end").touch()
        assert process.wait() == 0
    finally:
        process.kill()
        print((tmp_path / "log").read_text())
    said = (tmp_path / "log").read_text()
    assert "Connection refused" in said and "The job continues without that host." in said
