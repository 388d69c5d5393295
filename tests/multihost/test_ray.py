"""Jobs on a real Ray cluster of hosts: by `dtrain launch --ray`, and by the trainer for Ray Train."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import guide
from engine_variables import RAY_ACTOR, assert_as_recorded
from hosts import Host, HostProcess, HostsNotPermitted, hosts
from processes import wait_until
from ray_nodes import ACCESS, ENVIRONMENT, MARK, RayNode, needs_ray, ray_node

pytestmark = needs_ray

LIMIT = 280.0
PAGE = (guide.DOCS / "ray.md").read_text(encoding="utf-8")
PINNED = {"TF_NUM_INTRAOP_THREADS": "1", "OMP_NUM_THREADS": "1"}
# A fit of two epochs with a checkpoint each third step. With "kill", worker 1 dies in the second epoch.
LOOP = """
import os, signal, socket

def train(config):
    import keras
    import numpy as np
    import dtrain

    class Kill(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            steps.append(batch)
            if config["kill"] and dtrain.rank() == 1 and len(steps) == 17:
                if os.environ["DTRAIN_ATTEMPT"] == "0":
                    os.kill(os.getpid(), signal.SIGKILL)

    steps = []
    keras.utils.set_random_seed(3)
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(96, 6)).astype("float32"), rng.normal(size=(96, 1)).astype("float32")
    with dtrain.strategy("multi_worker").scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(300, "tanh"), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    backup = dtrain.BackupAndRestore(config["out"] + "-backup", save_freq=3)
    model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=[backup, Kill(), *config["callbacks"]])
    threads = [os.environ.get(name) for name in ("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS")]
    print("place:", socket.gethostname(), os.environ["DTRAIN_ATTEMPT"], len(steps), *threads, flush=True)
    np.savez(f"{config['out']}-{dtrain.rank()}.npz", *model.get_weights(), *model.optimizer.variables)
"""
SCRIPT = (
    LOOP
    + """
import sys
train({"out": sys.argv[1], "kill": "kill" in sys.argv, "callbacks": []})
import json
from dtrain import environments
of_ray = {name: value for name, value in os.environ.items() if name.startswith("RAY_")}
print("engine:", json.dumps([environments.describe()["schedulers"], of_ray]), flush=True)
"""
)
TRAINER = (
    LOOP
    + """
import sys
import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from dtrain.ray import TensorflowTrainer

def loop(config):
    from dtrain.ray import ReportCallback
    from dtrain import environments
    about = environments.describe()
    assert about["environment"] == "ray" and "Ray" in about["schedulers"], about
    train({**config, "callbacks": [ReportCallback(model_every=2)]})

if __name__ == "__main__":
    ray.init(sys.argv[1], log_to_driver=False)
    trainer = TensorflowTrainer(
        loop,
        train_loop_config={"out": sys.argv[2], "kill": True},
        scaling_config=ScalingConfig(num_workers=2, placement_strategy="SPREAD"),
        run_config=RunConfig("run", sys.argv[3], failure_config=FailureConfig(max_failures=1)),
    )
    result = trainer.fit()
    print("result:", sorted(result.metrics), os.listdir(result.checkpoint.path))
"""
)
SERVERS = """
import sys
import keras
import numpy as np
import dtrain

with dtrain.strategy("parameter_server").scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
history = model.fit(np.eye(64, 4), np.ones(64), batch_size=8, epochs=3, verbose=0)
print("steps:", int(model.optimizer.iterations.numpy()), flush=True)
"""
# Each worker tells its steps until the file "end" is there, and notes its host and its attempt.
TELLS = """
import json, os, signal, sys, time
from pathlib import Path
from dtrain.task import channel
folder = Path(sys.argv[1])
config = json.loads(os.environ["TF_CONFIG"])
place = f"{os.environ['DTRAIN_ATTEMPT']}-{config['task']['index']}-of-{len(config['cluster']['worker'])}"
signal.signal(signal.SIGUSR1, lambda *arguments: sys.exit(channel.RUN_AGAIN))
channel.report_checkpoint(1, str(folder))
step = 0
while not (folder / "end").exists():
    time.sleep(0.05)
    step += 1
    channel.report_progress(step, "step", train=True, done=step)
    (folder / place).write_text(os.uname().nodename)
