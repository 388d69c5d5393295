"""A training program that injects faults into itself as its options say, and writes its result.

Usage: python fault_program.py FOLDER OPTIONS [FOLDER OPTIONS ...], with options as JSON; see `Options`.
Several trainings are made one after another. Every start of a process appends a line to the first
FOLDER/lives, and every step of the first worker or the chief appends one to FOLDER/steps. The first process
writes the result.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import math
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fault_kinds import happen, once

EXAMPLES = 400
FEATURES = 12


@dataclass(frozen=True)
class Options:
    """The training and the faults to inject.

    Attributes:
        strategy: "one", "mirrored", "central_storage", "multi_worker", "fully_sharded" or "parameter_server".
        data: "arrays", "pipeline", "dataset" or "sequence" (a PyDataset).
        epochs: number of epochs.
        batch: global batch size.
        policy: the Keras dtype policy.
        accumulation: micro-batches in an update; 1 for no accumulation.
        xla: whether XLA compiles the step.
        save: arguments of BackupAndRestore without its folder; None trains without BackupAndRestore.
        settle: whether each step ends only when no checkpoint is being written, so that every save that is
            due is made, and the newest checkpoint at a fault is known.
        pause: seconds that each step takes at least, for faults that come at a random time.
        faults: dictionaries with `kind` (see `fault_kinds.happen`), `worker` and `step`. A fault happens
            once, at the end of the callbacks of its step (counted over all epochs), or for the step "after"
            when `fit` has returned; with `always`, after every start of the process; with `noted`, the step
            ends only when this process has got a preemption notice. A fault of the kind "data" is raised
            while data is read, at the batch number `item` that a process reads.
        learning_rate: the learning rate of Adam.
        dropout: the rate of the model's only dropout layer.
        normalize: whether the model has batch normalization, over each replica's part of a batch.
        backup: the folder of the checkpoints, relative to FOLDER.
        stop_after: the number of epochs after which EarlyStopping ends training, at least 2; 0 for no limit.
        over_mpi: whether the workers, each an MPI rank, also all-reduce a number over MPI at every step.
        hold: whether each step of the last epoch waits up to two seconds for a file FOLDER/go, and the last
            step until the file is there.
    """

    strategy: str = "one"
    data: str = "arrays"
    epochs: int = 3
    batch: int = 20
    policy: str = "mixed_float16"
    accumulation: int = 3
    xla: bool = False
    save: dict[str, Any] | None = field(default_factory=lambda: {"save_freq": 8})
    settle: bool = True
    pause: float = 0.0
    faults: list[dict[str, Any]] = field(default_factory=list)
    learning_rate: float = 0.01
    dropout: float = 0.3
    normalize: bool = True
    backup: str = "backup"
    stop_after: int = 0
    over_mpi: bool = False
    hold: bool = False


def main() -> None:
    """Make all trainings that the command line names."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger("dtrain").setLevel(logging.INFO)
    with Path(sys.argv[1], "lives").open("a") as lives:
        lives.write(f"{task()} {os.getpid()} {time.time():.3f}\n")
    for folder, options in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        train(Path(folder), Options(**json.loads(options)))


def train(folder: Path, options: Options) -> None:
    """Train, and write FOLDER/result.json."""
    strategy = make_strategy(options.strategy)

    import keras

    import dtrain

    keras.utils.set_random_seed(7)
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        model = make_model(options)
    patience = options.stop_after - 1
    callbacks: list[Any] = [
        keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=0.5),
        keras.callbacks.EarlyStopping("loss", patience=20, restore_best_weights=True),
        keras.callbacks.CSVLogger(str(folder / "log.csv")),
    ]
    if options.stop_after:
        callbacks.append(keras.callbacks.EarlyStopping("loss", patience=patience, min_delta=1e9))
    backup = None if options.save is None else make_backup(folder, options)
    if backup is not None:
        callbacks.insert(0, backup)
    callbacks.append(faults_of(folder, options, backup))
    x, y = arrays()
    data, arguments = data_of(folder, options, x, y)
    history = model.fit(
        data,
        epochs=options.epochs,
        validation_data=(x[:50], y[:50]),
        validation_batch_size=options.batch,
        callbacks=callbacks,
        verbose=0,
        **arguments,
    )
    result = {
        "weights": digest(model),
        "history": history.history,
        "epochs": history.epoch,
        "iterations": int(model.optimizer.iterations.numpy()),
        "values": [float(value) for weight in model.weights for value in weight.numpy().ravel()],
    }
    if dtrain.rank() == 0:
        unfinished = folder / "result.unfinished"
        unfinished.write_text(json.dumps(result))
        unfinished.replace(folder / "result.json")
    for number, fault in enumerate(options.faults):
        if fault.get("step") == "after" and fault.get("worker", "worker:0") == task():
            inject_fault(folder, options, number)


