"""`TPUStrategy` where there is no TPU: what was looked for is said, and within a limit."""

from __future__ import annotations

import logging
import math
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtrain
from dtrain.errors import ConfigurationError, TPUNotFoundError
from dtrain.strategies.tpu import _within, wait_for
from given_clock import GivenClock
from refusals import refused


def test_a_search_without_a_limit() -> None:
    assert _within(math.inf, lambda: "found") == "found"


@pytest.fixture
def mute() -> Iterator[str]:
    """The address of a server that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def look(**options: Any) -> TPUNotFoundError:
    with pytest.raises(TPUNotFoundError) as caught:
        dtrain.TPUStrategy(**options)
    assert "name it: dtrain.TPUStrategy(tpu='NAME')" in caught.value.hint
    return caught.value


@pytest.mark.parametrize(
    ("tpu", "words"),
    [
        ("local", ["the TPU 'local'"]),
        ("no-such-name", ["the TPU 'no-such-name'"]),
        (None, ["a TPU that the environment names (TPU_NAME)", "Please provide a TPU Name"]),
    ],
)
def test_no_tpu_is_said(environment: pytest.MonkeyPatch, tpu: str | None, words: list[str]) -> None:
    error = look(tpu=tpu, timeout=100)
    assert all(word in error.message for word in words)


def test_a_tpu_that_the_environment_names(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("TPU_NAME", "grpc://127.0.0.1:1")
    error = look(timeout=0.5)
    assert "the TPU 'grpc://127.0.0.1:1', named by the environment" in error.message
    environment.delenv("TPU_NAME")
    environment.setenv("COLAB_TPU_ADDR", "127.0.0.1:1")  # as Colab gives it, without a scheme
    error = look(timeout=0.5)
    assert "nothing serves at 127.0.0.1:1 (Connection refused); waited 0.5 s" in error.message


def test_an_address_where_nobody_answers_is_given_up(mute: str) -> None:
    for address, why in (("127.0.0.1:1", "Connection refused"), (mute, "no answer")):
        error = look(tpu=f"grpc://{address}", timeout=0.5)
        assert f"nothing serves at {address} ({why}); waited 0.5 s" in error.message


def test_an_address_is_tried_until_the_limit_and_that_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    clock = GivenClock()
    with pytest.raises(TimeoutError, match=r"127.0.0.1:1 \(Connection refused\); waited 300 s"):
        wait_for("127.0.0.1:1", clock.deadline(300.0), 300.0)
    assert clock.now() == 1300.0
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "dtrain: waiting for the TPU at 127.0.0.1:1; giving up in 290 s"
    assert len(said) == 29


def test_the_limit_is_that_of_a_missing_peer(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("DTRAIN_PEER_TIMEOUT", "0.3")
    assert "waited 0.3 s" in look(tpu="grpc://127.0.0.1:1").message


def test_a_resolver_is_looked_at(environment: pytest.MonkeyPatch) -> None:
    resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu="grpc://127.0.0.1:1")
    error = look(tpu_cluster_resolver=resolver, timeout=0.3)
    assert "the TPU of TPUClusterResolver" in error.message
    with refused(TPUNotFoundError, "TPUClusterResolver", "127.0.0.1:1"):
        dtrain.TPUStrategy(resolver, timeout=0.3)


def test_a_resolver_and_a_name_are_one_too_many() -> None:
    resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu="local")
    for options in ({}, {"fallback": "mirrored"}):
        with refused(ConfigurationError, "resolver", tpu="x"):
            dtrain.TPUStrategy(resolver, tpu="x", **options)


def test_the_fallback_trains_and_is_not_silent(caplog: pytest.LogCaptureFixture) -> None:
    strategy = dtrain.strategy("tpu", tpu="local", fallback="mirrored", timeout=100)
    assert type(strategy) is dtrain.MirroredStrategy
    warned = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and r.name == "dtrain"]
    assert len(warned) == 1
    assert "Looked for the TPU 'local'" in warned[0]
    assert "MirroredStrategy instead: fallback='mirrored' was set" in warned[0]
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="zeros")])
        model.compile(optimizer=keras.optimizers.SGD(0.5), loss="mse")
    model.fit(np.ones((4, 2), "float32"), np.ones((4, 1), "float32"), batch_size=4, verbose=0)
    np.testing.assert_allclose(model.get_weights()[0], [[1.0], [1.0]], rtol=1e-6)


def test_an_unknown_fallback_is_refused() -> None:
    with refused(ConfigurationError, "'cpu'", "mirrored, or None"):
        dtrain.TPUStrategy(tpu="local", fallback="cpu")


def test_a_system_that_is_initialised_is_not_initialised_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as it can be tried without a TPU: TensorFlow's record says that it is."""
    from tensorflow.python.tpu import tpu_strategy_util

    made: list[Any] = []
    monkeypatch.setitem(tpu_strategy_util._INITIALIZED_TPU_SYSTEMS, "local", object())
    monkeypatch.setattr(tf.tpu.experimental, "initialize_tpu_system", lambda resolver: pytest.fail("again"))
    monkeypatch.setattr(tf.distribute.TPUStrategy, "__init__", lambda self, *args: made.append(args))
    monkeypatch.setattr(tf.distribute.TPUStrategy, "num_replicas_in_sync", 8)
    resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu="local")
    for options in ({"tpu_cluster_resolver": resolver}, {"tpu": "local"}, {}, {"fallback": "mirrored"}):
        strategy = dtrain.TPUStrategy(**options)
        assert type(strategy) is dtrain.TPUStrategy
        assert strategy.num_replicas_in_sync == 8
    assert len(made) == 4
    assert made[0] == (resolver, None, False)
    assert all(type(found) is type(resolver) for found, _, _ in made)


GIVES_UP = """
import os, socket
server = socket.create_server(("127.0.0.1", 0))
address = f"127.0.0.1:{server.getsockname()[1]}"
os.environ["GCE_METADATA_HOST"] = address  # TensorFlow asks there, without a limit, for what a name means
import dtrain
for tpu in (f"grpc://{address}", "a-name"):
    try:
        dtrain.TPUStrategy(tpu=tpu, timeout=0.5)
    except dtrain.DtrainError as error:
        print(error.message)
"""


def test_what_still_looks_for_a_tpu_does_not_hold_up_the_end() -> None:
    done = subprocess.run([sys.executable, "-c", GIVES_UP], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert "(no answer); waited 0.5 s" in first
    assert "Looked for the TPU 'a-name': no answer in 0.5 s" in second
    assert "Traceback" not in done.stderr
