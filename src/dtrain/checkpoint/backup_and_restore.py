"""`BackupAndRestore`: Keras' callback of this name, exact, for every strategy.

It says when and where; `session` does the work, and needs no call at every batch.
"""

from __future__ import annotations

import collections
import os
from typing import Any

import keras

from dtrain.checkpoint.content import find_newest
from dtrain.checkpoint.group import find_group
from dtrain.checkpoint.session import BackupPlan, BackupSession
from dtrain.checkpoint.store import check_keep
from dtrain.checkpoint.variables import TrainingVariables
from dtrain.errors import ConfigurationError
from dtrain.keras_engine.hook import install
from dtrain.keras_engine.protocol import ReplicaLayout, layout_of
from dtrain.paths import checked_path
from dtrain.upstream import keras as upstream_keras

_ended: collections.Counter[str] = collections.Counter()  # fits that have ended well, by folder


class BackupAndRestore(keras.callbacks.BackupAndRestore):  # type: ignore[misc]
    """Lets a `fit` that was interrupted go on as if it had not been: the same weights, history and metrics.

    Put it into `fit`'s callbacks, and start the program again with the same command, by hand or by
    `dtrain launch`. A checkpoint holds the model, the optimizer with all that it keeps (accumulated
    gradients, loss scale, averages), metrics, random generators, what the other callbacks remember, and the
    place in the data, to the step. It is written while training goes on, by all workers, each its share, and
    counts once it is whole; a damaged one is recognised and the one before it used.

    Differences to Keras' callback: an epoch goes on at the step at which it was saved, in the same order of
    the data; `History`, and CSV logs of `CSVLogger`, hold every epoch once, those before included; the model
    need not be built; under several workers each calls it. Under `dtrain launch` the last checkpoint stays
    until the whole job has ended, so that nothing is trained twice whenever a process dies.

    The seeds of the program count: with `keras.utils.set_random_seed` a run that was interrupted ends with
    the same bits as one that was not. Data sets other than arrays, `keras.utils.PyDataset` and
    `dtrain.data` are read again up to the place where training goes on, which is logged with its cost.

    A checkpoint of another optimizer class is refused; other settings of the optimizer, or another seed, are
    named in a warning.

    Args:
        backup_dir: a folder for this callback alone, on any path that TensorFlow can write. Workers that see
            the same folder share the work; one with a disk of its own keeps a whole copy there. A second job
            that uses it while the first one lives gets a `CheckpointError` from `fit`.
        save_freq: "epoch", a number of batches, or False for neither.
        double_checkpoint: Keras' word for `keep=2`, which is the default here.
        delete_checkpoint: whether the checkpoints are deleted when training is complete. Otherwise a later
            `fit` with the same folder goes on from them, if it has more epochs.
        save_seconds: save whenever so many seconds are over, beside `save_freq` or, with False, alone.
        keep: how many checkpoints stay, at least 1.
        save_before_preemption: save when SIGTERM, Slurm's SIGUSR1 or a cloud's notice says that the machine
            is about to be taken away: at the same step on all workers, which then end with exit status 75
            ("run me again").

    Raises:
        ConfigurationError: an argument cannot be used.
    """

    # It looks at no batch.
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
        number = isinstance(save_seconds, int | float) and not isinstance(save_seconds, bool)
        if save_seconds is not None and not (number and 0 < save_seconds < float("inf")):
            raise ConfigurationError(f"save_seconds is {save_seconds!r}, not a positive number of seconds.")
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
        """What takes part in one `fit`; see `dtrain.keras_engine.between_steps`."""
        folder = self._folder()
        # Of checkpoints that are deleted at the end, each fit of a program has its own: a program that is
        # started again goes through those that are complete without training.
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
        """Gives a model that is built the weights of the newest checkpoint; all workers must call it.

        `fit` does so by itself, with all the rest; this is for looking at a model before. It is for
        checkpoints that stay (`delete_checkpoint=False`).

        Returns:
            How many whole epochs are done; 0 where there is no checkpoint.

        Raises:
            CheckpointError: the checkpoint is of another model.
        """
        layout = layout_of(upstream_keras.strategy_of(model)) or ReplicaLayout()
        folder = f"{self._folder()}/fit-0"
        found = find_newest(folder, layout, find_group(folder, layout))
        if found is None:
            return 0
        if model.built:
            TrainingVariables(model).restore_weights(found.table, found.tensors)
        return int(found.worker(layout.worker)["epoch"])

    def _folder(self) -> str:
        if "://" in self.backup_dir:
            return str(self.backup_dir)
        return os.path.abspath(self.backup_dir)  # noqa: PTH100

    # The session does what Keras' own hooks do.

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Nothing.

        Raises:
            ConfigurationError: it is called elsewhere than by `fit`.
        """
        if not self._in_fit:
            raise ConfigurationError(
                "BackupAndRestore works inside of fit only.", hint="Pass it as fit(callbacks=[...])."
            )

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Nothing."""

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Nothing."""

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Nothing."""


def _steps(save_freq: Any) -> int | None:
    """The number of batches, or None for "epoch" and False.

    Raises:
        ConfigurationError: it is something else.
    """
    if save_freq == "epoch" or save_freq is False or save_freq is None:
        return None
    if isinstance(save_freq, bool) or not isinstance(save_freq, int) or save_freq < 1:
        raise ConfigurationError(
            f"save_freq is {save_freq!r}.", hint='"epoch", a number of batches of at least 1, or False'
        )
    return save_freq
