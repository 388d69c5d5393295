"""Jobs with parameter servers on two hosts, started by `--nnodes` and by `--hosts`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hosts import Host, HostProcess, MakeHosts

TRAINS = """
import os
import keras
import numpy as np
import dtrain

keras.utils.set_random_seed(3)
x = np.random.default_rng(3).normal(size=(64, 4)).astype("float32")
with dtrain.strategy("parameter_server").scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
history = model.fit(x, x[:, :1], batch_size=8, epochs=3, verbose=0).history
print("steps:", int(model.optimizer.iterations), "falls:", history["loss"][-1] < history["loss"][0])
"""


AGAIN = pytest.mark.soak("reason: the same placement and tasks by --nnodes; test_ssh.py has the ways of SSH")


@pytest.mark.parametrize("way", ["nodes", pytest.param("ssh", marks=AGAIN)])
def test_a_chief_trains_with_workers_and_servers_on_two_hosts(
    way: str, with_ssh: None, make_hosts: MakeHosts, tmp_path: Path
) -> None:
    made: list[Host] = make_hosts(2)
    (tmp_path / "job.py").write_text(TRAINS)
    (tmp_path / "secret").touch(mode=0o600)
    (tmp_path / "secret").write_text("0123456789abcdef" * 2)
    env = os.environ | {"DTRAIN_SECRET_FILE": str(tmp_path / "secret"), "CUDA_VISIBLE_DEVICES": "-1"}
    launch = [sys.executable, "-m", "dtrain", "launch", "--ps", "2"]
    places = [["--hosts", "host1,host2", "--env", "CUDA_VISIBLE_DEVICES"]]
    if way == "nodes":
        nodes = ["--nnodes", "2", "--rendezvous", "10.77.0.1:20600", "--nproc-per-node", "1", "--node-rank"]
        places = [[*nodes, "0"], [*nodes, "1"]]
    else:
        made[1].start_ssh_server()
    started: list[HostProcess] = []
    for rank, place in enumerate(places):
        with (tmp_path / f"log-{rank}").open("w") as log:
            words = [*launch, *place, str(tmp_path / "job.py")]
            started.append(made[rank].popen(words, stdout=log, stderr=subprocess.STDOUT, env=env))
    try:
        statuses = [process.wait() for process in started]
    finally:
        for process in started:
            process.kill()
    said = (tmp_path / "log-0").read_text()
    assert statuses == [0] * len(places), said
    assert "[chief 0 on host1] steps: 24 falls: True" in said
    addresses = dict(re.findall(r"(\w+ \d) started, process \d+, ([\d.]+):", said))
    assert addresses == {
        "chief 0": "10.77.0.1",
        "worker 0": "10.77.0.1",
        "worker 1": "10.77.0.2",
        "ps 0": "10.77.0.1",
        "ps 1": "10.77.0.2",
    }
