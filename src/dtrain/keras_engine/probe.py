"""Finds out whether the losses of a user's own train step are means over the batch, sums, or already scaled.

A step may be written as for one device (`mean(loss)`) or as for TensorFlow's strategies (`sum(loss) /
global_batch`, `compute_average_loss`). One replica runs it on some examples, on the same examples repeated
twice, and as if there were one replica; the ratios of the gradients tell which kind it is. A trial
communicates with no other replica and keeps no change.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from dtrain.errors import StepError
from dtrain.keras_engine.context import TrialResults, current_step
from dtrain.keras_engine.halves import HINT, apart
from dtrain.keras_engine.layers_trial import LayersTrial
from dtrain.keras_engine.loss_trial import coupled_losses
from dtrain.keras_engine.losses_and_metrics import watch_own_call
from dtrain.keras_engine.peer_exchange import exchange, sendable
from dtrain.keras_engine.protocol import ReplicaLayout
from dtrain.keras_engine.rows import batch_rows
from dtrain.keras_engine.trial import Trial, TrialStep, TriedStep, if_possible, some_rows_of, twice
from dtrain.keras_engine.written_state import Flow, check_state
from dtrain.upstream import keras as upstream_keras

OwnStep = Callable[[Any, TrialStep], None]

_NEAR = 0.2  # how far the gradients' ratio may be from an expected factor (random layers change it)


@sendable
@dataclass(frozen=True, kw_only=True)
class LossKind:
    """What a step combines at one point: the loss of a `tape.gradient` call, or a value.

    Attributes:
        sums: whether it is a sum over examples, rather than their mean.
        scale: the factor that the step itself applies because of the number of replicas; 1.0 for none.
        rows: whether it has a row for each example.
    """

    sums: bool = False
    scale: float = 1.0
    rows: bool = False

    def weight(self, share: Any) -> Any:
        """The weight of a replica's loss with which the sum over replicas is the global batch's loss.

        Args:
            share: the replica's examples over all examples, a float32 scalar.
        """
        return (tf.ones_like(share) if self.sums else share) / self.scale


@dataclass(frozen=True)
class Findings:
    """What trials have found out about a model's step; nothing, until they have.

    Attributes:
        coupled: whether each compiled loss couples examples.
        summed: positions, among the losses that layers add, of those that are sums over the batch.
        kinds: what the step combines at each point, in order.
    """

    coupled: list[bool] = field(default_factory=list)
    summed: frozenset[int] = frozenset()
    kinds: list[LossKind] = field(default_factory=list)

    def trial_results(self, model: Any) -> TrialResults:
        """The findings, for the loss objects that the model has now."""
        pairs = zip(upstream_keras.compiled_losses(model), self.coupled, strict=False)
        coupled = frozenset(id(loss) for (_, loss), is_coupled in pairs if is_coupled)
        return TrialResults(self.kinds, self.summed, coupled)

    def as_data(self) -> dict[str, Any]:
        """The findings as plain data, for a checkpoint."""
        kinds = [(kind.sums, kind.scale, kind.rows) for kind in self.kinds]
        return {"coupled": list(self.coupled), "summed": sorted(self.summed), "kinds": kinds}

    @classmethod
    def of_data(cls, data: dict[str, Any]) -> Findings:
        """The findings that `as_data` has made plain."""
        kinds = [
            LossKind(sums=sums, scale=scale, rows=bool(rows and rows[0]))
            for sums, scale, *rows in data["kinds"]
        ]
        return cls(list(data["coupled"]), frozenset(data["summed"]), kinds)


def findings_of(
    step: TriedStep, *, own_step: OwnStep | None, try_layers: bool
) -> tuple[Findings, StepError | None]:
    """The findings of a step's trials, before it is traced for training; and why it is refused, if it is.

    All workers must call it, and get the same.

    Args:
        step: the step.
        own_step: runs the step on a batch, and records in a `TrialStep`, if it is the user's own.
        try_layers: whether to try the model's layers by themselves (`steps.needs_trial`).
    """
    # All workers trace the step, because tracing creates variables. A trial does not communicate, so
    # only the first worker runs it.
    trial = _traced(step, own_step, Findings()) if own_step is not None and step.rows > 0 else None
    # The first worker decides for all, because trials with different examples might differ.
    mine = _found(step, trial, try_layers=try_layers) if step.layout.worker == 0 else None
    coupled, summed, kinds, refusal = exchange(step.layout, mine, what="the trial of a step")[0]
    return Findings(coupled, summed, kinds), StepError(**refusal) if refusal else None


def _traced(step: TriedStep, run: OwnStep, known: Findings) -> StepTrial | None:
    return if_possible(lambda: StepTrial(step, run, known.trial_results(step.model)), None)


def _found(step: TriedStep, trial: StepTrial | None, *, try_layers: bool) -> Any:
    """The trials' findings: coupled losses, summed losses, kinds, and the error that refuses the step."""
    built = all(layer.built for layer in upstream_keras.layers_of(step.model))
    rows = step.rows if built else 0
    layers = if_possible(lambda: LayersTrial(step), None) if rows > 0 and try_layers else None
    summed = frozenset[int]() if layers is None else if_possible(layers.summed, frozenset[int]())
    coupled = coupled_losses(step.model, step.part, step.layout, rows)
    if trial is not None and (summed or any(coupled)):
        for _, loss in upstream_keras.compiled_losses(step.model):
            watch_own_call(loss)
        trial = _traced(step, trial.own_step, Findings(coupled, summed))
    kinds: list[LossKind] = []
    refusal: dict[str, str] = {}
    try:
        if trial is not None:
            if_possible(trial.check_state, None)
            kinds = if_possible(trial.kinds, [])
        elif layers is not None:
            if_possible(layers.check_state, None)
        if layers is not None:
            if_possible(layers.check_outputs, None)
    except StepError as error:
        refusal = {"message": error.message, "hint": error.hint}
    return coupled, summed, kinds, refusal


