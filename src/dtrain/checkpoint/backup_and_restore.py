"""`BackupAndRestore`: Keras' callback of this name, with exact checkpoints, for every strategy.

It only holds the settings; `session` saves and restores, without a callback hook at every batch.
"""

from __future__ import annotations

import collections
import os
from typing import Any

import keras

from dtrain.base.paths import checked_path
from dtrain.base.words import check_seconds
from dtrain.checkpoint.content import LoadedCheckpoint, find_newest
from dtrain.checkpoint.folder import check_no_link
from dtrain.checkpoint.group import find_group
from dtrain.checkpoint.restoration import is_state
from dtrain.checkpoint.session import BackupPlan, BackupSession
from dtrain.checkpoint.storages import storage_of
from dtrain.checkpoint.store import check_keep
from dtrain.checkpoint.variables import TrainingVariables
from dtrain.engine.install import install
from dtrain.errors import ConfigurationError
from dtrain.interfaces.managed_strategy import layout_of
from dtrain.interfaces.replica_layout import ReplicaLayout
from dtrain.upstream import keras_models

_ended: collections.Counter[str] = collections.Counter()  # fits that have ended without an error, by folder


class BackupAndRestore(keras.callbacks.BackupAndRestore):  # type: ignore[misc]
    """Resumes an interrupted `fit` with the same weights, history and metrics as without the interruption.

    Add it to `fit`'s callbacks, and start the program again with the same command, by hand or by
    `dtrain launch`. A checkpoint contains the model, the optimizer's whole state (accumulated gradients, loss
    scale and averages included), metrics, random generators, the states of the other callbacks, and the
    position in the data, exact to the step. Each worker writes a share of it while training continues. A
    checkpoint is used only when it is complete; if it is damaged, the previous one is used.

    Differences from Keras' callback: an epoch resumes at the step at which it was saved, in the same order of
    the data; `History`, and the files of `CSVLogger`, contain every epoch once, including those before the
    interruption; the model need not be built; with several workers, each must have the callback. Under
    `dtrain launch`, the last checkpoint stays until the whole job has ended, so that no work is repeated if a
    process dies after the training.

    With `keras.utils.set_random_seed`, an interrupted run ends with the same bits as an uninterrupted one.
    Datasets other than arrays, `keras.utils.PyDataset` and `dtrain.data` are read again up to the position at
    which training resumes; the log names the cost.

    A checkpoint of another optimizer class is refused. Other optimizer settings, or another seed, are listed
    in a warning.

    Args:
        backup_dir: a folder for this callback alone, on any path that TensorFlow can write. Workers that see
            the same folder share the work; a worker with a disk of its own writes a complete copy there. If a
            running job uses the folder, `fit` of another job raises a `CheckpointError`.
        save_freq: "epoch", a number of batches, or False for neither.
        double_checkpoint: Keras' name for `keep=2`, which is the default here.
        delete_checkpoint: whether to delete the checkpoints when training is complete. If not, a later `fit`
            with the same folder and more epochs resumes from them.
        save_seconds: the time in seconds between two saves, in addition to `save_freq`; None for no saves by
            time.
        keep: how many of the newest checkpoints to keep, at least 1.
        save_before_preemption: whether to save when SIGTERM, Slurm's SIGUSR1 or a cloud's notice announces a
            preemption. All workers then save at the same step, and end with exit status 75 ("run me again").

    Raises:
        ConfigurationError: an argument cannot be used.

    Example:
        ```python
        strategy = dtrain.strategy("mirrored")
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")

        backup = dtrain.BackupAndRestore("backup", save_seconds=300)
        model.fit(np.ones((64, 4)), np.ones((64, 1)), epochs=2, callbacks=[backup], verbose=0)
        ```
    """

    # Keras may call the batch hooks asynchronously, because they do nothing.
    async_safe = True

    def __init__(
        self,
        backup_dir: str | os.PathLike[str],
        save_freq: str | int | bool | None = "epoch",
        double_checkpoint: bool = False,
        delete_checkpoint: bool = True,
        *,
        save_seconds: float | None = None,
        keep: int = 2,
        save_before_preemption: bool = True,
    ) -> None:
        folder = checked_path("backup_dir", backup_dir)
        steps = _steps(save_freq)
        if save_seconds is not None:
            check_seconds("save_seconds", save_seconds)
        check_keep(keep)
        super().__init__(
            folder,
            save_freq="epoch" if steps is None else steps,
            double_checkpoint=double_checkpoint,
            delete_checkpoint=delete_checkpoint,
        )
        self.save_freq = save_freq
        self.save_seconds = save_seconds
        self.keep = max(keep, 2) if double_checkpoint else keep
        self.save_before_preemption = save_before_preemption
        self._in_fit = False
        install()

    def dtrain_session(self, model: Any, arguments: dict[str, Any]) -> BackupSession:
        """Makes the session that saves and restores one `fit`; see `dtrain.engine.loops.fit_session`."""
        folder = self._folder()
        # If checkpoints are deleted at the end, each `fit` of a program has a folder of its own. A restarted
        # program then passes through each complete `fit` without training.
        number = _ended[folder] if self.delete_checkpoint else 0
        self._in_fit = True
        plan = BackupPlan(
            folder=f"{folder}/fit-{number}",
            every_epoch=self.save_freq == "epoch",
            steps=_steps(self.save_freq),
            seconds=self.save_seconds,
            keep=self.keep,
            delete=self.delete_checkpoint,
            notices=self.save_before_preemption,
        )
        return BackupSession(plan, model, arguments, on_end=lambda: _ended.update([folder]))

    def restore_weights(self, model: Any) -> int:
        """Restores the weights of a built model from the newest checkpoint; all workers must call it.

        It is for looking at a model without training: `fit` restores the whole state by itself. It needs
        checkpoints that stay (`delete_checkpoint=False`).

        Returns:
            How many whole epochs are done; 0 if there is no checkpoint.

        Raises:
            ConfigurationError: the model is not built.
            CheckpointError: the checkpoint is of another model, or the folder cannot be listed.
        """
        if not model.built:
            raise ConfigurationError(
                f"The model {model.name!r} is not built, so its weights cannot be restored yet.",
                hint="Start it with a keras.Input layer, or call it on a batch first.",
            )
        checkpoint, epochs = self._newest(model)
        if checkpoint is not None:
            TrainingVariables(model).restore_weights(checkpoint.table, checkpoint.tensors)
        return epochs

    def epochs_done(self, model: Any) -> int:
        """As `restore_weights`, without restoring, for a model that only `fit` builds."""
        return self._newest(model)[1]

    def _newest(self, model: Any) -> tuple[LoadedCheckpoint | None, int]:
        """The newest checkpoint, and how many whole epochs are done in it."""
        layout = layout_of(keras_models.strategy_of(model)) or ReplicaLayout()
        folder = f"{self._folder()}/fit-0"
        check_no_link(folder, layout)
        checkpoint = find_newest(folder, layout, find_group(folder, layout), is_state)
        return checkpoint, 0 if checkpoint is None else int(checkpoint.worker(layout.worker)["epoch"])

    def _folder(self) -> str:
        return storage_of(self.backup_dir).absolute(self.backup_dir)

    # These override Keras' own hooks: the session does their work.

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Does nothing in `fit`.

        Raises:
            ConfigurationError: something else than `fit` called it.
        """
        if not self._in_fit:
            raise ConfigurationError(
                "BackupAndRestore works inside of fit only.", hint="Pass it as fit(callbacks=[...])."
            )

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Does nothing."""

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Does nothing."""

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Does nothing."""


def _steps(save_freq: Any) -> int | None:
    """The number of batches between two saves; None for "epoch", False and None.

    Raises:
        ConfigurationError: `save_freq` is something else.
    """
    if save_freq == "epoch" or save_freq is False or save_freq is None:
        return None
    if isinstance(save_freq, bool) or not isinstance(save_freq, int) or save_freq < 1:
        raise ConfigurationError(
            f"save_freq is {save_freq!r}.", hint='"epoch", a number of batches of at least 1, or False'
        )
    return save_freq
