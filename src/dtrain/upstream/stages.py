"""Lists the stages of a `tf.data.Dataset` and the operations that they run, for which there is no public API.

It changes no dataset; `keras_engine` uses the result. An unknown stage has the kind "other" and is no error:
the result is used only for advice and for a buffer at the end.
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
