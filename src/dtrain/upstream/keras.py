"""Reads and sets private names in objects of Keras: models, layers, optimizers, variables, metrics, adapters.

An adapter is the object that `fit` creates to read its data. What belongs to a call of a layer is in
`layer_calls.py`. The names that are reached by a path stand in `keras_names.py`.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

from dtrain.upstream import keras_names
from dtrain.upstream.reach import keras_is_at_least


def seed_generator_global() -> Any:
    """Keras' global seed generator; created if it does not exist yet.

    Creating it does not change Python's random state, so layers created afterwards get the same seeds.
    """
    from keras.src.random.seed_generator import global_seed_generator

    state = random.getstate()
    try:
        return global_seed_generator()
    finally:
        random.setstate(state)


# Keras has a constant for this name since 3.13; the name is older.
_GLOBAL_SEED_GENERATOR = "global_seed_generator"


def trainer_class() -> Any:
    """The trainer class for TensorFlow that `keras.Model` inherits from."""
    return keras_names.TRAINER_INIT.holder()


def epoch_iterator_base() -> Any:
    """The class of Keras' backend-independent epoch iterator."""
    from keras.src.trainers.epoch_iterator import EpochIterator

    return EpochIterator


def calls_have_two_numbers() -> bool:
    """Whether an epoch's iterator yields the first and the last step of a call, as since Keras 3.11."""
    return keras_is_at_least(3, 11)


def made_in_parts(make: Callable[[], Any], aggregation: Any) -> Any:
    """Makes a metric's variable hold a part on each replica; the parts are combined when it is read.

    Keras does so itself since 3.10. Before, replicas would have to communicate at each update.

    Args:
        make: makes the variable. In a stateless scope, Keras gives it a value later.
        aggregation: a `tf.VariableAggregation`, how the parts are combined; None leaves it to Keras.
    """
    import tensorflow as tf

    if aggregation is None and keras_is_at_least(3, 10):
        return make()
    asked = {"synchronization": tf.VariableSynchronization.ON_READ}
    if aggregation is not None:
        asked["aggregation"] = aggregation

    def on_read(create: Callable[..., Any], **kwargs: Any) -> Any:
        return create(**kwargs | asked)

    with tf.variable_creator_scope(on_read):
        variable = make()
    if getattr(variable, "_value", variable) is None:

        def initialize() -> None:
            del variable._deferred_initialize
            with tf.variable_creator_scope(on_read):
                variable._deferred_initialize()

        variable._deferred_initialize = initialize
    return variable


def profiles_batches(tensorboard: Any) -> bool:
    """Whether Keras' `TensorBoard` callback is set to profile batches, for which it must count them."""
    return bool(getattr(tensorboard, "_start_batch", 0) or getattr(tensorboard, "_stop_batch", 0))


def in_stateless_scope() -> bool:
    """Whether a Keras `StatelessScope` is active, so that variables are read from and written to it."""
    from keras.src.backend.common.stateless_scope import in_stateless_scope as found

    return bool(found())


def strategy_of(model: Any) -> Any:
    """The strategy in whose scope a model was constructed, or None."""
    return getattr(model, "_distribute_strategy", None)


def set_first_epoch(model: Any, epoch: int | None) -> None:
    """Makes the running `fit` begin with another epoch than its `initial_epoch`; None undoes this."""
    model._initial_epoch = epoch


def strategy_of_optimizer(optimizer: Any) -> Any:
    """The strategy in whose scope an optimizer was constructed; None for an object without one."""
    return getattr(optimizer, "_distribution_strategy", None)


def put_under(optimizer: Any, strategy: Any) -> None:
    """Makes an optimizer behave as if it were constructed in a strategy's scope, as its variables were."""
    for part in (optimizer, getattr(optimizer, "inner_optimizer", None)):
        if part is not None:
            part._distribution_strategy = strategy


def value_of(variable: Any) -> Any:
    """The `tf.Variable` that a Keras variable wraps; None for other objects."""
    return getattr(variable, "_value", None)


def set_value_of(variable: Any, value: Any) -> None:
    """Makes a Keras variable wrap another `tf.Variable`."""
    variable._value = value


def accumulators_of(optimizer: Any) -> list[Any]:
    """The variables in which an optimizer accumulates gradients, in the order of its trainable variables.

    An empty list if it does not accumulate.
    """
    return list(getattr(optimizer, "_accumulated_gradients", ()))


