"""The position of a `fit` in its data, and its form in a checkpoint.

How a source opens a position is not decided here, but in `dataset_sources.py`, `arrays.py` and
`py_datasets.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from dtrain.base.counts import is_count
from dtrain.errors import DataError


@dataclass(frozen=True, kw_only=True)
class DataPosition:
    """The position of a `fit` in its data.

    A pass is one iteration over the data from which at least one batch was read.

    Attributes:
        epochs: epochs that have ended.
        steps: batches of the running epoch that are done; 0 before its first.
        over: whether the running epoch has found the end of the data.
        passes: passes that have begun.
        taken: batches of the last pass that are done.
        goes_on: whether the next batch belongs to the last pass.
        made: iterators over the data that were made, read or not.
        num_batches: the number of batches of a pass; None while Keras does not know it.
        batches: batches of all epochs that are done.
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
        """The number of epochs that were read to their end, including a running one that is `over`."""
        return self.epochs + (1 if self.over else 0)

    @property
    def within_pass(self) -> bool:
        """Whether the next batch belongs to the last pass and the pass may have a batch left."""
        return self.goes_on and not (self.num_batches and self.num_batches <= self.taken)

    def saved(self, source: dict[str, Any], fingerprint: dict[str, Any]) -> dict[str, Any]:
        """The position as plain data for a checkpoint: numbers, strings, tuples and arrays.

        Args:
            source: the source's state (`Source.state`), which decides the order of its data.
            fingerprint: the facts about the data that must be the same when training resumes, by name.
        """
        return {"place": asdict(self), "source": source, "data": fingerprint}


def restored(saved: dict[str, Any], fingerprint: dict[str, Any]) -> DataPosition:
    """The position that `DataPosition.saved` stored.

    Args:
        saved: what `DataPosition.saved` returned.
        fingerprint: the fingerprint of the present data.

    Raises:
        DataError: it is a position in other data; the error names the first difference.
    """
    before = saved["data"]
    for name in before | fingerprint:
        then, now = before.get(name), fingerprint.get(name)
        if then != now:
            raise DataError(
                f"The checkpoint was written in the middle of other data: {name} was {then!r}, and is "
                f"{now!r} now.",
                hint="Give fit the same data and the same batch size as before, or start a new run in "
                "another folder.",
            )
    return DataPosition(**saved["place"])


def is_whole(value: object) -> bool:
    """Whether a value is a whole number from 0, of a size that a count can have."""
    return is_count(int(value) if isinstance(value, np.integer) else value)


_FORMS: Mapping[str, Callable[[object], bool]] = {
    "int": is_whole,
    "bool": lambda value: isinstance(value, bool | np.bool_),
    "int | None": lambda value: value is None or is_whole(value),
}


def is_position(value: object) -> bool:
    """Whether a value has the form of those that `DataPosition.saved` returns."""
    if not isinstance(value, dict):
        return False
    place = value.get("place")
    return (
        isinstance(place, dict)
        and all(isinstance(value.get(name), dict) for name in ("source", "data"))
        and {*place} == {field.name for field in fields(DataPosition)}
        and all(_FORMS[str(field.type)](place[field.name]) for field in fields(DataPosition))
    )
