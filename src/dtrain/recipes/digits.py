"""A complete training program: a small CNN learns scikit-learn's digits under any strategy.

It is an example to read and to copy from, not a framework: all but the lines that name the run's files is
ordinary Keras. Run it alone (`python -m dtrain.recipes.digits`), as `dtrain train digits`, or in many
processes (`dtrain launch --workers 2 -m dtrain.recipes.digits`; with `--ps 1`, on parameter servers). Where
the launcher starts it again, it goes on after its last whole epoch.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import keras
import tensorflow as tf

import dtrain
from dtrain import monitor
from dtrain.checkpoint import epoch_backups
from dtrain.data import Digits, Examples, load_digits
from dtrain.monitor.throughput import Throughput
from dtrain.recipes.options import RecipeOptions

_LEARNING_RATE = 3e-3
_LABEL_SMOOTHING = 0.1
_CLASSES = 10


class Pipelines(NamedTuple):
    """The data as `fit` and `evaluate` take it; every batch is a global batch."""

    train: tf.data.Dataset
    validation: tf.data.Dataset
    test: tf.data.Dataset


def make_pipelines(digits: Digits, global_batch: int) -> Pipelines:
    """Batches of images (b, 8, 8, 1) and one-hot labels (b, 10).

    The training images come in a new order each epoch; it follows from `keras.utils.set_random_seed`, and is
    the same in every process.
    """

    def dataset(examples: Examples) -> tf.data.Dataset:
        labels = keras.utils.to_categorical(examples.labels, _CLASSES)
        return tf.data.Dataset.from_tensor_slices((examples.images, labels))

    return Pipelines(
        train=dataset(digits.train).shuffle(len(digits.train.labels)).batch(global_batch),
        validation=dataset(digits.validation).batch(global_batch),
        test=dataset(digits.test).batch(global_batch),
    )


def build_model(steps: int) -> keras.Model:
    """A compiled CNN of 4 convolutions; its learning rate falls to zero over `steps` steps.

    It has no random layer, so that every strategy trains it to the same numbers.
    """
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Rescaling(2.0, offset=-0.6),
            layers.Conv2D(48, 3, padding="same", activation="relu"),
            layers.Conv2D(48, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(96, 3, padding="same", activation="relu"),
            layers.Conv2D(96, 3, padding="same", activation="relu"),
            layers.Flatten(),
            layers.Dense(_CLASSES),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(_LEARNING_RATE, steps)),
        loss=keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=_LABEL_SMOOTHING),
        metrics=["accuracy"],
    )
    return model


def train(options: RecipeOptions) -> str:
    """Train, test, and leave the files of the run. Every process of the job calls this.

    Returns:
        A summary of the run; the same on every process, by when all files are whole.

    Raises:
        ConfigurationError: before training, if the global batch is below the number of replicas or the
            run directory cannot take the run.
    """
    started = time.perf_counter()
    strategy = dtrain.strategy(options.strategy)
    options.check_replicas(strategy.num_replicas_in_sync)

    keras.utils.set_random_seed(options.seed)
    digits = load_digits()
    data = make_pipelines(digits, options.global_batch)

    record = monitor.describe_run("digits", strategy, options.settings())
    run = monitor.open_run_directory(options.run_dir, name="digits", record=record)

    with strategy.scope():
        model = build_model(steps=options.epochs * len(data.train))
        backups = epoch_backups(run.backups)
        done = backups.restore(model)

    throughput = Throughput(examples_per_epoch=len(digits.train.labels))
    if done:
        monitor.keep_epochs(run.metrics, done)
    history = model.fit(
        data.train,
        validation_data=data.validation,
        epochs=options.epochs,
        initial_epoch=done,
        shuffle=False,  # the pipeline shuffles
        verbose=1 if dtrain.is_chief() else 0,
        callbacks=[
            throughput,
            keras.callbacks.CSVLogger(str(run.metrics), append=done > 0),
            keras.callbacks.TensorBoard(str(run.tensorboard)),
            *backups.callbacks(),
        ],
    ).history
    if done:
        history = monitor.read_metrics(run.metrics)  # with what earlier attempts have written
    test = model.evaluate(data.test, verbose=0, return_dict=True)
    model.save(run.model)

    final = {f"test_{name}": value for name, value in test.items()}
    final |= {name: values[-1] for name, values in history.items() if name != throughput.log_name}
    record = monitor.finish_record(
        record,
        examples_per_second=throughput.examples_per_second,
        wall_time_seconds=time.perf_counter() - started,
        final_metrics=final,
    )
    if dtrain.is_chief():
        monitor.plot_curves(history, run.curves, title=f"digits under {record['strategy']}")
        run.write_record(record)
        backups.remove()
    dtrain.barrier()
    return monitor.summarize(record, run)


if __name__ == "__main__":
    summary = train(RecipeOptions.parse())
    if dtrain.is_chief():
        print(summary)
