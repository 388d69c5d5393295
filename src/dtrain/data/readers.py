"""Readers of one worker's examples: a table, whose rows can be fetched in any order, or a sequential stream.

They do not decide which worker reads which examples (`dtrain.data.source_shards` does), and make no batches
(`batching.py` does).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from dtrain.base.log import logger
from dtrain.data.columns import Column, ColumnTable
from dtrain.data.epoch_counter import NoEpochs
from dtrain.data.records import Records, open_array_record
from dtrain.engine.batches import example_order as order
from dtrain.engine.batches.batch_rows import unconverted
from dtrain.errors import DataError

_SHUFFLED_BYTES = 64 << 20
_SHUFFLED_RECORDS = (64, 16384)  # the fewest and the most records that are permuted together
_FILES_AT_ONCE = 4
_CACHED_AT_ONCE = 256


class Table(Protocol):
    """Examples that can be fetched by their indices."""

    examples: int
    endless: bool  # False, as for a `Stream` with an end

    def open(self) -> None:
        """Prepares the resources of `fetch`; called eagerly, before a graph is traced."""

    def fetch(self, indices: Any) -> Any:
        """The rows at `indices` (int64 of shape (n,)), as a nest of tensors of n rows."""

    def numbers(self, indices: Any) -> Any:
        """The numbers, in the whole source, of the rows at `indices`: int64 of shape (n,)."""


class Stream(Protocol):
    """Examples that can only be read sequentially.

    Attributes:
        examples: their number; None if it is unknown or infinite.
        endless: whether it is infinite.
    """

    examples: int | None
    endless: bool

    def elements(self, epochs: Any, seed: int | None) -> tf.data.Dataset:
        """The examples of an epoch as (epoch, example, number in the whole source).

        Args:
            epochs: attaches the epoch, as `EpochCounter` does.
            seed: seed of the order; None keeps the source's own order.
        """


class ArrayRecordTable:
    """A table of the records in array-record files, each as (serialized, name).

    Args:
        records: all files of the source.
        files: the numbers of the files that this worker reads.

    Attributes:
        examples: number of records in these files.
    """

    endless = False

    def __init__(self, records: Records, files: Sequence[int]) -> None:
        counts = np.array([records.counts[file] for file in files], np.int64)
        begins = np.cumsum([0, *records.counts])
        self.examples = int(counts.sum())
        self._paths = [records.files[file] for file in files]
        self._ends = np.cumsum(counts)
        self._begins = self._ends - counts
        self._shift = np.array([begins[file] for file in files], np.int64) - self._begins
        self._readers: dict[int, Any] = {}
        self._lock = threading.Lock()

    def open(self) -> None:
        """Does nothing: a file is opened when it is first read."""

    def fetch(self, indices: Any) -> Any:
        """Serialized records and their names, string tensors of shape (n,)."""
        tensors = tf.numpy_function(self._read, [indices], [tf.string, tf.string], stateful=False)
        for tensor in tensors:
            tensor.set_shape(indices.shape)
        return tuple(tensors)

    def numbers(self, indices: Any) -> Any:
        """As `Table.numbers`."""
        file = tf.searchsorted(tf.constant(self._ends), indices, side="right")
        return indices + tf.gather(tf.constant(self._shift), file)

    def _read(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        serialized = np.empty(len(indices), object)
        names = np.empty(len(indices), object)
        of_file = np.searchsorted(self._ends, indices, side="right")
        for file in np.unique(of_file):
            rows = np.flatnonzero(of_file == file)
            local = (indices[rows] - self._begins[file]).tolist()
            with self._lock:
                if file not in self._readers:
                    self._readers[file] = open_array_record(self._paths[file])
                serialized[rows] = self._readers[file].read(local)
            names[rows] = [f"{self._paths[file]}, record {number}" for number in local]
        return serialized, names


class RecordStream:
    """A stream of the records in TFRecord files, each as (serialized, name).

    With a seed, each epoch has its own order of files, interleaves four files, and permutes the records
    within consecutive blocks of about 64 MB.

    Args:
        records: all files of the source.
        files: the numbers of the files that this worker reads.
    """

    endless = False

    def __init__(self, records: Records, files: Sequence[int]) -> None:
        begins = np.cumsum([0, *records.counts])
        self.examples: int | None = sum(records.counts[file] for file in files)
        self._compression = records.compression
        self._paths = np.array([records.files[file] for file in files], object)
        self._counts = np.array([records.counts[file] for file in files], np.int64)
        self._begins = np.array([begins[file] for file in files], np.int64)
        least, most = _SHUFFLED_RECORDS
        self._block = int(np.clip(_SHUFFLED_BYTES / max(records.record_bytes, 1.0), least, most))

    def elements(self, epochs: Any, seed: int | None) -> tf.data.Dataset:
        """As `Stream.elements`."""
        places = epochs.attach(tf.data.Dataset.range(len(self._paths)))
        if seed is None:
            return places.flat_map(unconverted(self._file))

        def file(epoch: Any, place: Any) -> tf.data.Dataset:
            key = order.mixed(seed, order.FILES, epoch)
            return self._file(epoch, order.permuted(place[None], len(self._paths), key)[0])

        read = places.interleave(
            unconverted(file),
            cycle_length=max(1, min(_FILES_AT_ONCE, len(self._paths))),
            num_parallel_calls=tf.data.AUTOTUNE,
            deterministic=True,
        )

        def mix(block: Any, rows: Any) -> Any:
            return _permuted_rows(rows, order.mixed(seed, order.BLOCKS, rows[0][0], block))

        return read.batch(self._block).enumerate().map(unconverted(mix)).unbatch()

    def _file(self, epoch: Any, file: Any) -> tf.data.Dataset:
        path = tf.gather(tf.constant(self._paths), file)
        count = tf.gather(tf.constant(self._counts), file)
        begin = tf.gather(tf.constant(self._begins), file)
        numbers = tf.data.Dataset.range(count)
        records = tf.data.TFRecordDataset(path, self._compression)

        def named(number: Any, serialized: Any) -> Any:
            name = tf.strings.join([path, ", record ", tf.strings.as_string(number)])
            return epoch, (serialized, name), begin + number

        return tf.data.Dataset.zip((numbers, records)).map(unconverted(named))


class FunctionStream:
    """A stream of the examples in the dataset that a user's function makes.

    Args:
        make: the function, `InputContext -> tf.data.Dataset` of single examples.
        context: the argument of the function.

    Raises:
        DataError: the function returned no `tf.data.Dataset`.
    """

    def __init__(self, make: Callable[[Any], Any], context: tf.distribute.InputContext) -> None:
        dataset = make(context)
        if not isinstance(dataset, tf.data.Dataset):
            raise DataError(
                f"The source is a function; it returned a {type(dataset).__name__}, not a tf.data.Dataset.",
                hint="return single examples, such as tf.data.Dataset.from_tensor_slices((x, y))",
            )
        self._dataset = dataset
        self._context = context
        cardinality = int(dataset.cardinality())
        self.endless = cardinality == tf.data.INFINITE_CARDINALITY
        self.examples: int | None = cardinality if cardinality >= 0 else None

    def count(self) -> int | None:
        """The number of examples; reads a dataset of unknown length once to count it. None if endless."""
        if self.examples is None and not self.endless:
            logger.info(
                "The source's dataset does not say how long it is, so it is read through once to count it; "
                "dataset.apply(tf.data.experimental.assert_cardinality(n)) saves that."
            )
            self.examples = int(self._dataset.reduce(np.int64(0), lambda n, *_: n + 1))
        return self.examples

    def elements(self, epochs: Any, seed: int | None) -> tf.data.Dataset:
        """As `Stream.elements`, but ignores `seed`: the function's dataset decides the order."""
        many, mine = self._context.num_input_pipelines, self._context.input_pipeline_id
        numbered = epochs.attach(self._dataset.enumerate())
        return numbered.map(unconverted(lambda epoch, pair: (epoch, pair[1], pair[0] * many + mine)))


