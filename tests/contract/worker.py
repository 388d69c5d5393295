"""One process of a contract run: makes the strategy once, then runs the programs that it is given.

It reads program names from standard input, one a line, and leaves one pickle a program, so that the process
that drives it can tell a slow program from a stuck one and go on after a crash.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import pickle
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from tests.programs.registry import Env, find
from tests.programs.strategies import LAYOUTS

from .mpi_starter import mpi_rank

SEED = 1234


def start(name: str, communication: str | None = None) -> Any:
    """Configure the devices and make the strategy, checking that it has the replicas that it should."""
    import tensorflow as tf

    import dtrain

    layout = LAYOUTS[name]
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * layout.devices)
    # One thread an operation: the machine's cores belong to the replicas, and sums keep one order.
    tf.config.threading.set_intra_op_parallelism_threads(1)
    # Only strategies of several workers choose how values travel.
    chosen = {} if communication is None else {"communication": communication}
    strategy = layout.make(dtrain, **chosen)
    if strategy.num_replicas_in_sync != layout.replicas:
        raise RuntimeError(f"{name} has {strategy.num_replicas_in_sync} replicas, not {layout.replicas}")
    return strategy


def informative_line(message: str) -> str:
    """The line that says what is wrong: a failed graph's message begins with where, at length."""
    lines = [line.strip() for line in message.splitlines() if line.strip()] or [""]
    where = ("Graph execution error", "Detected at node", "File ", "<stack", "...")
    found = [line for line in lines if line.startswith("(0) ")]
    found += [line for line in lines if not line.startswith(where) and "root error(s)" not in line]
    return (found or lines)[0]


def run(name: str, env: Env) -> dict[str, Any]:
    """Run one program from a clean state and describe what came out of it."""
    import keras
    import numpy as np
    import tensorflow as tf

    keras.config.set_dtype_policy("float32")
    keras.config.set_floatx("float32")
    keras.utils.clear_session()
    # It collects garbage before every program: walking TensorFlow's own objects again each time would take
    # longer than most programs do.
    gc.freeze()
    keras.utils.set_random_seed(SEED)
    env.tmp.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    report: dict[str, Any] = {"status": "ok", "values": {}, "error": "", "traceback": "", "fatal": False}
    try:
        values = find(name)(env) or {}
        report["values"] = {key: np.asarray(value) for key, value in values.items()}
    except Exception as error:
        report |= {
            "status": "error",
            "error": f"{type(error).__name__}: {informative_line(str(error))[:300]}",
            "traceback": traceback.format_exc(),
            # A failed operation may have aborted the collectives of the process for good.
            "fatal": isinstance(error, tf.errors.OpError) and not isinstance(error, tf.errors.NotFoundError),
        }
    report["seconds"] = time.monotonic() - begun
    return report


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", required=True)
    parser.add_argument("--communication")
    parser.add_argument("--rank", type=int, help="this worker's number; without it, an MPI starter gives it")
    parser.add_argument("--cluster", type=json.loads, help="the workers' addresses, where started by MPI")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()

    commands = sys.stdin
    if options.rank is None:
        options.rank = mpi_rank()
        task = {"type": "worker", "index": options.rank}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": options.cluster, "task": task})
        with (options.out / f"log.{options.rank}.txt").open("ab") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        # Opened for both, so that it does not end when whoever wrote to it closes it.
        commands = os.fdopen(os.open(options.out / f"pipe.{options.rank}", os.O_RDWR))
    strategy = start(options.strategy, options.communication)
    if options.communication is not None and strategy.dtrain_communication.name != options.communication:
        raise RuntimeError(f"values travel by {strategy.dtrain_communication}")
    ready = options.out / f"ready.{options.rank}"
    unfinished = options.out / f"unfinished-ready.{options.rank}"
    unfinished.write_text(str(os.getpid()))
    unfinished.replace(ready)
    for line in commands:
        name = line.strip()
        env = Env(
            strategy=strategy,
            tmp=options.out / "tmp" / name,
            rank=options.rank,
            workers=LAYOUTS[options.strategy].workers,
        )
        report = run(name, env)
        done = options.out / f"{name}.{options.rank}.pickle"
        partial = done.with_suffix(".partial")
        partial.write_bytes(pickle.dumps(report))
        partial.replace(done)
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    # Strategies of several workers may wait for each other at exit; all results are on disk already.
    os._exit(0)


if __name__ == "__main__":
    main()
