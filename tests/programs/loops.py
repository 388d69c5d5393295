"""Training loops written by hand on the strategy's own methods."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from .common import Values, classes, dataset, mlp, regression, sgd, weights
from .registry import Env, program

BATCH = 16
Sum, Mean = tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN


def squared(y: Any, predicted: Any) -> Any:
    return tf.reduce_mean(tf.square(y - predicted), axis=-1)


def gradient_step(model: keras.Model, optimizer: Any, batch: int = BATCH) -> Any:
    """A replica's step as the guides write it: the sum of its examples' losses over the global batch."""

    def step(inputs: Any) -> Any:
        x, y = inputs
        with tf.GradientTape() as tape:
            loss = tf.nn.compute_average_loss(squared(y, model(x, training=True)), global_batch_size=batch)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return step


def loop(env: Env, step: Any, batches: Iterable[Any], *, graph: bool = True) -> np.ndarray:
    """Run the step on every batch and add the replicas' losses up."""

    def distributed(inputs: Any) -> Any:
        return env.strategy.reduce(Sum, env.strategy.run(step, args=(inputs,)), axis=None)

    run = tf.function(distributed) if graph else distributed
    return np.asarray([float(run(inputs)) for inputs in batches])


def result(model: keras.Model, optimizer: Any, losses: np.ndarray) -> Values:
    return weights(model) | {"losses": losses, "iterations": int(optimizer.iterations.numpy())}


@program("loop_in_graph")
def _(env: Env) -> Values:
    x, y = regression(48)
    with env.strategy.scope():
        model, optimizer = mlp(), sgd()
    data = env.strategy.experimental_distribute_dataset(dataset(x, y).repeat(2))
    return result(model, optimizer, loop(env, gradient_step(model, optimizer), data))


@program("loop_eager")
def _(env: Env) -> Values:
    x, y = regression(48)
    with env.strategy.scope():
        model, optimizer = mlp(), sgd()
        optimizer.build(model.trainable_variables)
    data = env.strategy.experimental_distribute_dataset(dataset(x, y))
    return result(model, optimizer, loop(env, gradient_step(model, optimizer), data, graph=False))


@program("loop_with_replica_function_compiled")
def _(env: Env) -> Values:
    x, y = regression(48)
    with env.strategy.scope():
        model, optimizer = mlp(), sgd()
        optimizer.build(model.trainable_variables)
    step = tf.function(gradient_step(model, optimizer))
    data = env.strategy.experimental_distribute_dataset(dataset(x, y))
    return result(model, optimizer, loop(env, step, data, graph=False))


@program("loop_with_replica_function_compiled_in_graph")
def _(env: Env) -> Values:
    x, y = regression(48)
    with env.strategy.scope():
        model, optimizer = mlp(), sgd()
        optimizer.build(model.trainable_variables)
    step = tf.function(gradient_step(model, optimizer))
    data = env.strategy.experimental_distribute_dataset(dataset(x, y))
    return result(model, optimizer, loop(env, step, data))


@program("loop_over_the_iterator_in_graph")
def _(env: Env) -> Values:
    x, y = regression(48)
    with env.strategy.scope():
        model, optimizer = mlp(), sgd()
        optimizer.build(model.trainable_variables)
    step = gradient_step(model, optimizer)

    @tf.function
    def epoch(data: Any) -> Any:
        total = 0.0
        for inputs in data:
            total += env.strategy.reduce(Sum, env.strategy.run(step, args=(inputs,)), axis=None)
        return total

    data = env.strategy.experimental_distribute_dataset(dataset(x, y))
    return result(model, optimizer, np.asarray([float(epoch(data)) for _ in range(2)]))


@program("loop_dataset_from_function")
def _(env: Env) -> Values:
    x, y = regression(48)

    def make(context: tf.distribute.InputContext) -> tf.data.Dataset:
        data = tf.data.Dataset.from_tensor_slices((x, y))
        data = data.shard(context.num_input_pipelines, context.input_pipeline_id)
        return data.batch(context.get_per_replica_batch_size(BATCH))

    with env.strategy.scope():
        model, optimizer = mlp(), sgd()
    data = env.strategy.distribute_datasets_from_function(make)
    return result(model, optimizer, loop(env, gradient_step(model, optimizer), data))


@program("loop_uneven_last_batch")
def _(env: Env) -> Values:
    x, y = regression(33)
    with env.strategy.scope():
        model, optimizer = mlp(), sgd()
    data = env.strategy.experimental_distribute_dataset(dataset(x, y))
    return result(model, optimizer, loop(env, gradient_step(model, optimizer), data))


