"""Reads and sets what has a private name in objects of Keras: models, layers, optimizers, variables, metrics.

The names that are reached by a path stand in `keras_names.py`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

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


def with_seed_generator(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function so that it uses this thread's global seed generator in any thread.

    Keras has one generator for each thread, and each replica is traced in its own thread.
    """
    from keras.src.backend.common import global_state

    generator = global_state.get_global_attribute(_GLOBAL_SEED_GENERATOR)
    if generator is None:
        return function

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        global_state.set_global_attribute(_GLOBAL_SEED_GENERATOR, generator)
        return function(*args, **kwargs)

    return run


def trainer_class() -> Any:
    """The trainer class for TensorFlow that `keras.Model` inherits from."""
    from keras.src.backend.tensorflow.trainer import TensorFlowTrainer

    return TensorFlowTrainer


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
    for each in (optimizer, getattr(optimizer, "inner_optimizer", None)):
        if each is not None:
            each._distribution_strategy = strategy


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
    own = {id(each) for each in optimizer._trainable_variables}
    lists = [each for each in vars(optimizer).values() if isinstance(each, list) and len(each) == count]
    found = [each[number] for each in lists]
    return [slot for slot in found if hasattr(slot, "_value") and id(slot) not in own]


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


def own_state_of(layer: Any) -> list[Any]:
    """The non-trainable variables of a layer itself, without those of the layers inside it."""
    return list(layer._non_trainable_variables)


def is_keras_own(thing: Any) -> bool:
    """Whether a class, its instance or a function is defined in Keras itself."""
    module = getattr(thing, "__module__", None) or type(thing).__module__
    return str(module).partition(".")[0] == "keras"


def adds_activity_sum(layer: Any) -> bool:
    """Whether a layer's activity regularizer adds a sum over the batch; since Keras 3.14 it adds a mean."""
    return layer.activity_regularizer is not None and not keras_is_at_least(3, 14)


def is_functional(model: Any) -> bool:
    """Whether the graph of layers alone defines a model: it is functional, and its `call` is Keras' own."""
    from keras.src.models.functional import Functional

    return isinstance(model, Functional) and type(model).call is Functional.call


def made_by(tensor: Any) -> tuple[Any, list[Any]]:
    """The operation that produced a symbolic tensor of a functional model, and the operation's inputs."""
    history = tensor._keras_history
    node = history.operation._inbound_nodes[history.node_index]
    return history.operation, list(node.input_tensors)


def current_remat_mode() -> Any:
    """The settings of the innermost `RematScope`, with `mode` and `layer_names`; None outside of any."""
    from keras.src.backend.common.remat import get_current_remat_mode

    return get_current_remat_mode()


def remat_mode_of(layer: Any) -> Any:
    """The settings of the `RematScope` in which a layer was created; None if there was none."""
    return getattr(layer, "_remat_mode", None)  # Keras 3.8 has none


def count_added_losses(layer: Any) -> int:
    """How many losses a layer and the layers inside it have added since the model was called last."""
    return sum(len(each._losses) for each in layer._flatten_layers())


def called_first() -> Any:
    """The layer or model whose call is the outermost one now; None outside of any call."""
    from keras.src.backend.common import global_state

    context = global_state.get_global_attribute("current_call_ctx")
    return getattr(context, "entry_layer", None)


def call_surroundings() -> dict[str, Any]:
    """Copies of the global state that a layer's call depends on: the call context and the autocast scope."""
    from keras.src.backend.common import global_state

    names = ("current_call_ctx", "autocast_scope")
    return {name: copy.copy(global_state.get_global_attribute(name)) for name in names}


@contextlib.contextmanager
def in_surroundings(surroundings: dict[str, Any]) -> Iterator[None]:
    """Sets, inside the context, the global state that `call_surroundings` returned."""
    from keras.src.backend.common import global_state

    before = {name: global_state.get_global_attribute(name) for name in surroundings}
    for name, value in surroundings.items():
        global_state.set_global_attribute(name, copy.copy(value))
    try:
        yield
    finally:
        for name, value in before.items():
            global_state.set_global_attribute(name, value)


def mask_of(tensor: Any) -> Any:
    """The Keras mask that is attached to a tensor, or None."""
    from keras.src.backend import get_keras_mask

    return get_keras_mask(tensor)


def set_mask(tensor: Any, mask: Any) -> None:
    """Attaches a mask to a tensor as Keras does; None attaches no mask."""
    from keras.src.backend import set_keras_mask

    set_keras_mask(tensor, mask)


def logits_of(tensor: Any) -> Any:
    """The logits that Keras has attached to the result of its softmax or sigmoid; None if there are none.

    Keras' cross-entropies use the logits instead of the probabilities.
    """
    return getattr(tensor, "_keras_logits", None)


def set_logits(tensor: Any, logits: Any) -> None:
    """Attaches logits to a tensor as Keras does."""
    tensor._keras_logits = logits


def symbolic_build(model: Any, batch: Any) -> None:
    """Builds a model, its metrics and its optimizer from a batch of symbolic tensors."""
    model._symbolic_build(data_batch=batch)


@contextlib.contextmanager
def built_or_untouched(model: Any) -> Iterator[None]:
    """If the code inside the context fails, marks layers as not built whose inner layers were not built.

    If calling a layer to build it fails, Keras marks the layer as built, warns, and locks it against new
    variables.
    """
    before = {id(each) for each in layers_of(model) if each.built}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*unbuilt state")
            yield
    except Exception:
        for layer in layers_of(model):
            inside = [each for each in layer._flatten_layers(include_self=False) if not each.built]
            if id(layer) not in before and inside:
                layer.built = False
                layer._tracker.unlock()
        raise


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


def metric_value(metric: Any, y_true: Any, y_pred: Any) -> Any:
    """Calls the function that a `MeanMetricWrapper` wraps, for one batch."""
    return metric._fn(y_true, y_pred, **metric._fn_kwargs)


def metric_function(metric: Any) -> Any:
    """The function that a `MeanMetricWrapper` wraps; None for other metrics."""
    return getattr(metric, "_fn", None)


def metrics_inside(metric: Any) -> list[Any]:
    """The metrics inside a metric, at any depth."""
    return [each for inner in metric._metrics for each in (inner, *metrics_inside(inner))]


def compiled_losses(model: Any) -> list[tuple[Any, Any]]:
    """The losses given to `compile`, each with the path of its output; [] before they are built."""
    compiled = model._compile_loss
    flat = compiled._flat_losses if compiled is not None and compiled.built else []
    return [(each.path, each.loss) for each in flat]
