"""`Trainer` in two workers: one device's numbers, one run directory, and going on where a run ended.

All cases share one job, since its processes take seconds to start.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dtrain

pytestmark = pytest.mark.long

ROWS = 45  # the last micro-batch has 5 rows, which is uneven over two workers


class Worker:
    """One worker's part of the job."""

    def __init__(self, root: Path) -> None:
        self.root = root
        rng = np.random.default_rng(0)
        self.x = rng.normal(size=(ROWS, 6)).astype("float32")
        self.y = rng.integers(0, 3, ROWS)

    @staticmethod
    def model() -> Any:
        import keras

        layers = keras.layers
        return keras.Sequential([keras.Input((6,)), layers.Dense(8, "tanh"), layers.Dense(3, "softmax")])

    def trainer(self, strategy: str, name: str | None) -> dtrain.Trainer:
        trainer = dtrain.Trainer(
            strategy=strategy,
            global_batch=20,
            accumulation=2,
            scaling="sqrt",
            base_batch=5,
            warmup_steps=2,
            run_dir=None if name is None else self.root / name,
            seed=4,
        )
        trainer.compile(
            self.model,
            optimizer="adam",
            learning_rate=0.01,
            loss="sparse_categorical_crossentropy",
            metrics=["accuracy"],
        )
        return trainer

    def train(self, strategy: str, name: str | None, epochs: int) -> dict[str, Any]:
        trainer = self.trainer(strategy, name)
        done = 0 if name is None else trainer.resume()
        # Arrays: what is seen in which order follows from the seed, on one device and on several.
        history = trainer.fit((self.x, self.y), (self.x, self.y), epochs=epochs, verbose=0)
        return {
            "done": done,
            "history": history.history,
            "weights": trainer.model.get_weights(),
            "evaluated": trainer.evaluate((self.x, self.y)),
            "predicted": trainer.predict(self.x),
            "updates": int(trainer.model.optimizer.iterations),
        }

    def search(self) -> dict[str, Any]:
        """A search for a rate: what it suggests, and the weights before and after."""
        with dtrain.strategy("multi_worker").scope():
            model = self.model()
            model.compile("adam", "sparse_categorical_crossentropy")
        before = model.get_weights()
        found = dtrain.find_learning_rate(model, self.x, self.y, batch_size=20, steps=40)
        return {"rate": found.suggestion, "before": before, "after": model.get_weights()}

    def refused(self) -> str:
        try:
            self.trainer("multi_worker", "whole").fit((self.x, self.y), verbose=0)
        except dtrain.DtrainError as error:
            return str(error)
        return ""


def job(root: Path) -> dict[str, Any]:
    worker = Worker(root)
    return {
        "whole": worker.train("multi_worker", "whole", 4),
        "begun": worker.train("multi_worker", "parts", 2),
        "ended": worker.train("multi_worker", "parts", 4),
        "refused": worker.refused(),
        "search": worker.search(),
        "alone": worker.train("default", None, 4),
    }


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    root = tmp_path_factory.mktemp("trainer")
    return root, dtrain.spawn(job, args=(root,), workers=2)


Reports = tuple[Path, list[dict[str, Any]]]


def test_two_workers_train_to_one_devices_numbers(reports: Reports) -> None:
    for report in reports[1]:
        trained, alone = report["whole"], report["alone"]
        for one, other in zip(trained["weights"], alone["weights"], strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-6)
        for name, values in alone["history"].items():
            np.testing.assert_allclose(trained["history"][name], values, rtol=2e-4)
        for name, value in alone["evaluated"].items():
            np.testing.assert_allclose(trained["evaluated"][name], value, rtol=2e-4)
        np.testing.assert_allclose(trained["predicted"], alone["predicted"], rtol=2e-4, atol=1e-6)
        assert trained["updates"] == alone["updates"] == 10  # 5 micro-batches an epoch, 2 to an update


def test_a_resumed_run_ends_as_one_that_was_left_alone(reports: Reports) -> None:
    root, worker_reports = reports
    for report in worker_reports:
        assert (report["begun"]["done"], report["ended"]["done"]) == (0, 2)
        for one, other in zip(report["ended"]["weights"], report["whole"]["weights"], strict=True):
            np.testing.assert_array_equal(one, other)
        for name in ("loss", "accuracy", "val_loss", "val_accuracy"):
            assert report["ended"]["history"][name] == report["whole"]["history"][name]
    lines = (root / "parts" / "metrics.csv").read_text().splitlines()
    assert [line.partition(",")[0] for line in lines] == ["epoch", "0", "1", "2", "3"]
    record = json.loads((root / "parts" / "run.json").read_text())
    assert (record["status"], record["workers"], record["epochs"]) == ("finished", 2, 4)


def test_all_workers_refuse_the_directory_of_another_run(reports: Reports) -> None:
    for report in reports[1]:
        assert "holds another run" in report["refused"]


def test_a_search_for_a_rate_leaves_the_weights_and_finds_one_rate(reports: Reports) -> None:
    first, second = (report["search"] for report in reports[1])
    assert first["rate"] == second["rate"] is not None
    for search in (first, second):
        for before, after in zip(search["before"], search["after"], strict=True):
            np.testing.assert_array_equal(after, before)
