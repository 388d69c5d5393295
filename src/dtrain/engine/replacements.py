"""What Keras and TensorFlow call in place of their own functions: private names and the engine's functions.

Each function gets the original first, then the original's arguments. No other module replaces or sets a name.
"""

from __future__ import annotations

from dtrain.engine.execution import xla_steps
from dtrain.engine.feed import batch_sources
from dtrain.engine.fit import build, epoch_iterator, fitting
from dtrain.engine.replica import (
    convolutions,
    gradients,
    outermost_layer,
    rematerialization,
    replica_losses,
    replica_metrics,
    replica_reductions,
    replica_threads,
    replica_writes,
    seeds,
)
from dtrain.engine.saving import saved_files
from dtrain.engine.sharding import sharding_plan
from dtrain.engine.step import local_normalization, steps
from dtrain.engine.synchronisation import optimizer
from dtrain.engine.variables import tables
from dtrain.upstream import keras_names, tensorflow_names
from dtrain.upstream.reach import made, replaced, set_on_objects


def register() -> None:
    """Registers all replacements, for `replace_all` and `set_methods`."""
    # Keras' trainer
    replaced(keras_names.FIT, by=fitting.fit, inside=True)
    replaced(keras_names.EVALUATE, by=fitting.evaluate)
    replaced(keras_names.PREDICT, by=fitting.predict)
    replaced(keras_names.TRAINER_INIT, by=fitting.trainer_init)
    set_on_objects(keras_names.COMPILE, by=fitting.compile, around_users=True)
    set_on_objects(keras_names.AUTO_JIT_COMPILE, by=fitting.auto_jit_compile, around_users=True)
    set_on_objects(keras_names.EPOCH_LOGS, by=fitting.epoch_logs)
    set_on_objects(keras_names.SYMBOLIC_BUILD, by=build.symbolic_build)
    replaced(keras_names.MAKE_TRAIN_FUNCTION, by=build.make_train_function)
    set_on_objects(keras_names.MAKE_FUNCTION, by=build.make_function)
    set_on_objects(keras_names.MAKE_PREDICT_FUNCTION, by=build.make_predict_function, around_users=True)
    made(keras_names.EPOCH_ITERATOR, by=epoch_iterator.make_epoch_iterator)
    replaced(keras_names.IS_DATASET, by=batch_sources.is_dataset)
    # its models' files
    set_on_objects(
        keras_names.MODEL_SAVE,
        keras_names.MODEL_SAVE_WEIGHTS,
        keras_names.MODEL_EXPORT,
        by=saved_files.save,
        around_users=True,
    )
    set_on_objects(keras_names.CHECKPOINT_SAVE, by=saved_files.save_checkpoint, around_users=True)
    replaced(
        keras_names.EXPORTED_VARIABLES,
        keras_names.EXPORTED_VARIABLES_EARLIER,
        by=saved_files.exported_variables,
    )
    # losses and metrics
    replaced(keras_names.UNSCALE_LOSS, by=replica_losses.unscale)
    set_on_objects(keras_names.ADDITIONAL_LOSS, by=replica_losses.additional_loss)
    replaced(keras_names.REDUCE_WEIGHTED, by=replica_losses.reduce_weighted)
    replaced(keras_names.METRIC_INIT, by=replica_metrics.metric_init)
    replaced(keras_names.ADD_METRIC_VARIABLE, by=replica_metrics.add_variable)
    set_on_objects(keras_names.WRAPPER_UPDATE, by=replica_metrics.wrapper_update)
    replaced(keras_names.GET_METRICS_RESULT, by=steps.metrics_result)
    set_on_objects(keras_names.RESET_METRICS, by=replica_metrics.reset_metrics)
    # optimizers
    set_on_objects(keras_names.MULTI_OPTIMIZER_APPLY, by=optimizer.apply)
    replaced(keras_names.OPTIMIZER_APPLY, keras_names.LOSS_SCALE_APPLY, by=optimizer.apply)
    set_on_objects(keras_names.LOSS_SCALE_TF_APPLY, by=optimizer.tf_apply)
    set_on_objects(keras_names.OPTIMIZER_REDUCE, by=optimizer.reduced_already)
    set_on_objects(keras_names.OPTIMIZER_ADD_SLOT, by=optimizer.add_slot, around_users=True)
    set_on_objects(keras_names.OPTIMIZER_UPDATE, by=sharding_plan.update_at_owners)
    set_on_objects(keras_names.OPTIMIZER_SAVE, by=sharding_plan.save_own, around_users=True)
    set_on_objects(keras_names.OPTIMIZER_LOAD, by=sharding_plan.load_own, around_users=True)
    # layers, variables and random numbers
    set_on_objects(keras_names.MAYBE_BUILD, by=replica_threads.maybe_build)
    replaced(keras_names.LAYER_CALL, by=outermost_layer.layer_call)
    replaced(
        keras_names.VARIABLE_ASSIGN_ADD, keras_names.VARIABLE_ASSIGN_SUB, by=replica_writes.assign_change
    )
    replaced(keras_names.EMBEDDING_CALL, by=tables.embedding_call)
    replaced(keras_names.BATCH_NORMALIZATION_CALL, by=local_normalization.batch_normalization)
    replaced(keras_names.REMAT, keras_names.REMAT_OF_OPS, by=rematerialization.remat)
    set_on_objects(keras_names.REMATERIALIZED_CALL, by=rematerialization.rematerialized_call)
    replaced(keras_names.SEED_NEXT, by=seeds.next_seed)
    # TensorFlow
    set_on_objects(tensorflow_names.MERGE_CALL, by=replica_threads.merge_call)
    set_on_objects(tensorflow_names.ALL_REDUCE, by=outermost_layer.all_reduce)
    replaced(tensorflow_names.FUNCTION_CALL, by=replica_writes.function_call)
    replaced(tensorflow_names.TAPE_GRADIENT, by=gradients.gradient)
    set_on_objects(tensorflow_names.EAGER_ALL_REDUCE, by=replica_reductions.all_reduce_per_replica_values)
    replaced(tensorflow_names.FILTER_GRADIENT, by=convolutions.filter_gradient)
    replaced(tensorflow_names.STATELESS_UNIFORM, by=xla_steps.uniform)
