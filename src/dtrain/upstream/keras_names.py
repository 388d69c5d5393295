"""The private names of Keras that dtrain uses or replaces, each with its reason.

`engine/replacements.py` lists the replacements; `reach.py` says on which objects they work. What has a
private name in objects is read in `keras_models.py`, `keras_variables.py`, `keras_optimizers.py` and
`keras_adapters.py`.
"""

from __future__ import annotations

from dtrain.upstream.reach import Reach, Replaced, SetOnObjects

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
GET_METRICS_RESULT = Replaced(
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
REDUCE_WEIGHTED = Replaced(
    f"{_LOSS}:reduce_weighted_values",
    "masked and weighted means divide by what the whole batch holds, not one replica's part",
)
APPLY_MASK = Reach(
    f"{_LOSS}:apply_mask", "the divisor of mean_with_sample_weight is the sum of what it returns"
)
METRIC_INIT = Replaced(
    "keras.src.metrics.metric:Metric.__init__",
    "the update of a user's metric must be seen, also in a loop of the user's own",
)
ADD_METRIC_VARIABLE = Replaced(
    "keras.src.metrics.metric:Metric.add_variable",
    "the first value of a metric that is not additive must not be summed over the replicas",
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
MULTI_OPTIMIZER_APPLY = SetOnObjects(
    "keras.src.optimizers.multi_optimizer:MultiOptimizer.apply",
    "all of a model's optimizers get their gradients from one reduction",
    since="3.15",
)
OPTIMIZER_REDUCE = SetOnObjects(
    f"{_TF_OPTIMIZER}:TFOptimizer._all_reduce_sum_gradients",
    "gradients that are reduced already must not be reduced again; behind clipping and accumulation, it "
    "is where weights can be left to the replicas that own their state",
)
OPTIMIZER_UPDATE = SetOnObjects(
    f"{_TF_OPTIMIZER}:TFOptimizer._distributed_tf_update_step",
    "of several processes, only one has the state of a weight, and updates it",
)
OPTIMIZER_ADD_SLOT = SetOnObjects(
    f"{_TF_OPTIMIZER}:TFOptimizer.add_variable_from_reference",
    "state that is divided over the replicas is made by one of them only",
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
INITIALIZE = Reach(
    "keras.src.backend:Variable._initialize_with_initializer",
    "the function that it gives to a variable knows the initializer; of a divided weight one worker draws",
)
SEED_NEXT = Replaced(
    "keras.src.random.seed_generator:SeedGenerator.next", "random layers drew the same mask on every replica"
)
CHECKPOINT_SAVE = SetOnObjects(
    "keras.src.callbacks.model_checkpoint:ModelCheckpoint._save_model",
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
BATCH_NORMALIZATION_CALL = Replaced(
    "keras.src.layers.normalization.batch_normalization:BatchNormalization.call",
    "without synchronized=True each replica normalizes with the moments of its own rows",
    "keras#18671",
)
_REMAT = "a layer that is computed again must draw the same numbers and write nothing a second time"
REMAT = Replaced("keras.src.backend.tensorflow.core:remat", _REMAT, since="3.9", until="3.16")
REMAT_OF_OPS = Replaced("keras.src.backend.tensorflow.ops:remat", _REMAT, since="3.16")
REMATERIALIZED_CALL = SetOnObjects(
    "keras.src.layers.layer:Layer.rematerialized_call",
    "it sets the activation of layers, also of recurrent ones, where it cannot be set",
    since="3.9",
)
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
IS_DATASET = Replaced(
    f"{_ADAPTERS}:is_tf_dataset",
    "it does not know what distribute_datasets_from_function returns, and fit refuses it",
    until="3.9",
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
        "_trainable_variables", "build", "built", "predict_function", "quantize", "test_function",
        "train_function",
    }
)  # fmt: skip
