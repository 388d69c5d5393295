"""The engine of parameter servers, as the synchronous engine calls it (`interfaces.managed_strategy`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from dtrain.engine.parameter_server import fit_arguments
from dtrain.engine.parameter_server.block_functions import AsynchronousFunction, AsynchronousPredict
from dtrain.engine.parameter_server.epochs import asynchronous_epochs
from dtrain.engine.parameter_server.server_updates import updating
from dtrain.engine.parameter_server.snapshot import ServerSnapshots
from dtrain.engine.replica.context import local_update
from dtrain.interfaces.replica_layout import ServerLayout


class ServerEngine:
    """Trains models whose weights are on the servers of a layout; an `AsynchronousEngine`."""

    def __init__(self, layout: ServerLayout) -> None:
        self._layout = layout

    def prepare_fit(self, arguments: dict[str, Any], callbacks: list[Any]) -> list[Any]:
        """Makes the datasets of functions, and adds the callback that reports the staleness."""
        return fit_arguments.prepare_fit(self._layout, arguments, callbacks)

    def prepare_without_training(self, arguments: dict[str, Any]) -> None:
        """Makes the dataset of a function."""
        fit_arguments.prepare_without_training(arguments)

    def step_function(self, model: Any, *, training: bool) -> Any:
        """The function that gives its batches to blocks of steps on the workers."""
        return AsynchronousFunction(model, "train" if training else "test")

    def predict_function(self, model: Any) -> Any:
        """The function that gives its batches to blocks of predictions on the workers."""
        return AsynchronousPredict(model)

    def epochs(self, base: type) -> type:
        """The class whose epochs end when all their blocks are done."""
        return asynchronous_epochs(base)

    def snapshots(self, model: Any) -> ServerSnapshots:
        """What reads all variables between two updates."""
        return ServerSnapshots(model, self._layout.servers)

    def update(self, optimizer: Any, apply: Callable[[], Any]) -> None:
        """Applies an update while the servers are locked, if a function is traced."""

        def update() -> None:
            with local_update(), updating(optimizer):
                apply()

        if tf.executing_eagerly():
            update()
        else:
            self._layout.servers.locked(update)
