"""The private names of Keras' data adapters and of `tf.data` that dtrain stands on, each with its reason.

An adapter is what `fit` makes of its arguments. What is done with these names is `keras_engine`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from dtrain.upstream.reach import Reach

_ADAPTERS = "keras.src.trainers.data_adapters"

ARRAYS = Reach(
    f"{_ADAPTERS}.array_data_adapter:ArrayDataAdapter",
    "the order of its batches cannot be asked for, nor can it begin in the middle of an epoch",
    "tf#24408",
)
PY_DATASET = Reach(f"{_ADAPTERS}.py_dataset_adapter:PyDatasetAdapter", "as for arrays", "tf#24408")
PY_DATASET_ITERATOR = Reach(
    f"{_ADAPTERS}.py_dataset_adapter:PyDatasetAdapter._get_iterator",
    "the one place that draws an order and reads the batches",
)
ENQUEUER_RUN = Reach(
    f"{_ADAPTERS}.py_dataset_adapter:OrderedEnqueuer._run",
    "with several threads or processes the order is drawn here, each time it is started",
)
TF_DATASET = Reach(
    f"{_ADAPTERS}.tf_dataset_adapter:TFDatasetAdapter",
    "to know a dataset that was given from one that Keras has made",
)
GENERATOR = Reach(
    f"{_ADAPTERS}.generator_data_adapter:GeneratorDataAdapter", "to say by its name what is read again"
)
TO_SLICEABLE = Reach(
    f"{_ADAPTERS}.array_slicing:convert_to_sliceable",
    "batches have the values that Keras' own have: types are changed on the way",
)
SLICE_SPARSE = Reach(f"{_ADAPTERS}.array_slicing:slice_tensorflow_sparse_wrapper", "as for the values")
SPARSE_WRAPPER = Reach(f"{_ADAPTERS}.array_slicing:TensorflowSparseWrapper", "as for the values")


def is_arrays(adapter: Any) -> bool:
    """Whether Keras reads from arrays."""
    return isinstance(adapter, ARRAYS.resolve())


def is_py_dataset(adapter: Any) -> bool:
    """Whether Keras reads from a `keras.utils.PyDataset`."""
    return isinstance(adapter, PY_DATASET.resolve())


def kind_of(adapter: Any) -> str:
    """What `fit` was given, in words."""
    if isinstance(adapter, TF_DATASET.resolve()):
        return "a dataset"
    if isinstance(adapter, GENERATOR.resolve()):
        return "a generator"
    return "a PyDataset" if is_py_dataset(adapter) else type(adapter).__name__


def array_facts(adapter: Any) -> tuple[int, int, Any]:
    """The rows of the arrays, those of a batch, and what `fit` was given as `shuffle`."""
    return int(adapter._num_samples), int(adapter._batch_size), adapter._shuffle


def arrays_of(adapter: Any) -> Any:
    """The arrays as a nest that `tf.data.Dataset.from_tensors` takes, with the types of Keras' batches."""
    import keras

    sliceable = TO_SLICEABLE.resolve()(adapter._inputs, target_backend="tensorflow")
    return keras.tree.lists_to_tuples(sliceable)


def some_rows(arrays: Any, indices: Any) -> Any:
    """The rows of a nest of arrays, as a dataset gives it, at `indices` (int64 of shape (n,))."""
    import keras
    import tensorflow as tf

    wrapper, slice_sparse = SPARSE_WRAPPER.resolve(), SLICE_SPARSE.resolve()

    def one(leaf: Any) -> Any:
        if isinstance(leaf, wrapper):
            return slice_sparse(leaf, indices)
        if isinstance(leaf, list | tuple | dict):
            return None
        return tf.gather(leaf, indices, axis=0) if tf.is_tensor(leaf) else leaf

    return keras.tree.traverse(one, arrays)


def py_dataset_facts(adapter: Any) -> tuple[Any, Any, bool]:
    """The `PyDataset`, what reads it in threads or processes (or None), and whether it is shuffled."""
    return adapter.py_dataset, adapter.enqueuer, bool(adapter.shuffle)


def standard_batch(adapter: Any, batch: Any) -> Any:
    """A batch of a `PyDataset` as Keras hands it on."""
    return adapter._standardize_batch(batch)


def read_instead(adapter: Any, batches: Callable[[], Iterator[Any]]) -> None:
    """Has the adapter of a `PyDataset` take its batches from somewhere else; before its dataset is made."""
    adapter._get_iterator = batches


def in_order(enqueuer: Any, ordered: Callable[[], Any]) -> None:
    """Has threads or processes read what `ordered` returns when they start, from its first item on."""
    start = enqueuer.start

    def start_in_order() -> None:
        if not enqueuer.is_running():
            enqueuer.py_dataset = ordered()
        start()

    enqueuer.shuffle = False
    enqueuer.start = start_in_order


def has_hooks(py_dataset: Any) -> bool:
    """Whether a `PyDataset` does something at the beginning or the end of an epoch."""
    import keras

    base = keras.utils.PyDataset
    return any(
        getattr(type(py_dataset), name) is not getattr(base, name)
        for name in ("on_epoch_begin", "on_epoch_end")
    )


def has_unseeded_shuffle(dataset: Any) -> bool:
    """Whether a dataset shuffles with neither a seed of its own nor a global one.

    Datasets that functions of the user make inside of it are not seen.
    """
    seeds: list[Any] = [getattr(dataset, name, None) for name in ("_seed", "_seed2")]
    if all(seed is not None for seed in seeds) and not any(int(seed) for seed in seeds):
        return True
    inputs = getattr(dataset, "_inputs", None)
    return any(has_unseeded_shuffle(each) for each in inputs()) if callable(inputs) else False


def batch_size(dataset: Any) -> int | None:
    """Examples in a batch of a dataset whose last operation but prefetching was `batch`; None for others."""
    import tensorflow as tf

    found = _batched(dataset)
    size = None if found is None else tf.get_static_value(found._batch_size)
    return None if size is None else int(size)


def in_larger_batches(dataset: Any, times: int) -> tuple[Any, int, bool]:
    """The same rows in batches so many times as large, for the datasets that `batch_size` knows.

    Returns:
        The dataset, or None; the rows of a batch of the one given; and whether it keeps a last, smaller one.
    """
    import tensorflow as tf

    found, size = _batched(dataset), batch_size(dataset)
    if found is None or size is None:
        return None, 0, True
    keeps = not bool(tf.get_static_value(found._drop_remainder))
    rows = found._input_dataset.batch(size * times)
    return rows.with_options(dataset.options()).prefetch(2), size, keeps


def _batched(dataset: Any) -> Any:
    while type(dataset).__name__ in ("_PrefetchDataset", "_OptionsDataset"):
        dataset = dataset._input_dataset
    return dataset if type(dataset).__name__ in ("_BatchDataset", "_ParallelBatchDataset") else None


# What the functions above read of objects, so that a test finds what has moved.
ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "arrays": ("_num_samples", "_batch_size", "_shuffle", "_inputs"),
    "PyDataset": ("py_dataset", "enqueuer", "shuffle", "_standardize_batch", "_get_iterator"),
    "enqueuer": ("start", "get", "stop", "is_running", "py_dataset", "shuffle"),
    "shuffled dataset": ("_seed", "_seed2", "_inputs"),
    "batched dataset": ("_batch_size", "_drop_remainder", "_input_dataset"),
}
