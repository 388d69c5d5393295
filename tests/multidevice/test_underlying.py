"""The variable behind a variable is found without a word to other replicas."""

from __future__ import annotations

import pytest
import tensorflow as tf

import dtrain
from dtrain.upstream.tf_variables import underlying


def test_no_reduction_is_made_for_what_is_read_in_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    import keras

    strategy = dtrain.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        mean = keras.metrics.Mean()
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    reductions = []
    original = strategy.extended._reduce_to
    monkeypatch.setattr(
        strategy.extended,
        "_reduce_to",
        lambda *each, **named: (reductions.append(1), original(*each, **named))[1],
    )
    for variable in [*mean.variables, *model.variables]:
        found = underlying(variable)
        assert isinstance(found, tf.distribute.DistributedValues)
        assert underlying(found) is found
        assert underlying(found.values[1]) is found
    assert not reductions
    mean.variables[0].numpy()
    assert reductions  # where it is read it is made, so the count counts
