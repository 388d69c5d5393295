"""A training program that tests break: it trains, hurts itself as it was told, and writes what came of it.

Usage: python fault_program.py FOLDER OPTIONS, with options as JSON; see `Options`. Every life of every
process leaves a line in FOLDER/lives. The result is that of the first process.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

EXAMPLES = 400
FEATURES = 12


@dataclass(frozen=True)
class Options:
    """What to train, and what shall happen.

    Attributes:
        strategy: "one", "mirrored", "central_storage", "multi_worker" or "parameter_server".
        data: "arrays", "pipeline", "dataset" or "sequence" (a PyDataset).
        epochs, batch: as `fit` takes them.
        policy: what is computed in.
        accumulation: micro-batches of an update; 1 for none.
        xla: whether the step is compiled.
        save: arguments of BackupAndRestore beside its folder; None trains without it.
        pause: seconds that each step takes at least.
        faults: each a dictionary with `kind`, `worker` and `step`, and happens once: at the end of the
            step's callbacks, counted over all epochs; with `always` in every life.
        learning_rate: of Adam.
    """

    strategy: str = "one"
    data: str = "arrays"
    epochs: int = 3
    batch: int = 20
    policy: str = "mixed_float16"
    accumulation: int = 3
    xla: bool = False
    save: dict[str, Any] | None = field(default_factory=lambda: {"save_freq": 8})
    pause: float = 0.0
    faults: list[dict[str, Any]] = field(default_factory=list)
    learning_rate: float = 0.01


def main() -> None:
    """Train, and write FOLDER/result.json."""
    folder, options = Path(sys.argv[1]), Options(**json.loads(sys.argv[2]))
    with (folder / "lives").open("a") as lives:
        lives.write(f"{task()} {os.getpid()} {time.time():.3f}\n")
    strategy = make_strategy(options.strategy)

    import keras

    import dtrain

    keras.utils.set_random_seed(7)
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        model = make_model(options)
    callbacks: list[Any] = [
        keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=0.5),
        keras.callbacks.EarlyStopping("loss", patience=20, restore_best_weights=True),
        keras.callbacks.CSVLogger(str(folder / "log.csv")),
        faults_of(folder, options),
    ]
    if options.save is not None:
        callbacks.insert(0, dtrain.BackupAndRestore(folder / "backup", **options.save))
    x, y = arrays()
    train, arguments = data_of(options, x, y)
    history = model.fit(
        train,
        epochs=options.epochs,
        validation_data=(x[:50], y[:50]),
        validation_batch_size=options.batch,
        callbacks=callbacks,
        verbose=0,
        **arguments,
    )
    if dtrain.rank() == 0:
        result = {
            "weights": digest(model),
            "history": history.history,
            "epochs": history.epoch,
            "iterations": int(model.optimizer.iterations.numpy()),
        }
        unfinished = folder / "result.unfinished"
        unfinished.write_text(json.dumps(result))
        unfinished.replace(folder / "result.json")


def task() -> str:
    """This process' name in its job."""
    found = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {"type": "worker", "index": 0})
    return f"{found['type']}:{found['index']}"


def make_strategy(name: str) -> Any:
    """The strategy of a name, with two logical devices where one process has several replicas."""
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
        "parameter_server": dtrain.ParameterServerStrategy,
    }
    return kind[name]()


def make_model(options: Options) -> Any:
    """A small model with all that is easily lost: dropout, moving statistics, moments, a loss scale."""
    import keras

    keras.config.set_dtype_policy(options.policy)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((FEATURES,)),
            layers.Dense(32, activation="relu"),
            layers.Dropout(0.3),
            layers.BatchNormalization(),
            layers.Dense(2, dtype="float32"),
        ]
    )
    steps = options.accumulation if options.accumulation > 1 else None
    optimizer = keras.optimizers.Adam(options.learning_rate, gradient_accumulation_steps=steps)
    model.compile(optimizer, loss_of_first, metrics=[Seen()], jit_compile=options.xla)
    return model


def loss_of_first(y_true: Any, y_pred: Any) -> Any:
    """The first column's squared error; the second holds the example's number."""
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
    """Inputs, and targets with the example's number beside them."""
    import numpy as np

    random = np.random.default_rng(0)
    x = random.normal(size=(EXAMPLES, FEATURES)).astype("float32")
    target = 2 * x[:, 0] - x[:, 1] + 3
    return x, np.stack([target, np.arange(EXAMPLES)], axis=1).astype("float32")


def data_of(options: Options, x: Any, y: Any) -> tuple[Any, dict[str, Any]]:
    """The shuffled training data as `fit` takes them, and its arguments."""
    import keras
    import tensorflow as tf

    import dtrain

    if options.data == "arrays":
        return x, {"y": y, "batch_size": options.batch}
    if options.data == "pipeline":
        return dtrain.data.Pipeline((x, y), batch=options.batch, seed=3).dataset(), {}
    if options.data == "dataset":
        dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(EXAMPLES, seed=5).batch(options.batch)
        return dataset, {}

    class Sequence(keras.utils.PyDataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return -(-EXAMPLES // options.batch)

        def __getitem__(self, index: int) -> Any:
            rows = slice(index * options.batch, (index + 1) * options.batch)
            return x[rows], y[rows]

    return Sequence(), {"shuffle": True}


def faults_of(folder: Path, options: Options) -> Any:
    """A callback that hurts this process at the steps that it was told."""
    import keras

    me = task()

    class Faults(keras.callbacks.Callback):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.step = 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.step += 1
            if options.pause:
                time.sleep(options.pause)
            for number, fault in enumerate(options.faults):
                if fault["step"] != self.step or fault.get("worker", "worker:0") != me:
                    continue
                mark = folder / f"fault-{number}"
                if fault.get("always") or not mark.exists():
                    mark.touch()
                    happen(fault["kind"], fault)

    return Faults()


def happen(kind: str, fault: dict[str, Any]) -> None:
    """The fault itself."""
    if kind == "deadlock":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    elif kind == "exception":
        raise RuntimeError(fault.get("text", "on purpose"))
    elif kind == "memory":
        grow: list[bytearray] = []
        while True:
            grow.append(bytearray(2**26))
    elif kind == "sleep":
        time.sleep(fault["seconds"])
    else:
        os.kill(os.getpid(), getattr(signal, kind))
        if kind in ("SIGTERM", "SIGUSR1"):
            return
        time.sleep(60)


def digest(model: Any) -> str:
    """Of every bit of weights, statistics, moments and counters."""
    found = hashlib.sha256()
    for variable in [*model.variables, *model.optimizer.variables]:
        found.update(variable.numpy().tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    main()
