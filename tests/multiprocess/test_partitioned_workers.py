"""`fit`, `evaluate` and `predict` of several workers, by a step that is traced once and partitioned."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tests.partitioned_models import MODELS, ROWS, trained

import dtrain


def numbers(strategy: Any) -> dict[str, list[Any]]:
    """For each model, its weights, history, scores and predictions."""
    x = np.random.default_rng(1).normal(size=(ROWS, 6)).astype("float32")
    found: dict[str, list[Any]] = {}
    for number, (name, make) in enumerate(MODELS.items()):
        if "eager" in name:
            continue  # not traced, and so not partitioned
        made, history, scores = trained(strategy, make, batch=17, as_dataset=bool(number % 2))
        callable_alone = type(made).call is not keras.Model.call
        outputs = made.predict(x, batch_size=17, verbose=0) if callable_alone else ()
        found[name] = [*made.get_weights(), *history.values(), scores, *outputs]
    return found


def of_worker() -> dict[str, list[Any]]:
    from dataclasses import replace

    strategy = dtrain.MultiWorkerMirroredStrategy()
    assert strategy.num_replicas_in_sync == 3
    strategy.dtrain_layout = replace(strategy.dtrain_layout, partitioned=True)
    return numbers(strategy)


def test_three_workers_have_the_numbers_of_one_device() -> None:
    """Batches of 17 give uneven parts; the last batch has one row, so two workers have none."""
    first, *others = dtrain.spawn(of_worker, workers=3)
    one = numbers(tf.distribute.get_strategy())
    assert len(one) > 5
    for name, values in one.items():
        for place, expected in enumerate(values):
            found = first[name][place]
            np.testing.assert_allclose(found, expected, rtol=2e-4, atol=1e-5, err_msg=name)
            for other in others:
                np.testing.assert_array_equal(found, other[name][place], name)