"""


@dataclass
class Cluster:
    """A cluster of two hosts with two CPUs each, and a third host without Ray."""

    made: list[Host]
    head: RayNode

    def popen(self, command: list[str], folder: Path) -> HostProcess:
        env = os.environ | ENVIRONMENT | PINNED | {"RAY_ADDRESS": self.head.address, MARK: self.head.mark}
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return self.made[0].popen([sys.executable, *command], cwd=folder, env=env, **pipe)

    def run(self, command: list[str], folder: Path, limit: float = LIMIT) -> Any:
        """Run Python on the head's host to its end, after which nothing of a job is left."""
        with self.popen(command, folder) as process:
            try:
                out, err = process.communicate(timeout=limit)
            finally:
                process.kill()
        wait_until(lambda: not self.head.left())
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def launch(self, folder: Path, *words: str, limit: float = LIMIT) -> Any:
        return self.run(["-m", "dtrain", "launch", "--ray", self.head.address, *words], folder, limit)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(hosts(tmp_path_factory.mktemp("ray") / "hosts", 3))
        except HostsNotPermitted as error:
            pytest.skip(f"hosts cannot be made here: {error}")
        head = stack.enter_context(ray_node(cpus=2, host=made[0]))
        stack.enter_context(ray_node(cpus=2, join=head, host=made[1]))
        yield Cluster(made, head)


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two workers of the local launcher give, which nobody kills."""
    folder = tmp_path_factory.mktemp("local")
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "dtrain", "launch", "--workers", "2", "train.py", str(folder / "local")]
    subprocess.run(command, check=True, env=os.environ | ENVIRONMENT | PINNED, cwd=folder, timeout=LIMIT)
    return folder / "local"


def assert_same(one: Path, other: Path) -> None:
    for rank in (0, 1):
        with np.load(f"{one}-{rank}.npz") as arrays, np.load(f"{other}-{rank}.npz") as expected:
            assert [*arrays] == [*expected]
            for name in expected:
                np.testing.assert_array_equal(arrays[name], expected[name])


def test_two_nodes_give_the_bits_of_one_machine_although_a_worker_dies(
    cluster: Cluster, wanted: Path, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    spread = ["--workers", "2", "--ray-placement", "spread"]
    done = cluster.launch(tmp_path, *spread, "train.py", str(tmp_path / "ray"), "kill")
    assert done.returncode == 0, done.stderr
    assert "worker 1 was killed by signal 9 (SIGKILL)" in done.stderr, done.stderr
    for rank in (0, 1):
        places = re.findall(rf"\[worker {rank} on host.*\] place: .*", done.stdout)
        attempt, steps, *threads = places[0].split()[-4:]
        assert len(places) == 1 and (attempt, threads) == ("1", ["1", "1"]), done.stdout
        assert 24 - 17 < int(steps) < 24, done.stdout  # from a checkpoint in the middle of an epoch on
    assert "on host1] place: host1" in done.stdout and "on host2] place: host2" in done.stdout
    engines = [json.loads(line) for line in re.findall(r"engine: (.*)", done.stdout)]
    for schedulers, variables in engines:
        assert "Ray" in schedulers
        assert_as_recorded(variables, RAY_ACTOR, varying=["RAY_JOB_ID", "RAY_RAYLET_PID"])
    assert len(engines) == 2
    assert_same(tmp_path / "ray", wanted)


def test_a_run_of_ray_train_resumes_exactly_after_a_failure(
    cluster: Cluster, wanted: Path, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(TRAINER)
    arguments = [cluster.head.address, str(tmp_path / "ray"), str(tmp_path / "results")]
    done = cluster.run(["train.py", *arguments], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "result: ['epoch', 'loss'] ['model.keras']" in done.stdout, done.stdout
    assert_same(tmp_path / "ray", wanted)


def test_what_the_cluster_cannot_place_is_an_error_in_time(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("print('began')\n")
    done = cluster.launch(tmp_path, "--workers", "5", "--join-timeout", "15", "job.py")
    assert done.returncode == 2 and "began" not in done.stdout
    assert "Ray has placed 0 of 5 tasks with 1 CPU each (pack) in 15 s." in done.stderr, done.stderr
    assert "The cluster has 2 nodes with 4 CPU" in done.stderr and "--ray-cpus" in done.stderr
    done = cluster.launch(tmp_path, "--ray-gpus", "1", "--join-timeout", "20", "job.py")
    assert done.returncode == 2 and "1 CPU and 1 GPU for each worker" in done.stderr, done.stderr
    done = cluster.run(["-m", "dtrain", "launch", "--ray", "host1:9", "job.py"], tmp_path)
    assert done.returncode == 2 and "Ray does not answer at host1:9: Connection refused" in done.stderr
    assert "Is the cluster up" in done.stderr and "Traceback" not in done.stderr
    env = os.environ | ENVIRONMENT | {MARK: cluster.head.mark}
    env = {name: value for name, value in env.items() if name not in ACCESS}
    command = [sys.executable, "-m", "dtrain", "launch", "--ray", cluster.head.address, "job.py"]
    done = cluster.made[0].run(command, cwd=tmp_path, env=env)
    wait_until(lambda: not cluster.head.left())
    assert done.returncode == 2 and "set RAY_AUTH_MODE=token" in done.stderr, done.stderr


@pytest.mark.soak("the tests above run such programs; this one runs those of the page")
@pytest.mark.parametrize("name", ["train.py", "run.py", "search.py"])
def test_a_program_of_the_page_runs_by_its_command(cluster: Cluster, tmp_path: Path, name: str) -> None:
    for block in guide.files(PAGE):
        (tmp_path / block.title).write_text(block.text, encoding="utf-8")
    (command,) = (words for words in guide.commands(PAGE) if words[-1] == name)
    try:
        done = cluster.run(["-m", *command] if command[0] == "dtrain" else command[1:], tmp_path)
    finally:
        for suffix in ("backup", "run", "search"):
            shutil.rmtree(f"/tmp/dtrain-{suffix}", ignore_errors=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.soak(
    "test_launchers.py has a worker of parameter servers that is started again, without training"
)
def test_parameter_servers_train(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SERVERS)
    done = cluster.launch(tmp_path, "--workers", "2", "--ps", "1", "train.py")
    assert done.returncode == 0, done.stderr
    assert "[chief 0 on host" in done.stdout and "steps: 24" in done.stdout, done.stdout


@pytest.mark.soak("test_lost_nodes.py shows it without Ray; the next test shows a lost node of Ray")
def test_an_elastic_job_shrinks_and_grows_with_the_cluster(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(TELLS)
    command = [sys.executable, "-m", "dtrain", "launch", "--workers", "1:2", "job.py", str(tmp_path)]

    def there(pattern: str) -> int:
        return len(list(tmp_path.glob(pattern)))

    with contextlib.ExitStack() as stack, (tmp_path / "log").open("w") as log:
        head = stack.enter_context(ray_node(cpus=1))
        command[4:4] = ["--ray", head.address]
        env = os.environ | ENVIRONMENT | {MARK: head.mark}
        with ray_node(cpus=1, join=head) as second:
            process = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.kill)
            wait_until(lambda: there("0-*-of-2") == 2)
            second.kill()
            wait_until(lambda: there("*-0-of-1") > 0)
        with ray_node(cpus=1, join=head):
            wait_until(lambda: there("[1-9]-*-of-2") == 2)
            (tmp_path / "end").touch()
            assert process.wait() == 0, (tmp_path / "log").read_text()
        wait_until(lambda: not head.left())


def test_the_tasks_of_a_lost_node_are_placed_anew(cluster: Cluster, tmp_path: Path) -> None:
    """The last test here: it takes a host away."""
    (tmp_path / "job.py").write_text(TELLS)
    command = ["-m", "dtrain", "launch", "--ray", cluster.head.address, "--ray-placement", "spread"]
    with (
        ray_node(cpus=2, join=cluster.head, host=cluster.made[2]),
        cluster.popen([*command, "--workers", "3", "job.py", str(tmp_path)], tmp_path) as process,
    ):
        places = lambda attempt: [path.read_text() for path in sorted(tmp_path.glob(f"{attempt}-*"))]  # noqa: E731
        try:
            wait_until(lambda: len(places(0)) == 3 and all(places(0)))
            assert sorted(places(0)) == ["host1", "host2", "host3"]
            cluster.made[1].power_off()
            wait_until(lambda: len(places(1)) == 3 and all(places(1)))
            assert {*places(1)} == {"host1", "host3"}
            process.send_signal(signal.SIGTERM)
            _, err = process.communicate()
        finally:
            process.kill()
    assert process.returncode == 128 + signal.SIGTERM and "host2 (node " in err, err
    wait_until(lambda: not cluster.head.left())