class TableStream:
    """A table as a stream in the table's order; for a worker without examples, which has no row to fetch.

    Args:
        table: any `Table`.
    """

    endless = False

    def __init__(self, table: Any) -> None:
        self.examples: int | None = table.examples
        self._table = table

    def elements(self, epochs: Any, seed: int | None) -> tf.data.Dataset:
        """As `Stream.elements`, but ignores `seed`."""
        return epochs.attach(in_order(self._table)).map(unconverted(lambda epoch, pair: (epoch, *pair)))


def cached(reader: Any, prepare: Callable[[Any], Any] | None) -> ColumnTable:
    """Read all examples of a reader, prepare them, and keep them in memory.

    Args:
        reader: a `Table`, or a `Stream` that is not endless.
        prepare: applied to each example; None leaves examples as they are.

    Raises:
        DataError: prepared examples differ in more than their first dimension, or there are none.
    """
    elements = in_order(reader)
    if prepare is not None:
        prepared = unconverted(lambda example, n: (prepare(example), n))
        elements = elements.map(prepared, num_parallel_calls=tf.data.AUTOTUNE)
    specs = tf.nest.flatten(elements.element_spec[0])
    ragged = [ragged_first(spec, "cache=True") for spec in specs]

    def measured(example: Any, number: Any) -> Any:
        leaves = tf.nest.flatten(example)
        return (
            tuple(leaves),
            tuple(tf.shape(leaf)[0] if r else 0 for leaf, r in zip(leaves, ragged, strict=True)),
            number,
        )

    batches = list(elements.map(unconverted(measured)).padded_batch(_CACHED_AT_ONCE).as_numpy_iterator())
    if not batches:
        raise DataError("The source has no examples.", hint="check what was read or filtered before")
    columns = [
        _column([b[0][i] for b in batches], [b[1][i] for b in batches] if ragged[i] else None)
        for i in range(len(specs))
    ]
    numbers = np.concatenate([b[2] for b in batches])
    packed = tf.nest.pack_sequence_as(elements.element_spec[0], columns)
    whole = np.array_equal(numbers, np.arange(len(numbers)))
    return ColumnTable(packed, None if whole else numbers)


