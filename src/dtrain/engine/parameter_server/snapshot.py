"""Takes a snapshot of a model's variables between two updates, while the workers keep training.

The servers are locked only while the values are read. Writing them to disk is not done here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from dtrain.engine.parameter_server.exchange import Exchange, Servers
from dtrain.engine.variables.local_variable import variables_replaced
from dtrain.engine.variables.split_variables import parts_of
from dtrain.upstream import tf_tracing
from dtrain.upstream.tf_variables import underlying


class ServerSnapshots:
    """Reads all variables of a model and its optimizer at the same moment; can be used repeatedly.

    Args:
        model: a Keras model under a parameter-server strategy.
        servers: the lock and clock of its servers.
    """

    def __init__(self, model: Any, servers: Servers) -> None:
        optimizer = getattr(model, "optimizer", None)
        wanted = [*model.variables, *(optimizer.variables if optimizer is not None else [])]
        self._variables = [v for v in {id(v): v for v in wanted}.values() if _on_servers(v)]
        self._read = tf_tracing.made_for_each_model(Exchange(servers, self._variables).read)

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """Takes a snapshot; inside the context, the Keras variables have the snapshot's values."""
        if not self._variables:
            yield
            return
        values, _ = self._read()
        copies = [tf.Variable(value, trainable=False) for value in values]
        with variables_replaced(self._variables, copies):
            yield


def _on_servers(variable: Any) -> bool:
    parts = parts_of(variable)
    return all("/job:ps/" in (getattr(p, "device", None) or "") for p in parts) and bool(
        underlying(variable).shape.is_fully_defined()
    )
