"""What a place in the data is, and what a source of batches must do so that `fit` can go on from one.

Sources that compute their place are `array_order.py`, `py_dataset_order.py` and datasets that carry one;
all others are read again, which is done in `epochs.py`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Protocol

import tensorflow as tf

from dtrain.errors import DataError
from dtrain.keras_engine.input_advice import tuned
from dtrain.keras_engine.protocol import Places, own_places
from dtrain.log import logger
from dtrain.upstream import datasets as upstream_data
from dtrain.upstream import tensorflow as upstream_tf


@dataclass(frozen=True, kw_only=True)
class Place:
    """How far a `fit` had come in its data. A pass is one iteration over the data, begun by reading from it.

    Attributes:
        epochs: that had ended.
        steps: batches of the running epoch that were done; 0 before its first.
        over: whether the running epoch had found the data's end.
        passes: that had begun.
        taken: batches that were done of the last pass.
        goes_on: whether the next batch belongs to the last pass.
        made: iterators that were made, read or not.
        num_batches: what Keras knew of the number of batches of an epoch.
        batches: that were done in all epochs.
    """

    epochs: int
    steps: int
    over: bool
    passes: int
    taken: int
    goes_on: bool
    made: int
    num_batches: int | None
    batches: int

    @property
    def whole_epochs(self) -> int:
        """Epochs from their beginning to their end."""
        return self.epochs + (1 if self.over else 0)


class Source(Protocol):
    """Batches of one `fit`.

    Attributes:
        kind: what it is, for messages.
        computed: whether any place can be begun with; else the batches before it must be read.
        counted: whether there are as many batches as Keras thinks, for sure.
        dataset: global batches; each iteration over it is a pass, or a distributed dataset.
        fingerprint: what must not change for a position to mean anything, by its name in messages.
    """

    kind: str
    computed: bool
    counted: bool
    dataset: Any

    @property
    def fingerprint(self) -> dict[str, Any]:  # noqa: D102
        ...

    def starting(self) -> None:
        """The first epoch is about to begin."""

    def begin(self, number: int) -> None:
        """The next iterator is for pass `number`, counted from 0, from its beginning; it may stay unread."""

    def rest(self, place: Place) -> Any:
        """What to iterate over, once, for the pass that goes on at the place, which `go_to` was told."""

    def state(self) -> dict[str, Any]:
        """What the order follows from, as plain data."""

    def go_to(self, state: dict[str, Any], place: Place) -> None:
        """Gets ready for the place, with what `state` gave there. `dataset` may be another one then."""

    def settle(self) -> None:
        """All that had been begun at the place has been begun again."""


class PlacedSource:
    """A dataset that knows how to begin elsewhere, such as a pipeline's.

    Args:
        dataset: what `fit` was given.
        places: what it carries.
    """

    kind = "dtrain.data"
    computed = True
    counted = False

    def __init__(self, dataset: Any, places: Places) -> None:
        self.dataset = dataset
        self._places = places
        self._first = 0

    @property
    def fingerprint(self) -> dict[str, Any]:
        """As `Source.fingerprint`."""
        return dict(self._places.fingerprint)

    def starting(self) -> None:
        """Notes the epoch that it begins with."""
        self._first = self._places.epoch

    def begin(self, number: int) -> None:
        """The dataset counts by itself."""

    def rest(self, place: Place) -> Any:
        """As `Source.rest`."""
        return self._places.rest(self._first + place.passes - 1, place.taken)

    def state(self) -> dict[str, Any]:
        """As `Source.state`."""
        return {"first_epoch": self._first}

    def go_to(self, state: dict[str, Any], place: Place) -> None:
        """As `Source.go_to`."""
        self._first = int(state["first_epoch"])
        # The pass that goes on is another dataset's; what is iterated over next is the epoch after it.
        self._places.seek(self._first + place.passes)

    def settle(self) -> None:
        """Nothing was begun."""


class ReadSource:
    """Batches that can only be read one after the other.

    Args:
        kind: what it is, for messages.
        dataset: what Keras made of what `fit` was given.
        replicas: of the job.
    """

    computed = False
    counted = False

    def __init__(self, kind: str, dataset: Any, replicas: int) -> None:
        self.kind = kind
        self.dataset = tuned(dataset)
        self._seed = upstream_tf.global_seed()
        self._distributed = isinstance(self.dataset, tf.distribute.DistributedDataset)
        self._replicas = replicas
        self._warned = False

    @property
    def fingerprint(self) -> dict[str, Any]:
        """As `Source.fingerprint`."""
        # Batches that TensorFlow has divided are other batches with other replicas.
        return {"the number of replicas": self._replicas} if self._distributed else {}

    def starting(self) -> None:
        """Nothing is noted."""

    def begin(self, number: int) -> None:
        """Every pass begins by itself."""

    def rest(self, place: Place) -> Any:
        """As `Source.rest`."""
        raise RuntimeError("a source that is read again has no rest")

    def state(self) -> dict[str, Any]:
        """The global seed, from which its operations may have theirs."""
        if not self._warned and not self._distributed and upstream_data.has_unseeded_shuffle(self.dataset):
            logger.warning(
                "The dataset shuffles without a seed, so a run that goes on from a checkpoint will not get "
                "the same batches. Call keras.utils.set_random_seed, or give shuffle a seed."
            )
        self._warned = True
        return {"seed": self._seed}

    def go_to(self, state: dict[str, Any], place: Place) -> None:
        """As `Source.go_to`."""
        if state["seed"] != self._seed:
            logger.warning(
                "TensorFlow's global seed is %s, but was %s when the checkpoint was written: if the data is "
                "shuffled by it, its order is another one. Call keras.utils.set_random_seed at the top of "
                "the program.",
                self._seed,
                state["seed"],
            )

    def settle(self) -> None:
        """Nothing was begun."""


def placed(dataset: Any) -> PlacedSource | None:
    """The source of a dataset that knows how to begin elsewhere; None for others."""
    places = own_places(dataset)
    return None if places is None else PlacedSource(dataset, places)


def position_of(place: Place, source: Source, fingerprint: dict[str, Any]) -> dict[str, Any]:
    """A place as plain data that can be kept: a dictionary of numbers, strings, tuples and arrays."""
    return {"place": asdict(place), "source": source.state(), "data": fingerprint}


def place_of(position: dict[str, Any], fingerprint: dict[str, Any]) -> Place:
    """The place that `position_of` kept.

    Raises:
        DataError: it is a place in other data.
    """
    before = position["data"]
    for what in before | fingerprint:
        then, now = before.get(what), fingerprint.get(what)
        if then != now:
            raise DataError(
                f"The checkpoint was written in the middle of other data: {what} was {then!r}, and is "
                f"{now!r} now.",
                hint="Give fit the same data and the same batch size as before, or begin anew elsewhere.",
            )
    return Place(**position["place"])