def task() -> str:
    """This process's task, such as `worker:0`."""
    own_task = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {"type": "worker", "index": 0})
    return f"{own_task['type']}:{own_task['index']}"


@functools.cache
def make_strategy(name: str) -> Any:
    """The strategy with this name; a process with several replicas gets two logical devices."""
    import dtrain

    if name == "one":
        return None
    if name in ("mirrored", "central_storage"):
        import tensorflow as tf

        device = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(device, [tf.config.LogicalDeviceConfiguration()] * 2)
        if name == "mirrored":
            return dtrain.MirroredStrategy(["CPU:0", "CPU:1"])
        return dtrain.CentralStorageStrategy(["CPU:0", "CPU:1"], "CPU:0")
    kind = {
        "multi_worker": dtrain.MultiWorkerMirroredStrategy,
        "fully_sharded": functools.partial(dtrain.FullyShardedStrategy, smallest=1),
        "parameter_server": dtrain.ParameterServerStrategy,
    }
    return kind[name]()


def make_model(options: Options) -> Any:
    """A small model with state that a restore could miss: dropout, moving statistics, moments, loss scale."""
    import keras

    keras.config.set_dtype_policy(options.policy)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((FEATURES,)),
            layers.Dense(32, activation="relu"),
            layers.Dropout(options.dropout),
            layers.BatchNormalization() if options.normalize else layers.Activation("linear"),
            layers.Dense(2, dtype="float32"),
        ]
    )
    steps = options.accumulation if options.accumulation > 1 else None
    optimizer = keras.optimizers.Adam(options.learning_rate, gradient_accumulation_steps=steps)
    model.compile(optimizer, loss_of_first, metrics=[Seen()], jit_compile=options.xla)
    return model


def loss_of_first(y_true: Any, y_pred: Any) -> Any:
    """The squared error of the first column; the second column holds the example's number."""
    from keras import ops

    return ops.square(y_true[:, 0] - y_pred[:, 0])


def Seen() -> Any:
    """A metric: how many examples were seen exactly once in the epoch."""
    import keras
    from keras import ops

    class SeenOnce(keras.metrics.Metric):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(name="seen_once", dtype="float32")
            self.counts = self.add_variable((EXAMPLES,), initializer="zeros", name="counts")

        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            numbers = ops.cast(y_true[:, 1], "int32")
            self.counts.assign_add(ops.sum(ops.one_hot(numbers, EXAMPLES, dtype="float32"), axis=0))

        def result(self) -> Any:
            return ops.sum(ops.cast(ops.equal(self.counts, 1.0), "float32"))

    return SeenOnce()


def arrays() -> tuple[Any, Any]:
    """Inputs, and targets with the example's number in a second column."""
    import numpy as np

    random = np.random.default_rng(0)
    x = random.normal(size=(EXAMPLES, FEATURES)).astype("float32")
    target = 2 * x[:, 0] - x[:, 1] + 3
    return x, np.stack([target, np.arange(EXAMPLES)], axis=1).astype("float32")


