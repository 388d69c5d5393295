"""Finds out from a dataset's stages why training waits for its data, and what would help.

`tuned` does only what changes no number; everything else is advice, which `time_report.py` shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from dtrain.upstream.tf_data import Stage, stages_of

_DECODING = ("Decode", "ParseExample", "ParseSequence", "ParseSingle", "ReadFile", "StringToNumber")
_RANDOM = ("Random", "StatelessRandom", "Multinomial")
_ALL_BUSY = 0.85  # above this share of all cores, the machine is busy


def tuned(dataset: Any) -> Any:
    """The same batches in the same order, with the next ones read while a step runs, if that is safe.

    A dataset that calls Python, reads variables or draws from a generator with a state is left as it is:
    reading ahead could make it see other values.

    Args:
        dataset: a user's `tf.data.Dataset`; anything else is returned as it is.
    """
    if not isinstance(dataset, tf.data.Dataset) or hasattr(dataset, "dtrain_split"):
        return dataset
    stages = stages_of(dataset)
    if _reads_ahead(stages) or not _same_whenever_read(stages):
        return dataset
    return dataset.prefetch(tf.data.AUTOTUNE)


def may_be_buffered(dataset: tf.data.Dataset) -> bool:
    """Whether a dataset's batches may be read ahead: it reads ahead itself, or that changes no number.

    Reading ahead may change numbers where something depends on how many batches were read: a Python function
    with a state, or the threads of a `PyDataset`, which rest between epochs.
    """
    stages = stages_of(dataset)
    return _reads_ahead(stages) or _same_whenever_read(stages)


def _reads_ahead(stages: Sequence[Stage]) -> bool:
    """Whether the last stage is `prefetch`."""
    return next((stage.kind for stage in stages if stage.kind != "options"), "") == "prefetch"


def may_read_ahead(dataset: tf.data.Dataset) -> bool:
    """Whether a dataset yields the same batches whenever they are read, as far as its stages show."""
    return _same_whenever_read(stages_of(dataset))


def _same_whenever_read(stages: Sequence[Stage]) -> bool:
    if any(stage.python or stage.reads_state or stage.kind == "other" for stage in stages):
        return False
    chain = [stage.kind for stage in stages]
    # `shuffle` before `repeat` draws a new order for each pass. How far the dataset was read ahead would then
    # decide the order with which a later `fit` begins.
    return not ("repeat" in chain and "shuffle" in chain[chain.index("repeat") :])


def counts_for_sure(dataset: tf.data.Dataset) -> bool:
    """Whether a dataset surely has as many batches as its cardinality says: unknown stages may drop some."""
    return int(dataset.cardinality()) >= 0 and all(stage.kind != "other" for stage in stages_of(dataset))


def advice_for(data: Any, *, busy: float | None = None) -> list[str]:
    """Advice that would let training wait less for its data, the most promising first.

    Args:
        data: what `fit` was given as `x`.
        busy: the share of the machine's cores that was in use, 0.0 to 1.0; None if not known.
    """
    advice = _of_dataset(stages_of(data)) if isinstance(data, tf.data.Dataset) else _of_other(data)
    if busy is not None and busy > _ALL_BUSY:
        advice.append(
            "all cores are busy, so more threads will not help: prepare less in each epoch (cache(), files "
            "that are prepared already), or read on other machines (dtrain.data.distribute)"
        )
    return advice


def _of_other(data: Any) -> list[str]:
    """Advice for data that is not a `tf.data.Dataset`."""
    from keras.utils import PyDataset

    if isinstance(data, PyDataset):
        if data.workers <= 1:
            return [
                "the PyDataset is read by one thread: PyDataset(workers=N, use_multiprocessing=True) reads "
                "with N processes"
            ]
        if not data.use_multiprocessing:
            return [
                "the PyDataset's threads share Python's lock: use_multiprocessing=True reads with processes"
            ]
        return ["the PyDataset's processes do not keep up: more workers, or a larger max_queue_size"]
    if hasattr(data, "__next__") or callable(data):
        return [
            "the generator makes its batches in Python, one at a time: a keras.utils.PyDataset reads with "
            "several processes, a tf.data.Dataset with several threads"
        ]
    return []


def _of_dataset(stages: Sequence[Stage]) -> list[str]:
    kinds = [stage.kind for stage in stages]
    if "service" in kinds:
        return ["the tf.data service does not keep up: give it more workers"]
    advice: list[str] = []
    batch = kinds.index("batch") if "batch" in kinds else len(kinds)
    if any(stage.python for stage in stages):
        advice.append(
            "examples are made in Python (from_generator, py_function or numpy_function), one at a time "
            "under Python's lock: write it with TensorFlow operations, or read in several processes "
            "(dtrain.data.distribute, keras.utils.PyDataset)"
        )
    serial = [stage for stage in stages if stage.kind == "map"]
    if serial:
        advice.append(
            "map(...) without num_parallel_calls works on one element at a time: "
            "map(..., num_parallel_calls=tf.data.AUTOTUNE)"
        )
    if "interleave" in kinds:
        advice.append(
            "interleave(...) without num_parallel_calls reads one file at a time: "
            "interleave(..., num_parallel_calls=tf.data.AUTOTUNE)"
        )
    if (kinds.count("files") or _decodes(stages)) and "cache" not in kinds:
        advice.append(
            "files are read and decoded anew in each epoch: cache() after decoding, before shuffle and "
            "random changes, if memory holds the examples"
        )
    if any(_small(stage) for stage in stages[batch + 1 :] if stage.kind in ("map", "parallel map")):
        advice.append(
            "a function is called for each example: batch() first, and map(...) works on whole batches"
        )
    first = next((kind for kind in kinds if kind not in ("options", "repeat", "take")), "")
    if first != "prefetch" and (any(s.python or s.reads_state or s.kind == "other" for s in stages)):
        advice.append("nothing is read ahead: prefetch(tf.data.AUTOTUNE) at the end")
    if not advice:
        advice.append(
            "its stages run in parallel already: prepare less in each epoch, or read in more processes or "
            "on other machines (dtrain.data.distribute)"
        )
    return advice


def _decodes(stages: Sequence[Stage]) -> bool:
    return any(op.startswith(_DECODING) for stage in stages for op in stage.operations)


def _small(stage: Stage) -> bool:
    """Whether a stage's function may as well be called with a batch, as far as its operations show."""
    return not (stage.python or any(op.startswith((*_DECODING, *_RANDOM)) for op in stage.operations))
