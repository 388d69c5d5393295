"""An optimizer's state divided over two workers: one device's numbers, half of the memory, saved whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

PROGRAM = """
import json, sys
from pathlib import Path
import keras
import numpy as np
import dtrain
from dtrain.errors import DtrainError
from dtrain.optim import shard_state

out = Path(sys.argv[1])
strategy = dtrain.MultiWorkerMirroredStrategy()
rng = np.random.default_rng(0)
x, y = rng.normal(size=(28, 6)).astype("float32"), rng.normal(size=(28, 1)).astype("float32")
report = {}


def adamw():
    return keras.optimizers.AdamW(0.02, weight_decay=0.1, epsilon=1e-3, global_clipnorm=0.3)


def train(scope, optimizer, layers=(5, 4)):
    keras.utils.set_random_seed(3)
    with scope.scope():
        hidden = [keras.layers.Dense(n, "tanh") for n in layers]
        model = keras.Sequential([keras.Input((6,)), *hidden, keras.layers.Dense(1)])
        model.compile(optimizer(), "mse")
    return model, fitted(model)


def fitted(model):
    return model.fit(x, y, batch_size=12, epochs=2, shuffle=False, verbose=0).history["loss"]


def state_bytes(model):
    return sum(v.value.numpy().nbytes for v in model.optimizer.variables if len(v.shape) > 0)


alone, report["alone"] = train(dtrain.strategy("default"), adamw)
whole, report["whole"] = train(strategy, adamw)
sharded, report["sharded"] = train(strategy, lambda: shard_state(adamw()))
report["same_bits"] = all(map(np.array_equal, whole.get_weights(), sharded.get_weights()))
report["bytes"] = [state_bytes(whole), state_bytes(sharded)]
report["weights"] = b"".join(w.tobytes() for w in sharded.get_weights()).hex()
sharded.save(out / "model.keras")
sharded.save_weights(out / "model.weights.h5")
loaded = keras.models.load_model(out / "model.keras")
report["state_error"] = max(
    float(np.abs(a.numpy() - b.numpy()).max())
    for a, b in zip(loaded.optimizer.variables, alone.optimizer.variables, strict=True)
)
for v in sharded.optimizer.variables[2:]:
    v.value.assign(v.value * 0)
sharded.load_weights(out / "model.weights.h5")
report["later"] = [fitted(loaded), fitted(sharded), fitted(alone)]
if dtrain.is_chief():
    try:
        sharded.save(out / "chief.keras")
    except DtrainError as error:
        report["alone_saving"] = f"{type(error).__name__}: {error}"
else:
    try:
        dtrain.barrier()
    except DtrainError as error:
        report["alone_saving"] = f"{type(error).__name__}: {error}"
(out / f"report.{dtrain.rank()}").write_text(json.dumps(report))
"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("sharded")
    script = out / "program.py"
    script.write_text(PROGRAM, encoding="utf-8")
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    environment.pop("TF_CONFIG", None)
    command = [sys.executable, "-m", "dtrain", "launch", "--workers", "2", str(script), str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    return [json.loads((out / f"report.{rank}").read_text(encoding="utf-8")) for rank in range(2)]


def test_workers_that_divide_the_state_train_to_the_same_numbers(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert report["same_bits"]
        assert report["sharded"] == report["whole"]
        assert report["sharded"] == pytest.approx(report["alone"], rel=2e-4)
    assert reports[0]["weights"] == reports[1]["weights"]


def test_each_worker_holds_a_part_of_the_state(reports: list[dict[str, Any]]) -> None:
    (whole, first), (_, second) = (report["bytes"] for report in reports)
    assert first + second == whole
    assert max(first, second) <= 0.6 * whole


def test_what_workers_save_together_is_the_whole_state(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert report["state_error"] < 1e-6
        loaded, restored, alone = report["later"]
        assert loaded == pytest.approx(alone, rel=2e-4)
        assert restored == pytest.approx(alone, rel=2e-4)


def test_the_error_of_a_worker_that_saves_alone(reports: list[dict[str, Any]]) -> None:
    said = [report["alone_saving"] for report in reports]
    assert said[0].startswith(
        "OperationMismatchError: A model whose optimizer state is divided over the workers"
    )
    assert "\nHint: call save in every worker" in said[0]
    assert all(
        "worker 0 is in save, worker 1 in barrier: is one of them behind" in message for message in said
    )
