"""Two hosts with the variables of two pods of a JobSet or a TrainJob train, and end with equal weights."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dtrain.environments.detected_job import ENVIRONMENTS
from hosts import Host, MakeHosts

PROGRAM = """
import sys, keras, numpy as np, dtrain
keras.utils.set_random_seed(3)
rng = np.random.default_rng(3)
x, y = rng.normal(size=(64, 6)).astype("float32"), rng.normal(size=(64, 1)).astype("float32")
with dtrain.strategy("auto").scope():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(30, "tanh"), keras.layers.Dense(1)])
    model.compile("adam", "mse")
model.fit(x, y, batch_size=8, epochs=2, verbose=0)
print("task", dtrain.rank(), "of", dtrain.world_size(), "in", dtrain.environments.origin())
np.savez(f"{sys.argv[1]}-{dtrain.rank()}.npz", *model.get_weights())
"""
JOBSET = {"JOBSET_NAME": "train", "REPLICATED_JOB_NAME": "worker", "DTRAIN_JOBSET_TASKS": "worker=2"}
TRAINJOB = {"PET_NNODES": "2", "PET_MASTER_ADDR": "train-node-0-0.train", "PET_MASTER_PORT": "29500"}
PODS = {
    "jobset": [JOBSET | {"JOB_COMPLETION_INDEX": f"{index}"} for index in (0, 1)],
    "kubeflow": [TRAINJOB | {"PET_NODE_RANK": f"{index}"} for index in (0, 1)],
}
LIMIT = 150.0


def name_pods(host: Host, made: list[Host]) -> None:
    """Let a host resolve the names that the headless Service of the job gives to its pods."""
    names = (f"train-{job}-0-{index}.train" for job in ("worker", "node") for index in range(len(made)))
    addresses = [pod.address for pod in made]
    lines = [f"{addresses[index % 2]} {name}\n" for index, name in enumerate(names)]
    with host.path("/etc/hosts").open("a") as file:
        file.writelines(lines)


OTHER = pytest.mark.soak("tests/multiprocess/test_environments.py holds the addresses of a TrainJob")


@pytest.mark.parametrize("environment", ["jobset", pytest.param("kubeflow", marks=OTHER)])
def test_two_pods_train_as_a_job_whose_names_appear_late(
    environment: str, make_hosts: MakeHosts, tmp_path: Path
) -> None:
    first, second = made = list(make_hosts())
    (tmp_path / "program.py").write_text(PROGRAM)
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef" * 4)
    secret.chmod(0o400)
    started = []
    logs = [tmp_path / f"output-{index}" for index in (0, 1)]
    try:
        # The second pod is there first, and does not know the name of the first.
        for index, host in ((1, second), (0, first)):
            env = os.environ | PODS[environment][index] | {"DTRAIN_SECRET_FILE": str(secret)}
            env |= {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1", "DTRAIN_PEER_TIMEOUT": "120"}
            command = [sys.executable, str(tmp_path / "program.py"), str(tmp_path / "weights")]
            with logs[index].open("w") as log:
                started.append(host.popen(command, stdout=log, stderr=subprocess.STDOUT, env=env))
        for host in made:
            name_pods(host, made)
        statuses = [process.wait() for process in started]
    finally:
        for process in started:
            process.kill()
    said = [log.read_text() for log in logs]
    assert statuses == [0, 0], said
    for index in (0, 1):
        assert f"task {index} of 2 in {ENVIRONMENTS[environment].label}\n" in said[index]
    with np.load(tmp_path / "weights-0.npz") as one, np.load(tmp_path / "weights-1.npz") as other:
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])
