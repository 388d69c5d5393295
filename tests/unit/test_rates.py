"""Rates, warm-ups and cosine restarts: the numbers by hand, what is saved, and the words that are known."""

from __future__ import annotations

import math
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtrain.errors import ConfigurationError, DataError
from dtrain.optim import SparseLabelSmoothing, WarmUp, cosine_restarts, precision_policy, scaled_rate
from refusals import refused


def rates(schedule: keras.optimizers.schedules.LearningRateSchedule, steps: int) -> list[float]:
    return [float(schedule(step)) for step in range(steps)]


def test_a_rate_for_another_batch() -> None:
    assert scaled_rate(0.1, batch=1024, base_batch=256) == pytest.approx(0.4)
    assert scaled_rate(0.1, batch=1024, base_batch=256, scaling="sqrt") == pytest.approx(0.2)
    assert scaled_rate(0.1, batch=1024, base_batch=256, scaling="none") == 0.1
    assert scaled_rate(0.1, batch=64, base_batch=256, scaling="Linear") == pytest.approx(0.025)


def test_a_scaling_that_is_not_known_is_named_with_the_nearest() -> None:
    with refused(ConfigurationError, "'linear'", "linear, sqrt, none", scaling="liner"):
        scaled_rate(0.1, batch=2, base_batch=1, scaling="liner")
    with refused(ConfigurationError, scaling=None):
        scaled_rate(0.1, batch=2, base_batch=1, scaling=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [{"batch": 0}, {"base_batch": -1}, {"rate": math.nan}])
def test_a_rate_is_not_scaled_by_what_is_no_size(wrong: dict[str, float]) -> None:
    values = {"rate": 0.1, "batch": 2, "base_batch": 1} | wrong
    with refused(ConfigurationError, **wrong):
        scaled_rate(values.pop("rate"), **values)  # type: ignore[arg-type]


def test_a_warm_up_rises_to_the_rate_and_stays() -> None:
    assert rates(WarmUp(0.5, 4, 0.1), 7) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.5])
    assert rates(WarmUp(0.5, 0), 2) == pytest.approx([0.5, 0.5])


def test_what_follows_a_warm_up_begins_with_its_own_first_step() -> None:
    after = keras.optimizers.schedules.PolynomialDecay(0.4, 4, 0.0)
    assert rates(WarmUp(after, 2), 7) == pytest.approx([0.0, 0.2, 0.4, 0.3, 0.2, 0.1, 0.0])


def test_a_warm_up_counts_steps_that_a_float_cannot() -> None:
    far = 2**24
    after = keras.optimizers.schedules.PiecewiseConstantDecay([far], [1.0, 0.5])
    schedule = WarmUp(after, 1)
    assert float(schedule(tf.constant(far + 1, tf.int64))) == 1.0
    assert float(schedule(tf.constant(far + 2, tf.int64))) == 0.5


def test_cosine_restarts() -> None:
    schedule = cosine_restarts(0.2, 2, growth=2.0, decay=0.5, lowest=0.1, warmup=2, start=0.1)
    cosine = [0.5 * (1 + math.cos(math.pi * part)) for part in (0, 0.25, 0.5, 0.75)]
    first = [0.2 * (0.9 * cosine[part] + 0.1) for part in (0, 2)]
    second = [0.2 * (0.9 * 0.5 * part + 0.1) for part in cosine]
    assert rates(schedule, 8) == pytest.approx([0.1, 0.15, *first, *second], rel=1e-5)
    traced = tf.function(schedule)
    assert [float(traced(tf.constant(i))) for i in range(8)] == pytest.approx(rates(schedule, 8))


@pytest.mark.parametrize(
    "wrong",
    [
        *({"first_steps": 0}, {"first_steps": 0.5}, {"growth": 0.0}, {"lowest": 2.0}, {"rate": -1.0}),
        *({"warmup": -1}, {"warmup": math.nan}),
    ],
)
def test_restarts_that_cannot_be(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match=r"growth=|learning rate|warm-up"):
        cosine_restarts(**({"rate": 0.1, "first_steps": 2} | wrong))  # type: ignore[arg-type]


