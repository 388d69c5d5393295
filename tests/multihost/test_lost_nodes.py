"""Jobs of `dtrain launch --nnodes` that lose a host: with a spare, without one, and with its return."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dtrain.launch.hosts.control_plane import LOST
from hosts import Host, HostProcess, MakeHosts
from processes import wait_until

# Each worker tells its steps until the file "end" is there.
TELLS = """
import json, os, signal, sys, time
from pathlib import Path
from dtrain.task import channel
folder = Path(sys.argv[1])
config = json.loads(os.environ["TF_CONFIG"])
attempt, index = os.environ["DTRAIN_ATTEMPT"], config["task"]["index"]
def save(signum, frame):
    sys.exit(channel.RUN_AGAIN)
signal.signal(signal.SIGUSR1, save)
channel.report_checkpoint(1, str(folder))
step = 1
channel.report_progress(step, "step", train=True, done=step)
place = folder / f"{attempt}-{index}-of-{len(config['cluster']['worker'])}"
(unfinished := folder / f"unfinished-{attempt}-{index}").write_text(os.uname().nodename)
unfinished.rename(place)
while not (folder / "end").exists():
    time.sleep(0.05)
    step += 1
    channel.report_progress(step, "step", train=True, done=step)
    if attempt == "0" and index == 1 and (folder / "cut").exists():
        if time.monotonic() > float((folder / "cut").read_text()) + LIMIT:
            (folder / "zombie").touch()
"""
TRAINS = """
import os, signal, sys
import keras
import numpy as np
import dtrain

keras.utils.set_random_seed(3)
rng = np.random.default_rng(3)
x, y = rng.normal(size=(96, 6)).astype("float32"), rng.normal(size=(96, 1)).astype("float32")
with dtrain.strategy("multi_worker").scope():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(300, "tanh"), keras.layers.Dense(1)])
    model.compile("adam", "mse")
backup = dtrain.BackupAndRestore(sys.argv[1] + "-backup", save_freq=3, delete_checkpoint=False)
print("begins", flush=True)
def lost(batch, logs):
    first = sys.argv[1].endswith("hosts") and os.environ["DTRAIN_ATTEMPT"] == "0"
    if first and batch == 7 and dtrain.rank() == 1:
        print("waits to be lost", flush=True)
        signal.pause()
