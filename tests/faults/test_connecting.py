"""Workers that connect to each other late, or never, after a restart: no other bits, and no server opens."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from processes import wait_until

pytestmark = pytest.mark.timeout(900)

PROGRAM = """
import hashlib, os, signal, sys, threading
from pathlib import Path

folder, faults = Path(sys.argv[1]), sys.argv[2] == "faults"
attempt, place = int(os.environ.get("DTRAIN_ATTEMPT", 0)), int(os.environ["DTRAIN_PLACE"])

import keras, numpy as np, psutil
import dtrain
from dtrain.collectives import connect, sockets

connect_all, connect_one = sockets.connect_all, connect._connect

def connect_late(*args, **kwargs):
    print(f"attempt {attempt} connects", flush=True)
    if faults and place == 2 and attempt in (1, 2):
        (folder / f"frozen-{attempt}").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    return connect_all(*args, **kwargs)

def connect_slowly(*args, **kwargs):
    if faults and place == 2 and attempt == 2:
        threading.Event().wait(12.0)  # wall clock: longer than any limit of a connection has ever been
    return connect_one(*args, **kwargs)

def listening():
    found = psutil.Process().net_connections("tcp")
    return sum(each.status == psutil.CONN_LISTEN for each in found)

class Kill(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if faults and place == 1 and attempt == 0 and batch == 5:
            os.kill(os.getpid(), signal.SIGKILL)

sockets.connect_all, connect._connect = connect_late, connect_slowly
keras.utils.set_random_seed(3)
try:
    strategy = dtrain.MultiWorkerMirroredStrategy()
finally:
    print(f"attempt {attempt} listens on {listening()} ports", flush=True)
with strategy.scope():
    hidden = [keras.layers.Dense(9, "relu"), keras.layers.Dropout(0.2)]
    model = keras.Sequential([keras.Input((12,)), *hidden, keras.layers.Dense(1)])
    model.compile("adam", "mse")
x = np.random.default_rng(5).normal(size=(240, 12)).astype("float32")
backup = dtrain.BackupAndRestore(folder / "backup", save_freq=2)
model.fit(x, x[:, :1], batch_size=24, epochs=2, verbose=0, callbacks=[backup, Kill()])
digest = hashlib.sha256(b"".join(each.tobytes() for each in model.get_weights())).hexdigest()
print("weights", digest, strategy.dtrain_communication.library, flush=True)
"""


class Launched:
    """A job of three workers that runs the program."""

    def __init__(self, folder: Path, faults: str) -> None:
        self.folder = folder
        folder.mkdir()
        (folder / "program.py").write_text(PROGRAM, encoding="utf-8")
        self._output = folder / "output"
        words = ["--workers", "3", "--spares", "none", "program.py", str(folder), faults]
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "dtrain", "launch", *words],
                cwd=folder,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
            )

    def text(self) -> str:
        return self._output.read_text(errors="replace")

    def end(self) -> str:
        assert self._process.wait() == 0, self.text()
        return self.text()

    def frozen(self, attempt: int) -> int:
        """The worker that is stopped before it connects; the others have begun to."""
        file = self.folder / f"frozen-{attempt}"
        wait_until(lambda: self.text().count(f"attempt {attempt} connects") == 3 or self.over())
        wait_until(lambda: (file.exists() and bool(file.read_text())) or self.over())
        assert not self.over(), self.text()
        return int(file.read_text())

    def over(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def test_one_worker_killed_and_one_frozen_at_connect_end_with_the_bits_of_a_job_without_faults(
    tmp_path: Path,
) -> None:
    """Once it stays stopped, and all are started again; once it goes on, and the others wait for it."""
    undisturbed = Launched(tmp_path / "undisturbed", "none").end()
    job = Launched(tmp_path / "faults", "faults")
    try:
        job.frozen(1)
        wait_until(lambda: (job.folder / "frozen-2").exists() or job.over())
        os.kill(job.frozen(2), signal.SIGCONT)
        text = job.end()
    finally:
        job.kill()
    for output in (undisturbed, text):
        assert len(re.findall(r"weights \w+ sockets \(local\)", output)) == 3, output
    assert {*re.findall(r"weights (\w+) s", text)} == {*re.findall(r"weights (\w+) s", undisturbed)}
    assert "OperationMismatchError" not in text  # those that have connected are at their next exchange
    assert text.count("All are started again") >= 2  # a slow machine may need one more
    assert "it lost worker 2" in text
    assert {*re.findall(r"listens on (\d+) ports", undisturbed + text)} == {"0"}
    assert {*re.findall(r"attempt (\d) listens", text)} >= {"0", "1", "2"}