@program("loop_keras_loss_and_metrics")
def _(env: Env) -> Values:
    x, y = classes(48)
    with env.strategy.scope():
        model, optimizer = mlp(outputs=3), keras.optimizers.Adam(0.02, epsilon=1e-3)
        each = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
        accuracy = keras.metrics.SparseCategoricalAccuracy()
        mean = keras.metrics.Mean()
        area = keras.metrics.MeanSquaredError()

    def step(inputs: Any) -> Any:
        features, labels = inputs
        with tf.GradientTape() as tape:
            logits = model(features, training=True)
            loss = tf.nn.compute_average_loss(each(labels, logits), global_batch_size=BATCH)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        accuracy.update_state(labels, logits)
        mean.update_state(each(labels, logits))
        area.update_state(tf.one_hot(labels, 3), tf.nn.softmax(logits))
        return loss

    values: Values = {}
    data = env.strategy.experimental_distribute_dataset(dataset(x, y))
    for epoch in range(2):
        values[f"losses_{epoch}"] = loop(env, step, data)
        for name, metric in {"accuracy": accuracy, "mean": mean, "area": area}.items():
            values[f"{name}_{epoch}"] = float(metric.result())
            metric.reset_state()
    return values | weights(model)


@program("loop_test_step")
def _(env: Env) -> Values:
    x, y = regression(45)
    with env.strategy.scope():
        model = mlp()
        error, total = keras.metrics.MeanAbsoluteError(), keras.metrics.Sum()

    @tf.function
    def step(inputs: Any) -> None:
        def replica(pair: Any) -> None:
            predicted = model(pair[0], training=False)
            error.update_state(pair[1], predicted)
            total.update_state(predicted)

        env.strategy.run(replica, args=(inputs,))

    for inputs in env.strategy.experimental_distribute_dataset(dataset(x, y)):
        step(inputs)
    return {"error": float(error.result()), "total": float(total.result())}


@program("loop_gradients_reduced_then_applied")
def _(env: Env) -> Values:
    """Several batches' gradients are averaged over the replicas, added up, and applied across replicas."""
    x, y = regression(64)
    parts = 2
    with env.strategy.scope():
        model, optimizer = mlp(), sgd()
        optimizer.build(model.trainable_variables)

    @tf.function
    def accumulate(iterator: Any) -> Any:
        def replica(inputs: Any) -> Any:
            features, labels = inputs
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(squared(labels, model(features, training=True))) / parts
            return loss, tape.gradient(loss, model.trainable_variables)

        total = 0.0
        summed = [tf.zeros(variable.shape) for variable in model.trainable_variables]
        for _ in range(parts):
            losses, gradients = env.strategy.run(replica, args=(next(iterator),))
            total += env.strategy.reduce(Mean, losses, axis=None)
            for i, gradient in enumerate(gradients):
                summed[i] += env.strategy.reduce(Mean, gradient, axis=None)
        optimizer.apply_gradients(zip(summed, model.trainable_variables, strict=True))
        return total

    iterator = iter(env.strategy.experimental_distribute_dataset(dataset(x, y)))
    losses = np.asarray([float(accumulate(iterator)) for _ in range(2)])
    return result(model, optimizer, losses)


@program("loop_gradients_reduced_by_one_call")
def _(env: Env) -> Values:
    x, y = regression(48)
    with env.strategy.scope():
        model, optimizer = mlp(), keras.optimizers.Adam(0.02, epsilon=1e-3)
        optimizer.build(model.trainable_variables)

    def replica(inputs: Any) -> Any:
        with tf.GradientTape() as tape:
            each = squared(inputs[1], model(inputs[0], training=True))
            loss = tf.nn.compute_average_loss(each, global_batch_size=BATCH)
        return loss, tape.gradient(loss, model.trainable_variables)

    def step(inputs: Any) -> Any:
        loss, gradients = env.strategy.run(replica, args=(inputs,))
        reduced = [env.strategy.reduce(Sum, gradient, axis=None) for gradient in gradients]
        optimizer.apply_gradients(zip(reduced, model.trainable_variables, strict=True))
        return env.strategy.reduce(Sum, loss, axis=None)

    run = tf.function(step)
    data = env.strategy.experimental_distribute_dataset(dataset(x, y))
    return result(model, optimizer, np.asarray([float(run(inputs)) for inputs in data]))


@program("loop_reduces_in_the_replica")
def _(env: Env) -> Values:
    x, y = regression(48)

    def replica(inputs: Any) -> Any:
        context = tf.distribute.get_replica_context()
        local = tf.reduce_sum(inputs[0], axis=0)
        return context.all_reduce(Sum, local), context.all_reduce(Mean, tf.reduce_mean(inputs[1]))

    values: Values = {}
    run = tf.function(lambda inputs: env.strategy.run(replica, args=(inputs,)))
    for i, inputs in enumerate(env.strategy.experimental_distribute_dataset(dataset(x, y))):
        total, mean = run(inputs)
        values[f"total_{i}"] = env.strategy.experimental_local_results(total)[0].numpy()
        values[f"mean_{i}"] = env.strategy.experimental_local_results(mean)[0].numpy()
    return values


