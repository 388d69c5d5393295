"""Rounds of local SGD or DiLoCo in a job with a quorum: what this worker sends, and what it takes.

Each worker trains alone. Its rounds go through the launcher's server (`process_group/quorum_server.py`),
which goes on with those that came. A worker that joins takes the state of another one (`quorum_session.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from dtrain.base.log import logger
from dtrain.base.quantization import Quantization
from dtrain.engine.synchronisation.outer_steps import OuterStep, outer_step_of
from dtrain.engine.synchronisation.weight_averages import WeightAverages
from dtrain.errors import ConfigurationError
from dtrain.interfaces.replica_layout import ReplicaLayout
from dtrain.process_group.quorum_client import JoinedRound, QuorumClient, RoundMean
from dtrain.process_group.quorum_messages import Agreed
from dtrain.telemetry import events
from dtrain.upstream import keras_optimizers
from dtrain.upstream.tf_variables import underlying


class Averaged(Protocol):
    """What the workers of a model average in a round.

    Attributes:
        kind, changes, further, dtype: as in `Agreed`.
    """

    kind: str
    changes: int
    further: int
    dtype: Any

    def reset(self) -> None:
        """A round begins, with the weights as they are."""

    def vector(self) -> np.ndarray:
        """What this worker sends at the end of a round."""

    def take(self, mean: np.ndarray) -> None:
        """Takes the mean of what was sent."""

    def begun(self) -> Mapping[int, Any]:
        """The variables that hold the weights of the round's beginning, by the ids of the weights."""


class _FloatVector:
    """Variables of floats, as one vector."""

    def __init__(self, variables: Sequence[Any], dtype: Any) -> None:
        self._variables = [variable for variable in variables if variable.dtype.is_floating]
        self._dtype = dtype
        self._ends = np.cumsum([0] + [variable.shape.num_elements() for variable in self._variables])
        self.size = int(self._ends[-1])

    def vector(self) -> np.ndarray:
        """Their values."""
        parts = [variable.numpy().astype(self._dtype).reshape(-1) for variable in self._variables]
        return np.concatenate([np.zeros(0, self._dtype), *parts])

    def assign(self, vector: np.ndarray) -> None:
        """Sets their values."""
        for variable, first, end in zip(self._variables, self._ends, self._ends[1:], strict=False):
            part = vector[first:end].reshape(variable.shape)
            variable.assign(tf.cast(part, variable.dtype))


class _AveragedChanges:
    """DiLoCo: what the weights have changed moves them by the outer optimizer; statistics are averaged."""

    kind = "changes"

    def __init__(self, model: Any, outer: OuterStep) -> None:
        self._strategy = model.distribute_strategy
        (self._fragment,) = outer.fragments
        self._weights = [underlying(weight) for weight in self._fragment.weights]
        wide = any(weight.dtype == tf.float64 for weight in self._weights)
        self.dtype = np.dtype(np.float64 if wide else np.float32)
        self.changes = sum(weight.shape.num_elements() for weight in self._weights)
        self._statistics = _FloatVector([*map(underlying, model.non_trainable_weights)], self.dtype)
        self.further = self._statistics.size

    def reset(self) -> None:
        self._fragment.reset(self._strategy)

    def vector(self) -> np.ndarray:
        return np.concatenate([self._fragment.changed(self._strategy), self._statistics.vector()])

    def take(self, mean: np.ndarray) -> None:
        self._fragment.take(self._strategy, mean[: self.changes], 1)
        self._statistics.assign(mean[self.changes :])

    def begun(self) -> Mapping[int, Any]:
        begun = self._fragment.start
        return {id(weight): value for weight, value in zip(self._weights, begun, strict=True)}


class _AveragedWeights:
    """Local SGD: weights, the optimizer's floats that belong to one, and statistics become their means."""

    kind = "weights"
    changes = 0

    def __init__(self, model: Any) -> None:
        variables = []
        for weight in model.trainable_variables:
            variables += [weight, *keras_optimizers.slots_of(model.optimizer, weight)]
        variables = [*map(underlying, [*variables, *model.non_trainable_weights])]
        wide = any(variable.dtype == tf.float64 for variable in variables)
        self.dtype = np.dtype(np.float64 if wide else np.float32)
        self._values = _FloatVector(variables, self.dtype)
        self.further = self._values.size

    def reset(self) -> None:
        return

    def vector(self) -> np.ndarray:
        return self._values.vector()

    def take(self, mean: np.ndarray) -> None:
        self._values.assign(mean)

    def begun(self) -> Mapping[int, Any]:
        return {}


