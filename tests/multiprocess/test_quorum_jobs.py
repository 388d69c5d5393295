"""Jobs with a quorum, by their launcher: nobody is lost, or workers are killed at a named step."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest

from diloco_by_hand import by_hand
from dtrain.launch import launch_local

# Each worker writes its weights and losses. `kills` are "worker:step", at which its first process dies.
PROGRAM = """
import json, os, signal, sys
from pathlib import Path

import keras
import numpy as np

import dtrain

hook, folder, kills = sys.argv[1], Path(sys.argv[2]), sys.argv[3].split(",")
strategy = dtrain.MultiWorkerMirroredStrategy(gradient_hook=hook)
assert strategy.num_replicas_in_sync == dtrain.world_size() == 3

class Dies(keras.callbacks.Callback):
    steps = 0

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if os.environ["DTRAIN_ATTEMPT"] == "0" and f"{dtrain.rank()}:{self.steps}" in kills:
            os.kill(os.getpid(), signal.SIGKILL)

generator = np.random.default_rng(6)
x, y = (generator.normal(size=(120, width)).astype("float32") for width in (20, 4))
with strategy.scope():
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(30, "tanh"), keras.layers.Dense(4)])
    model.compile(keras.optimizers.Adam(0.005, epsilon=1e-3), "mse")
callbacks = [
    keras.callbacks.CSVLogger(str(folder / "log.csv")), Dies(), dtrain.monitor.Monitor(folder / "run"),
    dtrain.BackupAndRestore(folder / "backup", save_freq=4),
]
how = {"batch_size": 12, "shuffle": False, "verbose": 0}
history = model.fit(x, y, epochs=EPOCHS, callbacks=callbacks, validation_data=(x, y), **how)
model.save(folder / "model.keras")
found = {
    "loss": history.history["loss"], "report": history.quorum_report, "epochs": history.epoch,
    "val_loss": history.history["val_loss"],
}
np.savez(folder / f"weights-{dtrain.rank()}.npz", *model.get_weights())
(folder / f"found-{dtrain.rank()}.json").write_text(json.dumps(found))
"""


class Ended(NamedTuple):
    """How a job has ended: what the launcher said, the weights of its workers, and what they found."""

    said: str
    weights: list[list[np.ndarray]]
    found: list[dict[str, Any]]
    folder: Path


def run(folder: Path, hook: str, *, kills: str = "", epochs: int = 2, quorum: int = 2) -> Ended:
    program = folder / "program.py"
    program.write_text(PROGRAM.replace("EPOCHS", str(epochs)))
    said = io.StringIO()
    command = [sys.executable, str(program), hook, str(folder), kills]
    status = launch_local(command, workers=3, quorum=quorum, stdout=said, stderr=said)
    assert status == 0, said.getvalue()
    weights = [np.load(folder / f"weights-{rank}.npz") for rank in range(3)]
    found = [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(3)]
    return Ended(said.getvalue(), [[*each.values()] for each in weights], found, folder)


def check_equal(ended: Ended) -> None:
    for weights in ended.weights[1:]:
        for one, other in zip(ended.weights[0], weights, strict=True):
            np.testing.assert_array_equal(one, other)


def model() -> Any:
    keras.utils.set_random_seed(3)
    return keras.Sequential([keras.Input((20,)), keras.layers.Dense(30, "tanh"), keras.layers.Dense(4)])


@pytest.mark.long
@pytest.mark.timeout(300)
def test_without_a_loss_it_is_diloco(tmp_path: Path) -> None:
    """Rounds of four steps in epochs of ten: the last one of an epoch is shorter."""
    ended = run(tmp_path, "diloco:every=4,quorum=3", quorum=3)  # so none can be too late
    check_equal(ended)
    generator = np.random.default_rng(6)
    x, y = (generator.normal(size=(120, width)).astype("float32") for width in (20, 4))
    right = by_hand(
        model,
        lambda: keras.optimizers.Adam(0.005, epsilon=1e-3),
        lambda: keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True),
        x,
        y,
        batch=12,
        epochs=2,
        every=4,
        replicas=3,
    )
    for one, other in zip(ended.weights[0], right, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-6)
    assert ended.found[0]["loss"] == ended.found[1]["loss"] == ended.found[2]["loss"]
    report = ended.found[0]["report"]
    assert (report["rounds"], report["contributions"], report["examples"]) == (6, 18, 240)
    assert report["missed"] == report["late"] == 0
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 3
    assert "6 rounds had 18 of 18 contributions" in ended.said
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["quorum"] == report
    assert record["goodput"]["seconds"]["away"] == 0.0


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("hook", ["diloco:every=4,compress=int8", "local_sgd:average_every=4"])
def test_lost_workers_are_started_again_and_end_with_the_others(tmp_path: Path, hook: str) -> None:
    """One dies within a round, and the first worker in the next epoch: the other one waits for a quorum."""
    ended = run(tmp_path, hook, kills="1:6,0:13", epochs=6)
    check_equal(ended)
    losses = [found["loss"] for found in ended.found]
    assert np.isfinite(losses[2]).all() and len(losses[2]) == 6
    assert losses[2][-1] < losses[2][0]
    assert all(found["epochs"] == [0, 1, 2, 3, 4, 5] for found in ended.found)
    for worker in (0, 1):
        assert f"worker {worker} was killed by signal 9 (SIGKILL)" in ended.said
    report = ended.found[2]["report"]
    whole = report["contributions"] + report["missed"] + report["late"]
    assert whole == 3 * report["rounds"] and report["missed"] >= 1
    assert report["away_seconds"] > report["first_away_seconds"] > 0
    goodput = json.loads((tmp_path / "run" / "run.json").read_text())["goodput"]
    assert sum(goodput["seconds"].values()) == pytest.approx(goodput["wall_seconds"])
    assert goodput["attempts"] == 2
