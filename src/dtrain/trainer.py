"""`Trainer`: one object for those who want one, which makes, trains, tests and goes on with a model.

It is a thin face, without a loop, a callback class or a model class of its own.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from dtrain import job, optim
from dtrain.batch_sizes import BatchSizes, plan_batches
from dtrain.data.pipeline import Pipeline
from dtrain.errors import ConfigurationError, DataError
from dtrain.optim.optimizers import OptimizerLike, base_optimizer, rate_of, with_settings
from dtrain.strategies.registry import strategy as make_strategy
from dtrain.trainer_run import NoRun, TrainerRun


class Trainer:
    """Trains a Keras model under a strategy. Make it first, at the top of the program.

    Args:
        strategy: a name that `dtrain.strategy` knows, or any `tf.distribute.Strategy`.
        precision: what is computed in: "float32", "mixed_float16" or "mixed_bfloat16"; None for Keras'
            global policy.
        global_batch: examples in one update of the weights, over all replicas and micro-batches.
        per_replica_batch: examples that one replica computes with at once.
        accumulation: micro-batches whose gradients make one update. Of these three any two decide the
            third; with none of them a replica has 32 examples and nothing is accumulated.
        scaling: how the learning rate grows with the global batch: "none", "linear" (Goyal et al.,
            arXiv:1706.02677) or "sqrt".
        base_batch: the global batch that the rate is right for; the per-replica batch if it is not given.
        warmup_steps: updates over which the rate rises to its scaled value, from the unscaled one; from 0
            with "none". The paper takes five epochs.
        run_dir: where the run's files go; None writes none.
        save_freq: when the run is saved: "epoch", or a number of micro-batches.
        seed: of initial weights, random layers and the order of arrays; None for another one each time.

    Attributes:
        strategy: the strategy itself.
        batches: the three sizes, and `micro_batch`, by which a `tf.data.Dataset` must be batched.
        model: what `compile` made; None before.
        learning_rate: the scaled rate that training reaches, or None before `compile` and for a schedule.

    Raises:
        ConfigurationError: a word is not known, or the sizes do not fit each other or the replicas.
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
        if isinstance(warmup_steps, bool) or not hasattr(warmup_steps, "__index__") or warmup_steps < 0:
            raise ConfigurationError(
                f"warmup_steps is {warmup_steps!r}, which is no integer of at least 0.",
                hint="Set it to 0 for no warm-up.",
            )
        self.strategy = make_strategy(strategy) if isinstance(strategy, str) else strategy
        replicas = self.strategy.num_replicas_in_sync
        # Where a worker of an elastic job is absent, the batches stay, and those that are there do more.
        self.batches: BatchSizes = plan_batches(
            replicas=job.full_size(replicas),
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
        """Makes and compiles the model, in the strategy's scope and in the precision.

        Args:
            model_fn: makes the model; called once. What it returns gives float32.
            loss: as Keras' `compile` takes it.
            optimizer: a name, an optimizer of Keras', its class, or a function of the rate. One of the same
                configuration is made, with the rate and the accumulation of this trainer.
            learning_rate: for `base_batch`; a number, or a Keras schedule, which counts micro-batches and is
                not scaled. None for the optimizer's own.
            metrics: as Keras' `compile` takes them.
            rematerialize: "full" and other words of `dtrain.optim.rematerialize`: forward results are
                computed again in the backward pass, rather than kept.
            shard_optimizer: whether each part of the optimizer's state is held by one replica only
                (`dtrain.optim.shard_state`).
            **options: more that Keras' `compile` takes.

        Returns:
            The model.

        Raises:
            ConfigurationError: the optimizer cannot be used, or a schedule is to be scaled.
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
        """Goes on with the run in the run directory, where its last checkpoint was; call it after `compile`.

        The model has its weights when this returns. `fit` then trains what is left, from the very step, with
        all that the checkpoint holds (`dtrain.BackupAndRestore`); its `History` and `metrics.csv` hold all
        epochs. A program that always calls it can be started again with the same command.

        Returns:
            How many whole epochs are done; 0 where the directory holds no run yet.

        Raises:
            ConfigurationError: there is no run directory, its run had other batches, another precision or
                another seed, or another process is at it.
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
        """Trains until `epochs` are done, with those before `resume()` counted.

        Args:
            train: a `dtrain.data.Pipeline`; arrays as `(x, y)` or `(x, y, sample_weight)`, which are batched
                and shuffled anew each epoch; a `tf.data.Dataset` in batches of `batches.micro_batch`; or
                anything else that Keras' `fit` takes.
            validation: the same, or None.
            epochs: passes over the data, at least 1.
            callbacks: Keras' own kind.
            verbose: as Keras takes it; None shows progress on the chief.
            **options: more that Keras' `fit` takes.

        Raises:
            ConfigurationError: `compile` was not called, the batches are of another size, or the run
                directory holds another run.
            DataError: the data is not batched.
        """
        model = self._compiled()
        if epochs < 1:
            raise ConfigurationError(f"epochs is {epochs}, which is below 1.", hint="Set it to 1 or more.")
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
            verbose=(1 if job.is_chief() else 0) if verbose is None else verbose,
            **options,
        )
        files.end(model, history)
        return history

    def evaluate(self, data: Any, **options: Any) -> dict[str, float]:
        """The loss and the metrics by name, over data as `fit` takes it."""
        found = self._plain(data)
        options = {"verbose": 0, "return_dict": True} | options
        if isinstance(found, tuple):
            x, y, weights = keras.utils.unpack_x_y_sample_weight(found)
            return self._compiled().evaluate(
                x, y, sample_weight=weights, batch_size=self.batches.micro_batch, **options
            )
        return self._compiled().evaluate(found, **options)

    def predict(self, data: Any, **options: Any) -> Any:
        """The model's outputs for inputs: an array, a `Pipeline`, or what else Keras' `predict` takes."""
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
        """What decides a run, for its record."""
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
            # Keras' schedules count micro-batches.
            steps = self._warmup_steps * batches.accumulation
            reached = optim.WarmUp(reached, steps, start=0.0 if self._scaling == "none" else rate)
        return with_settings(base, learning_rate=reached, accumulation=batches.accumulation)

    def _source(self, data: Any) -> Any:
        """Training data, with arrays made a pipeline; what is batched has the size of a micro-batch."""
        expected = self.batches.micro_batch
        if isinstance(data, tuple):
            seed = self._seed
            if seed is None:
                # All workers see the same order.
                seed = self._order_seed = job.broadcast(self._files.order_seed())
            return Pipeline(data, batch=expected, seed=seed)
        found = data.batch if isinstance(data, Pipeline) else _batch_of(data, expected)
        if found not in (None, expected):
            raise ConfigurationError(
                f"The data has batches of {found}, but {self.batches.per_replica} examples on each of "
                f"{self.batches.replicas} replicas make {expected}.",
                hint=f"Batch it by trainer.batches.micro_batch, which is {expected}.",
            )
        return data

    def _plain(self, data: Any) -> Any:
        """Data to evaluate, as Keras takes it: a tuple of arrays stays one."""
        return data.dataset() if isinstance(data, Pipeline) else data


def _batch_of(data: Any, expected: int) -> int | None:
    """The size of a dataset's batches, where its spec tells it; None for other data."""
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
