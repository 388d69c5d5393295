"""`Checkpoints`: exact checkpoints for training loops of one's own, written as those of `fit` are.

When to save, and what the loop's own numbers are, is the loop's to say.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from dtrain.checkpoint.callback_state import is_plain
from dtrain.checkpoint.content import restore_generators
from dtrain.checkpoint.folder import CheckpointFolder
from dtrain.checkpoint.store import check_keep
from dtrain.checkpoint.variables import TrainingVariables
from dtrain.errors import ConfigurationError
from dtrain.keras_engine.protocol import ReplicaLayout, layout_of
from dtrain.keras_engine.talk import exchange
from dtrain.log import logger
from dtrain.paths import checked_path
from dtrain.upstream import keras as upstream_keras


class Checkpoints:
    """Saves a model, its optimizer and metrics, random generators and the loop's numbers; finds them again.

    Every worker makes it, and calls its methods at the same steps. A save is written beside the training, by
    all workers, each its share, and counts once it is whole.

    ```python
    checkpoints = dtrain.checkpoint.Checkpoints("backup", model, optimizer=optimizer)
    begun = checkpoints.restore() or {"step": 0}
    for step in range(begun["step"], steps):
        train(batch(step))
        if (step + 1) % 100 == 0:
            checkpoints.save(step + 1)
    checkpoints.close()
    ```

    Args:
        folder: for these checkpoints alone, on any path that TensorFlow can write.
        model: a Keras model that is built, made in the strategy's scope if there is one.
        optimizer: a Keras optimizer that is built; None for the one that the model was compiled with.
        metrics: Keras metrics whose values matter across a restart.
        keep: how many checkpoints stay.

    Raises:
        ConfigurationError: the model or the optimizer is not built, or `keep` is no number of checkpoints.
        CheckpointError: another job that lives uses the folder.
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
                    hint="Begin it with keras.Input; build optimizers by build(model.trainable_variables).",
                )
        check_keep(keep)
        folder = checked_path("folder", folder)
        self._layout = layout_of(upstream_keras.strategy_of(model)) or ReplicaLayout()
        self._folder = CheckpointFolder(
            folder if "://" in folder else os.path.abspath(folder),  # noqa: PTH100
            TrainingVariables(model, used, metrics),
            used,
            self._layout,
            keep=keep,
        )
        self._folder.begin(-1)

    def restore(self) -> dict[str, Any] | None:
        """Gives the variables the values of the newest whole checkpoint, and the generators their states.

        Returns:
            What was given to `save`, with `step`; None where there is no checkpoint.

        Raises:
            CheckpointError: it is of another model, optimizer or set of metrics.
        """
        found = self._folder.find()
        if found is None:
            return None
        self._folder.restore(found)
        worker = found.worker(self._layout.worker)
        restore_generators(worker)
        logger.info("Step %d is restored from %s.", found.step, found.path)
        self._folder.begin(found.step)
        return {**worker["values"], "step": found.step}

    def save(self, step: int, **values: Any) -> None:
        """Begins to write a checkpoint, once the one before is written; every worker calls it.

        Args:
            step: steps that are done.
            **values: numbers, text, NumPy arrays, and containers of them, that `restore` gives back to this
                worker; to all where the number of workers is another then.

        Raises:
            ConfigurationError: a value is something else.
        """
        for name, value in values.items():
            if not is_plain(value) or name == "step":
                raise ConfigurationError(
                    f"{name}={value!r} cannot be saved.",
                    hint="Numbers, text, NumPy arrays, and lists, tuples, sets and dictionaries of them.",
                )
        self.wait()
        self._folder.save(step, {"values": values})

    def wait(self) -> None:
        """Returns when nothing is being written; says what could not be."""
        self._folder.wait()
        self._folder.report()

    def close(self, *, delete: bool = False) -> None:
        """Finishes what is being written; every worker calls it.

        Args:
            delete: delete all checkpoints: the training is over.
        """
        self.wait()
        self._folder.close()
        if delete:
            self._folder.remove()
        else:
            exchange(self._layout, None)
        self._folder.release()
