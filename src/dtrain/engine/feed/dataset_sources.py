"""Sources that read a dataset: a pipeline's can begin at any batch, any other only at the first one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from dtrain.base.log import logger
from dtrain.engine.feed.input_advice import tuned
from dtrain.engine.feed.position import DataPosition
from dtrain.interfaces.dataset_parts import Positions
from dtrain.upstream import tf_data as upstream_data
from dtrain.upstream import tf_tracing


class PipelineSource:
    """The source for a dataset that can begin at any batch, such as that of a `Pipeline`.

    Args:
        dataset: the dataset that `fit` was given.
        positions: the dataset's `Positions`.
    """

    kind = "dtrain.data"
    counted = False

    def __init__(self, dataset: Any, positions: Positions) -> None:
        self.dataset = dataset
        self._positions = positions
        self._first = 0

    @property
    def fingerprint(self) -> dict[str, Any]:
        """As `Source.fingerprint`."""
        return dict(self._positions.fingerprint)

    def start(self) -> None:
        """Records which epoch of the pipeline is the first of this `fit`."""
        self._first = self._positions.epoch

    def begin(self, number: int) -> None:
        """Nothing to do: the dataset counts its epochs by itself."""

    def state(self) -> dict[str, Any]:
        """As `Source.state`."""
        return {"first_epoch": self._first}

    @contextlib.contextmanager
    def open(self, position: DataPosition, state: dict[str, Any]) -> Iterator[Any]:
        """As `Source.open`; the rest of a pass is a separate dataset."""
        self._first = int(state["first_epoch"])
        self._positions.seek(self._first + position.passes)
        if position.within_pass:
            yield self._positions.rest(self._first + position.passes - 1, position.taken)
        else:
            yield self.dataset


class ReplayedSource:
    """The source for data that can only be read from the beginning; resuming reads up to the position again.

    Args:
        kind: the kind of data, for messages.
        dataset: the dataset that Keras made of the argument of `fit`.
        replicas: the number of replicas of the job.
    """

    counted = False

    def __init__(self, kind: str, dataset: Any, replicas: int) -> None:
        self.kind = kind
        self.dataset = tuned(dataset)
        self._seed = tf_tracing.global_seed()
        self._distributed = isinstance(self.dataset, tf.distribute.DistributedDataset)
        self._replicas = replicas
        self._warned = False

    @property
    def fingerprint(self) -> dict[str, Any]:
        """As `Source.fingerprint`."""
        # In a distributed dataset, TensorFlow has divided the batches by the number of replicas.
        return {"the number of replicas": self._replicas} if self._distributed else {}

    def start(self) -> None:
        """Nothing to do."""

    def begin(self, number: int) -> None:
        """Nothing to do: every iterator begins a pass."""

    def state(self) -> dict[str, Any]:
        """The global seed, from which the dataset's random operations may derive their seeds.

        Warns once if the dataset shuffles without a seed.
        """
        if not self._warned and not self._distributed and upstream_data.has_unseeded_shuffle(self.dataset):
            logger.warning(
                "The dataset shuffles without a seed, so a run that resumes from a checkpoint "
                "will not get the same batches. Call keras.utils.set_random_seed, or give shuffle a seed."
            )
        self._warned = True
        return {"seed": self._seed}

    @contextlib.contextmanager
    def open(self, position: DataPosition, state: dict[str, Any]) -> Iterator[None]:
        """As `Source.open`; the value is None. Warns if the global seed has changed."""
        if state["seed"] != self._seed:
            logger.warning(
                "TensorFlow's global seed is %s, but was %s when the checkpoint was written: if the data "
                "is shuffled by it, its order is different. Call keras.utils.set_random_seed at the top of "
                "the program.",
                self._seed,
                state["seed"],
            )
        yield None
