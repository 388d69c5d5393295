"""What a pipeline reads: arrays, record files or a function. Each opens a reader of the whole or of a share.

`dtrain.data.source_shards` decides which worker gets which share, from the attributes of a source.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from dtrain.data.arguments import is_function
from dtrain.data.columns import ColumnTable, columns_of
from dtrain.data.readers import ArrayRecordTable, FunctionStream, RecordStream
from dtrain.data.records import Records


class Share(NamedTuple):
    """The share of a source that one worker reads; by default the whole source.

    Attributes:
        files: the numbers of its files; None takes all.
        context: the argument of a function; None says that one process reads everything.
    """

    files: tuple[int, ...] | None = None
    context: tf.distribute.InputContext | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        """Tells shares of one source apart."""
        return self.files, getattr(self.context, "input_pipeline_id", None)


class ExampleSource(abc.ABC):
    """A source of examples, by default one that holds no files and gives its examples in one order only.

    Attributes:
        name: what it is, for messages.
        examples: the number of its examples; None if it is not known without reading.
        random_access: whether single examples can be fetched without a cache.
        function: whether it is a function.
        counts: the number of examples in each of its files; empty if it has none.
    """

    name: str
    examples: int | None = None
    random_access = False
    function = False
    counts: tuple[int, ...] = ()

    @abc.abstractmethod
    def open(self, share: Share) -> Any:
        """A reader of a share: a `Table` or a `Stream`."""

    def prepared_by(self, transform: Callable[[Any], Any] | None) -> Callable[[Any], Any] | None:
        """The function that makes an example of what a reader gives; None if that is the example."""
        return transform


class ArraysInMemory(ExampleSource):
    """Arrays in memory; every worker holds all of them."""

    name, random_access = "arrays", True

    def __init__(self, arrays: Any) -> None:
        self._table = ColumnTable(columns_of(arrays))
        self.examples = self._table.examples

    def open(self, share: Share) -> ColumnTable:
        """As `ExampleSource.open`."""
        return self._table


class RecordSource(ExampleSource):
    """Record files; their records are parsed before the user's function gets them."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self.name = "array-record files" if records.random_access else "TFRecord files"
        self.examples, self.counts = records.examples, records.counts
        self.random_access = records.random_access

    def open(self, share: Share) -> ArrayRecordTable | RecordStream:
        """As `ExampleSource.open`."""
        files = range(len(self.counts)) if share.files is None else share.files
        return (ArrayRecordTable if self.random_access else RecordStream)(self._records, files)

    def prepared_by(self, transform: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
        """As `ExampleSource.prepared_by`."""
        parse = tf.function(self._records.parse)

        def prepare(raw: Any) -> Any:
            example = parse(*raw)
            return example if transform is None else transform(example)

        return prepare


class FunctionSource(ExampleSource):
    """A user's function `InputContext -> tf.data.Dataset`, which divides the examples itself."""

    name, function = "a function", True

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self._make = make

    def open(self, share: Share) -> FunctionStream:
        """As `ExampleSource.open`."""
        return FunctionStream(self._make, share.context or tf.distribute.InputContext())


def source_of(given: Any) -> ExampleSource:
    """The source for what a pipeline is given.

    Raises:
        ConfigurationError: it is no source. DataError: its arrays do not fit together.
    """
    if isinstance(given, Records):
        return RecordSource(given)
    return FunctionSource(given) if is_function(given) else ArraysInMemory(given)
