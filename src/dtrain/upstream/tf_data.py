"""Private names for data: examines datasets, uses tf.data's service, computes TFRecord files' checksum."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dtrain.upstream import tensorflow_names


def masked_crc32c(data: bytes) -> int:
    """The checksum of TFRecord files.

    TensorFlow has no Python function for it, and a data reader must count records without importing
    TensorFlow. TensorBoard writes its own record files with this private function. It is no `Reach`, since
    the versions on record are those of Keras and TensorFlow.
    """
    from tensorboard.compat.tensorflow_stub import pywrap_tensorflow

    return int(pywrap_tensorflow.masked_crc32c(data))


def has_unseeded_shuffle(dataset: Any) -> bool:
    """Whether a dataset shuffles, with neither a seed of its own nor a global seed.

    Datasets that a user's function creates inside of it are not examined.
    """
    seeds: list[Any] = [getattr(dataset, name, None) for name in ("_seed", "_seed2")]
    if all(seed is not None for seed in seeds) and not any(int(seed) for seed in seeds):
        return True
    inputs = getattr(dataset, "_inputs", None)
    return any(has_unseeded_shuffle(source) for source in inputs()) if callable(inputs) else False


def batch_size(dataset: Any) -> int | None:
    """The number of examples in a batch, for a dataset that ends with `batch`; None for others.

    Options and prefetching may follow the `batch`.
    """
    import tensorflow as tf

    batched = _batched(dataset)
    size = None if batched is None else tf.get_static_value(batched._batch_size)
    return None if size is None else int(size)


def in_larger_batches(dataset: Any, times: int) -> tuple[Any, int, bool]:
    """A dataset with the same rows in batches that are `times` times as large.

    Returns:
        The dataset, or None if `batch_size` is None; the rows in a batch of the given dataset; and whether
        the given dataset keeps a last, smaller batch.
    """
    import tensorflow as tf

    batched, size = _batched(dataset), batch_size(dataset)
    if batched is None or size is None:
        return None, 0, True
    keeps = not bool(tf.get_static_value(batched._drop_remainder))
    rows = batched._input_dataset.batch(size * times)
    return rows.with_options(dataset.options()).prefetch(2), size, keeps


def _batched(dataset: Any) -> Any:
    while type(dataset).__name__ in ("_PrefetchDataset", "_OptionsDataset"):
        dataset = dataset._input_dataset
    return dataset if type(dataset).__name__ in ("_BatchDataset", "_ParallelBatchDataset") else None


_KINDS = {
    "MapDataset": "map",
    "ParallelMapDataset": "parallel map",
    "FlatMapDataset": "flat map",
    "InterleaveDataset": "interleave",
    "ParallelInterleaveDataset": "parallel interleave",
    "FilterDataset": "filter",
    "BatchDataset": "batch",
    "ParallelBatchDataset": "batch",
    "PaddedBatchDataset": "batch",
    "RaggedBatchDataset": "batch",
    "PrefetchDataset": "prefetch",
    "CacheDataset": "cache",
    "ShuffleDataset": "shuffle",
    "RepeatDataset": "repeat",
    "OptionsDataset": "options",
    "TakeDataset": "take",
    "SkipDataset": "skip",
    "TensorSliceDataset": "arrays",
    "TensorDataset": "arrays",
    "RangeDataset": "range",
    "TFRecordDataset": "files",
    "TextLineDataset": "files",
    "FixedLengthRecordDataset": "files",
    "DataServiceDataset": "service",
    "ZipDataset": "zip",
    "ConcatenateDataset": "concatenate",
    "ShardDataset": "shard",
    "UnbatchDataset": "unbatch",
    "RebatchDataset": "rebatch",
    "WindowDataset": "window",
    "ScanDataset": "scan",
    "TakeWhileDataset": "take while",
    "GroupByWindowDataset": "group by window",
    "DirectedInterleaveDataset": "choose",
    "AssertCardinalityDataset": "assert cardinality",
    "DenseToSparseBatchDataset": "batch",
    "DenseToRaggedDataset": "ragged",
    "UniqueDataset": "unique",
}


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One transformation or source in a dataset.

    Attributes:
        kind: a value of `_KINDS`, or "other".
        operations: the types of all operations in the stage's functions and the functions that they call.
        reads_state: whether the functions capture a resource that may change, such as a variable, or draw
            random numbers, whose generator keeps its state from one iteration to the next.
    """

    kind: str
    operations: frozenset[str] = frozenset()
    reads_state: bool = False

    @property
    def draws(self) -> bool:
        """Whether the stage's functions draw random numbers."""
        return any(operation.startswith(_DRAWING) for operation in self.operations)

    @property
    def python(self) -> bool:
        """Whether the stage calls Python."""
        return not _PYTHON.isdisjoint(self.operations)


_PYTHON = frozenset({"PyFunc", "PyFuncStateless", "EagerPyFunc"})
_DRAWING = (
    "Random",
    "TruncatedNormal",
    "ParameterizedTruncatedNormal",
    "Multinomial",
    "SampleDistortedBoundingBox",
)


def stages_of(dataset: Any) -> list[Stage]:
    """The stages of a dataset, from the last transformation to the sources. Nothing is run."""
    return list(_stages(dataset))


def _stages(dataset: Any) -> Iterator[Stage]:
    yield _stage(dataset)
    inputs = getattr(dataset, "_inputs", None)
    for source in inputs() if callable(inputs) else ():
        yield from _stages(source)


def _stage(dataset: Any) -> Stage:
    name = type(dataset).__name__.lstrip("_").removesuffix("V2").removesuffix("V1")
    functions = getattr(dataset, "_functions", None)
    operations: set[str] = set()
    reads_state = False
    for wrapper in functions() if callable(functions) else ():
        graph = wrapper.function.graph
        definition = graph.as_graph_def()
        operations.update(node.op for node in definition.node)
        for called in definition.library.function:
            operations.update(node.op for node in called.node_def)
        reads_state = reads_state or any(_may_change(held) for held in wrapper.function.captured_inputs)
    reads_state = reads_state or any(operation.startswith(_DRAWING) for operation in operations)
    return Stage(kind=_KINDS.get(name, "other"), operations=frozenset(operations), reads_state=reads_state)


def _may_change(held: Any) -> bool:
    import tensorflow as tf

    return held.dtype == tf.resource


_ASK_MS = 50


def read_from_service(service: str, dataset_id: Any, element_spec: Any, *, shared: bool) -> Any:
    """A dataset that the service computes anew for each iteration over it.

    Args:
        service: the address of the dispatcher, `grpc://HOST:PORT`.
        dataset_id: the id under which the dispatcher knows the dataset.
        element_spec: the spec of the elements.
        shared: whether the dispatcher's workers divide the elements between them; if not, each worker
            produces all elements, which is for a dispatcher with one worker.
    """
    import tensorflow as tf

    policy = tf.data.experimental.service.ShardingPolicy
    return tensorflow_names.FROM_DATASET_ID.resolve()(
        policy.DYNAMIC if shared else policy.OFF,
        service,
        dataset_id,
        element_spec,
        task_refresh_interval_hint_ms=_ASK_MS,
    )


def yields_replica_batches(dataset: Any) -> bool:
    """Whether a distributed dataset was made from a function: then its elements are one replica's batches."""
    return isinstance(dataset, tensorflow_names.FROM_FUNCTION.resolve())
