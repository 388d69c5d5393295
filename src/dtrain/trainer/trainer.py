"""`Trainer`: an optional single object that compiles, trains, resumes and evaluates a model.

It is a thin wrapper around dtrain's strategies and Keras' `fit`, with no loop, callback or model of its own.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from dtrain import optim
from dtrain.base.batch_sizes import BatchSizes, plan_batches
from dtrain.base.words import whole_number
from dtrain.data.pipeline import Pipeline
from dtrain.errors import ConfigurationError, DataError
from dtrain.optim.optimizers import OptimizerLike, base_optimizer, rate_of, with_settings
from dtrain.process_group import ranks
from dtrain.strategies.registry import strategy as make_strategy
from dtrain.trainer.trainer_run import NoRun, TrainerRun


class Trainer:
    """Trains a Keras model under a strategy. Create it at the top of the program, before any model.

    Any two of `global_batch`, `per_replica_batch` and `accumulation` determine the third. With none of them,
    the per-replica batch is 32 and the accumulation is 1.

    Args:
        strategy: a name that `dtrain.strategy` accepts, or any `tf.distribute.Strategy`.
        precision: the dtype policy: "float32", "mixed_float16" or "mixed_bfloat16"; None means Keras' global
            policy.
        global_batch: the examples of one weight update, over all replicas and micro-batches.
        per_replica_batch: the examples that one replica processes at once.
        accumulation: the number of micro-batches whose gradients make one weight update.
        scaling: how the learning rate grows with the global batch: "none", "linear" (Goyal et al.,
            arXiv:1706.02677) or "sqrt".
        base_batch: the global batch for which the learning rate is meant; by default the per-replica batch.
        warmup_steps: the number of weight updates in which the learning rate rises to its scaled value. It
            starts from the unscaled value, or from 0 with the scaling "none". The paper uses five epochs.
        run_dir: the directory of the run's files; None writes no files.
        save_freq: when a checkpoint is saved: "epoch", or every so many micro-batches.
        seed: the seed of the initial weights, the random layers and the order of arrays; None draws a new one
            for each run.

    Attributes:
        strategy: the strategy.
        batches: the batch sizes; a `tf.data.Dataset` must have batches of `batches.micro_batch` examples.
        model: the model that `compile` made; None before.
        learning_rate: the scaled learning rate after the warm-up; None before `compile` and for a schedule.

    Raises:
        ConfigurationError: a value is unknown or out of range, or the batch sizes do not fit each other or
            the number of replicas.

    Example:
        ```python
        def make_model():
            return keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(10)])

        trainer = dtrain.Trainer(global_batch=64, scaling="linear", base_batch=32, seed=1)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        trainer.compile(make_model, loss=loss, optimizer="sgd", learning_rate=0.1, metrics=["accuracy"])
        digits = dtrain.data.load_digits()
        trainer.fit(digits.train, digits.validation, epochs=1)
        print(trainer.evaluate(digits.test))
        ```
    """

    def __init__(
        self,
        *,
        strategy: str | tf.distribute.Strategy = "auto",
        precision: str | None = None,
        global_batch: int | None = None,
        per_replica_batch: int | None = None,
        accumulation: int | None = None,
        scaling: str = "none",
        base_batch: int | None = None,
        warmup_steps: int = 0,
        run_dir: str | os.PathLike[str] | None = None,
        save_freq: str | int = "epoch",
        seed: int | None = None,
    ) -> None:
        self._precision = None if precision is None else optim.precision_policy(precision)
        optim.scaled_rate(1.0, batch=1, base_batch=1 if base_batch is None else base_batch, scaling=scaling)
        warmup_steps = whole_number(warmup_steps, "warmup_steps", 0)
        self.strategy = make_strategy(strategy) if isinstance(strategy, str) else strategy
        replicas = self.strategy.num_replicas_in_sync
        # If a worker of an elastic job is absent, the batches stay the same, and each present worker's shard
        # grows.
        self.batches: BatchSizes = plan_batches(
            replicas=ranks.full_size(replicas),
            global_batch=global_batch,
            per_replica=per_replica_batch,
            accumulation=accumulation,
        ).on(replicas)
        self._scaling, self._base_batch, self._warmup_steps = scaling, base_batch, warmup_steps
        self._seed = seed
        self._files: TrainerRun | NoRun = NoRun() if run_dir is None else TrainerRun(run_dir, save_freq)
        self._order_seed: int | None = None
        self.model: Any = None
        self.learning_rate: float | None = None

    def compile(
        self,
        model_fn: Callable[[], keras.Model],
        *,
        loss: Any,
        optimizer: OptimizerLike = "adam",
        learning_rate: Any = None,
        metrics: Sequence[Any] | None = None,
        rematerialize: str | None = None,
        shard_optimizer: bool = False,
        **options: Any,
    ) -> Any:
        """Create and compile the model, in the strategy's scope and with the trainer's precision.

        Args:
            model_fn: creates the model; called once. The model's outputs are converted to float32.
            loss: as for Keras' `compile`.
            optimizer: a name, a Keras optimizer, an optimizer class, or a function of the learning rate. The
                model gets a new optimizer of the same configuration, with this trainer's learning rate and
                accumulation.
            learning_rate: the learning rate for `base_batch`: a number, or a Keras schedule, which counts
                micro-batches and is not scaled. None means the optimizer's own.
            metrics: as for Keras' `compile`.
            rematerialize: "full" or another word of `dtrain.optim.rematerialize`: activations are recomputed
                in the backward pass instead of being stored. None stores them.
            shard_optimizer: whether to shard the optimizer's state over the replicas
                (`dtrain.optim.shard_state`).
            **options: further arguments of Keras' `compile`.

        Returns:
            The compiled model.

        Raises:
            ConfigurationError: the optimizer cannot be used, or a schedule would have to be scaled.
        """
        if self._seed is not None:
            keras.utils.set_random_seed(self._seed)
        again = contextlib.nullcontext() if rematerialize is None else optim.rematerialize(rematerialize)
        word = self._precision
        with self.strategy.scope(), contextlib.nullcontext() if word is None else optim.precision(word):
            with again:
                model = optim.float32_outputs(model_fn())
            made = self._make_optimizer(optimizer, learning_rate)
            if shard_optimizer:
                made = optim.shard_state(made)
            model.compile(optimizer=made, loss=loss, metrics=metrics, **options)
        self.model = model
        return model

    def resume(self) -> int:
        """Resume the run in the run directory from its last checkpoint. Call it after `compile`.

        When this returns, the model has the checkpoint's weights. `fit` then restores everything else that
        the checkpoint holds (`dtrain.BackupAndRestore`) and trains the remaining steps. Its `History` and
        `metrics.csv` contain all epochs. A program that always calls `resume` can be run again with the same
        command.

        Returns:
            The number of completed epochs; 0 if the directory holds no run yet.

        Raises:
            ConfigurationError: the trainer has no run directory, the directory's run has other settings (such
                as batches, precision, optimizer, learning rate or seed), or another process uses it.
            CheckpointError: the checkpoint is of another model.
        """
        return self._files.resume(self._compiled(), self._settings())

    def fit(
        self,
        train: Any,
        validation: Any = None,
        epochs: int = 1,
        *,
        callbacks: Iterable[keras.callbacks.Callback] = (),
        verbose: int | None = None,
        **options: Any,
    ) -> keras.callbacks.History:
        """Train until `epochs` epochs are done, including those before `resume()`.

        Args:
            train: a `dtrain.data.Pipeline`; arrays as `(x, y)` or `(x, y, sample_weight)`, which are batched,
                and shuffled in each epoch; a `tf.data.Dataset` in batches of `batches.micro_batch`; or
                anything else that Keras' `fit` takes.
            validation: data of the same kinds, or None.
            epochs: the total number of passes over the data, at least 1.
            callbacks: Keras callbacks.
            verbose: as for Keras' `fit`; None shows progress on the chief only.
            **options: further arguments of Keras' `fit`.

        Returns:
            Keras' `History`.

        Raises:
            ConfigurationError: `compile` was not called, the data has batches of another size, or the run
                directory holds another run.
            DataError: the dataset is not batched.
        """
        model = self._compiled()
        epochs = whole_number(epochs, "epochs", 1)
        source = self._source(train)
        files = self._files
        held_out = None if validation is None else self._plain(validation)
        files.begin(self.strategy, self._settings() | {"epochs": epochs, "order_seed": self._order_seed})
        x = source.dataset() if isinstance(source, Pipeline) else source
        options.setdefault("shuffle", not isinstance(x, tf.data.Dataset))
        history = model.fit(
            x,
            validation_data=held_out,
            validation_batch_size=self.batches.micro_batch if isinstance(held_out, tuple) else None,
            epochs=epochs,
            callbacks=files.callbacks([*callbacks]),
            verbose=(1 if ranks.is_chief() else 0) if verbose is None else verbose,
            **options,
        )
        files.end(model, history)
        return history

    def evaluate(self, data: Any, **options: Any) -> dict[str, float]:
        """Evaluate the model.

        Args:
            data: data of the kinds that `fit` takes.
            **options: further arguments of Keras' `evaluate`.

        Returns:
            The loss and the metrics by name.

        Raises:
            ConfigurationError: `compile` was not called.
        """
        plain = self._plain(data)
        options = {"verbose": 0, "return_dict": True} | options
        if isinstance(plain, tuple):
            x, y, weights = keras.utils.unpack_x_y_sample_weight(plain)
            return self._compiled().evaluate(
                x, y, sample_weight=weights, batch_size=self.batches.micro_batch, **options
            )
        return self._compiled().evaluate(plain, **options)

    def predict(self, data: Any, **options: Any) -> Any:
        """The model's outputs.

        Args:
            data: the inputs: an array, a `Pipeline`, or anything else that Keras' `predict` takes.
            **options: further arguments of Keras' `predict`.

        Raises:
            ConfigurationError: `compile` was not called.
        """
        options = {"verbose": 0} | options
        if not isinstance(data, Pipeline | tf.data.Dataset):
            options = {"batch_size": self.batches.micro_batch} | options
        return self._compiled().predict(data, **options)

    # --- what the methods above share

    def _compiled(self) -> Any:
        if self.model is None:
            raise ConfigurationError(
                "The trainer has no model yet.", hint="Call trainer.compile(model_fn, loss=...) first."
            )
        return self.model

    def _settings(self) -> dict[str, Any]:
        """The settings that determine the run's results, for its record."""
        return {
            "global_batch": self.batches.global_batch,
            "per_replica_batch": self.batches.per_replica,
            "accumulation": self.batches.accumulation,
            "precision": self._precision or keras.config.dtype_policy().name,
            "optimizer": type(self._compiled().optimizer).__name__,
            "learning_rate": self.learning_rate,
            "scaling": self._scaling,
            "warmup_steps": self._warmup_steps,
            "seed": self._seed,
        }

    def _make_optimizer(self, optimizer: OptimizerLike, learning_rate: Any) -> keras.optimizers.Optimizer:
        base = base_optimizer(optimizer, learning_rate)
        rate, batches = rate_of(base), self.batches
        if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
            if self._scaling != "none" or self._warmup_steps:
                raise ConfigurationError(
                    f"The learning rate is the schedule {type(rate).__name__}, but scaling is "
                    f"{self._scaling!r} and warmup_steps {self._warmup_steps}.",
                    hint="Scale its rate with dtrain.optim.scaled_rate, and put it into dtrain.optim.WarmUp.",
                )
            self.learning_rate = None
            return with_settings(base, accumulation=batches.accumulation)
        self.learning_rate = optim.scaled_rate(
            rate,
            batch=batches.global_batch,
            base_batch=self._base_batch or batches.per_replica,
            scaling=self._scaling,
        )
        reached: Any = self.learning_rate
        if self._warmup_steps:
            # A Keras schedule counts micro-batches, not weight updates.
            steps = self._warmup_steps * batches.accumulation
            reached = optim.WarmUp(reached, steps, start=0.0 if self._scaling == "none" else rate)
        return with_settings(base, learning_rate=reached, accumulation=batches.accumulation)

    def _source(self, data: Any) -> Any:
        """The training data, with arrays converted to a pipeline; checks the size of batched data."""
        expected = self.batches.micro_batch
        if isinstance(data, tuple):
            seed = self._seed
            if seed is None:
                # The chief's seed, so that all workers use the same order.
                seed = self._order_seed = ranks.broadcast(self._files.order_seed())
            return Pipeline(data, batch=expected, seed=seed)
        batch = data.batch if isinstance(data, Pipeline) else _batch_of(data, expected)
        if batch not in (None, expected):
            raise ConfigurationError(
                f"The data has batches of {batch}, but {self.batches.per_replica} examples on each of "
                f"{self.batches.replicas} replicas make {expected}.",
                hint=f"Batch it by trainer.batches.micro_batch, which is {expected}.",
            )
        return data

    def _plain(self, data: Any) -> Any:
        """Data as Keras' `evaluate` takes it: a pipeline becomes a dataset, other data stays as it is."""
        return data.dataset() if isinstance(data, Pipeline) else data


def _batch_of(data: Any, expected: int) -> int | None:
    """The batch size of a dataset if its element spec states it; None for other data.

    Raises:
        DataError: the dataset yields single examples.
    """
    if not isinstance(data, tf.data.Dataset):
        return None
    shapes = [getattr(spec, "shape", None) for spec in tf.nest.flatten(data.element_spec)]
    if any(shape is not None and shape.rank == 0 for shape in shapes):
        raise DataError(
            "The dataset yields single examples, not batches.",
            hint=f"Use dataset.batch(trainer.batches.micro_batch), which is {expected}.",
        )
    sizes = {shape[0] for shape in shapes if shape is not None and shape.rank}
    return sizes.pop() if len(sizes) == 1 else None
