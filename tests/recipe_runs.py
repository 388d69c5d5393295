"""Runs the built-in recipes on small archives, several in one process; with helpers to start and read them.

    python tests/recipe_runs.py FOLDER TASK:STRATEGY ...
    dtrain launch --workers 2 [--ps 1] tests/recipe_runs.py FOLDER TASK:STRATEGY ...

FOLDER holds `data/`; each run writes the directory FOLDER/TASK-STRATEGY.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any, NamedTuple

TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "digits": ("digits", {}),
    "cifar10": (
        "cifar10",
        {
            "model": "small",
            "accumulation": 2,
            "global_batch": 32,
            "scaling": "sqrt",
            "base_batch": 16,
            "warmup": 0.5,
        },
    ),
    "cifar10-resnet": ("cifar10", {"width": 8, "limit": 100, "global_batch": 16}),
    "imdb": ("imdb", {"global_batch": 16}),
    "imdb-transformer": ("imdb", {"model": "transformer", "sequence_length": 12, "global_batch": 16}),
    "text-csv": ("text-csv", {"global_batch": 16}),
    "text-csv-transformer": (
        "text_csv",
        {"model": "transformer", "limit": 60, "precision": "mixed_bfloat16", "global_batch": 16},
    ),
    "synthetic-cnn": ("synthetic", {"size": 120, "image_size": 16, "width": 16, "global_batch": 16}),
    "synthetic-transformer": (
        "synthetic",
        {
            "model": "transformer",
            "size": 96,
            "sequence_length": 12,
            "vocabulary": 200,
            "width": 16,
            "global_batch": 16,
        },
    ),
}
"""For each task the recipe's name, and its options except for epochs, data and directory."""


class Run(NamedTuple):
    """A finished run, read from its files."""

    path: Path

    @property
    def record(self) -> dict[str, Any]:
        return json.loads((self.path / "run.json").read_text(encoding="utf-8"))

    @property
    def losses(self) -> list[float]:
        with (self.path / "metrics.csv").open(encoding="utf-8") as file:
            return [float(row["loss"]) for row in csv.DictReader(file)]


def start(folder: Path, tasks: list[str], *launch: str, timeout: float = 600.0) -> None:
    """Run the tasks, under `dtrain launch` if arguments for it are given; a failure shows the log's end."""
    launcher = [sys.executable, "-m", "dtrain", "launch", *launch] if launch else [sys.executable]
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "-1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "DTRAIN_DATA_DIR": str(folder / "data"),
    }
    if not launch:
        environment["DTRAIN_DEVICES_PER_WORKER"] = "2"
    environment.pop("TF_CONFIG", None)
    log = folder / "log.txt"
    with log.open("w", encoding="utf-8") as file:
        # At the limit the launcher gets SIGTERM, on which it ends its tasks.
        process = subprocess.Popen(
            [*launcher, __file__, str(folder), *tasks], env=environment, cwd=folder, stdout=file, stderr=file
        )
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.terminate()
            status = process.wait()
    assert status == 0, f"status {status}\n{log.read_text(encoding='utf-8', errors='replace')[-5000:]}"


def run_task(folder: Path, name: str, strategy: str) -> None:
    """Run one recipe under one strategy, as a user's program does."""
    from dtrain.recipes import RECIPES, check_recipe, load_recipe

    recipe, settings = TASKS[name]
    options = {"epochs": 2, "seed": 5, **settings}
    if recipe.startswith("text"):
        options["data"] = str(folder / "data" / "news.csv")
    run_dir = str(folder / f"{name}-{strategy}")
    kind = RECIPES[check_recipe(recipe)].options
    print(load_recipe(recipe).train(kind(strategy=strategy, run_dir=run_dir, **options)))


def main(folder: str, *tasks: str) -> None:
    import keras

    for task in tasks:
        name, strategy = task.split(":")
        keras.utils.clear_session()
        try:
            run_task(Path(folder), name, strategy)
        except Exception:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)  # the other workers of this task wait for this one


if __name__ == "__main__":
    main(*sys.argv[1:])