def data_of(folder: Path, options: Options, x: Any, y: Any) -> tuple[Any, dict[str, Any]]:
    """The shuffled training data for `fit`, and further arguments of `fit`."""
    import keras
    import tensorflow as tf

    import dtrain

    read = reader_of(folder, options)
    if options.data == "arrays":
        return x, {"y": y, "batch_size": options.batch}
    if options.data == "pipeline":
        return dtrain.data.Pipeline((x, y), batch=options.batch, seed=3).dataset(), {}
    if options.data == "dataset":
        dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(EXAMPLES, seed=5).batch(options.batch)
        if any(fault["kind"] == "data" for fault in options.faults):
            dataset = dataset.map(
                lambda a, b: (tf.ensure_shape(tf.numpy_function(read, [a], a.dtype), a.shape), b)
            )
        return dataset, {}

    class Sequence(keras.utils.PyDataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return -(-EXAMPLES // options.batch)

        def __getitem__(self, index: int) -> Any:
            rows = slice(index * options.batch, (index + 1) * options.batch)
            return read(x[rows]), y[rows]

    return Sequence(), {"shuffle": True}


def reader_of(folder: Path, options: Options) -> Any:
    """A function that every batch passes through as it is read; it injects the faults of the kind "data"."""
    count = 0

    def read(batch: Any) -> Any:
        nonlocal count
        count += 1
        for number, fault in enumerate(options.faults):
            at = fault["kind"] == "data" and fault["item"] == count
            if at and fault.get("worker", "worker:0") == task():
                inject_fault(folder, options, number)
        return batch

    return read


def make_backup(folder: Path, options: Options) -> Any:
    """A BackupAndRestore that can also be asked what its session knows."""
    import dtrain

    class Backup(dtrain.BackupAndRestore):
        def dtrain_session(self, model: Any, arguments: dict[str, Any]) -> Any:
            self.session = super().dtrain_session(model, arguments)
            return self.session

        def settle(self) -> None:
            """Waits until this process writes no checkpoint: it is committed, or has failed."""
            self.session._folder.store.wait()

        def wait_for_notice(self) -> None:
            """Waits until this process has got a preemption notice."""
            while not self.session._notices.noted:
                time.sleep(0.02)

    return Backup(folder / options.backup, **options.save)


def faults_of(folder: Path, options: Options, backup: Any) -> Any:
    """A callback that injects faults into this process at their steps."""
    import keras

    me = task()
    per_epoch = -(-EXAMPLES // options.batch)
    last = options.epochs * per_epoch

    class Faults(keras.callbacks.Callback):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.step = 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.step += 1
            if me in ("worker:0", "chief:0"):
                with (folder / "steps").open("a") as steps:
                    steps.write(f"{os.getpid()} {self.step} {time.time()}\n")
            if options.over_mpi:
                add_up_over_mpi(self.step)
            if options.settle and backup is not None:
                backup.settle()
            if options.pause:
                time.sleep(options.pause)  # wall clock: a kill of chaos comes at any time
            if options.hold and self.step > last - per_epoch:
                wait_for_file(folder / "go", limit=math.inf if self.step == last else 2.0)
            for number, fault in enumerate(options.faults):
                if fault.get("step") == self.step and fault.get("worker", "worker:0") == me:
                    inject_fault(folder, options, number, backup)

    return Faults()


@functools.cache
def everyone_of_mpi() -> Any:
    """An MPI communicator of all ranks, separate from the one that a transport may use."""
    from dtrain.environments import mpi_start

    return mpi_start.world().Dup()


def add_up_over_mpi(step: int) -> None:
    """All-reduce the step's number over MPI, and assert that all workers are at the same step."""
    everyone = everyone_of_mpi()
    assert everyone.allreduce(step) == step * everyone.Get_size()


def wait_for_file(path: Path, limit: float) -> None:
    """Wait until a file exists, at most `limit` seconds."""
    deadline = time.monotonic() + limit
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)


def inject_fault(folder: Path, options: Options, number: int, backup: Any = None) -> None:
    """Inject a fault, unless it has happened before; with `always`, in any case."""
    fault = options.faults[number]
    if once(folder, number, folder / options.backup) or fault.get("always"):
        lives = Path(sys.argv[1]) / "lives"
        happen(fault, folder / options.backup, lives)
        if fault.get("noted"):
            backup.wait_for_notice()


def digest(model: Any) -> str:
    """A hash of all bits of weights, moving statistics, moments and counters."""
    hasher = hashlib.sha256()
    for variable in [*model.variables, *model.optimizer.variables]:
        hasher.update(variable.numpy().tobytes())
    return hasher.hexdigest()


if __name__ == "__main__":
    main()
