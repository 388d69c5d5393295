"""The private names of TensorFlow that dtrain uses or replaces, each with its reason.

TensorFlow's strategies can only be subclassed through `tensorflow.python`: the classes of `extended`, which
does the work, and of variables have no public names. The subclasses are in `strategies/`. The other modules
here have the functions that use private names.
"""

from __future__ import annotations

from dtrain.upstream.reach import Reach, Replaced, SetOnObjects

_VALUES = "tensorflow.python.distribute.values"
_MIRRORED = "tensorflow.python.distribute.mirrored_strategy"
_REPLICAS = "tensorflow.python.distribute.mirrored_run"
_COLLECTIVE = "tensorflow.python.distribute.collective_all_reduce_strategy"
TAPE_GRADIENT = Replaced(
    "tensorflow.python.eager.backprop:GradientTape.gradient",
    "a step's gradients are the whole batch's from here on, so what a user does to them is right",
    "tf#33929",
)
FILTER_GRADIENT = Replaced(
    "tensorflow.python.ops.gen_nn_ops:conv2d_backprop_filter",
    "one kernel for CPUs ends the process on odd numbers of examples, which replicas have",
)
MIRRORED_EXTENDED = Reach(
    f"{_MIRRORED}:MirroredExtended", "the only place where a strategy's variables and updates can be changed"
)
COLLECTIVE_EXTENDED = Reach(
    f"{_COLLECTIVE}:CollectiveAllReduceExtended", "as MirroredExtended, for several workers"
)
CREATE_VARIABLE = Reach(
    f"{_MIRRORED}:MirroredExtended._create_variable",
    "variables that a replica can update alone once the gradients are reduced",
)
INITIAL_VALUE = Reach(
    f"{_MIRRORED}:MirroredExtended._get_variable_creator_initial_value",
    "gives every replica the whole initial value of a variable that is summed over them",
)
USE_MERGE_CALL = Reach(
    f"{_MIRRORED}:MirroredExtended._use_merge_call",
    "merge_call cannot stand inside cond; after the reduction no merge is needed",
    "keras#20582",
)
LOCAL_DEVICES = Reach(
    f"{_COLLECTIVE}:CollectiveAllReduceExtended._initialize_local_devices",
    "a worker without a GPU may have several logical CPUs",
)
INITIALIZE_WORKER = Reach(
    f"{_COLLECTIVE}:CollectiveAllReduceExtended._initialize_multi_worker",
    "it starts a server on all interfaces, which runs what anyone sends; dtrain's transports need none",
    "tf#11689",
)
MIRRORED_VARIABLE = Reach(f"{_VALUES}:MirroredVariable", "the class of variables under a strategy")
UPDATE_REPLICA = Reach(
    f"{_VALUES}:MirroredVariable._update_replica",
    "writes to a variable in a replica must be seen, and be local after the reduction",
)
GET_REPLICA = Reach(
    f"{_VALUES}:DistributedVariable._get_replica",
    "a centrally stored variable is the same one for every replica",
)
SYNC_ON_READ = Reach(
    f"{_VALUES}:SyncOnReadVariable", "metrics are summed over the replicas when they are read"
)
SYNC_ON_READ_SAVEABLES = Reach(
    f"{_VALUES}:SyncOnReadVariable._gather_saveables_for_checkpoint",
    "restoring cuts an integer into equal parts and drops the rest: a count of 1 becomes 0 on two replicas",
)
PER_REPLICA = Reach(f"{_VALUES}:PerReplica", "hands each replica its part of a batch inside a graph")
REPLICA_THREADS = Reach(
    f"{_MIRRORED}:MirroredExtended._call_for_each_replica",
    "replicas' threads take turns with the same Python objects: each is given attributes of its own",
)
MERGE_CALL = SetOnObjects(
    f"{_REPLICAS}:_MirroredReplicaContext._merge_call",
    "the one place where a replica's turn ends before its function does",
)
ALL_REDUCE = SetOnObjects(
    "tensorflow.python.distribute.distribute_lib:ReplicaContext.all_reduce",
    "synchronized moments must not count the row that a replica without examples is given",
)
REDUCTION_TO_ONE = Reach(
    "tensorflow.python.distribute.cross_device_ops:ReductionToOneDevice",
    "on one machine's CPUs a plain sum needs no collective keys, which a second strategy would share",
    "tf#62790",
)
RUN_REPLICAS = Reach(
    "tensorflow.python.eager.polymorphic_function.polymorphic_function:Function",
    "a replica function that is a tf.function itself must be unwrapped inside another",
)
FUNCTION_CALL = Replaced(
    "tensorflow.python.eager.polymorphic_function.polymorphic_function:Function.__call__",
    "replicas cannot communicate in a function of the user's own inside a step, so it becomes part of it",
)
FUNCTION_CLONE = Reach(
    "tensorflow.python.eager.polymorphic_function.polymorphic_function:Function._clone",
    "what a function traced in one block on a worker holds variables that the next one does not have",
)
FROM_FUNCTION = Reach(
    "tensorflow.python.distribute.input_lib:DistributedDatasetsFromFunction",
    "its cardinality counts one replica's batches, not steps",
)
PY_FUNCTIONS = Reach(
    "tensorflow.python.ops.script_ops:FuncRegistry.get",
    "the chief calls a function of a server by its name, over the connection that TensorFlow has",
)
PS_EXTENDED = Reach(
    "tensorflow.python.distribute.parameter_server_strategy_v2:ParameterServerStrategyV2Extended",
    "where variables are made, and how updates of one worker stay together",
    "keras#18624",
)
RESOURCE_VARIABLE = Reach(
    "tensorflow.python.ops.resource_variable_ops:BaseResourceVariable",
    "a variable that lives inside one call of a function has no public constructor",
)
STATELESS_UNIFORM = Replaced(
    "tensorflow.python.ops.stateless_random_ops:stateless_random_uniform",
    "under XLA the same seed gives other numbers, and so other masks of dropout",
)
CLUSTER_SCHEDULE = Reach(
    "tensorflow.python.distribute.coordinator.cluster_coordinator:Cluster.schedule",
    "a block is done when the chief has its results, so fetching them is part of what may run again",
)
WORKER_FAILURE = Reach(
    "tensorflow.python.distribute.coordinator.cluster_coordinator:_is_worker_failure",
    "an error of a step is the user's; one of a lost process means that its block must run elsewhere",
)
PS_FAILURE = Reach(
    "tensorflow.python.distribute.coordinator.cluster_coordinator:_is_ps_failure", "as WORKER_FAILURE"
)
RESOURCE_DELETER = Reach(
    "tensorflow.python.ops.resource_variable_ops:EagerResourceDeleter.__del__",
    "when the interpreter ends, a variable is deleted on its server, which may not answer any more",
)
COORDINATOR_DELETER = Reach(
    "tensorflow.python.distribute.coordinator.cluster_coordinator:ClusterCoordinator.__del__",
    "it waits for a lock that is held while the coordinator waits for a lost worker to come back",
)
REMOVE_FUNCTION = Reach(
    "tensorflow.python.eager.context:Context.remove_function",
    "as RESOURCE_DELETER: a function is removed on every server",
)
RUN_INDEPENDENTLY = Reach(
    "tensorflow.python.framework.auto_control_deps:AutomaticControlDependencies.run_independently",
    "a clock that is read in a step must not cost a message between worker and servers",
)
_CONTEXT = "tensorflow.python.distribute.distribute_lib"
LONE_MERGE_CALL = Reach(
    f"{_CONTEXT}:ReplicaContextBase._merge_call",
    "a replica that is tried out alone has nobody to be merged with",
)
REDUCE_TO = Reach(
    f"{_CONTEXT}:StrategyExtendedV2._reduce_to", "as LONE_MERGE_CALL: what it reduces there is its own value"
)
BATCH_REDUCE_TO = Reach(f"{_CONTEXT}:StrategyExtendedV2._batch_reduce_to", "as REDUCE_TO")
GATHER_TO = Reach(f"{_CONTEXT}:StrategyExtendedV2._gather_to", "as REDUCE_TO")
GET_FUNCTION = Reach(
    "tensorflow.python.framework.ops:Graph._get_function",
    "whether a function that a step calls draws random numbers",
)
SHARDED_VARIABLE = Reach(
    "tensorflow.python.distribute.sharded_variable:ShardedVariable",
    "Keras needs more of a variable that a partitioner has split",
)
_UTILS = "tensorflow.python.distribute.cross_device_utils"
LAUNCHER = Reach(
    f"{_UTILS}:CollectiveReplicaLauncher",
    "the one place through which a strategy's sums and gatherings go",
    "tf#60245",
)
EAGER_ALL_REDUCE = SetOnObjects(
    "tensorflow.python.distribute.cross_device_ops:CollectiveAllReduce._all_reduce_per_replica_values",
    "outside of graphs it makes a multiprocessing.pool.ThreadPool, which needs room in /dev/shm for a lock",
)
ALL_REDUCE_OF_DEVICE = Reach(
    "tensorflow.python.distribute.cross_device_ops:CollectiveAllReduce._all_reduce",
    "the part of that of one device",
)
COLLECTIVE_INITIAL_VALUE = Reach(
    f"{_COLLECTIVE}:CollectiveAllReduceExtended._get_variable_creator_initial_value",
    "the first worker's initial values go to the others by the chosen transport too",
)
CALLED_AS_IT_IS = Reach(
    "tensorflow.python.ops.script_ops:EagerFunc",
    "Python functions that graphs call with the arguments as they come: the checks of numpy_function take "
    "longer than a small sum",
)
OPTIMIZE_GRAPH = Reach(
    "tensorflow.python.grappler.tf_optimizer:OptimizeGraph",
    "what a step keeps in memory is decided by the graph that runs, not by the one that was traced",
)
SET_ATTRIBUTE = Reach(
    "tensorflow.python.framework.ops:Operation._set_attr",
    "sums that the graph optimizer joins are summed in an order that depends on timing",
)
DATASET_INPUTS = Reach(
    "tensorflow.python.data.ops.dataset_ops:DatasetV2._inputs",
    "the datasets that one is made of cannot be asked for",
)
DATASET_FUNCTIONS = Reach(
    "tensorflow.python.data.ops.dataset_ops:DatasetV2._functions",
    "whether a dataset calls Python, or reads variables, is written in its functions only",
)
_OPS = "tensorflow.python.data.experimental.ops.data_service_ops"
FROM_DATASET_ID = Reach(
    f"{_OPS}:_from_dataset_id",
    "how often a consumer asks whether all has been read cannot be set: once a second, each epoch",
)