def slots_of(optimizer: Any, variable: Any) -> list[Any]:
    """An optimizer's slots of one variable; [] if the optimizer does not update the variable.

    Keras' optimizers have one list for each kind of slot, in the order of the variables that they update.
    """
    number = optimizer._trainable_variables_indices.get(optimizer._var_key(variable))
    if number is None:
        return []
    count = len(optimizer._trainable_variables)
    own = {id(trainable) for trainable in optimizer._trainable_variables}
    lists = [value for value in vars(optimizer).values() if isinstance(value, list) and len(value) == count]
    candidates = [slots[number] for slots in lists]
    return [slot for slot in candidates if hasattr(slot, "_value") and id(slot) not in own]


@contextlib.contextmanager
def known_as(optimizer: Any, part: Any, variable: Any) -> Iterator[None]:
    """Makes an optimizer treat `part`, inside the context, as `variable`, which it was built for."""
    indices = optimizer._trainable_variables_indices
    key = optimizer._var_key(part)
    number = indices.get(optimizer._var_key(variable))
    if number is None or key in indices:
        yield
        return
    indices[key] = number
    try:
        yield
    finally:
        del indices[key]


def number_of_variable(optimizer: Any, variable: Any) -> int:
    """The index of a variable among the variables that an optimizer was built for."""
    return int(optimizer._get_variable_index(variable))


def layers_of(model: Any) -> list[Any]:
    """A model and all layers in it, at any depth."""
    return list(model._flatten_layers())


def layer_structure(layer: Any) -> tuple[Any, ...]:
    """A value that changes when a layer is built, or gets variables, layers or metrics."""
    lists = (layer._trainable_variables, layer._non_trainable_variables, layer._layers, layer._metrics)
    return (layer.built, *map(len, lists))


def compiled_parts(model: Any) -> list[Any]:
    """The `loss`, `metrics` and `weighted_metrics` arguments of `compile`; None for a missing one."""
    compiled = model._compile_loss
    parts = [getattr(compiled, "_user_loss", None), getattr(model._compile_metrics, "_user_metrics", None)]
    return [*parts, getattr(model._compile_metrics, "_user_weighted_metrics", None)]


def is_keras_own(thing: Any) -> bool:
    """Whether a class, its instance or a function is defined in Keras itself."""
    module = getattr(thing, "__module__", None) or type(thing).__module__
    return str(module).partition(".")[0] == "keras"


def remat_mode_of(layer: Any) -> Any:
    """The settings of the `RematScope` in which a layer was created; None if there was none."""
    return getattr(layer, "_remat_mode", None)  # Keras 3.8 has none


def symbolic_build(model: Any, batch: Any) -> None:
    """Builds a model, its metrics and its optimizer from a batch of symbolic tensors."""
    model._symbolic_build(data_batch=batch)


def compute_loss(model: Any, x: Any, y: Any, y_pred: Any, sample_weight: Any) -> Any:
    """Calls a model's `compute_loss` with `training=False`, if it has this argument."""
    return model._compute_loss(x, y, y_pred, sample_weight, training=False)


def takes_training(model: Any) -> bool:
    """Whether a model's `call` has the argument `training`."""
    return bool(model._call_has_training_arg)


def iterations_of(optimizer: Any) -> Any:
    """The variable that counts an optimizer's calls, including those that only accumulate a micro-batch."""
    return optimizer._iterations


def copy_decay_exclusions(source: Any, target: Any) -> None:
    """Copies the variables that are excluded from weight decay to another optimizer, which is not built.

    The arguments of `exclude_from_weight_decay` are not in an optimizer's configuration: Keras stores the
    keys of the variables and a pattern of names when it is called.
    """
    if hasattr(source, "_exclude_from_weight_decay"):
        target._exclude_from_weight_decay = set(source._exclude_from_weight_decay)
        target._exclude_from_weight_decay_pattern = source._exclude_from_weight_decay_pattern


def trainable_variables_of(optimizer: Any) -> list[Any]:
    """The variables that an optimizer was built for."""
    return list(optimizer._trainable_variables)


def common_apply(optimizer: Any, grads: Any, variables: Any) -> None:
    """Calls the single-device `apply` of a `LossScaleOptimizer`."""
    optimizer._common_apply(grads, trainable_variables=variables)


def metric_function(metric: Any) -> Any:
    """The function that a `MeanMetricWrapper` wraps; None for other metrics."""
    return getattr(metric, "_fn", None)


def metrics_inside(metric: Any) -> list[Any]:
    """The metrics inside a metric, at any depth."""
    return [nested for inner in metric._metrics for nested in (inner, *metrics_inside(inner))]


def compiled_losses(model: Any) -> list[tuple[Any, Any]]:
    """The losses given to `compile`, each with the path of its output; [] before they are built."""
    compiled = model._compile_loss
    flat = compiled._flat_losses if compiled is not None and compiled.built else []
    return [(entry.path, entry.loss) for entry in flat]


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
