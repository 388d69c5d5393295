"""`Checkpoints`: exact checkpoints for custom training loops, written in the same way as those of `fit`.

The loop decides when to save, and which values of its own to save.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from dtrain.base.log import logger
from dtrain.base.paths import checked_path
from dtrain.checkpoint.callback_state import is_plain
from dtrain.checkpoint.content import restore_generators
from dtrain.checkpoint.folder import CheckpointFolder
from dtrain.checkpoint.storages import storage_of
from dtrain.checkpoint.store import check_keep
from dtrain.checkpoint.variables import TrainingVariables
from dtrain.engine.callbacks.copies import check_copies
from dtrain.errors import ConfigurationError
from dtrain.interfaces.managed_strategy import layout_of
from dtrain.interfaces.replica_layout import ReplicaLayout
from dtrain.process_group.value_exchange import exchange
from dtrain.upstream import keras_models


class Checkpoints:
    """Saves and restores a model, its optimizer and metrics, random generators, and the loop's own values.

    Every worker must create it, and call its methods at the same steps. Each worker writes a share of a
    checkpoint while training continues. A checkpoint is used only when all shares are complete.

    Args:
        folder: a folder for these checkpoints alone, on any path that TensorFlow can write.
        model: a built Keras model, created in the strategy's scope if there is a strategy.
        optimizer: a built Keras optimizer; None for the one that the model was compiled with.
        metrics: Keras metrics to save and restore besides the model's own.
        keep: how many of the newest checkpoints to keep, at least 1.

    Raises:
        ConfigurationError: the model or the optimizer is not built, or `keep` is less than 1.
        CheckpointError: another running job uses the folder.

    Example:
        ```python
        with dtrain.strategy("mirrored").scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
            model.optimizer.build(model.trainable_variables)
        checkpoints = dtrain.checkpoint.Checkpoints("backup", model)
        begun = checkpoints.restore() or {"step": 0}
        for step in range(begun["step"], 4):
            model.train_on_batch(np.ones((8, 4)), np.ones((8, 1)))
            checkpoints.save(step + 1)
        checkpoints.close()
        ```
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        model: Any,
        *,
        optimizer: Any = None,
        metrics: Sequence[Any] = (),
        keep: int = 2,
    ) -> None:
        used = getattr(model, "optimizer", None) if optimizer is None else optimizer
        for name, part in (("model", model), ("optimizer", used)):
            if part is not None and not part.built:
                raise ConfigurationError(
                    f"The {name} is not built, so it has nothing to save or restore yet.",
                    hint="Start it with a keras.Input layer; build optimizers by "
                    "build(model.trainable_variables).",
                )
        check_keep(keep)
        folder = checked_path("folder", folder)
        self._model = model
        self._layout = layout_of(keras_models.strategy_of(model)) or ReplicaLayout()
        self._folder = CheckpointFolder(
            storage_of(folder).absolute(folder),
            TrainingVariables(model, used, metrics),
            used,
            self._layout,
            keep=keep,
        )
        self._folder.report_to_launcher(-1)

    def restore(self) -> dict[str, Any] | None:
        """Restores variables and random generators from the newest complete checkpoint; all workers call it.

        Returns:
            The values that were given to `save`, and `step`; None if there is no checkpoint.

        Raises:
            CheckpointError: the checkpoint is of another model, optimizer or set of metrics, or the
                checkpoints in the folder cannot be listed.
        """
        checkpoint = self._folder.find(lambda state: isinstance(state.get("values"), dict))
        if checkpoint is None:
            return None
        self._folder.restore(checkpoint)
        worker = checkpoint.worker(self._layout.worker)
        restore_generators(worker)
        logger.info("Step %d is restored from %s.", checkpoint.step, checkpoint.path)
        self._folder.report_to_launcher(checkpoint.step)
        return {**worker["values"], "step": checkpoint.step}

    def save(self, step: int, **values: Any) -> None:
        """Starts to write a checkpoint, after the previous one is written; every worker must call it.

        Before, the replicas' copies of the weights are compared, since a checkpoint holds one of them.

        Args:
            step: how many steps are done.
            **values: numbers, text, NumPy arrays, and containers of them. `restore` returns them to this
                worker; a worker that did not take part in the save gets the values of another worker.

        Raises:
            ConfigurationError: a value is of another kind, or is called `step`.
            ReplicaMismatchError: the replicas' copies of the weights differ. Nothing is written.
        """
        for name, value in values.items():
            if not is_plain(value) or name == "step":
                raise ConfigurationError(
                    f"{name}={value!r} cannot be saved.",
                    hint="Only numbers, text, NumPy arrays, and lists, tuples, sets and dictionaries of "
                    "them can be saved.",
                )
        if not self._layout.average_every:
            check_copies(self._model, self._layout, f"After step {step}")
        self.wait()
        self._folder.save(step, {"values": values})

    def wait(self) -> None:
        """Waits until nothing is being written; logs a warning if a checkpoint could not be written."""
        self._folder.wait()
        self._folder.report()

    def close(self, *, delete: bool = False) -> None:
        """Waits for the checkpoint that is being written, and releases the folder; every worker must call it.

        Args:
            delete: whether to delete all checkpoints, because the training is complete.
        """
        self.wait()
        self._folder.close()
        if delete:
            self._folder.remove()
        else:
            exchange(self._layout, None)
        self._folder.release()