def test_a_warm_up_takes_rates_and_schedules_only() -> None:
    with refused(ConfigurationError, "schedule", after="0.1"):
        WarmUp("0.1", 3)  # type: ignore[arg-type]
    with refused(ConfigurationError, steps=2.5):
        WarmUp(0.1, 2.5)  # type: ignore[arg-type]


def test_a_saved_model_keeps_its_schedule(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(cosine_restarts(0.2, 3, warmup=2, start=0.05)), "mse")
    model.fit(np.ones((8, 2)), np.ones((8, 1)), batch_size=2, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert isinstance(loaded.optimizer._learning_rate, WarmUp)
    assert float(loaded.optimizer.learning_rate) == float(model.optimizer.learning_rate)
    assert rates(loaded.optimizer._learning_rate, 9) == rates(model.optimizer._learning_rate, 9)


def smoothed(smoothing: float, logits: bool) -> tuple[keras.losses.Loss, keras.losses.Loss]:
    return (
        SparseLabelSmoothing(smoothing, from_logits=logits),
        keras.losses.CategoricalCrossentropy(label_smoothing=smoothing, from_logits=logits),
    )


@pytest.mark.parametrize("logits", [False, True])
@pytest.mark.parametrize("shape", [(6,), (6, 1), (3, 2)])
def test_smoothed_sparse_labels_are_smoothed_one_hot_ones(shape: tuple[int, ...], logits: bool) -> None:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 4, shape)
    rows = labels[..., 0] if shape[-1] == 1 else labels
    scores = tf.constant(rng.normal(size=(*rows.shape, 4)), tf.float32)
    scores = scores if logits else tf.nn.softmax(scores)
    sparse, dense = smoothed(0.2, logits)
    weights = np.linspace(0.5, 2, rows.size).reshape(rows.shape)
    one_hot = np.eye(4)[rows]
    assert float(sparse(labels, scores)) == pytest.approx(float(dense(one_hot, scores)), rel=1e-6)
    assert float(sparse(labels, scores, weights)) == pytest.approx(
        float(dense(one_hot, scores, weights)), rel=1e-6
    )
    plain = keras.losses.SparseCategoricalCrossentropy(from_logits=logits)
    assert float(smoothed(0.0, logits)[0](labels, scores)) == pytest.approx(
        float(plain(labels, scores)), rel=1e-5
    )


def test_labels_that_name_no_class() -> None:
    loss, scores = SparseLabelSmoothing(), tf.fill([2, 3], 1 / 3)
    with refused(DataError, "from 0 to 3", "3 classes"):
        loss(np.array([0, 3]), scores)
    with refused(DataError, "(2, 3)", "CategoricalCrossentropy"):
        loss(np.eye(3)[:2], scores)

    @tf.function
    def traced(labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(scores)
            value = loss(labels, scores)
        return value, tape.gradient(value, scores)

    value, gradient = traced(tf.constant([0, -1]))
    assert math.isnan(float(value))
    assert np.isnan(gradient[1]).all()
    assert math.isfinite(float(traced(tf.constant([0, 1]))[0]))


def test_a_loss_is_made_again_from_what_was_saved() -> None:
    made = SparseLabelSmoothing(0.3, from_logits=True, name="mine")
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(made))
    assert again.get_config() == made.get_config()
    assert (again.smoothing, again.from_logits, again.name) == (0.3, True, "mine")
    for smoothing in (1.5, "a"):
        with refused(ConfigurationError, smoothing=smoothing):
            SparseLabelSmoothing(smoothing)  # type: ignore[arg-type]


def test_words_for_precision() -> None:
    words = ("float32", "mixed_bfloat16", "mixed-float16")
    assert [precision_policy(word) for word in words] == ["float32", "mixed_bfloat16", "mixed_float16"]
    # Keras' own "float16" keeps weights in 16 bits.
    meant = {"float16": "mixed_float16", "bf16": "mixed_bfloat16", "mixed_flot16": "mixed_float16"}
    for word, suggested in meant.items():
        with refused(ConfigurationError, f"'{suggested}'", precision=word):
            precision_policy(word)