class QuorumRounds(WeightAverages):
    """The rounds of one `fit` in which this worker takes part.

    Args:
        model, layout, callbacks: as for `WeightAverages`.
        client: the connection to the server of the rounds.

    Attributes:
        client: as given.
        fit: the number of this `fit` in the job.
        number: the number of the present round.
        gives: whether this worker is to give its state before its next step.
        elsewhere: the state of others, which this worker has taken after the end of a round: the text about
            it, until it has gone to its position.
        over: whether the `fit` has ended in the job.
        leads: whether this worker was the first one in the round before, so that its callbacks may end `fit`.
        skipped: the logs of the epoch that runs, if this worker leaves the rest of it out.
        begins: the text about the state at the beginning of the present round.

    Raises:
        ConfigurationError: as `WeightAverages`, or the model makes several steps in each call.
    """

    def __init__(
        self, model: Any, layout: ReplicaLayout, callbacks: Sequence[Any], client: QuorumClient
    ) -> None:
        super().__init__(model, layout, callbacks)
        if model.steps_per_execution > 1:
            raise ConfigurationError(
                f"steps_per_execution={model.steps_per_execution} was set, but with a quorum a worker may go "
                "to another place of the data after each round.",
                hint="leave it out: dtrain runs many steps in a call by itself",
            )
        self._hook: Any = layout.gradient_hook
        self.client = client
        self.fit = client.next_fit()
        self.number = 0
        self.gives = False
        self.elsewhere: str | None = None
        self.over = False
        self.leads = False
        self.skipped: dict[str, float] | None = None
        self.begins = ""
        self._rows = 0  # examples of the round
        self._epoch_rows = 0  # examples of the epoch that this worker has made
        self._averaged: Any = None
        self._states: list[Any] = []

    @property
    def model(self) -> Any:
        """The model."""
        return self._model

    # --- what the loop over the steps calls

    def open(self) -> None:
        """The round begins with the weights as they are, which a callback may have set."""
        self._epoch_rows = 0
        if self.savable:
            self._since = self._rows = 0
            self._made().reset()

    def fitting(self, steps: int) -> int:
        """The most steps, up to `steps`, of the present round: between two rounds others may join."""
        return min(steps, self._every - self._since)

    def count(self, examples: int | None) -> None:
        """Counts the examples of this worker's part of the batches."""
        own = (examples or 0) / self._layout.members
        self._rows += round(own)
        self._epoch_rows += round(own)

    def note(self, steps: int) -> None:
        """Counts the steps, and ends the round if it is time."""
        self._since += steps
        if self._since >= self._every:
            self._end_round(joinable=True)

    def close(self) -> None:
        """Ends the round, unless it has just begun: all members are equal at the end of an epoch."""
        if self._since:
            with events.waiting_for_others():  # no step runs whose time includes this waiting
                self._end_round(joinable=False)

    def abandon(self) -> None:
        """After an error: the others go on without this worker."""

    def whole_logs(self, logs: Any) -> Any:
        """The mean of the members' logs, weighted by their examples; this worker's if it is not one now."""
        if self.skipped is not None:
            skipped, self.skipped = self.skipped, None
            return skipped
        alone = self.over or self.elsewhere is not None or not isinstance(logs, dict)
        if alone or any(np.size(value) != 1 for value in logs.values()):
            return logs
        names = sorted(logs)
        values = [float(logs[name]) for name in names]
        mean, over = self.client.mean_of_logs(self.fit, self.number, names, values, self._epoch_rows)
        if mean is None:
            self._fall_behind(over)
            return logs
        self.number, self.leads = self.number + 1, mean.first
        self.gives = self.gives or mean.give
        return {name: float(value) for name, value in zip(names, mean.vector, strict=True)}

    # --- joining

    def join(self) -> JoinedRound:
        """Waits until this worker may take part; takes the state of others, if there is one."""
        made = self._made()
        agreed = Agreed(
            self._every,
            made.kind,
            made.changes,
            made.further,
            made.dtype.name,
            self._hook.bits or 0,
            sum(_bytes_of(variable) for variable in self._variables()),
        )
        with events.waiting_for_others():
            joined = self.client.join(self.fit, agreed)
        self._enter(joined)
        return joined

    def state(self, *, begun: bool = False) -> tuple[int, str, bytes]:
        """The round's number, `begins`, and the variables: as they are, or at the beginning of the round."""
        at_beginning = self._made().begun() if begun else {}
        values = [at_beginning.get(id(variable), variable) for variable in self._variables()]
        return self.number, self.begins, b"".join(value.numpy().tobytes() for value in values)

    def _enter(self, joined: JoinedRound) -> None:
        self.over = joined.round is None
        self.number = joined.round or 0
        self.gives = joined.round is not None and joined.about is None
        if joined.about is not None:
            self._restore(joined.content)
        self._since = self._rows = 0
        self._made().reset()

    def _restore(self, content: bytes) -> None:
        variables = self._variables()
        if len(content) != sum(map(_bytes_of, variables)):
            raise ConfigurationError(
                f"The state of the other workers has {len(content)} bytes, which this model has not.",
                hint="run the same program with the same settings on every worker",
            )
        first = 0
        for variable in variables:
            end = first + _bytes_of(variable)
            value = np.frombuffer(content[first:end], variable.dtype.as_numpy_dtype).reshape(variable.shape)
            variable.assign(value)
            first = end

    def _variables(self) -> list[Any]:
        """The variables of a state: weights, statistics, and both optimizers', TensorFlow's."""
        if not self._states:
            outer = outer_step_of(self._model)
            found = [
                *self._model.trainable_variables,
                *self._model.non_trainable_weights,
                *self._model.optimizer.variables,
                *([] if outer is None else outer.variables),
            ]
            self._states = [*{id(variable): variable for variable in map(underlying, found)}.values()]
        return self._states

    # --- rounds

    def _made(self) -> Averaged:
        if self._averaged is None:
            outer = outer_step_of(self._model)
            self._averaged = (
                _AveragedWeights(self._model) if outer is None else _AveragedChanges(self._model, outer)
            )
        averaged: Averaged = self._averaged
        return averaged

    def _end_round(self, *, joinable: bool) -> None:
        made = self._made()
        mean, over = self.client.contribute(
            self.fit,
            self.number,
            self._packed(made.vector()),
            self._rows,
            joinable=joinable,
            given=lambda: self.state(begun=True),
        )
        if mean is None:
            self._fall_behind(over)
            return
        self._take(mean)
        self.number, self.leads = self.number + 1, mean.first
        self._since = self._rows = 0
        self.gives = self.gives or mean.give
        made.reset()

    def _take(self, mean: RoundMean) -> None:
        made = self._made()
        vector = mean.vector.view(made.dtype)
        if len(vector) != made.changes + made.further:
            raise ConfigurationError(
                f"The mean of a round has {len(vector)} numbers, which this model has not.",
                hint="run the same program with the same settings on every worker",
            )
        made.take(vector)

    def _packed(self, vector: np.ndarray) -> bytes:
        """What is sent of a vector: the changes in few bits, if the hook says so."""
        bits, changes = self._hook.bits, self._made().changes
        if not bits or not changes:
            return vector.tobytes()
        few = Quantization(bits).encode(
            vector[:changes].astype(np.float32), (self.fit, self.number, self.client.rank)
        )
        return few.tobytes() + vector[changes:].tobytes()

    def _fall_behind(self, over: JoinedRound | None) -> None:
        """The round has ended without this worker: it takes the others' state, and their position."""
        if over is None:
            logger.warning("A round ended before this worker came: it takes the others' weights.")
            over = self.join()
        else:
            self._enter(over)
        self.elsewhere = over.about
        if self.over:
            self._model.stop_training = True


def _bytes_of(variable: Any) -> int:
    return int(variable.shape.num_elements() * variable.dtype.size)