class StepTrial:
    """The user's step, traced on one replica, so that its losses can be examined.

    Tracing also creates the step's variables.

    Args:
        step: the step.
        own_step: runs it on a batch, and records in a `TrialStep`.
        trial_results: what is known of the step's losses already.
    """

    def __init__(self, step: TriedStep, own_step: OwnStep, trial_results: TrialResults) -> None:
        self._step, self.own_step, self._trial_results = step, own_step, trial_results
        self._last: TrialStep  # the record of the last trace
        self._trial = Trial(self._run, step.part, step.model.distribute_strategy)

    def _run(self, part: Any) -> list[list[Any]]:
        step = self._step
        trial = TrialStep(
            step.layout,
            size=batch_rows(part),
            total=step.rows,
            training=step.training,
            trial_results=self._trial_results,
        )
        with current_step.set(trial):
            self.own_step(part, trial)
        self._last = trial
        return trial.taken

    @functools.cached_property
    def _flow(self) -> Flow:
        """What depends on what in the graph of the trial, before it is run and perhaps traced anew."""
        return Flow(self._trial, self._last)

    def kinds(self) -> list[LossKind]:
        """The kinds of the step's losses and values, in the order in which the step combines them.

        Raises:
            StepError: a value's shape depends on the number of examples, but its rows are not the examples.
        """
        if not self._last.taken:
            return []
        with self._trial.with_all_terms():
            return self._kinds()

    def _kinds(self) -> list[LossKind]:
        step, traced, flow = self._step, self._last, self._flow
        once = some_rows_of(step.part, 0, step.rows)
        here, _ = self._trial.run(once)
        doubled, _ = self._trial.run(twice(once))
        alone = here
        if self._trial.asked:  # the step may have scaled a loss by the number of replicas
            alone, _ = Trial(self._run, step.part, step.model.distribute_strategy, replicas=1).run(once)
        differences = apart(self._trial, flow, step, traced.taken, here)
        # What follows from whole gradients, such as their norm, is the same on all replicas already.
        same = [not self._trial.asked and flow.same_on_all(values) for values in traced.taken]
        noisy = [flow.random(values) for values in traced.taken]
        points = zip(traced.names, alone, here, doubled, differences, noisy, strict=True)
        return [
            LossKind() if is_same else _kind(*each, rows=step.rows, layout=step.layout)
            for is_same, each in zip(same, points, strict=True)
        ]

    def check_state(self) -> None:
        """Checks the variables that the step writes; warns of one whose mean over replicas is approximate.

        Raises:
            StepError: replicas cannot write one of the variables as one device would.
        """
        method = "train_step" if self._step.training else "test_step"
        check_state(method, self._step, self._trial, self._flow, self._last)


def _kind(
    name: str,
    alone: Any,
    here: Any,
    doubled: Any,
    differences: Any,
    noisy: bool,
    *,
    rows: int,
    layout: ReplicaLayout,
) -> LossKind:
    if _shapes(here) != _shapes(doubled):
        (one,), (two,) = here, doubled
        if two.shape == [2 * one.shape[0], *one.shape[1:]]:
            return LossKind(rows=True)
        raise StepError(
            f"The shape of {name} depends on the number of examples, {one.shape} for {rows} and {two.shape} "
            f"for {2 * rows}, but its rows are not the examples': replicas' values cannot be put together.",
            hint="return a number, or a tensor whose first dimension is the examples'",
        )
    growth, scale = _ratio(doubled, here), _ratio(here, alone)
    sums = math.isfinite(growth) and abs(growth - 2) < abs(growth - 1)
    scaled = math.isfinite(scale) and abs(scale * layout.replicas - 1) < _NEAR
    known = abs(growth - (2 if sums else 1)) < _NEAR and (scaled or abs(scale - 1) < _NEAR)
    clear = known or noisy or not math.isfinite(growth)  # random numbers change the ratio, too
    kind = "sum" if sums else "mean"
    if not clear or kind in differences:
        found = (
            "its halves do not give the same"
            if clear
            else f"twice the examples give {growth:.3g} times of it"
        )
        warnings.warn(
            f"{name[0].upper()}{name[1:]} is neither a mean nor a sum over the batch ({found}): replicas are "
            f"combined as for a {kind}, and the numbers may differ from one device's. {HINT}",
            stacklevel=2,
        )
    return LossKind(sums=sums, scale=1 / layout.replicas if scaled and layout.replicas > 1 else 1.0)


def _shapes(values: Sequence[Any]) -> list[Any]:
    return [None if v is None or isinstance(v, tf.IndexedSlices) else tuple(v.shape) for v in values]


def _ratio(numerator: Sequence[Any], denominator: Sequence[Any]) -> float:
    """The factor between two lists of gradients, by least squares; NaN if no denominator is non-zero."""
    dot = square = 0.0
    for a, b in zip(numerator, denominator, strict=True):
        if a is None or b is None:
            continue
        a, b = (tf.cast(tf.convert_to_tensor(g), tf.float64) for g in (a, b))
        dot += float(tf.reduce_sum(a * b))
        square += float(tf.reduce_sum(b * b))
    return dot / square if square > 0 else math.nan
