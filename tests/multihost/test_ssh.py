"""`dtrain launch --hosts` with real SSH servers: a job, how it ends, and hosts that cannot be used."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hosts import Host, HostProcess, MakeHosts, processes_on_hosts
from processes import processes_with, wait_until

AGENT = "dtrain.launch.hosts.agent"
ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1"}
TRAIN = """
import os, socket, sys
import keras
import numpy as np
import dtrain

keras.utils.set_random_seed(3)
rng = np.random.default_rng(3)
x, y = rng.normal(size=(96, 6)).astype("float32"), rng.normal(size=(96, 1)).astype("float32")
with dtrain.strategy("multi_worker").scope():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(300, "tanh"), keras.layers.Dense(1)])
    model.compile("adam", "mse")
model.fit(x, y, batch_size=12, epochs=2, verbose=0)
variables = [os.environ.get(name) for name in ("DTRAIN_LOCAL_RANK", "TOKEN")]
print("place:", socket.gethostname(), *variables, os.getcwd())
np.savez(f"{sys.argv[1]}-{dtrain.rank()}.npz", *model.get_weights(), *model.optimizer.variables)
"""
WAIT = "import signal\nprint('waits', flush=True)\nsignal.pause()\n"


def launch_command(*words: str) -> list[str]:
    return [sys.executable, "-m", "dtrain", "launch", *words]


@pytest.fixture
def made(with_ssh: None, make_hosts: MakeHosts) -> list[Host]:
    """Three hosts; the second and the third have an SSH server."""
    hosts = make_hosts(3)
    for host in hosts[1:]:
        host.start_ssh_server()
    return hosts


def assert_nothing_left(folder: Path) -> None:
    agents = functools.partial(processes_on_hosts, folder / "hosts", AGENT)
    wait_until(lambda: not agents() and not processes_with(str(folder / "job.py")))


def refused(host: Host, folder: Path, *words: str, **options: object) -> str:
    """Launches a job that cannot begin; what it says."""
    done = host.run(launch_command(*words, str(folder / "job.py")), **options)
    assert done.returncode not in (0, -signal.SIGKILL), done.stdout
    assert "waits" not in done.stdout and "Traceback" not in done.stderr
    assert_nothing_left(folder)
    return str(done.stderr)


@pytest.mark.usefixtures("as_installed")
def test_two_hosts_give_the_bits_of_one(made: list[Host], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "hosts.txt").write_text("# the machines\nhost2 slots=2\n\nhost3  # one worker\n")
    environment = os.environ | ENVIRONMENT | {"TOKEN": "of mine"}
    local = launch_command("--workers", "3", "train.py", str(tmp_path / "local"))
    subprocess.run(local, check=True, env=environment, cwd=tmp_path, timeout=180)
    command = launch_command("--hostfile", "hosts.txt", "--env", "TOKEN", "--env", "CUDA_VISIBLE_DEVICES")
    command += ["train.py", str(tmp_path / "hosts")]
    done = made[0].run(command, env=environment, cwd=tmp_path, timeout=180)
    assert done.returncode == 0, done.stderr
    for rank, place in enumerate(("host2 0", "host2 1", "host3 0")):
        name = place.split()[0]
        assert f"[worker {rank} on {name}] place: {place} of mine {tmp_path}\n" in done.stdout
        with (
            np.load(tmp_path / f"hosts-{rank}.npz") as arrays,
            np.load(tmp_path / f"local-{rank}.npz") as wanted,
        ):
            assert [*arrays] == [*wanted]
            for key in wanted:
                np.testing.assert_array_equal(arrays[key], wanted[key])
    assert_nothing_left(tmp_path)


def started(host: Host, folder: Path, *words: str) -> HostProcess:
    """A job of three workers that wait."""
    (folder / "job.py").write_text(WAIT)
    command = launch_command(*words, "--hosts", "host1:1,host2:2", str(folder / "job.py"))
    with (folder / "log").open("w") as log:
        process = host.popen(command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | ENVIRONMENT)
    wait_until(lambda: (folder / "log").read_text().count("waits") == 3)
    return process


def test_nothing_is_left_when_the_launcher_is_killed(made: list[Host], tmp_path: Path) -> None:
    process = started(made[0], tmp_path)
    agents = processes_on_hosts(tmp_path / "hosts", AGENT)
    assert len(agents) >= 2 and "TOKEN" not in str(agents)
    process.kill()
    process.wait()
    assert_nothing_left(tmp_path)


def test_nothing_is_left_when_the_link_is_cut(made: list[Host], tmp_path: Path) -> None:
    process = started(made[0], tmp_path)
    made[1].cut()
    assert process.wait() not in (0, -signal.SIGKILL)
    log = (tmp_path / "log").read_text()
    assert "host2 (node 1) is lost" in log and "Lost: host2 (node 1)." in log, log
    assert_nothing_left(tmp_path)


def test_hosts_that_do_not_let_us_in(made: list[Host], tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(WAIT)
    one, two, three = made
    said = refused(one, tmp_path, "--hosts", "host1:1,nowhere:1")
    assert "started on nowhere" in said and "Could not resolve hostname" in said and "Check the name" in said
    three.path("/etc/ssh/authorized_keys").write_text("")
    said = refused(one, tmp_path, "--hosts", "host2,host3")
    assert "started on host3" in said and "Permission denied" in said and "ssh-copy-id host3" in said
    known = one.path("/etc/ssh/ssh_known_hosts")
    keys = [line.partition(" ") for line in known.read_text().splitlines()]
    known.write_text("".join(f"{names} {keys[0][2]}\n" for names, _, _ in keys))
    said = refused(one, tmp_path, "--hosts", "host2")
    assert "REMOTE HOST IDENTIFICATION HAS CHANGED" in said and "ssh-keygen -R host2" in said
    known.write_text("")
    said = refused(one, tmp_path, "--hosts", "host2")
    assert "Host key verification failed" in said and "Connect once by hand (ssh host2)" in said
    two.cut()
    said = refused(one, tmp_path, "--hosts", "host1,host2")
    assert "started on host2" in said and "Is host2 up" in said


def test_hosts_without_what_the_job_needs(with_ssh: None, make_hosts: MakeHosts, tmp_path: Path) -> None:
    for name in ("work", "python"):
        (tmp_path / name).mkdir()
    one, two = make_hosts(2, own=[tmp_path / "work", tmp_path / "python"])
    two.start_ssh_server()
    one.path(tmp_path / "work" / "job.py").write_text(WAIT)

    said = refused(one, tmp_path / "work", "--hosts", "host1,host2")
    assert "host2: There is no script" in said and "Copy it there" in said

    def python(host: Host, line: str) -> None:
        path = host.path(tmp_path / "python" / "python")
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)

    two.path(tmp_path / "work" / "job.py").write_text(WAIT)
    python(one, f'exec {sys.executable} "$@"')
    own = [str(tmp_path / "python" / "python"), *launch_command("--hosts", "host2")[1:]]
    code = f"import sys; sys.executable = {own[0]!r}; from dtrain.cli import main; sys.exit(main())"
    job = str(tmp_path / "work" / "job.py")
    command = [sys.executable, "-c", code, *own[3:], job]
    cases = {
        "": (
            "status 127",
            f"Install Python and dtrain on host2 at the same path as on this machine: {own[0]}",
        ),
        'exec /usr/bin/python3 -I "$@"': ("No module named", "Install the same version of dtrain on host2"),
        f"shift; exec {sys.executable} -c \"import runpy, dtrain; dtrain.__version__ = '0.0'; "
        "runpy.run_module('$1', run_name='__main__')\"": (
            "has dtrain 0.0, and this machine",
            "Install the same",
        ),
    }
    for line, (problem, remedy) in cases.items():
        if line:
            python(two, line)
        done = one.run(command)
        assert done.returncode and "waits" not in done.stdout, done.stderr
        assert problem in done.stderr and remedy in done.stderr, done.stderr
        assert "host2" in done.stderr
    assert_nothing_left(tmp_path)
