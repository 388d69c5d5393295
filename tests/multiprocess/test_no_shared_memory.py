"""Jobs on a machine whose /dev/shm is read-only or full, in a mount namespace of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mpi_jobs import needs_mpi

MOUNTS = {
    "read-only": "mount -t tmpfs -o ro tmpfs /dev/shm",
    "full": "mount -t tmpfs -o size=4k,nr_inodes=3 tmpfs /dev/shm && echo x > /dev/shm/x && mkdir /dev/shm/d",
}

TRAINS = """
import sys
import keras, numpy as np, tensorflow as tf
import dtrain

X = np.ones((32, 4), "float32")

class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 4
    def __getitem__(self, number):
        return X[8 * number : 8 * number + 8], X[8 * number : 8 * number + 8, :1]

strategy = dtrain.MultiWorkerMirroredStrategy()
for epochs in (1, 1, 2):  # the second one resumes at the end of its last epoch
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=["mae"])
    backup = dtrain.BackupAndRestore(sys.argv[1], delete_checkpoint=False)
    model.fit(X, X[:, :1], epochs=epochs, batch_size=8, verbose=0, callbacks=[backup])
assert float(strategy.reduce("SUM", strategy.run(lambda: tf.constant(1.0)), axis=None)) == 2.0
model.fit(Batches(workers=2), epochs=2, verbose=0)
model.evaluate(X, X[:, :1], verbose=0)
print("has trained")
"""

SUMS = """
from mpi4py import MPI
print("sum", MPI.COMM_WORLD.allreduce(1), len(MPI.COMM_WORLD.bcast(bytes(1 << 20))))
"""


def launched(kind: str, folder: Path, text: str, *options: str) -> str:
    """What a job of two workers writes, which must succeed."""
    (folder / "job.py").write_text(text)
    inside = ["unshare", "--mount", "sh", "-c", f'{MOUNTS[kind]} && exec "$@"', "sh"]
    try:
        subprocess.run([*inside, "true"], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"/dev/shm cannot be replaced: {getattr(error, 'stderr', error)}")
    job = [sys.executable, "-m", "dtrain", "launch", "--workers", "2", *options, str(folder / "job.py")]
    done = subprocess.run(
        [*inside, *job, str(folder / "backup")], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.parametrize("kind", ["read-only", pytest.param("full", marks=pytest.mark.long)])
def test_training_resuming_and_reading_need_no_shared_memory(kind: str, tmp_path: Path) -> None:
    assert launched(kind, tmp_path, TRAINS).count("has trained") == 2


@needs_mpi
@pytest.mark.parametrize("kind", MOUNTS)
def test_mpi_shares_files_on_a_disk_instead(kind: str, tmp_path: Path) -> None:
    assert launched(kind, tmp_path, SUMS, "--mpi").count("sum 2 1048576") == 2
