"""What a `tf.data.Dataset` is made of: its stages, and which operations they run. No public way asks it.

It only looks; what is made of it is `keras_engine`'s. A stage that it does not know is an unknown one, never
an error: nothing but advice and a buffer at the end depends on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dtrain.upstream.reach import Reach

DATASET_INPUTS = Reach(
    "tensorflow.python.data.ops.dataset_ops:DatasetV2._inputs",
    "the datasets that one is made of cannot be asked for",
)
DATASET_FUNCTIONS = Reach(
    "tensorflow.python.data.ops.dataset_ops:DatasetV2._functions",
    "whether a dataset calls Python, or reads variables, is written in its functions only",
)


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
    """One dataset in a chain of them.

    Attributes:
        kind: one of those above, or "other".
        operations: the types of the operations of its functions, those that they call included.
        reads_state: whether its functions hold something from outside that may change, such as a variable,
            or draw from a generator that goes on from one iteration to the next.
    """

    kind: str
    operations: frozenset[str] = frozenset()
    reads_state: bool = False

    @property
    def python(self) -> bool:
        """Whether it calls Python."""
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
    """The stages of a dataset, from what it gives back to its sources. Nothing is run."""
    return list(_stages(dataset))


def _stages(dataset: Any) -> Iterator[Stage]:
    yield _stage(dataset)
    inputs = getattr(dataset, "_inputs", None)
    for each in inputs() if callable(inputs) else ():
        yield from _stages(each)


def _stage(dataset: Any) -> Stage:
    name = type(dataset).__name__.lstrip("_").removesuffix("V2").removesuffix("V1")
    functions = getattr(dataset, "_functions", None)
    operations: set[str] = set()
    reads_state = False
    for each in functions() if callable(functions) else ():
        graph = each.function.graph
        definition = graph.as_graph_def()
        operations.update(node.op for node in definition.node)
        for called in definition.library.function:
            operations.update(node.op for node in called.node_def)
        reads_state = reads_state or any(_may_change(held) for held in each.function.captured_inputs)
    reads_state = reads_state or any(each.startswith(_DRAWING) for each in operations)
    return Stage(kind=_KINDS.get(name, "other"), operations=frozenset(operations), reads_state=reads_state)


def _may_change(held: Any) -> bool:
    import tensorflow as tf

    return held.dtype == tf.resource
