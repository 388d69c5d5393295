"""Files under two workers that run the same script: whole, once a path, there when the call returns.

All cases share one job, since its processes take seconds to start; each leaves what it saw in its report.
"""

from __future__ import annotations

import contextlib
import csv
import io
import random
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dtrain

pytestmark = pytest.mark.long

EPOCHS = 3
SAVES = 12


class Worker:
    """One worker's part of the job: its strategy, its data, and the cases."""

    def __init__(self, root: Path) -> None:
        import keras

        self.root = root
        self.rank = dtrain.rank()
        self.strategy = dtrain.MultiWorkerMirroredStrategy()
        rng = np.random.default_rng(0)
        self.x = rng.normal(size=(22, 3)).astype("float32")
        self.y = (self.x.sum(axis=1, keepdims=True) + 1).astype("float32")
        self.keras = keras

    def model(self) -> Any:
        self.keras.utils.set_random_seed(1)
        with self.strategy.scope():
            model = self.keras.Sequential(
                [
                    self.keras.Input((3,)),
                    self.keras.layers.Dense(4, activation="tanh"),
                    self.keras.layers.Dense(1),
                ]
            )
            model.compile(optimizer=self.keras.optimizers.Adam(0.05), loss="mse", metrics=["mae"])
        return model

    def fit(self, model: Any, *callbacks: Any, epochs: int = EPOCHS) -> list[int]:
        return model.fit(
            self.x,
            self.y,
            validation_data=(self.x, self.y),
            batch_size=8,
            epochs=epochs,
            shuffle=False,
            verbose=0,
            callbacks=list(callbacks),
        ).epoch

    def differences(self, model: Any, path: Path) -> float:
        """The largest difference between a model's weights and those in a file."""
        if path.name.endswith(".weights.h5"):
            other = self.model()
            other.load_weights(path)
        else:
            # Keras cannot read back the name of a loss from its old format, on one device either.
            other = self.keras.models.load_model(path, compile=False)
        pairs = list(zip(model.get_weights(), other.get_weights(), strict=True))
        return max(float(np.abs(a - b).max()) for a, b in pairs)

    # The cases

    def checkpoints(self) -> Any:
        checkpoint = self.keras.callbacks.ModelCheckpoint
        folder = self.root / "checkpoints"
        model = self.model()
        self.fit(
            model,
            checkpoint(folder / "each" / "{epoch:02d}.keras"),
            checkpoint(folder / "weights" / "{epoch}-{val_loss:.3f}.weights.h5", save_weights_only=True),
            checkpoint(folder / "best.keras", save_best_only=True, monitor="val_loss"),
            checkpoint(folder / "batches.keras", save_freq=2),
            checkpoint(folder / f"own{self.rank}" / "{epoch}.keras"),
        )
        paths = sorted(p for p in folder.rglob("*") if p.is_file())
        report = {str(p.relative_to(folder)): self.whole(p) for p in paths}
        last = [folder / "each" / f"{EPOCHS:02d}.keras", folder / f"own{self.rank}" / f"{EPOCHS}.keras"]
        last += [*sorted((folder / "weights").glob(f"{EPOCHS}-*")), folder / "best.keras"]
        return report, [self.differences(model, path) for path in last]

    def backup(self) -> Any:
        expected = self.model()
        self.fit(expected)

        class Stop(self.keras.callbacks.Callback):  # type: ignore[name-defined, misc]
            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                if epoch == 2:
                    raise InterruptedError

        report: dict[str, Any] = {}
        for kind, own in (("one folder", ""), ("a folder each", f"-{self.rank}")):
            for delete in (True, False):
                folder = self.root / f"backup-{delete}{own}"

                def callback(folder: Path = folder, delete: bool = delete) -> Any:
                    return self.keras.callbacks.BackupAndRestore(folder, delete_checkpoint=delete)

                interrupted = False
                try:
                    self.fit(self.model(), callback(), Stop())
                except InterruptedError:
                    interrupted = True
                dtrain.barrier()
                left = folder.exists()
                resumed = self.model()
                epochs = self.fit(resumed, callback())
                same = max(
                    float(np.abs(a - b).max())
                    for a, b in zip(expected.get_weights(), resumed.get_weights(), strict=True)
                )
                files = sorted(p.name for p in folder.rglob("*") if p.is_file()) if folder.exists() else []
                report[f"{kind}, {'deleted' if delete else 'kept'}"] = (
                    interrupted,
                    left,
                    epochs,
                    same,
                    files,
                )
        return report

    def csv(self) -> Any:
        logger = self.keras.callbacks.CSVLogger
        shared, own = self.root / "log.csv", self.root / f"log{self.rank}.csv"
        for append in (False, True):
            self.fit(self.model(), logger(str(shared), append=append), logger(str(own), append=append))
        with shared.open() as one, own.open() as other:
            return list(csv.DictReader(one)), list(csv.DictReader(other))

    def tensorboard(self) -> Any:
        board = self.keras.callbacks.TensorBoard
        shared, own = self.root / "board", self.root / f"board{self.rank}"
        self.fit(self.model(), board(shared, histogram_freq=1), board(str(own)))
        return [self.events(folder) for folder in (shared, own)]

    def callbacks_of_some_workers(self) -> Any:
        """The chief logs to a file of its own as well, so its list is longer."""
        callbacks = [self.keras.callbacks.TensorBoard(self.root / "shared")]
        if dtrain.is_chief():
            callbacks.insert(0, self.keras.callbacks.CSVLogger(str(self.root / "chief.csv")))
            callbacks.append(self.keras.callbacks.ModelCheckpoint(self.root / "of-the-chief.keras"))
        self.fit(self.model(), *callbacks)
        return (
            self.events(self.root / "shared"),
            (self.root / "chief.csv").exists(),
            self.whole(self.root / "of-the-chief.keras"),
        )

    def saves(self) -> Any:
        """Many in a row without waiting for each other; what is read right after is whole every time."""
        random.seed(self.rank)
        model = self.model()
        self.fit(model, epochs=1)
        targets: list[tuple[Callable[[Path], Any], Path]] = [
            (model.save, self.root / "saved" / "model.keras"),
            (model.save, self.root / "saved" / "model.h5"),
            (model.save_weights, self.root / "saved" / "model.weights.h5"),
        ]
        broken = []
        for i in range(SAVES):
            for save, path in targets:
                try:
                    save(path)
                    if problem := self.whole(path):
                        broken.append((i, path.name, problem))
                except Exception as error:
                    broken.append((i, path.name, f"{type(error).__name__}: {error}"))
            time.sleep(random.random() / 100)  # wall clock: at most 0.01 s
        return broken, [self.differences(model, path) for _, path in targets]

    def exports(self) -> Any:
        import tensorflow as tf

        model = self.model()
        self.fit(model, epochs=1)
        folder = self.root / "exports" / "model"
        problems = []
        for i in range(4):
            try:
                model.export(folder, verbose=False)
                served = tf.saved_model.load(str(folder))
                difference = float(
                    np.abs(served.serve(self.x) - model.predict(self.x, batch_size=8, verbose=0)).max()
                )
                if difference > 1e-5:
                    problems.append((i, difference))
            except Exception as error:
                problems.append((i, f"{type(error).__name__}: {error}"))
                model.predict(self.x, batch_size=8, verbose=0)
        own = self.root / "exports" / f"own{self.rank}"
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            model.export(own)
        return problems, (own / "saved_model.pb").exists(), printed.getvalue()

    def only_the_chief(self) -> Any:
        model = self.model()
        self.fit(model, epochs=1)
        path, last = self.root / "chief.keras", self.root / "chief-export"
        if dtrain.is_chief():
            model.save(path)
            model.save_weights(self.root / "chief.weights.h5")
            model.export(last, verbose=False)
        while not last.exists():  # a save that waited for this worker would wait for ever
            time.sleep(0.01)
        return path.exists(), self.differences(model, path)

    def paths_of_their_own(self) -> Any:
        model = self.model()
        folder = self.root / "own" / f"worker{self.rank}" / "deep"
        model.save(folder / "model.keras")
        model.save_weights(str(folder / "model.weights.h5"))
        return [self.differences(model, p) for p in sorted(folder.iterdir())]

    def optimizer_state(self) -> Any:
        """A saved model goes on under the strategy where it was."""
        model = self.model()
        self.fit(model, epochs=1)
        path = self.root / "state.keras"
        model.save(path)
        with self.strategy.scope():
            loaded = self.keras.models.load_model(path)
        for trained in (model, loaded):
            self.fit(trained, epochs=1)
        pairs = zip(model.get_weights(), loaded.get_weights(), strict=True)
        return max(float(np.abs(a - b).max()) for a, b in pairs)

    def events(self, folder: Path) -> dict[str, int]:
        """How many writers TensorBoard's folder has had."""
        return {part: len(list((folder / part).glob("events*"))) for part in ("train", "validation")}

    def whole(self, path: Path) -> str:
        """What is wrong with a file, or nothing."""
        import h5py

        try:
            if path.suffix == ".keras":
                with zipfile.ZipFile(path) as archive:
                    bad = archive.testzip()
                    missing = {"config.json", "metadata.json", "model.weights.h5"} - set(archive.namelist())
                    return f"{bad} is broken" if bad else f"{missing} missing" if missing else ""
            with h5py.File(path) as file:
                return "" if len(file) else "empty"
        except Exception as error:
            return f"{type(error).__name__}: {error}"