@program("loop_reduce_and_gather")
def _(env: Env) -> Values:
    x, y = regression(48)
    with env.strategy.scope():
        model = mlp()
    values: Values = {}

    def replica(inputs: Any) -> Any:
        predicted = model(inputs[0], training=False)
        return predicted, tf.reduce_mean(predicted), {"sum": tf.reduce_sum(predicted)}

    run = tf.function(lambda inputs: env.strategy.run(replica, args=(inputs,)))
    for i, inputs in enumerate(env.strategy.experimental_distribute_dataset(dataset(x, y))):
        predicted, mean, more = run(inputs)
        # The examples' order among the replicas is the strategy's own; the set of them is not.
        values[f"gathered_{i}"] = np.sort(env.strategy.gather(predicted, axis=0).numpy(), axis=0)
        values[f"mean_{i}"] = env.strategy.reduce(Mean, mean, axis=None).numpy()
        values[f"sum_{i}"] = env.strategy.reduce("SUM", more["sum"], axis=None).numpy()
        values[f"mean_of_axis_{i}"] = env.strategy.reduce(Mean, predicted, axis=0).numpy()
        values[f"sum_of_axis_{i}"] = env.strategy.reduce(Sum, predicted, axis=0).numpy()
    return values


@program("loop_two_optimizers")
def _(env: Env) -> Values:
    x, y = regression(48)
    with env.strategy.scope():
        body, head = mlp(4, 3, activation="tanh"), mlp(3, 1)
        slow, fast = sgd(0.02), keras.optimizers.Adam(0.02, epsilon=1e-3)

    def step(inputs: Any) -> Any:
        with tf.GradientTape() as tape:
            each = squared(inputs[1], head(body(inputs[0], training=True), training=True))
            loss = tf.nn.compute_average_loss(each, global_batch_size=BATCH)
        first, second = tape.gradient(loss, [body.trainable_variables, head.trainable_variables])
        slow.apply_gradients(zip(first, body.trainable_variables, strict=True))
        fast.apply_gradients(zip(second, head.trainable_variables, strict=True))
        return loss

    data = env.strategy.experimental_distribute_dataset(dataset(x, y).repeat(2))
    losses = loop(env, step, data)
    return result(body, slow, losses) | weights(head, "head")


@program("loop_plain_variables")
def _(env: Env) -> Values:
    """No Keras at all: tf.Variables made in the scope, updated through their aggregation."""
    x, y = regression(48)
    with env.strategy.scope():
        weight = tf.Variable(tf.ones((4, 1)) * 0.1)
        steps = tf.Variable(0, dtype=tf.int64, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)
        seen = tf.Variable(
            0.0, synchronization=tf.VariableSynchronization.ON_READ, aggregation=tf.VariableAggregation.SUM
        )

    def replica(inputs: Any) -> Any:
        with tf.GradientTape() as tape:
            each = squared(inputs[1], tf.matmul(inputs[0], weight))
            loss = tf.nn.compute_average_loss(each, global_batch_size=BATCH)
        gradient = tape.gradient(loss, weight)
        gradient = tf.distribute.get_replica_context().all_reduce(Sum, gradient)
        seen.assign_add(tf.cast(tf.shape(inputs[0])[0], tf.float32))

        def update(strategy: Any, total: Any) -> None:
            strategy.extended.update(weight, lambda v, g: v.assign_sub(0.1 * g), args=(total,))
            strategy.extended.update(steps, lambda v: v.assign_add(1))

        tf.distribute.get_replica_context().merge_call(update, args=(gradient,))
        return loss

    data = env.strategy.experimental_distribute_dataset(dataset(x, y))
    losses = loop(env, replica, data)
    return {
        "weight": weight.numpy(),
        "steps": int(steps.numpy()),
        "seen": float(seen.read_value()),
        "losses": losses,
    }


@program("loop_jit_compiled_replica_step")
def _(env: Env) -> Values:
    x, y = regression(48)
    with env.strategy.scope():
        model, optimizer = mlp(), sgd()
        optimizer.build(model.trainable_variables)

    @tf.function(jit_compile=True)
    def forward(features: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(squared(labels, model(features, training=True))) / BATCH
        return loss, tape.gradient(loss, model.trainable_variables)

    def step(inputs: Any) -> Any:
        loss, gradients = forward(*inputs)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    data = env.strategy.experimental_distribute_dataset(dataset(x, y))
    return result(model, optimizer, loop(env, step, data))
