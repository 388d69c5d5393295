"""What every recipe does around its own data and model: strategy, seeds, files, callbacks, test, summary.

It is a sequence of steps, meant to be read. It knows no data set and no model, and trains with Keras' `fit`,
without a loop of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

import dtrain
from dtrain import monitor
from dtrain.base import safe_files
from dtrain.data import Pipeline
from dtrain.monitor import RunDirectory
from dtrain.monitor.logged_rates import RateLogs
from dtrain.monitor.run_files import ended_record, run_callbacks, write_end
from dtrain.optim import precision, scaled_rate
from dtrain.process_group import ranks
from dtrain.recipes.options import RecipeOptions

_SAVE_SECONDS = 60.0  # seconds between two checkpoints within an epoch; each epoch also ends with one


class Data(NamedTuple):
    """The data sets of a run, in batches of `BatchSizes.micro_batch` examples.

    Attributes:
        train: the data that the model is trained on.
        validation: the data that is evaluated after every epoch.
        test: the data that is evaluated once, after training.
        examples: the number of examples in `train`.
    """

    train: tf.data.Dataset | Pipeline
    validation: tf.data.Dataset | Pipeline
    test: tf.data.Dataset | Pipeline
    examples: int


class TrainingRun:
    """One run of a recipe. Create it before any other use of TensorFlow, because it makes the strategy.

    Args:
        recipe: the recipe's name, for the run's record.
        options: the recipe's options.

    Attributes:
        strategy: the strategy of the run.
        batches: the batch sizes of the run.

    Raises:
        ConfigurationError: the batch sizes do not fit the number of replicas.
    """

    def __init__(self, recipe: str, options: RecipeOptions) -> None:
        self._started = time.perf_counter()
        self.recipe, self.options = recipe, options
        hook = {} if options.gradient_hook is None else {"gradient_hook": options.gradient_hook}
        self.strategy = dtrain.strategy(options.strategy, **hook)
        replicas = self.strategy.num_replicas_in_sync
        # If a worker of an elastic job is absent, the batches stay the same, and each present worker's shard
        # grows.
        self.batches = options.batches(ranks.full_size(replicas)).on(replicas)
        keras.utils.set_random_seed(options.seed)

    def schedule(self, steps_per_epoch: int) -> keras.optimizers.schedules.LearningRateSchedule:
        """A learning rate that rises during the warm-up and then falls to zero along a cosine.

        With scaling, the warm-up starts from the unscaled rate (Goyal et al., arXiv:1706.02677), else from 0.

        Args:
            steps_per_epoch: the number of micro-batches in an epoch. Keras counts the steps of a schedule in
                micro-batches, not in weight updates.
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
        """The value for a Keras optimizer's `gradient_accumulation_steps`; None without accumulation."""
        return self.batches.accumulation if self.batches.accumulation > 1 else None

    def train(
        self,
        data: Data,
        make_model: Callable[[], keras.Model],
        *,
        save: Callable[[keras.Model, RunDirectory], None] | None = None,
    ) -> str:
        """Train and test the model, and write the files of the run. Every process of the job must call this.

        An interrupted run in the same directory is resumed from its last checkpoint.

        Args:
            data: the data sets.
            make_model: creates the compiled model; called once, in the strategy's scope.
            save: writes the trained model; called by every process. By default `model.save`.

        Returns:
            A summary of the run, the same in every process. All files are complete when this returns.

        Raises:
            ConfigurationError: before training, if the run directory cannot be used for the run.
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
                # Keep the checkpoints until the record is written, so that a run killed before can resume.
                dtrain.BackupAndRestore(run.backups, save_seconds=_SAVE_SECONDS, delete_checkpoint=False),
            ],
        )
        test = model.evaluate(_dataset(data.test), verbose=0, return_dict=True)
        if save is None:
            model.save(run.model)
        else:
            save(model, run)

        tested = {f"test_{name}": value for name, value in test.items()}
        record = ended_record(run, record, model, fitted, begun=self._started, tested=tested)
        write_end(run, record, fitted, title=f"{self.recipe} under {record['strategy']}")
        if dtrain.is_chief():
            safe_files.remove(run.backups, ignore_errors=True)
        dtrain.barrier()
        return monitor.summarize(record, run)

    def _decisive(self) -> list[str]:
        """The settings that must be unchanged for an interrupted run to resume; the workers may differ."""
        free = ("strategy_asked", "per_replica_batch")
        return [name for name in self._settings() if name not in free]

    def _settings(self) -> dict[str, Any]:
        """The settings for the run's record: the options, and the values that follow from them."""
        return {
            **self.options.settings(),
            "global_batch": self.batches.global_batch,
            "micro_batch": self.batches.micro_batch,
            "accumulation": self.batches.accumulation,
            "highest_learning_rate": self._highest_rate(),
        }


def show(summary: str) -> None:
    """Print the summary of a run, on the chief only."""
    if dtrain.is_chief():
        print(summary)


def _dataset(data: tf.data.Dataset | Pipeline) -> tf.data.Dataset:
    return data.dataset() if isinstance(data, Pipeline) else data
