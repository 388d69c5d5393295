"""Embedding layers with a `call` of their own; tables on real servers are tested in multiprocess."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtrain
from dtrain.engine.variables import tables

IDS = np.array([[0, 2, 5], [5, 1, 1]], "int32")


class Scaled(keras.layers.Embedding):  # type: ignore[misc]
    """Takes an argument of its own, and calls Keras' method by `super()`."""

    def call(self, inputs: Any, scale: float = 1.0) -> Any:
        return super().call(inputs) * scale


@pytest.mark.skipif(not hasattr(keras.layers, "ReversibleEmbedding"), reason="needs a newer Keras")
def test_an_embedding_of_keras_with_a_call_of_its_own() -> None:
    with dtrain.MirroredStrategy().scope():
        layer = keras.layers.ReversibleEmbedding(6, 4)
        found = layer(IDS)
        scores = layer(found, reverse=True)
    table = layer.embeddings.numpy()
    np.testing.assert_array_equal(found, table[IDS])
    np.testing.assert_allclose(scores, table[IDS] @ table.T, rtol=1e-5)


@pytest.mark.parametrize("kind", ["Embedding", "ReversibleEmbedding", "Scaled"])
def test_a_table_on_servers_is_looked_up_there(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Scaled if kind == "Scaled" else getattr(keras.layers, kind, None)
    if made is None:
        pytest.skip("needs a newer Keras")
    seen = []

    def lookup(table: Any, ids: Any) -> Any:
        seen.append(ids)
        return tf.gather(table, ids)

    with dtrain.MirroredStrategy().scope():
        layer = made(6, 4)
        layer(IDS)
    monkeypatch.setattr(tables, "stays_on_servers", lambda _: True)
    monkeypatch.setattr(tables, "lookup", lookup)
    with dtrain.MirroredStrategy().scope():
        found = layer(IDS, scale=2.0) if kind == "Scaled" else layer(IDS)
    assert len(seen) == 1
    np.testing.assert_array_equal(found, layer.embeddings.numpy()[IDS] * (2 if kind == "Scaled" else 1))
