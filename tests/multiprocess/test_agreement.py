"""Two workers agree on the end of training and on the logs, and raise where one does something else."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import dtrain
from spawned_cases import outcomes


def agreements() -> dict[str, Any]:
    """All cases in one pair of processes: what each worker saw."""
    os.environ["DTRAIN_PEER_TIMEOUT"] = "1e6"  # a worker that waits for the other one does so for ever
    import keras
    import tensorflow as tf

    strategy = dtrain.MultiWorkerMirroredStrategy()
    rank = dtrain.rank()
    x = np.random.default_rng(0).normal(size=(48, 3)).astype("float32")
    y = x.sum(axis=1, keepdims=True)

    class OwnLogs(keras.Model):
        def test_step(self, data: Any) -> Any:
            super().test_step(data)
            return {"of_this_worker": 10.0 + rank}

    def model(kind: Any = keras.Model) -> Any:
        keras.utils.set_random_seed(1)
        with strategy.scope():
            inputs = keras.Input((3,))
            made = kind(inputs, keras.layers.Dense(1)(inputs))
            made.compile(keras.optimizers.SGD(0.05), "mse")
        return made

    def fit(*callbacks: Any, data: Any = None, made: Any = None, **options: Any) -> Any:
        made = made or model()
        given = (x, y) if data is None else (data,)
        size = {} if data is not None else {"batch_size": 8}
        history = made.fit(
            *given, **{"epochs": 3, "shuffle": False, "verbose": 0} | size | options, callbacks=[*callbacks]
        )
        return len(history.epoch), int(made.optimizer.iterations), float(made.get_weights()[0].sum())

    def stops(hook: str, at: dict[int, int], attribute: str = "stop_training") -> Any:
        """A callback that stops on each worker after this number of calls of a hook."""
        seen = []

        class Stops(keras.callbacks.Callback):
            pass

        def called(self: Any, number: int, logs: Any = None) -> None:
            seen.append(number)
            if len(seen) == at.get(rank):
                setattr(self.model, attribute, True)

        setattr(Stops, hook, called)
        return Stops()

    def endless() -> Any:
        def batches() -> Any:
            while True:
                yield x[:8], y[:8]

        specs = tf.TensorSpec([8, 3]), tf.TensorSpec([8, 1])
        return tf.data.Dataset.from_generator(batches, output_signature=specs)

    class Timer(keras.callbacks.Callback):
        """Stops from another thread, of which no callback knows."""

        async_safe = True

        def on_train_begin(self, logs: Any = None) -> None:
            if rank == 1:
                self.model.stop_training = True

    def edited(*callbacks: Any, **options: Any) -> Any:
        seen: list[Any] = []
        own = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: logs.update(own=1.0 + rank))
        looks = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(dict(logs)))
        made = model()
        fitted = fit(own, *callbacks, looks, made=made, **options)
        return fitted, seen, made.history.history["own"], float(made.optimizer.learning_rate)

    def plateau() -> Any:
        def numbers(epoch: int, logs: Any) -> None:
            logs["mine"] = 1.0 if rank == 0 else 2.0 - epoch

        worse = keras.callbacks.LambdaCallback(on_epoch_end=numbers)
        slower = keras.callbacks.ReduceLROnPlateau(
            monitor="mine", mode="min", patience=1, factor=0.1, min_delta=0
        )
        return edited(worse, slower, epochs=5)

    def early() -> Any:
        mine = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: logs.update(mine=float(epoch if rank else -epoch))
        )
        return edited(mine, keras.callbacks.EarlyStopping(monitor="mine", mode="min", patience=1), epochs=4)

    def alone_on_the_chief() -> Any:
        class Times(keras.callbacks.Callback):
            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                logs["seconds"] = time.perf_counter()

        more = [Times()] if rank == 0 else []
        seen: list[Any] = []
        looks = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(dict(logs)))
        fit(*more, looks)
        return seen

    def evaluated_in_part() -> Any:
        made = model()
        callback = stops("on_test_batch_end", {1: 2}, "stop_evaluating")
        return made.evaluate(x, y, batch_size=8, verbose=0, callbacks=[callback])

    def predicted_in_part(hook: str, at: dict[int, int], **options: Any) -> Any:
        made = model()
        callback = stops(hook, at, "stop_predicting")
        outputs = made.predict(x, **{"batch_size": 8, "verbose": 0} | options, callbacks=[callback])
        again = made.predict(x, batch_size=8, verbose=0)  # the workers are at the same point still
        parts = zip(keras.tree.flatten(outputs), keras.tree.flatten(again), strict=True)
        return [(len(part), np.array_equal(part, whole[: len(part)])) for part, whole in parts]

    def predicted_rows_of_any_length() -> Any:
        class Ragged(keras.Model):
            def call(self, inputs: Any) -> Any:
                lengths = tf.cast(tf.math.abs(inputs[:, 0]) < 1, tf.int64) + 1
                return tf.RaggedTensor.from_tensor(inputs, lengths=lengths)

        with strategy.scope():
            made = Ragged()
            made.compile("sgd", "mse")
        callback = stops("on_predict_batch_end", {0: 2}, "stop_predicting")
        outputs = made.predict(x, batch_size=8, verbose=0, callbacks=[callback])
        return int(outputs.nrows()), outputs.row_lengths().numpy().tolist()

    def predicted_in_pieces() -> Any:
        inputs = keras.Input((3,))
        with strategy.scope():
            outputs = {"a": keras.layers.Dense(1)(inputs), "b": keras.layers.Dense(2)(inputs)}
            made = keras.Model(inputs, outputs)
            made.compile("sgd", "mse", steps_per_execution=2)
        callback = stops("on_predict_batch_end", {1: 1}, "stop_predicting")
        predictions = made.predict(
            tf.data.Dataset.from_tensor_slices(x).batch(8), verbose=0, callbacks=[callback]
        )
        return {name: value.shape for name, value in predictions.items()}

    def own_logs() -> Any:
        made = model(OwnLogs)
        return made.evaluate(x, y, batch_size=8, verbose=0, return_dict=True)

    def evaluates_alone() -> Any:
        class Alone(keras.callbacks.Callback):
            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                if rank == 0:
                    self.model.evaluate(x, y, batch_size=8, verbose=0)

        return fit(Alone())

    cases: dict[str, Callable[[], Any]] = {
        "epoch": lambda: fit(stops("on_epoch_end", {1: 1})),
        "epoch on the first": lambda: fit(stops("on_epoch_end", {0: 2})),
        "batch": lambda: fit(stops("on_train_batch_end", {1: 3})),
        "batch on the first": lambda: fit(stops("on_train_batch_end", {0: 2})),
        "last batch": lambda: fit(stops("on_train_batch_end", {1: 6})),
        "same batch": lambda: fit(stops("on_train_batch_end", {0: 4, 1: 4})),
        "different batches": lambda: fit(stops("on_train_batch_end", {0: 5, 1: 2})),
        "two calls of fit": lambda: fit(stops("on_train_batch_end", {1: 7})),
        "validation": lambda: fit(stops("on_test_batch_end", {0: 2}), validation_data=(x, y)),
        "from elsewhere": lambda: fit(Timer()),
        "endless data": lambda: fit(
            stops("on_train_batch_end", {1: 3}), data=endless(), steps_per_epoch=9, epochs=2
        ),
        "logs": lambda: edited(),
        "plateau": plateau,
        "early stopping": early,
        "alone on the chief": alone_on_the_chief,
        "evaluated in part": evaluated_in_part,
        "predicted in part": lambda: predicted_in_part("on_predict_batch_end", {1: 2}),
        "predicted in part on the first": lambda: predicted_in_part("on_predict_batch_end", {0: 1}),
        "predicted to different batches": lambda: predicted_in_part("on_predict_batch_end", {0: 4, 1: 3}),
        "predicted from a batch's beginning": lambda: predicted_in_part("on_predict_batch_begin", {1: 5}),
        "predicted to the last batch": lambda: predicted_in_part("on_predict_batch_end", {1: 6}),
        "predicted rows of any length": predicted_rows_of_any_length,
        "predicted in pieces": predicted_in_pieces,
        "own logs": own_logs,
        "evaluates alone": evaluates_alone,
    }
    return outcomes(cases)


@pytest.fixture(scope="module")
def seen() -> list[dict[str, Any]]:
    return dtrain.spawn(agreements, workers=2)


@pytest.mark.parametrize(
    ("case", "epochs", "steps"),
    [
        ("epoch", 1, {6}),
        ("epoch on the first", 2, {12}),
        ("batch", 1, {3, 4}),
        ("batch on the first", 1, {2, 3}),
        ("last batch", 1, {6}),
        ("same batch", 1, {4}),  # as on one device
        ("different batches", 1, {2, 3}),
        ("two calls of fit", 2, {7, 8}),
        ("validation", 1, {6}),
        ("from elsewhere", 1, {1, 2, 3, 4, 5, 6}),
        ("endless data", 1, {3, 4}),
    ],
)
def test_one_worker_stops_all(seen: list[dict[str, Any]], case: str, epochs: int, steps: set[int]) -> None:
    first, second = (worker[case] for worker in seen)
    assert first == second
    assert first[0] == epochs and first[1] in steps, first


def test_callbacks_see_the_logs_of_the_first_worker(seen: list[dict[str, Any]]) -> None:
    first, second = (worker["logs"] for worker in seen)
    assert first == second
    assert [logs["own"] for logs in first[1]] == [1.0] * 3 == first[2]


def test_callbacks_decide_by_the_logs_of_the_first_worker(seen: list[dict[str, Any]]) -> None:
    first, second = (worker["plateau"] for worker in seen)
    assert first == second and first[3] == pytest.approx(0.05 * 0.1**4)
    first, second = (worker["early stopping"] for worker in seen)
    assert first == second and first[0][0] == 4


def test_a_callback_of_the_chief_alone_may_change_the_logs(seen: list[dict[str, Any]]) -> None:
    first, second = (worker["alone on the chief"] for worker in seen)
    assert first == second and all("seconds" in logs for logs in first)


def test_evaluate_returns_the_same_on_every_worker(seen: list[dict[str, Any]]) -> None:
    first, second = (worker["evaluated in part"] for worker in seen)
    assert first == second and np.isfinite(first)
    assert [worker["own logs"] for worker in seen] == [{"of_this_worker": 10.0}] * 2


@pytest.mark.parametrize(
    ("case", "batches"),
    [
        ("predicted in part", 2),
        ("predicted in part on the first", 1),
        ("predicted to different batches", 3),
        ("predicted from a batch's beginning", 5),
        ("predicted to the last batch", 6),
    ],
)
def test_one_worker_stops_predicting(seen: list[dict[str, Any]], case: str, batches: int) -> None:
    """All workers return the outputs that the worker had when it stopped."""
    assert [worker[case] for worker in seen] == [[(8 * batches, True)]] * 2


def test_one_worker_stops_predicting_rows_of_any_length(seen: list[dict[str, Any]]) -> None:
    first, second = (worker["predicted rows of any length"] for worker in seen)
    assert first == second and first[0] == 16 and {*first[1]} == {1, 2}, first


def test_one_worker_stops_predicting_with_several_batches_a_call(seen: list[dict[str, Any]]) -> None:
    assert [worker["predicted in pieces"] for worker in seen] == [{"a": (16, 1), "b": (16, 2)}] * 2


def test_a_worker_that_evaluates_alone(seen: list[dict[str, Any]]) -> None:
    for worker in seen:
        error = worker["evaluates alone"]
        assert isinstance(error, str), error
        assert error.startswith("OperationMismatchError: The workers are not at the same point")
        assert "worker 0 is in evaluate within fit (epoch 1), worker 1 in fit (epoch 1)" in error
        assert "is one of them behind is_chief()?" in error
