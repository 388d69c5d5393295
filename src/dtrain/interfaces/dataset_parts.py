"""What a dataset may do for the engine: read one worker's part of its batches, or begin at a position."""

from __future__ import annotations

from typing import Any, Protocol

from dtrain.interfaces.replica_layout import ReplicaLayout


def own_split(dataset: Any, layout: ReplicaLayout) -> Any | None:
    """A dataset of this worker's part of each batch, if the source dataset can read it; else None.

    A `tf.data.Dataset` may have an attribute `dtrain_split`, a function `layout -> tf.data.Dataset | None`.
    It returns a dataset of `(parts, sizes)`: a batch for each local replica, and the numbers of rows of the
    parts of all replicas of the job (an int32 vector). The dataset has the same number of elements on every
    worker; a part may have no rows. None means that global batches are read and cut. Every worker must call
    it.

    Args:
        dataset: the dataset that `fit` was given.
        layout: how the replicas are distributed; with one worker the result is None.
    """
    split = getattr(dataset, "dtrain_split", None)
    return None if split is None or layout.workers == 1 else split(layout)


def datasets_in_place(arguments: dict[str, Any], used_by: str) -> bool:
    """Replaces objects that make a dataset (by a method `dtrain_dataset`) with the dataset, in place.

    Args:
        arguments: of `fit`, `evaluate` or `predict`, by name.
        used_by: the name of that method.

    Returns:
        Whether anything was replaced.
    """
    made = False
    for name in ("x", "validation_data"):
        make = getattr(type(arguments.get(name)), "dtrain_dataset", None)
        if make is not None:
            arguments[name] = make(arguments[name], "evaluate" if name == "validation_data" else used_by)
            made = True
    return made


class Positions(Protocol):
    """The interface of the attribute `dtrain_positions` of a dataset that can begin at any batch.

    Attributes:
        epoch: the number of the epoch that the next iteration over the dataset yields.
        fingerprint: the facts that decide the order of the dataset, by their names in messages.
    """

    @property
    def epoch(self) -> int:  # noqa: D102
        ...

    @property
    def fingerprint(self) -> dict[str, Any]:  # noqa: D102
        ...

    def seek(self, epoch: int) -> None:
        """Makes the next iteration over the dataset yield this epoch."""

    def rest(self, epoch: int, step: int) -> Any:
        """A dataset of the epoch's batches from a step to the end of the epoch."""


def own_positions(dataset: Any) -> Positions | None:
    """A dataset's `Positions`, or None; a dataset that is derived from it, as by `map`, has none."""
    return getattr(dataset, "dtrain_positions", None)
