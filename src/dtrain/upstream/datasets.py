"""The private names of Keras' data adapters and of `tf.data` that dtrain uses, each with its reason.

An adapter is the object that `fit` creates to read its data. The names are used in `keras_engine`.
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
    """Whether the adapter reads from arrays."""
    return isinstance(adapter, ARRAYS.resolve())


def is_py_dataset(adapter: Any) -> bool:
    """Whether the adapter reads from a `keras.utils.PyDataset`."""
    return isinstance(adapter, PY_DATASET.resolve())


def kind_of(adapter: Any) -> str:
    """The kind of data that `fit` was given, in words for messages."""
    if isinstance(adapter, TF_DATASET.resolve()):
        return "a dataset"
    if isinstance(adapter, GENERATOR.resolve()):
        return "a generator"
    return "a PyDataset" if is_py_dataset(adapter) else type(adapter).__name__


def array_facts(adapter: Any) -> tuple[int, int, Any]:
    """The number of rows of the arrays, the rows of a batch, and the `shuffle` argument of `fit`."""
    return int(adapter._num_samples), int(adapter._batch_size), adapter._shuffle


def arrays_of(adapter: Any) -> Any:
    """The arrays as a nest that `tf.data.Dataset.from_tensors` accepts, with the dtypes of Keras' batches."""
    import keras

    sliceable = TO_SLICEABLE.resolve()(adapter._inputs, target_backend="tensorflow")
    return keras.tree.lists_to_tuples(sliceable)


def some_rows(arrays: Any, indices: Any) -> Any:
    """Takes rows of a nest of arrays.

    Args:
        arrays: the nest that `arrays_of` returned, as an element of a dataset.
        indices: the numbers of the rows, int64 of shape (n,).
    """
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


def has_unseeded_shuffle(dataset: Any) -> bool:
    """Whether a dataset shuffles, with neither a seed of its own nor a global seed.

    Datasets that a user's function creates inside of it are not examined.
    """
    seeds: list[Any] = [getattr(dataset, name, None) for name in ("_seed", "_seed2")]
    if all(seed is not None for seed in seeds) and not any(int(seed) for seed in seeds):
        return True
    inputs = getattr(dataset, "_inputs", None)
    return any(has_unseeded_shuffle(each) for each in inputs()) if callable(inputs) else False


def batch_size(dataset: Any) -> int | None:
    """The number of examples in a batch, for a dataset that ends with `batch`; None for others.

    Options and prefetching may follow the `batch`.
    """
    import tensorflow as tf

    found = _batched(dataset)
    size = None if found is None else tf.get_static_value(found._batch_size)
    return None if size is None else int(size)


def in_larger_batches(dataset: Any, times: int) -> tuple[Any, int, bool]:
    """A dataset with the same rows in batches that are `times` times as large.

    Returns:
        The dataset, or None if `batch_size` is None; the rows in a batch of the given dataset; and whether
        the given dataset keeps a last, smaller batch.
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


# The private attributes that the functions above use, so that a test notices when one is renamed.
ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "arrays": ("_num_samples", "_batch_size", "_shuffle", "_inputs"),
    "PyDataset": ("py_dataset", "enqueuer", "shuffle", "_standardize_batch", "_get_iterator"),
    "enqueuer": ("start", "get", "stop", "is_running", "py_dataset", "shuffle"),
    "shuffled dataset": ("_seed", "_seed2", "_inputs"),
    "batched dataset": ("_batch_size", "_drop_remainder", "_input_dataset"),
}
