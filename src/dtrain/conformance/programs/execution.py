"""Arguments of `compile` and `fit` that change how steps run, or how many."""

from __future__ import annotations

import keras

from dtrain.conformance.corpus import ProgramRun, Values, program
from dtrain.conformance.parts import dataset, evaluated, history, network, regression, sgd, trained


@program()
def several_steps_a_call(run: ProgramRun) -> Values:
    """`steps_per_execution=3`, which does not divide the epoch."""
    x, y = regression(40)
    with run.strategy.scope():
        model = network()
        model.compile(sgd(0.05), "mse", metrics=["mae"], steps_per_execution=3)
    record = model.fit(dataset(x, y, batch=8), epochs=2, verbose=0)
    return trained(model, record) | evaluated(model, x, y, batch=8)


@program()
def compiled_by_xla(run: ProgramRun) -> Values:
    """`jit_compile=True`."""
    x, y = regression()
    with run.strategy.scope():
        model = network()
        model.compile(sgd(), "mse", metrics=["mae"], jit_compile=True)
    return trained(model, model.fit(dataset(x, y), epochs=2, verbose=0))


@program()
def eager(run: ProgramRun) -> Values:
    """`run_eagerly=True`."""
    x, y = regression(40)
    with run.strategy.scope():
        model = network()
        model.compile(sgd(), "mse", metrics=["mae"], run_eagerly=True)
    return trained(model, model.fit(dataset(x, y), epochs=2, verbose=0))


@program()
def validation_split(run: ProgramRun) -> Values:
    """`validation_split` and `validation_freq`."""
    x, y = regression(50)
    with run.strategy.scope():
        model = network()
        model.compile(sgd(), "mse", metrics=["mae"])
    arguments = {"batch_size": 10, "shuffle": False, "validation_split": 0.3, "validation_freq": 2}
    return trained(model, model.fit(x, y, epochs=4, verbose=0, **arguments))


@program()
def steps_of_an_endless_dataset(run: ProgramRun) -> Values:
    """`steps_per_epoch` and `validation_steps` on datasets that repeat."""
    x, y = regression()
    data = dataset(x, y, batch=8).repeat()
    with run.strategy.scope():
        model = network()
        model.compile(sgd(0.05), "mse")
    steps = {"steps_per_epoch": 4, "validation_steps": 2}
    return trained(model, model.fit(data, validation_data=data, epochs=3, verbose=0, **steps))


@program()
def fine_tuning(run: ProgramRun) -> Values:
    """A frozen layer, which is released for a second `fit`."""
    x, y = regression()
    with run.strategy.scope():
        model = network()
        model.layers[0].trainable = False
        model.compile(sgd(), "mse")
    first = model.fit(dataset(x, y), epochs=2, verbose=0)
    with run.strategy.scope():
        model.layers[0].trainable = True
        model.compile(keras.optimizers.SGD(0.02), "mse")
    second = model.fit(dataset(x, y), epochs=2, verbose=0)
    return history(first, "first_") | trained(model, second)
