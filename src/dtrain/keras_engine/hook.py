"""Puts the engine under Keras, once a process, when the first strategy is made.

Models that are not under a strategy of dtrain's pass through unchanged; importing dtrain installs nothing.
"""

from __future__ import annotations

import threading

from dtrain.cluster import settings

_lock = threading.Lock()
_installed = False


def install() -> None:
    """Replaces the names listed in `upstream/`; calling it again does nothing.

    Raises:
        UnsupportedVersionError: TensorFlow or Keras is not of a supported version.
        BackendError: Keras does not run on TensorFlow.
    """
    global _installed
    with _lock:
        if not _installed:
            from dtrain.upstream.versions import check_versions

            check_versions()
            _install()
            if settings.log_device_placement():
                import tensorflow as tf

                tf.debugging.set_log_device_placement(True)
            _installed = True


def _install() -> None:
    from dtrain.keras_engine import (
        between_steps,
        build,
        convolutions,
        empty_parts,
        epochs,
        files,
        fitting,
        functions,
        gradients,
        losses,
        metrics,
        optimizer,
        own_functions,
        own_metrics,
        randoms,
        rematerialization,
        replica_attributes,
        seeds,
        sharded_state,
        tables,
        variables,
    )
    from dtrain.upstream import keras, tensorflow
    from dtrain.upstream.reach import replace, replace_inside

    replace(keras.MAKE_TRAIN_FUNCTION, lambda f: functions.make_step_function(f, training=True))
    replace(keras.MAKE_TEST_FUNCTION, lambda f: functions.make_step_function(f, training=False))
    replace(keras.MAKE_PREDICT_FUNCTION, functions.make_predict_function)
    replace(keras.SYMBOLIC_BUILD, build.make_symbolic_build)
    replace(keras.EPOCH_ITERATOR, epochs.make_epoch_iterator)
    # A callback may be what installs all this, after Python has looked up `model.fit` to call it.
    replace_inside(keras.FIT, fitting.make_fit)
    replace(keras.EVALUATE, fitting.make_evaluate)
    replace(keras.PREDICT, fitting.make_predict)
    replace(keras.RESET_METRICS, metrics.make_reset)
    replace(keras.EPOCH_LOGS, between_steps.make_epoch_logs)
    replace(keras.COMPILE, fitting.make_compile)
    replace(keras.SCALE_LOSS, losses.make_scale)
    replace(keras.UNSCALE_LOSS, losses.make_scale)
    replace(keras.ADDITIONAL_LOSS, losses.make_additional_loss)
    replace(keras.LAYER_CALL, empty_parts.make_layer_call)
    replace(keras.MAYBE_BUILD, replica_attributes.make_maybe_build)
    replace(keras.SYNCHRONIZED_MOMENTS, empty_parts.make_moments)
    replace(keras.REDUCE_WEIGHTED, losses.make_reduce_weighted)
    replace(keras.LOSS_CALL, losses.make_loss_call)
    replace(keras.METRIC_INIT, own_metrics.make_init)
    replace(keras.ADD_METRIC_VARIABLE, own_metrics.make_add_variable)
    replace(keras.MEAN_UPDATE, metrics.make_mean_update)
    replace(keras.SUM_UPDATE, metrics.make_sum_update)
    replace(keras.WRAPPER_UPDATE, metrics.make_wrapper_update)
    replace(keras.OPTIMIZER_APPLY, optimizer.make_apply)
    replace(keras.LOSS_SCALE_APPLY, optimizer.make_apply)
    replace(keras.LOSS_SCALE_TF_APPLY, optimizer.make_tf_apply)
    replace(keras.MULTI_OPTIMIZER_APPLY, optimizer.make_apply)
    replace(keras.OPTIMIZER_REDUCE, optimizer.make_reduce)
    replace(keras.OPTIMIZER_ADD_SLOT, sharded_state.make_add_slot)
    replace(keras.OPTIMIZER_UPDATE, sharded_state.make_update)
    replace(keras.OPTIMIZER_SAVE, sharded_state.make_save_own)
    replace(keras.OPTIMIZER_LOAD, sharded_state.make_load_own)
    replace(keras.VARIABLE_ASSIGN_ADD, lambda f: variables.make_assign_change(f, "assign_add"))
    replace(keras.VARIABLE_ASSIGN_SUB, lambda f: variables.make_assign_change(f, "assign_sub"))
    replace(keras.SEED_NEXT, seeds.make_next)
    replace(keras.REMAT, rematerialization.make_remat)
    replace(keras.REMATERIALIZED_CALL, rematerialization.make_rematerialized_call)
    replace(keras.EMBEDDING_CALL, tables.make_embedding_call)
    replace(keras.MAKEDIRS, files.make_makedirs)
    replace(keras.MODEL_SAVE, files.make_save)
    replace(keras.MODEL_SAVE_WEIGHTS, files.make_save)
    replace(keras.MODEL_EXPORT, lambda f: files.make_save(f, values=False))
    replace(keras.EXPORTED_VARIABLES, files.make_exported_variables)
    replace(tensorflow.WRITE_SUMMED, variables.make_write_summed)
    replace(tensorflow.RESTORE_SUMMED, variables.make_restore_summed)
    replace(tensorflow.STATELESS_UNIFORM, randoms.make_uniform)
    replace(tensorflow.TAPE_GRADIENT, gradients.make_gradient)
    replace(tensorflow.REPLICA_THREADS, replica_attributes.make_replica_threads)
    replace(tensorflow.FILTER_GRADIENT, convolutions.make_filter_gradient)
    replace(tensorflow.FUNCTION_CALL, own_functions.make_call)
    replace(tensorflow.MERGE_CALL, replica_attributes.make_merge_call)
