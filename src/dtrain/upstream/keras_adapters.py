"""Reads and sets private names in Keras' data adapters: the objects that `fit` creates to read its data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from dtrain.upstream import keras_names


def epoch_iterator_base() -> Any:
    """The class of Keras' backend-independent epoch iterator."""
    from keras.src.trainers.epoch_iterator import EpochIterator

    return EpochIterator


def is_arrays(adapter: Any) -> bool:
    """Whether the adapter reads from arrays."""
    return isinstance(adapter, keras_names.ARRAYS.resolve())


def is_py_dataset(adapter: Any) -> bool:
    """Whether the adapter reads from a `keras.utils.PyDataset`."""
    return isinstance(adapter, keras_names.PY_DATASET.resolve())


def kind_of(adapter: Any) -> str:
    """The kind of data that `fit` was given, in words for messages."""
    if isinstance(adapter, keras_names.TF_DATASET.resolve()):
        return "a dataset"
    if isinstance(adapter, keras_names.GENERATOR.resolve()):
        return "a generator"
    return "a PyDataset" if is_py_dataset(adapter) else type(adapter).__name__


def array_facts(adapter: Any) -> tuple[int, int, Any]:
    """The number of rows of the arrays, the rows of a batch, and the `shuffle` argument of `fit`."""
    return int(adapter._num_samples), int(adapter._batch_size), adapter._shuffle


def arrays_of(adapter: Any) -> Any:
    """The arrays as a nest that `tf.data.Dataset.from_tensors` accepts, with the dtypes of Keras' batches."""
    import keras

    sliceable = keras_names.TO_SLICEABLE.resolve()(adapter._inputs, target_backend="tensorflow")
    return keras.tree.lists_to_tuples(sliceable)


def some_rows(arrays: Any, indices: Any) -> Any:
    """Takes rows of a nest of arrays.

    Args:
        arrays: the nest that `arrays_of` returned, as an element of a dataset.
        indices: the numbers of the rows, int64 of shape (n,).
    """
    import keras
    import tensorflow as tf

    wrapper, slice_sparse = keras_names.SPARSE_WRAPPER.resolve(), keras_names.SLICE_SPARSE.resolve()

    def one(leaf: Any) -> Any:
        if isinstance(leaf, wrapper):
            return slice_sparse(leaf, indices)
        if isinstance(leaf, list | tuple | dict):
            return None
        return tf.gather(leaf, indices, axis=0) if tf.is_tensor(leaf) else leaf

    return keras.tree.traverse(one, arrays)


def py_dataset_facts(adapter: Any) -> tuple[Any, Any, bool]:
    """The `PyDataset`, the enqueuer of its threads or processes (or None), and whether it is shuffled."""
    return adapter.py_dataset, adapter.enqueuer, bool(adapter.shuffle)


def standard_batch(adapter: Any, batch: Any) -> Any:
    """A batch of a `PyDataset` in the form in which Keras passes it on."""
    return adapter._standardize_batch(batch)


def read_instead(adapter: Any, batches: Callable[[], Iterator[Any]]) -> None:
    """Makes the adapter of a `PyDataset` read other batches; call it before the adapter creates a dataset.

    Args:
        adapter: the adapter.
        batches: returns an iterator over the batches to read.
    """
    adapter._get_iterator = batches


def in_order(enqueuer: Any, ordered: Callable[[], Any]) -> None:
    """Makes an enqueuer read another dataset, in order and without shuffling.

    Args:
        enqueuer: the enqueuer of a `PyDataset`, which reads in threads or processes.
        ordered: returns the dataset to read; called each time that the enqueuer starts.
    """
    start = enqueuer.start

    def start_in_order() -> None:
        if not enqueuer.is_running():
            enqueuer.py_dataset = ordered()
        start()

    enqueuer.shuffle = False
    enqueuer.start = start_in_order


def has_hooks(py_dataset: Any) -> bool:
    """Whether a `PyDataset` overrides `on_epoch_begin` or `on_epoch_end`."""
    import keras

    base = keras.utils.PyDataset
    return any(
        getattr(type(py_dataset), name) is not getattr(base, name)
        for name in ("on_epoch_begin", "on_epoch_end")
    )
