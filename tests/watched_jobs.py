"""Runs a job whose worker gets stuck or slow at a given step, by the real launcher; records its output."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

PROGRAM = '''
import ctypes, hashlib, os, signal, sys, threading, time
import keras
import numpy as np
import tensorflow as tf
import dtrain
from dtrain.environments import settings

folder, kind, *numbers, pause = sys.argv[1:]
(rank_at_fault, step_at_fault, steps), pause = map(int, numbers), float(pause)
named = os.path.join(os.path.dirname(__file__), "named")
print("attempt", settings.attempt(), flush=True)
strategy = dtrain.strategy("multi_worker" if dtrain.world_size() > 1 else "one_device")
rank, first = dtrain.rank(), settings.attempt() == 0
keras.utils.set_random_seed(7)
rng = np.random.default_rng(0)
rows = 1024 if kind == "slow_process" else 32  # there, computing takes longer than talking
data = rng.random((rows, 16), np.float32), rng.integers(0, 4, rows)


def stop():
    """What goes wrong, once."""
    print(f"fault {os.getpid()}", flush=True)
    if kind == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "deadlock":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    elif kind == "python_lock":
        # A signal ends a sleep, but not the wait for a mutex.
        mutex, libc = ctypes.create_string_buffer(64), ctypes.PyDLL(None)
        libc.pthread_mutex_lock(mutex)
        libc.pthread_mutex_lock(mutex)
    elif kind == "reader":
        threading.Event().wait()


def be_slow():
    """Until the launcher has named the slow worker."""
    if rank == rank_at_fault and not os.path.exists(named):
        time.sleep(pause)  # wall clock: a slow worker is what is found


def batches():
    for number in range(steps):
        if (kind, rank, first, number) == ("reader", rank_at_fault, True, step_at_fault):
            stop()
        if kind == "slow_reader":
            be_slow()
        yield data


class Fault(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if kind in ("stopped", "deadlock", "python_lock"):
            if (rank, first, batch + 1) == (rank_at_fault, True, step_at_fault):
                stop()
        if kind == "slow_callback":
            be_slow()
        if kind == "slow_process" and batch == 20 and rank == rank_at_fault:
            print(f"fault {os.getpid()}", flush=True)


with strategy.scope():
    model = keras.Sequential([keras.Input((16,)), *(keras.layers.Dense(256, "relu") for _ in range(3))])
    model.add(keras.layers.Dense(4))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
specs = tf.TensorSpec((rows, 16), tf.float32), tf.TensorSpec((rows,), tf.int64)
dataset = tf.data.Dataset.from_generator(batches, output_signature=specs)
backup = [dtrain.BackupAndRestore(folder, save_freq=8)] if folder else []
model.fit(dataset, epochs=1, steps_per_epoch=steps, verbose=0, callbacks=[Fault(), *backup])
weights = b"".join(each.tobytes() for each in model.get_weights())
print(f"ended {hashlib.sha256(weights).hexdigest()}", flush=True)
'''

HANGS = ("--hang-timeout", "10", "--spares", "none")
"""Options of `dtrain launch` for a hang: the timeout is longer than the pauses of a busy machine."""


class Watched:
    """The exit status and the output of a job.

    Attributes:
        status: its exit status.
        lines: the lines of its standard output and standard error.
    """

    def __init__(self, status: int, lines: list[str]) -> None:
        self.status = status
        self.lines = lines

    @property
    def text(self) -> str:
        """The whole output."""
        return "\n".join(self.lines)

    def first(self, pattern: str) -> str:
        """The first line that matches a pattern; AssertionError without one."""
        for line in self.lines:
            if re.search(pattern, line):
                return line
        raise AssertionError(f"no line with {pattern!r} in\n{self.text}")

    def attempts(self) -> list[int]:
        """The attempt of each start of a task, in order."""
        return sorted(map(int, re.findall(r"\] attempt (\d+)", self.text)))

    def digests(self) -> set[str]:
        """The digests of the final weights of all tasks that ended."""
        return set(re.findall(r"ended (\w{64})", self.text))

    def stacks(self, task: str) -> str:
        """The stack dumps of all threads of a task."""
        own = [line for line in self.lines if line.startswith(f"[{task}] ")]
        begin = next((i for i, text in enumerate(own) if "most recent call first" in text), len(own))
        return "\n".join(own[begin:])


def run(
    folder: Path,
    kind: str,
    *,
    workers: int = 2,
    at: tuple[int, int] = (1, 20),
    steps: int = 30,
    pause: float = 0.0,
    options: tuple[str, ...] = HANGS,
    on_line: Callable[[str], None] = lambda text: None,
) -> Watched:
    """Launch the program and wait for its end.

    Args:
        folder: the folder for the program and its checkpoints.
        kind: the kind of fault; "nothing" for a run without one.
        workers: number of workers.
        at: the worker and the step of the fault.
        steps: number of training steps.
        pause: seconds by which each step of a slow worker is longer, until there is a file `named` in the
            folder.
        options: options of `dtrain launch`.
        on_line: called with every line as it arrives.
    """
    program = folder / "job.py"
    program.write_text(PROGRAM)
    arguments = [str(folder / "checkpoints"), kind, *map(str, (*at, steps, pause))]
    command = [sys.executable, "-m", "dtrain", "launch", "--workers", str(workers), *options, str(program)]
    job = subprocess.Popen(
        [*command, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
        start_new_session=True,
    )
    lines = []
    try:
        if job.stdout is None:
            raise RuntimeError("subprocess made no pipe")
        for text in job.stdout:
            lines.append(text.rstrip("\n"))
            on_line(text)
        return Watched(job.wait(), lines)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