CASES = [
    "checkpoints",
    "backup",
    "csv",
    "tensorboard",
    "callbacks_of_some_workers",
    "saves",
    "exports",
    "only_the_chief",
    "paths_of_their_own",
    "optimizer_state",
]


def work(root: Path, cases: list[str]) -> dict[str, Any]:
    worker = Worker(root)
    report = {}
    for case in cases:
        report[case] = getattr(worker, case)()
        dtrain.barrier()
    return report


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="module")
def reports(root: Path) -> list[dict[str, Any]]:
    return dtrain.spawn(work, workers=2, args=(root, CASES))


def test_checkpoints(reports: list[dict[str, Any]]) -> None:
    for rank, report in enumerate(reports):
        files, differences = report["checkpoints"]
        assert set(files.values()) == {""}, files
        by_epoch = {f"each/{epoch:02d}.keras" for epoch in range(1, EPOCHS + 1)}
        own = {f"own{rank}/{epoch}.keras" for epoch in range(1, EPOCHS + 1)}
        assert by_epoch | own | {"best.keras", "batches.keras"} <= set(files)
        weights = [name for name in files if name.startswith("weights/")]
        assert len(weights) == EPOCHS, weights
        assert differences[:3] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("kind", ["one folder", "a folder each"])
@pytest.mark.parametrize("end", ["deleted", "kept"])
def test_backup_and_restore(reports: list[dict[str, Any]], kind: str, end: str) -> None:
    for report in reports:
        interrupted, left, epochs, difference, files = report["backup"][f"{kind}, {end}"]
        assert interrupted
        assert left, "nothing was left to restore from"
        assert epochs == [2], "it should go on at the third epoch"
        assert difference == 0.0
        assert bool(files) == (end == "kept")


