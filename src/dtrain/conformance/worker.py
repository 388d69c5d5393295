"""One process of a conformance run: makes the strategy, runs the programs in order, writes a file for each.

A process that hangs ends itself after the time limit. `verdicts` evaluates the files.
Usage: python -m dtrain.conformance.worker STRATEGY SIDE FOLDER SECONDS PROGRAM ...
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

from dtrain import environments
from dtrain.conformance.corpus import ProgramRun, find
from dtrain.conformance.strategy_layouts import LAYOUTS, STOCK, make_strategy
from dtrain.environments.topology import Task

ALL_DONE = 9
"""The exit status of a worker that has run all programs; not 0, so that the launcher ends the other tasks."""

RESTART = 8
"""The exit status of a worker after an error that may have broken its connections."""

READY = "ready"
START_SECONDS = 240.0
_LAG = 8.0  # seconds that a worker whose program failed waits for the results of its peers
_SEED = 1234
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_INSTALLED = re.compile(r"/\S*/site-packages/")  # says nothing to a reader on another machine


def main(name: str, side: str, folder: Path, limit: float, programs: list[str]) -> int:
    """Run the programs; returns the exit status."""
    faulthandler.dump_traceback_later(START_SECONDS, exit=True)
    strategy = make_strategy(name, side)
    topology = environments.current()
    task = topology.task if topology is not None else LAYOUTS[name].tasks[0]
    peers = [peer for peer in LAYOUTS[name].tasks if LAYOUTS[name].trains(peer)]
    (folder / READY).touch()
    for program in programs:
        faulthandler.dump_traceback_later(limit, exit=True)
        error, fatal = _run(
            program, ProgramRun(strategy, folder / "files" / program), result(folder, program, task)
        )
        deadline = time.monotonic() + (_LAG if error else limit)
        while not all(result(folder, program, peer).exists() for peer in peers):
            if time.monotonic() > deadline:
                return RESTART  # a peer may be waiting for this worker inside the program
            time.sleep(0.01)
        failed = [peer for peer in peers if _failed(result(folder, program, peer))]
        if fatal or (failed and len(failed) < len(peers)):
            return RESTART
        if side == STOCK:
            _check_stock()
    return ALL_DONE


def result(folder: Path, program: str, task: Task) -> Path:
    """The file to which a task writes a program's result: NumPy arrays, or an error as JSON."""
    return folder / f"{program}.{task.job}-{task.index}.npz"


def _failed(file: Path) -> bool:
    with file.open("rb") as opened:
        return opened.read(1) == b"{"


def _run(program: str, run: ProgramRun, file: Path) -> tuple[str, bool]:
    """Run one program from a clean state; returns its error, and whether the process should end."""
    import keras
    import numpy as np
    import tensorflow as tf

    keras.config.set_dtype_policy("float32")
    keras.utils.clear_session()
    gc.freeze()  # `clear_session` collects garbage, and need not look at TensorFlow's own objects each time
    keras.utils.set_random_seed(_SEED)
    run.folder.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".unfinished")
    try:
        values = find(program)(run)
    except Exception as exception:
        error = f"{type(exception).__name__}: {informative_line(str(exception))}"
        unfinished.write_text(json.dumps({"error": error}))
        fatal = isinstance(exception, tf.errors.OpError) and not isinstance(
            exception, tf.errors.NotFoundError
        )
    else:
        error, fatal = "", False
        arrays: dict[str, Any] = {key: np.asarray(value) for key, value in values.items()}
        with unfinished.open("wb") as opened:
            np.savez(opened, **arrays)
    unfinished.replace(file)
    return error, fatal


def informative_line(message: str) -> str:
    """The line of an error that says what is wrong; the error of a failed graph begins with locations."""
    lines = [_COLOUR.sub("", line).strip() for line in message.splitlines() if line.strip()] or [""]
    where = (
        "Graph execution",
        "Detected at",
        "File ",
        "<stack",
        "...",
        "in user code",
        "Exception encountered",
    )
    causes = [line for line in lines if line.startswith("(0) ")]
    if not causes and lines[0].startswith("in user code"):
        causes = [line.partition(": ")[2] for line in lines if "Error: " in line.split("(")[0]]
    causes += [line for line in lines if not line.startswith(where) and "root error(s)" not in line]
    return _INSTALLED.sub("", (causes or lines)[0])[:300]


def _check_stock() -> None:
    """Make sure that the stock side is stock: no part of dtrain that changes Keras has been imported.

    Raises:
        RuntimeError: one has been.
    """
    ours = [module for module in sys.modules if module.startswith(("dtrain.engine", "dtrain.strategies"))]
    if ours:
        raise RuntimeError(f"the stock side has imported {ours[0]}")


if __name__ == "__main__":
    arguments: list[Any] = sys.argv[1:]
    status = main(arguments[0], arguments[1], Path(arguments[2]), float(arguments[3]), arguments[4:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # workers may wait for each other at exit; all results are on the disk