def in_order(reader: Any) -> tf.data.Dataset:
    """All examples of a reader, as (example, number), in the source's order."""
    if not hasattr(reader, "fetch"):
        dataset: tf.data.Dataset = reader.elements(NoEpochs(), None)
        return dataset.map(unconverted(lambda _, example, number: (example, number)))
    reader.open()
    rows = tf.data.Dataset.range(reader.examples).batch(_CACHED_AT_ONCE)

    def fetched(indices: Any) -> Any:
        return reader.fetch(indices), reader.numbers(indices)

    return rows.map(unconverted(fetched)).unbatch()


def ragged_first(spec: Any, what: str) -> bool:
    """Whether the first dimension of an example's tensor may differ between examples.

    Raises:
        DataError: another dimension may differ too, or the spec is neither dense nor ragged.
    """
    if not isinstance(spec, tf.TensorSpec | tf.RaggedTensorSpec):
        raise DataError(f"{what} cannot hold {type(spec).__name__}.", hint="give dense tensors")
    if spec.shape.rank is None or not spec.shape[1:].is_fully_defined():
        raise DataError(
            f"{what} was set, but examples have the shape {spec.shape}.",
            hint="give them one in transform, such as tf.ensure_shape(image, [32, 32, 3]); only the first "
            "dimension may be open",
        )
    return bool(spec.shape.rank and spec.shape[0] is None)


def _column(parts: list[np.ndarray], lengths: list[np.ndarray] | None) -> Column:
    if lengths is None:
        return Column(np.concatenate(parts))
    inside = [np.arange(part.shape[1]) < n[:, None] for part, n in zip(parts, lengths, strict=True)]
    values = np.concatenate([part[mask] for part, mask in zip(parts, inside, strict=True)])
    return Column(values, np.cumsum([0, *np.concatenate(lengths)], dtype=np.int64))


def _permuted_rows(rows: Any, key: Any) -> Any:
    size = tf.shape(tf.nest.flatten(rows)[0], out_type=tf.int64)[0]
    places = order.permuted(tf.range(size), size, key)
    return tf.nest.map_structure(lambda leaf: tf.gather(leaf, places), rows)
