"""Compares what the workers of a job read, where each takes its part of the same global batches.

If their batches differ, some examples are trained on twice and others never, without any error. So workers
compare a digest of their arrays, or of the first batch of a dataset as it is read, and how many batches they
have read. How batches are divided is not decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from dtrain.base.log import logger
from dtrain.errors import DataError
from dtrain.interfaces.replica_layout import ReplicaLayout
from dtrain.process_group.value_exchange import exchange
from dtrain.upstream import tf_data as upstream_datasets
from dtrain.upstream import tf_tracing, tf_variables

_WHOLE_BYTES = 2**20  # arrays of at most so many bytes are compared as a whole
_ROWS = 64  # rows that are compared of larger ones
_ENOUGH = 16  # values that are not equal by chance, if they are not all the same
_DIFFERENT = 8  # different rows, of which two workers do not have the same by chance
_BUCKETS = 2**62
_HINT = (
    "give every worker the same data: no shard(), skip() or rank in it, because fit divides each batch; and "
    "call keras.utils.set_random_seed(SEED), with one seed for all workers, before NumPy draws or shuffles "
    "it. Data that is divided already goes through strategy.distribute_datasets_from_function"
)


class ArrayDigest(NamedTuple):
    """A digest of arrays of examples: with and without their order."""

    ordered: int
    unordered: int


def digest_of(leaves: Sequence[Any], rows: int) -> ArrayDigest | None:
    """The digest of the rows of dense tensors; of some rows, evenly spread, if they are large.

    Args:
        leaves: tensors of `rows` rows; None if a leaf is not one.
        rows: the number of rows of each.
    """
    if not rows or not all(isinstance(leaf, tf.Tensor) for leaf in leaves):
        return None
    whole = sum(_bytes(leaf) for leaf in leaves) <= _WHOLE_BYTES
    some = np.arange(rows) if whole else np.unique(np.linspace(0, rows - 1, _ROWS).astype(np.int64))
    hashes = np.zeros(len(some), np.uint64)
    with np.errstate(over="ignore"):
        for number, leaf in enumerate(leaves, 1):
            hashes = hashes * np.uint64(2 * number + 1) + _row_hashes(leaf.numpy()[some])
        weights = _weights(len(some), seed=1)
        return ArrayDigest(int((hashes * weights).sum() >> np.uint64(1)), int(hashes.sum() >> np.uint64(1)))


def _bytes(leaf: Any) -> int:
    return int(tf.size(leaf)) * (leaf.dtype.size or 32)


def _row_hashes(rows: np.ndarray) -> np.ndarray:
    """A hash of each row, as uint64."""
    if rows.dtype == object:  # text
        width = max((len(text) for text in rows.ravel()), default=0) + 1
        rows = rows.astype(f"S{width}")
    if not rows.size:
        return np.zeros(len(rows), np.uint64)
    content = np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), -1)
    padded = np.zeros((len(rows), -(-content.shape[1] // 8) * 8), np.uint8)
    padded[:, : content.shape[1]] = content
    words = padded.view(np.uint64)
    mixed = (words ^ (words >> np.uint64(29))) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(32)
    hashes: np.ndarray = (mixed * _weights(words.shape[1], seed=2)).sum(axis=1, dtype=np.uint64)
    return hashes


def _weights(count: int, *, seed: int) -> np.ndarray:
    drawn = np.random.default_rng(seed).integers(0, 2**63, count, np.uint64)
    return drawn * np.uint64(2) + np.uint64(1)


class FirstBatch:
    """The digest of the first batch of each pass over a dataset, taken while it is read.

    Args:
        dataset: a dataset of global batches.
    """

    def __init__(self, dataset: Any) -> None:
        self._leaves = len(_tensors_of_spec(dataset.element_spec))
        with tf.init_scope(), tf.device("CPU:0"):
            self._handle = tf_variables.unnamed_variable_handle(tf.int64, [self._leaves, 2])
            nothing = tf.zeros([self._leaves, 2], tf.int64)
            tf.raw_ops.AssignVariableOp(resource=self._handle, value=nothing)

    def note(self, number: Any, batch: Any) -> Any:
        """Notes the digest of a batch if it is the first one; returns the operation, in a dataset's function.

        Args:
            number: the number of the batch in its pass, an int64 scalar.
            batch: a nest of tensors.
        """

        def noted() -> Any:
            digests = tf.stack([_digest(leaf) for leaf in _tensors(batch)])
            return tf.raw_ops.AssignVariableOp(resource=self._handle, value=digests)

        if not self._leaves:
            return tf.no_op()
        return tf.cond(tf.equal(number, 0), noted, tf.no_op)

    def digests(self) -> list[list[int]]:
        """For each tensor of the first batch its digest, and whether equal ones cannot be by chance."""
        with tf.device("CPU:0"):
            digests = tf.raw_ops.ReadVariableOp(resource=self._handle, dtype=tf.int64)
        return [[int(number) for number in leaf] for leaf in digests.numpy()]


def _tensors(batch: Any) -> list[Any]:
    leaves = tf.nest.flatten(batch, expand_composites=True)
    return [leaf for leaf in leaves if tf.is_tensor(leaf) and _is_plain(leaf.dtype)]


def _tensors_of_spec(spec: Any) -> list[Any]:
    leaves = tf.nest.flatten(spec, expand_composites=True)
    return [leaf for leaf in leaves if isinstance(leaf, tf.TensorSpec) and _is_plain(leaf.dtype)]


def _is_plain(dtype: Any) -> bool:
    return dtype not in (tf.variant, tf.resource)


def _digest(leaf: Any) -> Any:
    text = tf.io.serialize_tensor(leaf)
    digest = tf.strings.to_hash_bucket_fast(text, _BUCKETS)
    flat = tf.reshape(leaf, [-1])
    differ = tf.reduce_any(flat[:1] != flat) if leaf.dtype != tf.bool else tf.constant(False)
    certain = tf.logical_and(differ, tf.size(flat) >= _ENOUGH)
    return tf.stack([digest, tf.cast(certain, tf.int64)])


def check_same_data(
    dataset: Any, steps: int | None, layout: ReplicaLayout, digest: Callable[[], ArrayDigest | None]
) -> None:
    """Refuses data that differ between workers, if each worker takes its part of the same global batches.

    Every worker must call it.

    Args:
        dataset: this worker's dataset.
        steps: `steps_per_epoch`, or None.
        layout: how the replicas are distributed.
        digest: returns the digest of arrays; None for other data.

    Raises:
        DataError: the data differ; it is raised on every worker and names what differs.
    """
    mine = {
        "the number of batches": int(dataset.cardinality()),
        "steps per epoch": steps,
        "shapes and types": str(dataset.element_spec),
        "the seed of TensorFlow's random numbers": tf_tracing.global_seed(),
    }
    compared = digest()
    exchanged = exchange(layout, (mine, None if compared is None else tuple(compared)), what="the data")
    everyone = [theirs for theirs, _ in exchanged]
    for name in mine:
        values = [theirs[name] for theirs in everyone]
        if any(value != values[0] for value in values):
            by_worker = "; ".join(f"worker {worker}: {value}" for worker, value in enumerate(values))
            raise DataError(
                f"The workers' data differ in {name} ({by_worker}), but each takes its part of the same "
                "batches.",
                hint=(
                    "give every worker the same dataset and the same seed, unsharded; data sharded by "
                    "worker already go through strategy.distribute_datasets_from_function"
                ),
            )
    check_arrays([fields and ArrayDigest(*fields) for _, fields in exchanged])


def check_arrays(found: Sequence[ArrayDigest | None]) -> None:
    """Refuses arrays that differ between workers.

    Raises:
        DataError: they do.
    """
    known = [digest for digest in found if digest is not None]
    if len(known) < len(found) or len({*known}) == 1:
        return
    if len({digest.unordered for digest in known}) == 1:
        cause = "they have the same examples in another order, as NumPy shuffles them without a common seed"
    else:
        cause = "they depend on the rank (a shard), or NumPy has drawn them without a common seed"
    raise _error(f"The workers have other arrays, but each takes its part of the same batches: {cause}.")


def check_first_batches(found: Sequence[Any], dataset: Any) -> None:
    """Refuses datasets whose first batch differs between workers.

    A dataset may draw random numbers for each example, as to flip images, and processors of different kinds
    may round differently. Such batches are of the same examples if one of their parts, as the labels, is the
    same on all workers.

    Args:
        found: what `FirstBatch.digests` returned, by worker.
        dataset: this worker's dataset, for the cause.

    Raises:
        DataError: the first batches differ.
    """
    by_part = [*zip(*found, strict=True)]
    same = [all(digest == part[0] for digest in part) for part in by_part]
    if all(same):
        return
    stages = upstream_datasets.stages_of(dataset)
    if any(stage.draws for stage in stages):
        return
    specs = _tensors_of_spec(dataset.element_spec)
    may_vary = [spec.dtype.is_floating or spec.dtype == tf.uint8 for spec in specs]
    varies = any(stage.python for stage in stages) or all(
        one or may for one, may in zip(same, may_vary, strict=True)
    )
    if varies and any(one and part[0][1] for one, part in zip(same, by_part, strict=True)):
        return
    if any(stage.kind == "shard" for stage in stages):
        cause = "the dataset has a shard()"
    elif any(stage.python for stage in stages):
        cause = "what Python yields depends on the rank, or on random numbers without a common seed"
    else:
        cause = "it depends on the rank, or on NumPy's random numbers without a common seed"
    raise _error(
        f"The workers read other examples, but each takes its part of the same batches: {cause}. The first "
        "batch differs."
    )


class OwnRows:
    """The first rows that this worker has read of a dataset that is divided already, and how many it has."""

    def __init__(self) -> None:
        self.examples = 0
        self._hashes: list[int] = []

    def note(self, parts: Sequence[Any]) -> None:
        """Notes the parts of a batch of the replicas of this worker, nests of tensors."""
        for part in parts:
            leaves = [
                leaf for leaf in tf.nest.flatten(part) if isinstance(leaf, tf.Tensor) and leaf.shape.rank
            ]
            rows = int(leaves[0].shape[0] or 0) if leaves else 0
            self.examples += rows
            left = min(rows, _ROWS - len(self._hashes))
            if left <= 0 or any(leaf.shape[0] != rows for leaf in leaves):
                continue
            hashes = np.zeros(left, np.uint64)
            with np.errstate(over="ignore"):
                for leaf in leaves:
                    hashes = hashes * np.uint64(3) + _row_hashes(leaf[:left].numpy())
            self._hashes += [int(number) for number in hashes]

    def facts(self) -> list[Any]:
        """The number of examples and the hashes of the first rows, for `check_own`."""
        return [self.examples, self._hashes]


def check_own(found: Sequence[Any], layout: ReplicaLayout) -> None:
    """Refuses data that each worker should have read its own part of, if two have read the same part.

    Few different rows, as in constant data, may be in several parts. So only many count.

    Args:
        found: what `OwnRows.facts` returned, by worker.
        layout: how the replicas are distributed.

    Raises:
        DataError: two have read the same rows, in the same order.
    """
    by_rows: dict[tuple[int, ...], int] = {}
    for worker, (examples, hashes) in enumerate(found):
        other = by_rows.setdefault(tuple(hashes), worker)
        if other != worker and len({*hashes}) >= _DIFFERENT and found[other][0] == examples:
            raise DataError(
                f"Workers {other} and {worker} have read the same {examples} examples, but the program has "
                "divided the data, so each must read a part of its own.",
                hint="in the function of distribute_datasets_from_function, return dataset.shard("
                "context.num_input_pipelines, context.input_pipeline_id); fit divides each batch of a "
                "dataset by itself if it is not distributed; AutoShardPolicy.OFF divides nothing",
            )
    counts = [examples for examples, _ in found]
    if layout.worker == 0 and min(counts) * 2 < max(counts):
        by_worker = ", ".join(f"worker {worker}: {count}" for worker, count in enumerate(counts))
        logger.warning("The workers' parts of the data differ in size (examples read: %s).", by_worker)


def check_counts(found: Sequence[int]) -> None:
    """Refuses data of which workers have read different numbers of batches.

    Raises:
        DataError: the numbers differ.
    """
    if len({*found}) > 1:
        by_worker = ", ".join(f"worker {worker}: {count}" for worker, count in enumerate(found))
        raise _error(f"The workers have read different numbers of batches in an epoch ({by_worker}).")


def _error(problem: str) -> DataError:
    return DataError(problem, hint=_HINT)