def test_csv_logger(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        shared, own = report["csv"]
        assert [int(row["epoch"]) for row in shared] == [*range(EPOCHS)] * 2
        assert shared == own
        assert {"loss", "mae", "val_loss", "val_mae"} <= set(shared[0])


def test_tensorboard(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        shared, own = report["tensorboard"]
        assert shared == {"train": 1, "validation": 1}
        assert own == {"train": 1, "validation": 1}


def test_callbacks_of_some_workers_only(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert report["callbacks_of_some_workers"] == ({"train": 1, "validation": 1}, True, "")


def test_saves_to_one_path_by_all_workers(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        broken, differences = report["saves"]
        assert broken == []
        assert differences == [0.0, 0.0, 0.0]


def test_exports_to_one_path_by_all_workers(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert report["exports"][:2] == ([], True)
    printed = [report["exports"][2].splitlines() for report in reports]
    assert [len(lines) for lines in printed] == [1] + [0] * (len(reports) - 1)
    assert "own0" in printed[0][0]


def test_a_save_that_only_the_chief_makes(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert report["only_the_chief"] == (True, 0.0)


def test_paths_that_differ_by_worker_are_all_written(reports: list[dict[str, Any]], root: Path) -> None:
    assert [report["paths_of_their_own"] for report in reports] == [[0.0, 0.0], [0.0, 0.0]]
    for rank in range(2):
        assert (root / "own" / f"worker{rank}" / "deep" / "model.keras").exists()
        assert (root / "checkpoints" / f"own{rank}" / f"{EPOCHS}.keras").exists()
        assert (root / "exports" / f"own{rank}" / "saved_model.pb").exists()
        assert (root / f"log{rank}.csv").exists()
        assert (root / f"board{rank}" / "train").exists()


def test_a_saved_model_goes_on_where_it_was(reports: list[dict[str, Any]]) -> None:
    assert [report["optimizer_state"] for report in reports] == [0.0, 0.0]


def test_nothing_but_the_files_is_left(reports: list[dict[str, Any]], root: Path) -> None:
    left = [str(p.relative_to(root)) for p in root.rglob("*") if p.name.startswith(".") or "tmp" in p.name]
    assert left == []
    assert not (root / "backup-True").exists()
