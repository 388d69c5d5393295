"""Saves a model as it was at one moment between two updates, while the workers go on.

The servers are locked for as long as reading takes, not for as long as writing does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from dtrain.keras_engine.asynchronous.exchange import Exchange
from dtrain.keras_engine.asynchronous.stand_in import standing_in
from dtrain.keras_engine.context import underlying
from dtrain.keras_engine.parts import parts_of
from dtrain.keras_engine.protocol import ServerLayout


@contextlib.contextmanager
def snapshot(model: Any, layout: ServerLayout) -> Iterator[None]:
    """While it is entered, a model's and its optimizer's variables have the values of one moment.

    Args:
        model: a Keras model under a parameter-server strategy.
        layout: the strategy's.
    """
    optimizer = getattr(model, "optimizer", None)
    wanted = [*model.variables, *(optimizer.variables if optimizer is not None else [])]
    variables = [v for v in {id(v): v for v in wanted}.values() if _on_servers(v)]
    if not variables:
        yield
        return
    exchange = Exchange(layout.servers, variables)
    values, _ = tf.function(exchange.read, autograph=False)()
    copies = [tf.Variable(value, trainable=False) for value in values]
    with standing_in(variables, copies):
        yield


def _on_servers(variable: Any) -> bool:
    parts = parts_of(variable)
    return all("/job:ps/" in (getattr(p, "device", None) or "") for p in parts) and bool(
        underlying(variable).shape.is_fully_defined()
    )
