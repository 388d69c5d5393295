"""A host that stops as a whole, is replaced, and comes back: its worker writes nothing after that."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from hosts import Host, MakeHosts
from processes import wait_until

# A worker alone waits for nobody, so that nothing but the fences holds it back.
TRAINS = """
import os, sys, time
import keras
import numpy as np
import dtrain
from dtrain.monitor import Monitor

keras.utils.set_random_seed(3)
x = np.random.default_rng(3).normal(size=(160, 4)).astype("float32")
with dtrain.strategy("multi_worker").scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
def note(batch, logs):
    print("batch", batch, flush=True)
    while batch == 9 and os.environ["DTRAIN_ATTEMPT"] == "0" and not os.path.exists(sys.argv[1] + "/go"):
        time.sleep(0.02)
gate = keras.callbacks.LambdaCallback(on_train_batch_end=note)
backup = dtrain.BackupAndRestore(sys.argv[1] + "/backup", save_freq=2, delete_checkpoint=False)
monitor = Monitor(sys.argv[1] + "/run", tensorboard=False)
model.fit(x, x[:, :1], batch_size=8, epochs=2, verbose=0, callbacks=[monitor, backup, gate])
"""


def written(folder: Path) -> dict[str, float]:
    """What a job has committed or written, by path, with the time of the last change."""
    kept = [*folder.glob("backup/**/*"), *folder.glob("run/*")]
    return {str(path): path.stat().st_mtime for path in kept}


def test_a_worker_whose_host_was_stopped_and_replaced_writes_nothing_more(
    with_ssh: None, make_hosts: MakeHosts, tmp_path: Path
) -> None:
    """Its agent stays stopped, which else would end it at once."""
    made: list[Host] = make_hosts(3)
    servers = [host.start_ssh_server() for host in made[1:]]
    (tmp_path / "job.py").write_text(TRAINS)
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    words = ["--hosts", "host2,host3", "--nnodes", "1", "--env", "CUDA_VISIBLE_DEVICES", "--log-dir", "logs"]
    words += ["--hang-timeout", "3600"]  # the host is lost, before its worker counts as stuck
    command = [sys.executable, "-m", "dtrain", "launch", *words, str(tmp_path / "job.py"), str(tmp_path)]
    with (tmp_path / "log").open("w") as log:
        job = made[0].popen(command, stdout=log, stderr=subprocess.STDOUT, env=env, cwd=tmp_path)
    first = tmp_path / "logs" / "worker-0.attempt-0.log"
    try:
        wait_until(lambda: first.exists() and "batch 9" in first.read_text())
        wait_until(lambda: any(tmp_path.glob("backup/**/COMMITTED.json")))
        made[1].run(["sh", "-c", "kill -STOP -1"])
        assert job.wait() == 0
        before = written(tmp_path)
        (tmp_path / "go").touch()
        made[1].run(["pkill", "-CONT", "-f", "job.py"])
        wait_until(lambda: made[1].run(["pgrep", "-f", "job.py"]).returncode == 1)
        assert written(tmp_path) == before
    finally:
        print((tmp_path / "log").read_text())
        job.kill()
        made[1].run(["sh", "-c", "kill -CONT -1"])
        os.kill(servers[0].pid, signal.SIGCONT)  # it has stopped with its server
    batches = re.findall(r"\[worker 0 on host3\] batch (\d+)", (tmp_path / "log").read_text())
    assert batches[0] != "0", "it did not resume from a checkpoint"
    assert batches[-1] == "19"
