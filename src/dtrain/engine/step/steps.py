"""What computes a train or test step, as `step_function.py` calls it, and what all kinds of it share.

The kinds are `local_steps.py` for one replica, `partitioned_steps.py` for several, `eager_program.py` and
`own_steps.py`. How many steps a call makes is decided in `call_size.py`, where their data comes
from in `engine/feed/`.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from dtrain.engine.replica.thread_state import thread_state
from dtrain.partition.plan import Plan
from dtrain.upstream import graph_functions, keras_models


class Program(abc.ABC):
    """A model's train or test step, as a `StepFunction` calls it.

    Attributes:
        stock: whether the step is Keras' own; then `results` gives the logs of a call, and `run` gives none.
        compiled: whether XLA compiles the step.
    """

    stock: bool
    compiled: bool

    @property
    def traced(self) -> int:
        """The number of functions that the program has traced by itself."""
        return 0

    @property
    def plan(self) -> Plan | None:
        """What the replicas communicate in the step that was prepared last; None if no step is divided."""
        return None

    @property
    def findings(self) -> dict[str, Any] | None:
        """What the program has found out or decided, as plain data, for a resumed training; None before."""
        return None

    @findings.setter
    @abc.abstractmethod
    def findings(self, found: dict[str, Any]) -> None: ...

    def prepare(self, spec: Any, phase: str | None, *, filled: bool = False) -> bool:
        """Makes what `run` of a phase needs, before it is traced.

        Args:
            spec: the spec of a global batch.
            phase: as in `run`.
            filled: whether every replica surely has rows of each batch.

        Returns:
            Whether it is for such batches only.
        """
        del spec, phase, filled
        return False

    @abc.abstractmethod
    def run(self, parts: Sequence[Any], sizes: Any, phase: str | None = None) -> tuple[Any, Any]:
        """Runs one step on all replicas.

        Args:
            parts: a batch for each replica of this process.
            sizes: the examples of each replica's part, over all processes; None if not known yet.
            phase: `accumulation.PARTS` where each replica accumulates its own gradients,
                `steps_without_hook.WHOLE` where there is no gradient hook yet; else None.

        Returns:
            What `outputs` takes, or {} for a stock step; and the seconds that this worker
            waited for other workers, a scalar, or None if not measured.
        """

    def outputs(self, returned: Any) -> Any:
        """The outputs of the last step of a call, from what `run` has returned for it; nothing is sent.

        Where replicas train alone, these are the outputs of this process.
        """
        return returned

    def whole_outputs(self, returned: Any) -> Any:
        """As `outputs`, for the global batch; None where `outputs` returns them already."""
        del returned
        return None

    @abc.abstractmethod
    def results(self) -> Any:
        """The metrics over all replicas and all steps since they were reset."""

    def own_results(self) -> Any:
        """As `results`; where replicas train alone, over the replicas of this process, so nothing is sent."""
        return self.results()

    def in_xla(self, steps: int | None, batch: int | None) -> bool:
        """Whether the planned steps run in XLA, many steps in one program.

        Args:
            steps: the number of planned steps; None if not known.
            batch: the examples in a batch; None if not known.
        """
        del steps, batch
        return False

    def run_group(self, part: Any) -> None:
        """Runs the steps of a part of a group of batches; called only if `in_xla` has returned True."""
        raise NotImplementedError

    def forget_restored(self) -> None:  # noqa: B027
        """Forgets restored findings, because the `fit` that they were restored for is over."""


def step_is_stock(model: Any, name: str) -> bool:
    """Whether a model's step, and the methods that compute its results, are Keras' own."""
    names = (name, "compute_metrics", "get_metrics_result")
    return all(is_keras_own(model, method) for method in names)


def is_keras_own(model: Any, name: str) -> bool:
    """Whether a model's method of this name is Keras' own, neither overridden nor set on the instance."""
    if name in vars(model):
        return False
    return getattr(type(model), name) is getattr(keras_models.trainer_class(), name)


def run_step(model: Any, name: str, batch: Any, *, stock: bool) -> Any:
    """Runs a model's step. Keras' own gives {}: its results are computed once, after the all-reduce."""
    with thread_state.having(without_results=model if stock else None):
        return getattr(model, name)(batch)


def metrics_result(original: Callable[..., Any], self: Any) -> Any:
    """The replacement of `get_metrics_result`."""
    return {} if thread_state.without_results is self else original(self)


def unwrapped(function: Any) -> Callable[..., Any]:
    """The Python code of a `tf.function`, even of one for XLA: replicas cannot communicate inside one."""
    if not callable(getattr(function, "python_function", None)):
        return function
    return lambda *args: graph_functions.call_inline(function, type(function).__call__, args, {})


def first_replica(strategy: Any, value: Any) -> Any:
    """The values of this process' first replica, of a nest of per-replica values."""
    return tf.nest.map_structure(
        lambda v: strategy.experimental_local_results(v)[0], value, expand_composites=False
    )
