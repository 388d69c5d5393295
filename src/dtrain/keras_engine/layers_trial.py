"""Finds out what a model's layers do with a batch: what losses they add, what they write, what they mix.

A replica's layers see its part of the batch. Trials tell how what they add is combined, and where layers of
the user's own do not give what they give on one device.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import keras
import tensorflow as tf

from dtrain.keras_engine.context import current_step
from dtrain.keras_engine.halves import HINT, apart, normalizes_batches
from dtrain.keras_engine.protocol import ReplicaLayout
from dtrain.keras_engine.rows import batch_rows
from dtrain.keras_engine.trial import (
    OF_ALL_ROWS,
    Trial,
    TrialStep,
    TriedStep,
    if_possible,
    some_rows_of,
    twice,
)
from dtrain.keras_engine.written_state import Flow, check_state
from dtrain.upstream import keras as upstream_keras


def check_predictions(model: Any, part: Any, layout: ReplicaLayout) -> None:
    """Warns if what `predict_step` returns for an example depends on the other examples of the batch.

    Nothing is said of a model that cannot be tried.

    Args:
        model: the model; nothing is tried if it is not built.
        part: a batch of one replica.
        layout: the layout of the model's strategy.
    """
    built = all(layer.built for layer in upstream_keras.layers_of(model))
    step = TriedStep(part=part, model=model, layout=layout, training=False)
    if layout.worker == 0 and built and step.rows > 0:
        if_possible(lambda: LayersTrial(step, model.predict_step).check_outputs(), None)


class LayersTrial:
    """The layers of a built model, traced on one replica.

    Args:
        step: the step that calls the layers.
        method: the model's method that calls them instead, on the whole batch; None for the model itself.
    """

    def __init__(self, step: TriedStep, method: Callable[[Any], Any] | None = None) -> None:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(step.part)
        self._given, self._method = step, method
        self._step = replace(step, part=some_rows_of(x if method is None else step.part, 0, step.rows))
        self._last: TrialStep  # the record of the last trace
        self._values: list[list[Any]]  # of the last trace: each loss that layers add, then the outputs
        self._trial = Trial(self._run, self._step.part, step.model.distribute_strategy)
        # What depends on what in the trial's graph, before it is run and perhaps traced anew.
        self._flow = Flow(self._trial, self._last)

    def _run(self, x: Any) -> list[list[Any]]:
        step, model = self._step, self._step.model
        trial = TrialStep(step.layout, size=batch_rows(x), total=step.rows, training=step.training)
        with current_step.set(trial):
            if self._method is not None:
                outputs = self._method(x)
            elif upstream_keras.takes_training(model):
                outputs = model(x, training=step.training)
            else:
                outputs = model(x)
        self._last = trial
        self._values = [*([tf.reduce_sum(loss)] for loss in model.losses), keras.tree.flatten(outputs)]
        return self._values

    def _differences(self) -> tuple[list[list[Any]], list[set[str]]]:
        """The values for some examples, and as what those of two parts do not give these (see `apart`)."""
        step, trial, values = self._step, self._trial, self._values
        once, _ = trial.run(step.part)
        found = apart(trial, self._flow, step, values, once, training=step.training)
        return once, found

    @functools.cached_property
    def _found(self) -> tuple[list[list[Any]], list[set[str]]]:
        with self._trial.with_all_terms() as changed:
            once, found = self._differences()
        if changed:  # such as a variable that says whether another one has its first value
            found[-1] |= self._differences()[1][-1]
        return once, found

    def summed(self) -> frozenset[int]:
        """Indices in `model.losses` of those that are sums over the batch, rather than means or constants."""
        (*once, _), (*differences, _) = self._found
        if not once:
            return frozenset()
        with self._trial.with_all_terms():
            doubled, _ = self._trial.run(twice(self._step.part))
        sums = [
            float(a) != 0 and abs(b / a - 2) < abs(b / a - 1)
            for (a,), (b,) in zip(once, doubled, strict=False)
        ]
        doubtful = [i for i, each in enumerate(sums) if ("sum" if each else "mean") in differences[i]]
        if doubtful:
            warnings.warn(
                f"Of the losses that layers add, model.losses[{doubtful[0]}] is neither a mean nor a sum "
                "over the batch (its halves do not give the same): replicas are combined as for the nearer "
                f"of both, and the numbers may differ from one device's. {HINT}",
                stacklevel=2,
            )
        return frozenset(i for i, each in enumerate(sums) if each)

    def check_outputs(self) -> None:
        """Warns if the outputs for an example depend on the other examples of the batch.

        What normalizes batches or draws random numbers hides that in training; then the layers are called as
        in inference.
        """
        _, (*_, differences) = self._found
        model, hidden = self._step.model, not self._flow.own_alone(self._values[-1])
        if self._step.training and (hidden or normalizes_batches(model)):
            LayersTrial(replace(self._given, training=False), self._method).check_outputs()
        elif "rows" in differences:
            warnings.warn(
                f"What {model.name!r} computes from an example depends on the other examples of the batch. "
                "Each replica has a part of the batch only, so the numbers may differ from one device's. "
                f"Hint: {OF_ALL_ROWS}",
                stacklevel=2,
            )

    def check_state(self) -> None:
        """Checks the variables that the layers write in a train step.

        Raises:
            StepError: as `written_state.check_state`.
        """
        if self._step.training:
            check_state("A layer", self._step, self._trial, self._flow, self._last)
