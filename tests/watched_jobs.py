"""Runs a job whose worker gets stuck or slow at a given step, by the real launcher; records its output."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

PROGRAM = '''
import ctypes, hashlib, os, signal, sys, threading, time
import keras
import numpy as np
import tensorflow as tf
import dtrain
from dtrain.cluster import settings

folder, kind, *numbers, pause = sys.argv[1:]
(rank_at_fault, step_at_fault, steps), pause = map(int, numbers), float(pause)
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


def batches():
    for number in range(steps):
        if (kind, rank, first, number) == ("reader", rank_at_fault, True, step_at_fault):
            stop()
        if kind == "slow_reader" and rank == rank_at_fault:
            time.sleep(pause)
        yield data


class Fault(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if kind in ("stopped", "deadlock", "python_lock"):
            if (rank, first, batch + 1) == (rank_at_fault, True, step_at_fault):
                stop()
        if kind == "slow_callback" and rank == rank_at_fault:
            time.sleep(pause)
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


class Line(NamedTuple):
    """A line of the launcher's output, and the monotonic time at which it arrived."""

    at: float
    text: str


class Watched:
    """The exit status and the output of a job.

    Attributes:
        status: its exit status.
        lines: the lines of its standard output and standard error.
    """

    def __init__(self, status: int, lines: list[Line]) -> None:
        self.status = status
        self.lines = lines

    @property
    def text(self) -> str:
        """The whole output."""
        return "\n".join(line.text for line in self.lines)

    def first(self, pattern: str) -> Line:
        """The first line that matches a pattern; AssertionError without one."""
        for line in self.lines:
            if re.search(pattern, line.text):
                return line
        raise AssertionError(f"no line with {pattern!r} in\n{self.text}")

    def digests(self) -> set[str]:
        """The digests of the final weights of all tasks that ended."""
        return set(re.findall(r"ended (\w{64})", self.text))

    def stacks(self, task: str) -> str:
        """The stack dumps of all threads of a task."""
        own = [line.text for line in self.lines if line.text.startswith(f"[{task}] ")]
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
    options: tuple[str, ...] = ("--hang-timeout", "5", "--spares", "none"),
    on_line: Callable[[str], None] = lambda text: None,
    limit: float = 200.0,
) -> Watched:
    """Launch the program and wait for its end.

    Args:
        folder: the folder for the program and its checkpoints.
        kind: the kind of fault; "nothing" for a run without one.
        workers: number of workers.
        at: the worker and the step of the fault.
        steps: number of training steps.
        pause: seconds by which each step of a slow worker is longer.
        options: options of `dtrain launch`.
        on_line: called with every line as it arrives.
        limit: seconds after which the job gets SIGTERM.
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
    alarm = _after(limit, lambda: os.killpg(job.pid, signal.SIGTERM))
    try:
        if job.stdout is None:
            raise RuntimeError("subprocess made no pipe")
        for text in job.stdout:
            lines.append(Line(time.monotonic(), text.rstrip("\n")))
            on_line(text)
        return Watched(job.wait(timeout=30), lines)
    finally:
        alarm()
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()


def _after(seconds: float, action: Callable[[], None]) -> Callable[[], None]:
    """Call `action` after some seconds; the returned function cancels the call."""
    timer = threading.Timer(seconds, action)
    timer.daemon = True
    timer.start()
    return timer.cancel