gate = keras.callbacks.LambdaCallback(on_train_batch_end=lost)
model.fit(x, y, batch_size=8, epochs=3, verbose=0, callbacks=[backup, gate])
np.savez(f"{sys.argv[1]}-{dtrain.rank()}.npz", *model.get_weights(), *model.optimizer.variables)
"""


class Nodes:
    """The launchers of one job, each on a host."""

    def __init__(self, made: list[Host], folder: Path, nnodes: str, program: list[str]) -> None:
        self.made, self.folder, self.nnodes, self.program = made, folder, nnodes, program
        self.started: list[HostProcess] = []
        secret = folder / "secret"
        secret.touch(mode=0o600)
        secret.write_text("0123456789abcdef" * 2)
        self.env = os.environ | {"CUDA_VISIBLE_DEVICES": "-1", "DTRAIN_SECRET_FILE": str(secret)}

    def start(self, rank: int, *options: str) -> HostProcess:
        place = ["--nnodes", self.nnodes, "--node-rank", str(rank), "--rendezvous", "10.77.0.1:20400"]
        # A worker without progress for 30 s would count as stuck when its node counts as lost.
        launch = [sys.executable, "-m", "dtrain", "launch", "--hang-timeout", "3600"]
        command = [*launch, *place, *options, *self.program]
        with (self.folder / f"log-{rank}").open("a") as log:
            host = self.made[rank]
            self.started.append(host.popen(command, stdout=log, stderr=subprocess.STDOUT, env=self.env))
        return self.started[-1]

    def says(self, text: str, rank: int = 0) -> bool:
        return text in self.log(rank)

    def log(self, rank: int = 0) -> str:
        return (self.folder / f"log-{rank}").read_text()


@contextlib.contextmanager
def job(made: list[Host], folder: Path, nnodes: str, text: str, argument: str) -> Iterator[Nodes]:
    (folder / "program.py").write_text(text)
    nodes = Nodes(made, folder, nnodes, [str(folder / "program.py"), argument])
    try:
        yield nodes
    except BaseException:
        print(nodes.log())
        raise
    finally:
        for process in nodes.started:
            process.kill()


@pytest.fixture
def tells(tmp_path: Path) -> str:
    return TELLS.replace("LIMIT", str(LOST))


@pytest.mark.usefixtures("as_installed")
def test_a_spare_takes_the_place_of_a_lost_host_with_the_same_bits(
    make_hosts: MakeHosts, tmp_path: Path
) -> None:
    made = make_hosts(3)
    with job(made, tmp_path, "2", TRAINS, str(tmp_path / "hosts")) as nodes:
        first, _ = nodes.start(0), nodes.start(1)
        wait_until(lambda: nodes.says("(node 1) has joined"))
        spare = nodes.start(2)
        wait_until(lambda: nodes.says("waits to be lost"))
        made[1].power_off()
        assert [first.wait(), spare.wait()] == [0, 0]
        assert nodes.says("and waits as a spare") and nodes.says("[worker 1 on host3] begins")
    command = [sys.executable, "-m", "dtrain", "launch", "--workers", "2", *nodes.program[:1]]
    done = subprocess.run([*command, str(tmp_path / "local")], env=nodes.env, capture_output=True)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        with (
            np.load(tmp_path / f"hosts-{rank}.npz") as arrays,
            np.load(tmp_path / f"local-{rank}.npz") as wanted,
        ):
            assert [*arrays] == [*wanted]
            for name in wanted:
                np.testing.assert_array_equal(arrays[name], wanted[name])


def test_a_job_goes_on_smaller_and_grows_when_the_node_is_back(
    make_hosts: MakeHosts, tmp_path: Path, tells: str
) -> None:
    with job(make_hosts(2), tmp_path, "1:2", tells, str(tmp_path)) as nodes:
        first, second = nodes.start(0), nodes.start(1)
        wait_until((tmp_path / "0-1-of-2").exists)
        second.kill()
        wait_until((tmp_path / "1-0-of-1").exists)
        assert nodes.says("There is room for 1 of 2 workers: the job continues with 1.")
        again = nodes.start(1)
        wait_until((tmp_path / "2-1-of-2").exists)
        assert nodes.says("Tasks are asked to save")
        (tmp_path / "end").touch()
        assert [first.wait(), again.wait()] == [0, 0]


def test_a_node_that_is_started_again_at_once_is_taken_in(
    make_hosts: MakeHosts, tmp_path: Path, tells: str
) -> None:
    with job(make_hosts(2), tmp_path, "2", tells, str(tmp_path)) as nodes:
        first, second = nodes.start(0), nodes.start(1)
        wait_until((tmp_path / "0-1-of-2").exists)
        second.kill()
        again = nodes.start(1)
        wait_until((tmp_path / "1-1-of-2").exists)
        assert nodes.says("waits until host2 (node 1) counts as lost")
        (tmp_path / "end").touch()
        assert [first.wait(), again.wait()] == [0, 0]


def test_a_host_that_is_cut_off_writes_nothing_after_it_was_replaced(
    make_hosts: MakeHosts, tmp_path: Path, tells: str
) -> None:
    """The worker there waits to write until the launcher may have replaced it."""
    made = make_hosts(3)
    with job(made, tmp_path, "2", tells, str(tmp_path)) as nodes:
        first, second = nodes.start(0), nodes.start(1)
        wait_until((tmp_path / "0-1-of-2").exists)
        spare = nodes.start(2)
        wait_until(lambda: nodes.says("waits as a spare"))
        (tmp_path / "moment").write_text(str(time.monotonic()))
        (tmp_path / "moment").rename(tmp_path / "cut")
        made[1].cut()
        wait_until((tmp_path / "1-1-of-2").exists)
        assert (tmp_path / "1-1-of-2").read_text() == "host3"
        made[1].reconnect()
        assert second.wait() == 2 and "was silent for" in nodes.log(1)
        wait_until(lambda: made[1].run(["pgrep", "-f", "program.py"]).returncode == 1)
        assert not (tmp_path / "zombie").exists()
        (tmp_path / "end").touch()
        assert [first.wait(), spare.wait()] == [0, 0]


def test_a_job_with_too_few_nodes_ends(make_hosts: MakeHosts, tmp_path: Path, tells: str) -> None:
    with job(make_hosts(3), tmp_path, "2:3", tells, str(tmp_path)) as nodes:
        first, others = nodes.start(0), [nodes.start(1), nodes.start(2)]
        wait_until((tmp_path / "0-2-of-3").exists)
        for process in others:
            process.kill()
        assert first.wait() == 2
        assert nodes.says("The job needs 2 workers, but the remaining hosts have room for 1")
