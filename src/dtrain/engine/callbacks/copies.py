"""Compares the copies of a model's weights that replicas hold. They must be the same.

Every replica makes the same update of its own copy. Copies differ where a step computes something else on
each worker, such as by its rank, and in their last bits where processors differ or GPUs are not
deterministic.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dtrain.base.log import logger
from dtrain.engine.callbacks.callback_lists import Stateless
from dtrain.engine.replica.gradient_marks import GradientMarks
from dtrain.engine.step.replica_communication import StrategyCollectives
from dtrain.errors import ReplicaMismatchError
from dtrain.interfaces.divided_weights import divided_dim
from dtrain.interfaces.managed_strategy import layout_of
from dtrain.interfaces.replica_layout import ReplicaLayout
from dtrain.process_group.value_exchange import exchange
from dtrain.upstream.tf_variables import underlying

_TOLERANCE = 1e-5  # of the largest value of a weight
_SHOWN = 4  # weights that an error names

_warned = False


class Copies:
    """The copies of a model's weights.

    Args:
        model: a built model.
        layout: the layout of its strategy.
    """

    def __init__(self, model: Any, layout: ReplicaLayout) -> None:
        self._model = model
        self._layout = layout

    def digests(self) -> list[int]:
        """A checksum of each copy that this process has."""
        checksums = [0] * self._layout.local_replicas
        for _, copies in self._weights():
            for place, copy in enumerate(copies):
                checksums[place] = zlib.crc32(_bytes(copy.value().numpy()), checksums[place])
        return checksums

    def compare(self, everyone: Sequence[Sequence[int]], when: str) -> None:
        """Compares the checksums of all workers; where they differ, the weights. All workers must call it.

        Args:
            everyone: the checksums of each worker.
            when: when this is, as the beginning of a sentence.

        Raises:
            ReplicaMismatchError: copies differ by more than 1e-5 of a weight's largest value.
        """
        global _warned
        if len({digest for digests in everyone for digest in digests}) == 1:
            return
        far = self._differences()
        wrong = sorted(name for name, most in far.items() if not most <= _TOLERANCE)
        if wrong:
            named = ", ".join(f"{name!r} by {far[name]:.1e}" for name in wrong[:_SHOWN])
            more = f" and {len(wrong) - _SHOWN} others" if len(wrong) > _SHOWN else ""
            raise ReplicaMismatchError(
                f"{when}, the copies of weights that {self._layout.replicas} replicas hold differ: {named}"
                f"{more}, of the largest value.",
                hint="let a step compute the same on every worker: by no rank, no time and no random numbers "
                "of Python's or NumPy's own; and let a callback set weights on all workers",
            )
        if not _warned and self._layout.worker == 0:
            _warned = True
            name = max(far, key=lambda weight: far[weight])
            logger.warning(
                "%s, the replicas' copies of the weights differ in their last bits, of %r by %.1e of its "
                "largest value. Processors of different kinds, and GPUs without op determinism, round "
                "differently.",
                when,
                name,
                far[name],
            )

    def _weights(self) -> list[tuple[str, Sequence[Any]]]:
        """The name of each weight and the copies that this process has of it.

        With local SGD, counters and seeds are each replica's own.
        """
        named = [(variable.path, underlying(variable)) for variable in self._model.variables]
        return [
            (name, variable.values)
            for name, variable in named
            if isinstance(variable, tf.distribute.DistributedValues)
            and len(variable.values) == self._layout.local_replicas
            and divided_dim(variable) is None
            and variable.synchronization != tf.VariableSynchronization.ON_READ
            and variable.dtype != tf.string
            and (variable.dtype.is_floating or not self._layout.average_every)
        ]

    def _differences(self) -> dict[str, float]:
        """For each weight, how far a copy is from the mean of all, over the mean's largest value."""
        together = StrategyCollectives(self._model.distribute_strategy, self._layout, GradientMarks())
        mine = {}
        for name, copies in self._weights():
            parts = [tf.cast(copy.value(), tf.float64) for copy in copies]
            ((total, *_),) = together.sums([parts], nested=False)
            mean = total.numpy() / self._layout.replicas
            far = [np.where(np.isnan(mean) & np.isnan(part), 0.0, np.abs(part - mean)) for part in parts]
            most = float(np.max([np.max(distance, initial=0.0) for distance in far]))
            size = float(np.nanmax(np.abs(mean), initial=0.0))
            mine[name] = most / size if size > 0 else (0.0 if most == 0 else float("inf"))
        names = [*mine]
        workers = exchange(self._layout, [mine[name] for name in names], what="the copies of the weights")
        return {
            name: float(np.max([worker[place] for worker in workers])) for place, name in enumerate(names)
        }


def _bytes(value: np.ndarray) -> memoryview:
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8).data


def compare_copies(model: Any) -> None:
    """Checks that all replicas hold the same weights; `fit` does it after each epoch.

    In a loop of one's own, `dtrain.checkpoint.Checkpoints` does it at each save, and the loop may call it
    where it likes to. Every worker must call it. Copies that differ in their
    last bits are warned of, once.

    Args:
        model: a built model under a strategy of dtrain's; with one replica there is nothing to compare.

    Raises:
        ReplicaMismatchError: copies differ by more than 1e-5 of a weight's largest value; it names them.

    Example:
        ```python
        strategy = dtrain.MirroredStrategy()
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        dtrain.compare_copies(model)
        ```
    """
    layout = layout_of(model.distribute_strategy)
    if layout is not None:
        check_copies(model, layout, "Now")


def check_copies(model: Any, layout: ReplicaLayout, when: str) -> None:
    """Compares the copies of a model's weights; all workers must call it.

    Args:
        model: a built model.
        layout: the layout of its strategy.
        when: when this is, as the beginning of a sentence.

    Raises:
        ReplicaMismatchError: copies differ by more than 1e-5 of a weight's largest value.
    """
    if layout.replicas > 1:
        copies = Copies(model, layout)
        copies.compare(exchange(layout, copies.digests(), what="the copies of the weights"), when)


class CopiesAfterEpochs(Stateless, keras.callbacks.Callback):  # type: ignore[misc]
    """Compares the copies of one process at the end of each epoch; several workers do it in `agreement.py`.

    Args:
        layout: the layout of the model's strategy.
    """

    async_safe = True  # it has no hook that is called at each batch

    def __init__(self, layout: ReplicaLayout) -> None:
        super().__init__()
        self._layout = layout

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Compares them."""
        check_copies(self.model, self._layout, f"After epoch {epoch + 1}")
