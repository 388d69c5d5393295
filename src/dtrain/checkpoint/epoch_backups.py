"""Lets a job that is started again go on after its last whole epoch.

Keras' own `ModelCheckpoint` writes; this names the files and finds the newest that is whole. Keras'
`BackupAndRestore` keeps the number of the epoch in a second file, and cannot start where that one is torn.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from dtrain import job
from dtrain.cluster import settings
from dtrain.errors import ConfigurationError
from dtrain.log import logger

_FILES = "epoch-{epoch:05d}.weights.h5"
_PATTERN = "epoch-*.weights.h5"


class EpochBackups:
    """The weights and the optimizer's state after each epoch, in files of one folder.

    Args:
        folder: where; made when the first epoch has ended.
        keep: how many of the newest files are kept; None for all.
    """

    def __init__(self, folder: Path, keep: int | None = None) -> None:
        self._folder = folder
        self._keep = keep

    def callbacks(self) -> list[Any]:
        """What `fit` should call; put it last, so that an epoch counts once everything has noted it."""
        import keras

        callbacks = [keras.callbacks.ModelCheckpoint(str(self._folder / _FILES), save_weights_only=True)]
        if self._keep is not None and job.is_chief():
            callbacks.append(keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: self._prune()))
        return callbacks

    def _prune(self) -> None:
        """Deletes all but the newest files; another one's being there still costs nothing but its room."""
        for path in sorted(self._folder.glob(_PATTERN))[: -(self._keep or 1)]:
            path.unlink(missing_ok=True)

    def restore(self, model: Any) -> int:
        """Bring a compiled and built model to where the newest whole backup left it; call it in the scope.

        Returns:
            How many epochs are done: what `fit` takes as `initial_epoch`.

        Raises:
            ConfigurationError: there is a backup, but the model is not built.
        """
        for path in sorted(self._folder.glob(_PATTERN), reverse=True):
            if not model.built:
                raise ConfigurationError(
                    f"{path} cannot be loaded: the model {model.name!r} knows no shapes before it sees data.",
                    hint="Begin it with keras.Input(shape), or call model.build.",
                )
            if not model.optimizer.built:
                model.optimizer.build(model.trainable_variables)
            try:
                model.load_weights(path)
            except OSError as error:  # the process was killed while it wrote
                logger.warning("The backup %s is not whole, so the one before it is used: %s", path, error)
                continue
            return int(path.name.partition("-")[2].partition(".")[0])
        return 0

    def remove(self) -> None:
        """Delete them: the run is over."""
        shutil.rmtree(self._folder, ignore_errors=True)


class NoBackups:
    """Where nobody would start the job again: nothing is written, and training begins at the beginning."""

    def callbacks(self) -> list[Any]:
        """None."""
        return []

    def restore(self, model: Any) -> int:
        """No epoch is done."""
        return 0

    def remove(self) -> None:
        """There is nothing to delete."""


def epoch_backups(folder: Path) -> EpochBackups | NoBackups:
    """Backups in `folder` if the launcher starts this job again when it is lost; otherwise none."""
    return EpochBackups(folder) if settings.restarted_job() is not None else NoBackups()
