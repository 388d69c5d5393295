"""Workers that are killed or stopped at a named step: evaluation stays exact, and training goes on.

These need a launcher that starts a worker again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import dtrain
from dtrain.process_group import serving

from .common import BATCH, CLASSES, ROWS, STEPS, Examples, data, iterations
from .registry import Job, case


def status(worker: int) -> dict[str, Any]:
    """What a worker says of itself; nothing if it is not there, or does not answer in time."""
    return serving.ask("worker", worker, {"ask": "status"}, 5.0) or {}


def present(worker: int) -> dict[str, Any]:
    """What a worker that is there says of itself, however long it takes."""
    while not (found := status(worker)):
        pass
    return found


def wait_until_back(worker: int, before: dict[str, Any]) -> None:
    """Until another process has taken a worker's place."""
    while status(worker).get("incarnation", before["incarnation"]) == before["incarnation"]:
        time.sleep(0.05)


def workers_with_blocks(function: Any) -> list[int | None]:
    """The worker of each block of a train or test function that is in flight; None where none has it yet."""
    return [block.worker for run in [*function._runs] for block in run.session.runner.in_flight]


class AtBatch(keras.callbacks.Callback):
    """Sends a worker a signal at the end of a batch of training or of a test."""

    def __init__(self, worker: int, batch: int, number: int = signal.SIGKILL) -> None:
        super().__init__()
        self.worker, self.batch, self.number = worker, batch, number
        self.before: dict[str, Any] = {}
        self.busy: list[int | None] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.busy += workers_with_blocks(self.model.train_function)
        self._at(batch)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self._at(batch)

    def _at(self, batch: int) -> None:
        if batch == self.batch and not self.before:
            self.before = present(self.worker)
            os.kill(self.before["pid"], self.number)
            self.busy.clear()


@contextlib.contextmanager
def killed_in_a_block(function: Any, worker: int) -> Iterator[threading.Event]:
    """Kills a worker as soon as it is at a block of a train or test function, and yields whether it has."""
    pid = present(worker)["pid"]
    killed, over = threading.Event(), threading.Event()

    def watch() -> None:
        while not over.wait(0.001):
            if worker in workers_with_blocks(function):
                os.kill(pid, signal.SIGKILL)
                killed.set()
                return

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield killed
    finally:
        over.set()
        thread.join()


def slow_classifier(strategy: Any) -> Any:
    """A classifier whose steps take long enough to be in the middle of one."""
    with strategy.scope():
        inputs = keras.Input((10,))
        wide = keras.layers.Dense(600, "tanh", trainable=False)(inputs)
        for _ in range(12):
            wide = keras.layers.Dense(600, "tanh", trainable=False)(wide)
        model = keras.Model(inputs, keras.layers.Dense(CLASSES)(wide))
        model.compile(
            optimizer=keras.optimizers.SGD(0.01),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy"), Examples()],
        )
    return model


@case
def evaluation_is_exact_whoever_dies(job: Job) -> None:
    x, y = data()
    model = slow_classifier(job.strategy)
    outputs = model.predict(x, verbose=0)
    loss = float(keras.losses.SparseCategoricalCrossentropy(from_logits=True)(y, outputs))
    accuracy = float(np.mean(np.argmax(outputs, axis=1) == y))

    def evaluate(*callbacks: Any) -> None:
        found = model.evaluate(x, y, batch_size=8, callbacks=[*callbacks], verbose=0, return_dict=True)
        assert found["examples"] == ROWS, found
        np.testing.assert_allclose([found["loss"], found["accuracy"]], [loss, accuracy], rtol=1e-5)

    for worker, batch in ((0, 5), (1, 6), (0, 7)):
        before = present(worker)
        evaluate(AtBatch(worker, batch))
        wait_until_back(worker, before)
    for worker in (1, 0):
        before = present(worker)
        with killed_in_a_block(model.test_function, worker) as killed:
            while not killed.is_set():
                evaluate()
        wait_until_back(worker, before)
    for _ in range(15):
        evaluate()


@case
def training_goes_on_and_the_worker_takes_work_again(job: Job) -> None:
    x, y = data()
    model = slow_classifier(job.strategy)
    model.fit(x, y, batch_size=BATCH, verbose=0)
    kill = AtBatch(worker=1, batch=3)
    done = STEPS
    while 1 not in kill.busy or status(1).get("pid", kill.before["pid"]) == kill.before["pid"]:
        history = model.fit(x, y, batch_size=BATCH, callbacks=[kill], verbose=0).history
        done += STEPS
        # Metrics are counted when a block comes back, so once; a block that was lost may have updated
        # the servers before it was.
        assert history["examples"] == [ROWS], history
        assert done <= iterations(model) <= done + 1
        assert np.isfinite(history["loss"][0])
        if 1 in kill.busy and status(1).get("pid", kill.before["pid"]) == kill.before["pid"]:
            kill.busy.clear()


@case
def a_stopped_worker_is_started_again(job: Job) -> None:
    x, y = data()
    model = slow_classifier(job.strategy)
    model.fit(x, y, batch_size=BATCH, verbose=0)
    stop = AtBatch(worker=1, batch=3, number=signal.SIGSTOP)
    history = model.fit(x, y, batch_size=BATCH, epochs=2, callbacks=[stop], verbose=0).history
    assert history["examples"] == [ROWS, ROWS], history
    assert 3 * STEPS <= iterations(model) <= 3 * STEPS + 1
    wait_until_back(1, stop.before)


@case
def an_update_is_whole_when_its_worker_dies(job: Job) -> None:
    dies_in_a_block(job.strategy)


@case
def an_overlapped_update_is_whole_when_its_worker_dies(job: Job) -> None:
    dies_in_a_block(dtrain.ParameterServerStrategy(overlap=True))


def dies_in_a_block(strategy: Any) -> None:
    """A block may be done twice, but never half an update."""
    from .numbers import slope

    x = np.ones((16 * 400, 2), "float32")
    model = slope(strategy, lambda: keras.optimizers.SGD(1.0, momentum=0.0))
    model.fit(x[:320], x[:320], batch_size=16, verbose=0)
    before, done = present(0), 20
    with killed_in_a_block(model.train_function, 0) as killed:
        while not killed.is_set():
            model.fit(x, x, batch_size=16, verbose=0)
            done += 400
    steps = iterations(model)
    assert steps >= done
    for part in model.parts:
        np.testing.assert_array_equal(part.numpy(), np.full(part.shape, -float(steps), "float32"))
    wait_until_back(0, before)


@case
def a_question_to_a_lost_worker_is_nobody_elses_error(job: Job) -> None:
    """A worker that dies while it is asked something neither holds up nor stops the chief's own reading."""
    before = present(1)
    # TensorFlow tells all workers of the first operation of each kind, and waits for them: not one of those.
    numbers = iter(tf.data.Dataset.range(1 << 40))
    read = [int(next(numbers)), int(next(numbers))]
    os.kill(before["pid"], signal.SIGSTOP)
    assert serving.ask("worker", 1, {"ask": "status"}, 1.0) is None
    asking = threading.Thread(target=status, args=(1,))
    asking.start()
    read += [int(next(numbers)) for _ in range(1000)]
    os.kill(before["pid"], signal.SIGKILL)
    while status(1).get("incarnation", before["incarnation"]) == before["incarnation"]:
        read.append(int(next(numbers)))
    asking.join()
    assert read == list(range(len(read)))
    assert int(next(numbers)) == len(read)
