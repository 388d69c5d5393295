"""The private names of Keras that dtrain uses or replaces, each with its reason.

The replacements themselves are in `keras_engine/`; `reach.py` says on which objects they work.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from dtrain.upstream.reach import Reach, Replaced, SetOnObjects
from dtrain.upstream.versions import minor

_TRAINER = "keras.src.backend.tensorflow.trainer"
_LOSS = "keras.src.losses.loss"
_METRICS = "keras.src.metrics.reduction_metrics"
_OPTIMIZER = "keras.src.optimizers.base_optimizer"
_TF_OPTIMIZER = "keras.src.backend.tensorflow.optimizer"

TRAINER_INIT = Replaced(
    f"{_TRAINER}:TensorFlowTrainer.__init__",
    "sees each model that is made: what it needs under a strategy is set on the model, not on its class",
)
MAKE_TRAIN_FUNCTION = Replaced(
    f"{_TRAINER}:TensorFlowTrainer.make_train_function",
    "fit and train_on_batch call it each time, also for a model made before the first strategy, which is "
    "refused if it was left out of the scope",
)
MAKE_FUNCTION = SetOnObjects(
    f"{_TRAINER}:TensorFlowTrainer._make_function",
    "makes the function of a train or test step; the step must combine replicas by their share of the batch",
    "keras#20585, keras#19246",
)
MAKE_PREDICT_FUNCTION = SetOnObjects(
    f"{_TRAINER}:TensorFlowTrainer.make_predict_function",
    "as for training; outputs are put together in the order of the examples",
    "keras#20585",
)
SYMBOLIC_BUILD = SetOnObjects(
    f"{_TRAINER}:TensorFlowTrainer._maybe_symbolic_build",
    "it averages a first batch to build the model, which fails on strings and consumes data",
    "keras#21172",
)
FIT = Replaced(
    f"{_TRAINER}:TensorFlowTrainer.fit",
    "callbacks that write must write once a path, and mistakes be named before training",
)
EVALUATE = Replaced(f"{_TRAINER}:TensorFlowTrainer.evaluate", "one progress bar for the job")
PREDICT = Replaced(f"{_TRAINER}:TensorFlowTrainer.predict", "one progress bar for the job")
EPOCH_ITERATOR = Replaced(
    f"{_TRAINER}:TFEpochIterator",
    "it splits by TensorFlow's rule, which leaves replicas empty and needs a collective a step",
    "tf#36224",
)
COMPILE = SetOnObjects(
    "keras.src.trainers.trainer:Trainer.compile",
    "optimizer and metrics must be made in the model's own scope",
)
AUTO_JIT_COMPILE = SetOnObjects(
    "keras.src.trainers.trainer:Trainer._resolve_auto_jit_compile",
    'compile calls it for jit_compile="auto", where dtrain decides for each training',
)
GET_METRICS_RESULT = Reach(
    "keras.src.trainers.trainer:Trainer.get_metrics_result",
    "the stock steps' results are computed once, after the reduction, not in every replica",
)
RESET_METRICS = SetOnObjects(
    "keras.src.trainers.trainer:Trainer.reset_metrics",
    "each variable is reset by a call for each replica, milliseconds every epoch",
)
EPOCH_LOGS = SetOnObjects(
    "keras.src.trainers.trainer:Trainer._get_metrics_result_or_logs",
    "an epoch that is resumed after its last step has no step whose logs could be the epoch's; and each "
    "metric's variables are reduced by a call of their own",
)
UNSCALE_LOSS = Replaced(
    f"{_LOSS}:unscale_loss_for_distribution",
    "it multiplies by the number of replicas, by which no loss of dtrain's was divided",
    "tf#36224",
)
ADDITIONAL_LOSS = SetOnObjects(
    f"{_TRAINER}:TensorFlowTrainer._aggregate_additional_loss",
    "a loss that a layer adds may be a sum over the batch, which must not be averaged",
)
LAYER_CALL = Replaced(
    "keras.src.layers.layer:Layer.__call__",
    "a replica without examples cannot run convolutions, pooling and others on a CPU",
)
MAYBE_BUILD = SetOnObjects(
    "keras.src.layers.layer:Layer._maybe_build",
    "attributes that a layer sets while it is built are for all replicas, those of a call for one",
)
SYNCHRONIZED_MOMENTS = Replaced(
    "keras.src.backend.tensorflow.nn:_compute_moments_sync",
    "the row that such a replica is given must not count among all replicas' examples",
)
REDUCE_WEIGHTED = Replaced(
    f"{_LOSS}:reduce_weighted_values",
    "masked and weighted means divide by what the whole batch holds, not one replica's part",
)
APPLY_MASK = Reach(
    f"{_LOSS}:apply_mask", "the divisor of mean_with_sample_weight is the sum of what it returns"
)
LOSS_CALL = Replaced(
    f"{_LOSS}:Loss.__call__", "a loss that returns a scalar must see the examples of all replicas"
)
METRIC_INIT = Replaced(
    "keras.src.metrics.metric:Metric.__init__",
    "the update of a user's metric must be seen, also in a loop of the user's own",
)
ADD_METRIC_VARIABLE = Replaced(
    "keras.src.metrics.metric:Metric.add_variable",
    "the first value of a metric that is not additive must not be summed over the replicas",
)
METRIC_VALUES = Replaced(
    f"{_METRICS}:reduce_to_samplewise_values",
    "Mean and Sum call it first: a value a step is one value for all replicas, not one each",
)
WRAPPER_UPDATE = SetOnObjects(
    f"{_METRICS}:MeanMetricWrapper.update_state",
    "a metric function that returns a scalar must see the examples of all replicas",
)
OPTIMIZER_APPLY = Replaced(
    f"{_OPTIMIZER}:BaseOptimizer.apply",
    "clipping, accumulation, EMA and constraints must come after the reduction",
    "keras#20582, tf#33929",
)
LOSS_SCALE_APPLY = Replaced(
    "keras.src.optimizers.loss_scale_optimizer:LossScaleOptimizer.apply",
    "overflow must be looked for after the reduction, so that all replicas decide alike",
)
LOSS_SCALE_TF_APPLY = SetOnObjects(
    "keras.src.optimizers.loss_scale_optimizer:LossScaleOptimizer._tf_apply",
    "it merges the replicas, and refuses to run where they are merged already",
)
MULTI_OPTIMIZER_APPLY = Replaced(
    "keras.src.optimizers.multi_optimizer:MultiOptimizer.apply",
    "several optimizers, the same reduction",
    since="3.15",
)
OPTIMIZER_REDUCE = SetOnObjects(
    f"{_TF_OPTIMIZER}:TFOptimizer._all_reduce_sum_gradients",
    "gradients that are reduced already must not be reduced again",
)
OPTIMIZER_ADD_SLOT = SetOnObjects(
    f"{_TF_OPTIMIZER}:TFOptimizer.add_variable_from_reference",
    "state that is divided over the replicas is made by one of them only",
)
OPTIMIZER_UPDATE = Replaced(
    f"{_TF_OPTIMIZER}:TFOptimizer._backend_update_step",
    "the one place behind clipping and accumulation where weights can be left to their owners",
)
OPTIMIZER_SAVE = SetOnObjects(
    f"{_OPTIMIZER}:BaseOptimizer.save_own_variables", "divided state is gathered before it is written"
)
OPTIMIZER_LOAD = SetOnObjects(
    f"{_OPTIMIZER}:BaseOptimizer.load_own_variables", "of divided state each process takes what it keeps"
)
VARIABLE_ASSIGN_ADD = Replaced(
    "keras.src.backend.common.variables:Variable.assign_add",
    "it is assign(self + value), which aggregates the old value too and loses concurrent updates",
)
VARIABLE_ASSIGN_SUB = Replaced("keras.src.backend.common.variables:Variable.assign_sub", "as for assign_add")
SEED_NEXT = Replaced(
    "keras.src.random.seed_generator:SeedGenerator.next", "random layers drew the same mask on every replica"
)
MAKEDIRS = Replaced(
    "keras.src.utils.file_utils:makedirs",
    "workers that make one directory at the same time must not fail: FileExistsError",
    "ray#47464",
)
MODEL_SAVE = SetOnObjects(
    "keras.src.models.model:Model.save",
    "workers that save to one path must not write into each other's file",
    "ray#47464",
)
MODEL_SAVE_WEIGHTS = SetOnObjects("keras.src.models.model:Model.save_weights", "as for save")
MODEL_EXPORT = SetOnObjects("keras.src.models.model:Model.export", "as for save")
EXPORTED_VARIABLES = Replaced(
    "keras.src.export.saved_model_export_archive:_list_variables_used_by_fns",
    "it lists variables in the order of a set, so two workers' exports name them differently",
    since="3.14",
)
EXPORTED_VARIABLES_EARLIER = Replaced(
    "keras.src.export.saved_model:_list_variables_used_by_fns", "as EXPORTED_VARIABLES", until="3.14"
)
EMBEDDING_CALL = Replaced(
    "keras.src.layers.core.embedding:Embedding.call",
    "it fetches the whole table to look up a few rows",
    "keras#18624",
)
REMAT = Replaced(
    "keras.src.backend.tensorflow.core:remat",
    "a layer that is computed again must draw the same numbers and write nothing a second time",
    since="3.9",
)
REMATERIALIZED_CALL = SetOnObjects(
    "keras.src.layers.layer:Layer.rematerialized_call",
    "it sets the activation of layers, also of recurrent ones, where it cannot be set",
    since="3.9",
)


# The attributes in which a layer keeps the losses of its last call.
LAYER_LOSSES = frozenset({"_losses", "_loss_ids", "_losses_override"})
# The attributes of layers and models that Keras itself uses, and that are the same for all replicas.
LAYER_BOOKKEEPING = frozenset(
    {
        "_allow_non_tensor_positional_args", "_auto_config", "_build_shapes_dict", "_call_context_args",
        "_call_has_context_arg", "_call_has_mask_arg", "_call_has_training_arg", "_call_signature",
        "_called", "_compile_config", "_compile_loss", "_compile_metrics", "_compiled_trainable_state",
        "_compute_loss_has_training_arg", "_convert_input_args", "_distribute_strategy", "_dtype_policy",
        "_eval_epoch_iterator", "_functional", "_inbound_nodes", "_initial_epoch", "_input_spec", "_inputs",
        "_inputs_struct", "_jit_compile", "_layers", "_lock", "_loss_tracker", "_metrics", "_nodes",
        "_nodes_by_depth", "_non_trainable_variables", "_operations", "_operations_by_depth",
        "_outbound_nodes", "_outputs", "_outputs_struct", "_parent_path", "_path", "_remat_mode",
        "_run_eagerly", "_saved_model_arg_spec", "_saved_model_inputs_spec", "_seed_generators",
        "_self_setattr_tracking", "_supports_masking", "_tracked", "_tracker", "_trainable",
        "_trainable_variables", "build", "built", "get_metrics_result", "predict_function", "quantize",
        "test_function", "train_function",
    }
)  # fmt: skip


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
    """Whether an epoch's iterator yields the first and the last step of each call, as since Keras 3.11.

    Before, it yields the first step alone.
    """
    import keras

    return minor(keras.__version__) >= (3, 11)


def made_in_parts(make: Callable[[], Any]) -> Any:
    """Makes a metric's variable hold a part on each replica; the parts are combined when it is read.

    Keras does so itself since 3.10. Before, each update would have to meet the other replicas.

    Args:
        make: makes the variable. In a stateless scope, Keras gives it a value later.
    """
    import keras
    import tensorflow as tf

    if minor(keras.__version__) >= (3, 10):
        return make()

    def on_read(create: Callable[..., Any], **kwargs: Any) -> Any:
        return create(**kwargs | {"synchronization": tf.VariableSynchronization.ON_READ})

    with tf.variable_creator_scope(on_read):
        variable = make()
    if variable._value is None:

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


# The functions below use private attributes. tests/multidevice/test_upstream.py lists these attributes, to
# notice when one is renamed.


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


def copy_mask(source: Any, target: Any) -> None:
    """Copies the Keras mask of one tensor to another, if it has one."""
    mask = mask_of(source)
    if source is not target and mask is not None:
        set_mask(target, mask)


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
