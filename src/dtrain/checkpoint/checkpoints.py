"""`Checkpoints`: exact checkpoints for training loops of one's own, written as those of `fit` are.

When to save, and what the loop's own numbers are, is the loop's to say.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from dtrain import channel
from dtrain.checkpoint.callback_state import is_plain
from dtrain.checkpoint.content import content, find_newest, restore_generators
from dtrain.checkpoint.folder_lock import FolderLock
from dtrain.checkpoint.group import find_group
from dtrain.checkpoint.program import check_program, program_facts, warn_of_other_program
from dtrain.checkpoint.store import CheckpointStore, remove_all, remove_uncommitted
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
        ConfigurationError: the model or the optimizer is not built.
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
        folder = checked_path("folder", folder)
        self._folder = folder if "://" in folder else os.path.abspath(folder)  # noqa: PTH100
        self._layout = layout_of(upstream_keras.strategy_of(model)) or ReplicaLayout()
        self._variables = TrainingVariables(model, used, metrics)
        self._optimizer = used
        self._group = find_group(self._folder, self._layout)
        self._lock = FolderLock(self._folder, self._layout, self._group)
        if self._group.leads:
            remove_uncommitted(self._folder)
        self._program = program_facts(used)
        self._serial = 0
        self._store = CheckpointStore(
            self._folder,
            token=self._group.token,
            writer=self._group.mine,
            writers=len(self._group.members),
            keep=keep,
        )
        if self._layout.worker == 0:
            channel.tell_checkpoint(-1, self._folder)

    def restore(self) -> dict[str, Any] | None:
        """Gives the variables the values of the newest whole checkpoint, and the generators their states.

        Returns:
            What was given to `save`, with `step`; None where there is no checkpoint.

        Raises:
            CheckpointError: it is of another model, optimizer or set of metrics.
        """
        found = find_newest(self._folder, self._layout, self._group)
        if found is None:
            return None
        program = program_facts(self._optimizer)
        check_program(found.program, program, found.path)
        self._variables.restore(found.table, found.tensors, found.replicas)
        if self._layout.worker == 0:
            warn_of_other_program(found.program, program, self._optimizer, found.path)
        self._serial = found.serial
        worker = found.worker(self._layout.worker)
        restore_generators(worker)
        logger.info("Step %d is restored from %s.", found.step, found.path)
        if self._layout.worker == 0:
            channel.tell_checkpoint(found.step, self._folder)
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
        self._serial += 1
        tensors, notes = content(
            self._variables, self._layout, self._group, {"values": values}, self._program
        )
        self._store.save(step, tensors, notes, serial=self._serial)

    def wait(self) -> None:
        """Returns when nothing is being written; says what could not be."""
        self._store.wait()
        problem = self._store.take_problem()
        if problem:
            logger.warning("%s The next checkpoint is tried as ever.", problem)
        committed = self._store.last_committed
        if committed is not None and self._layout.worker == 0:
            channel.tell_checkpoint(committed, self._folder)

    def close(self, *, delete: bool = False) -> None:
        """Finishes what is being written; every worker calls it.

        Args:
            delete: delete all checkpoints: the training is over.
        """
        self.wait()
        self._store.close()
        exchange(self._layout, None)
        if delete and self._group.leads:
            remove_all(self._folder)
        self._lock.release(remove=delete)
