"""What every recipe does around its own data and model: strategy, seeds, files, callbacks, test, summary.

It is a program in steps, meant to be read; it knows no data and no model, and adds no loop to Keras'.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

import dtrain
from dtrain import job, monitor
from dtrain.data import Pipeline
from dtrain.monitor import RunDirectory
from dtrain.monitor.rates import RateLogs
from dtrain.monitor.run_files import ended_record, run_callbacks, write_end
from dtrain.optim import precision, scaled_rate
from dtrain.recipes.options import RecipeOptions

_SAVE_SECONDS = 60.0  # between two checkpoints, beside those at the end of each epoch


class Data(NamedTuple):
    """What `fit` and `evaluate` take, in batches over all replicas.

    Attributes:
        train: what the weights are fitted to.
        validation: what is looked at after every epoch.
        test: what is looked at once, at the end.
        examples: how many there are in `train`.
    """

    train: tf.data.Dataset | Pipeline
    validation: tf.data.Dataset | Pipeline
    test: tf.data.Dataset | Pipeline
    examples: int


class TrainingRun:
    """One run of a recipe. Make it first: making a strategy decides what TensorFlow does after.

    Args:
        recipe: its name, for the record.
        options: what it was told.

    Attributes:
        strategy: what it trains under.
        batches: the sizes of its batches.

    Raises:
        ConfigurationError: the options do not fit the number of replicas.
    """

    def __init__(self, recipe: str, options: RecipeOptions) -> None:
        self._started = time.perf_counter()
        self.recipe, self.options = recipe, options
        self.strategy = dtrain.strategy(options.strategy)
        replicas = self.strategy.num_replicas_in_sync
        # Where a worker of an elastic job is absent, the batches stay, and those that are there do more.
        self.batches = options.batches(job.full_size(replicas)).on(replicas)
        keras.utils.set_random_seed(options.seed)

    def schedule(self, steps_per_epoch: int) -> keras.optimizers.schedules.LearningRateSchedule:
        """A rate that rises over the warm-up, and then falls to zero with a cosine until the end.

        It rises from the unscaled rate where it is scaled (Goyal et al., arXiv:1706.02677), else from 0.

        Args:
            steps_per_epoch: micro-batches in an epoch; Keras asks a schedule by these, not by updates.
        """
        options = self.options
        highest = self._highest_rate()
        rising = round(options.warmup_epochs() * steps_per_epoch)
        falling = max(options.epochs * steps_per_epoch - rising, 1)
        if not rising:
            return keras.optimizers.schedules.CosineDecay(highest, falling)
        start = 0.0 if options.scaling == "none" else options.rate()
        return keras.optimizers.schedules.CosineDecay(
            start, falling, warmup_target=highest, warmup_steps=rising
        )

    def _highest_rate(self) -> float:
        options = self.options
        return scaled_rate(
            options.rate(),
            batch=self.batches.global_batch,
            base_batch=options.base_batch or options.usual_batch,
            scaling=options.scaling,
        )

    @property
    def accumulation(self) -> int | None:
        """What a Keras optimizer takes as `gradient_accumulation_steps`."""
        return self.batches.accumulation if self.batches.accumulation > 1 else None

    def train(
        self,
        data: Data,
        make_model: Callable[[], keras.Model],
        *,
        save: Callable[[keras.Model, RunDirectory], None] | None = None,
    ) -> str:
        """Train, test, and leave the files of the run. Every process of the job calls this.

        Args:
            data: what to train and test on.
            make_model: makes the compiled model; called once, in the strategy's scope.
            save: writes the trained model; by default `model.save`.

        Returns:
            A summary of the run; the same on every process, by when all files are whole.

        Raises:
            ConfigurationError: before training, if the run directory cannot take the run.
        """
        record = monitor.describe_run(self.recipe, self.strategy, self._settings())
        run = monitor.open_run_directory(
            self.options.run_dir, name=self.recipe, record=record, same=self._decisive()
        )

        with precision(self.options.precision), self.strategy.scope():
            model = make_model()

        fitted = model.fit(
            _dataset(data.train),
            validation_data=_dataset(data.validation),
            epochs=self.options.epochs,
            shuffle=False,  # the pipeline shuffles
            verbose=1 if dtrain.is_chief() else 0,
            callbacks=[
                RateLogs(),
                *run_callbacks(run, record),
                # They stay until the record is written: a run that is killed before then goes on.
                dtrain.BackupAndRestore(run.backups, save_seconds=_SAVE_SECONDS, delete_checkpoint=False),
            ],
        )
        test = model.evaluate(_dataset(data.test), verbose=0, return_dict=True)
        if save is None:
            model.save(run.model)
        else:
            save(model, run)

        tested = {f"test_{name}": value for name, value in test.items()}
        record = ended_record(record, model, fitted, begun=self._started, tested=tested)
        write_end(run, record, fitted, title=f"{self.recipe} under {record['strategy']}")
        if dtrain.is_chief():
            shutil.rmtree(run.backups, ignore_errors=True)
        dtrain.barrier()
        return monitor.summarize(record, run)

    def _decisive(self) -> list[str]:
        """What in the record must be as it was for an interrupted run to go on; the workers may be others."""
        free = ("strategy_asked", "per_replica_batch")
        return [name for name in self._settings() if name not in free]

    def _settings(self) -> dict[str, Any]:
        """What the record tells of the options, with what followed from them."""
        return {
            **self.options.settings(),
            "global_batch": self.batches.global_batch,
            "micro_batch": self.batches.micro_batch,
            "accumulation": self.batches.accumulation,
            "highest_learning_rate": self._highest_rate(),
        }


def show(summary: str) -> None:
    """Print the summary of a run, once for the whole job."""
    if dtrain.is_chief():
        print(summary)


def _dataset(data: tf.data.Dataset | Pipeline) -> tf.data.Dataset:
    return data.dataset() if isinstance(data, Pipeline) else data
