"""`MultiWorkerMirroredStrategy`: synchronous training in several processes, on one machine or many.

Every process runs the same program with its own copy of the model; gradients are all-reduced over all
processes before the update. The transport is chosen in `collectives`.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from dtrain.base.log import logger
from dtrain.collectives.graph_calls import buckets
from dtrain.collectives.transports import asked_for, connect, implementation_of, install
from dtrain.engine.replica.seeds import note_drawn
from dtrain.environments import current, join, known_to_tensorflow
from dtrain.environments.topology import Topology
from dtrain.errors import ConfigurationError
from dtrain.gradient_hooks.hooks import hook_of
from dtrain.interfaces.gradient_hook import GradientHook
from dtrain.interfaces.managed_strategy import ManagedStrategy
from dtrain.interfaces.replica_layout import ReplicaLayout
from dtrain.interfaces.scope_checks import strategy_made
from dtrain.partition.shard_groups import ShardGroups
from dtrain.process_group import peers
from dtrain.process_group.secret import on_loopback
from dtrain.process_group.value_exchange import exchange
from dtrain.strategies import common, devices
from dtrain.strategies.quorum_workers import check_one_device, quorum_of, seed_alike
from dtrain.task import channel
from dtrain.upstream import tensorflow_names, tf_tracing
from dtrain.upstream.servers import abort_collectives

_Extended: Any = tensorflow_names.COLLECTIVE_EXTENDED.resolve()
_LOCAL = "/job:localhost/replica:0/task:0/device:CPU:0"

# The resolvers that take the number of GPUs of a task as an argument.
_GIVEN_DEVICES = (
    tf.distribute.cluster_resolver.SimpleClusterResolver,
    tf.distribute.cluster_resolver.SlurmClusterResolver,
)


class _AllDevices(_Extended):  # type: ignore[misc]
    """Uses all local devices, logical CPUs too."""

    def _initialize_local_devices(self, cluster_resolver: Any, worker_device: str) -> tuple[Any, str]:
        local_devices, kind = super()._initialize_local_devices(cluster_resolver, worker_device)
        cpus = len(devices.local("CPU", worker_device))
        if kind == "CPU" and cpus > 1:
            # TensorFlow uses only one CPU. Several logical CPUs exist because the user asked for them.
            local_devices = tuple(f"{worker_device}/device:CPU:{i}" for i in range(cpus))
        return local_devices, kind


class MultiWorkerMirroredExtended(common.LocalUpdates, _AllDevices):
    """The strategy's `extended`, with dtrain's variables, local updates and transport."""


class ServerlessExtended(MultiWorkerMirroredExtended):
    """The strategy's `extended` without TensorFlow's server, where dtrain's transports reduce.

    TensorFlow's server would listen on all interfaces, and carry out what anyone sends. Without it, this
    process has the devices of a process alone.
    """

    _local_or_standalone_client_mode = True
    _enable_check_health = False
    _worker_device = property(lambda self: _LOCAL, lambda self, device: None)

    def _initialize_multi_worker(self, cluster_resolver: Any) -> None:
        super()._initialize_multi_worker(cluster_resolver)
        self._default_device = None

    def _initialize_local_devices(self, cluster_resolver: Any, worker_device: str) -> tuple[Any, str]:
        return super()._initialize_local_devices(cluster_resolver, "")

    def _initialize_local(self, cluster_resolver: Any, devices: Any = None) -> None:
        # It warns where TensorFlow's collectives cannot be configured any more, which are not used here.
        logger = tf.get_logger()
        level = logger.level
        logger.setLevel("ERROR")
        try:
            super()._initialize_local(cluster_resolver, devices)
        finally:
            logger.setLevel(level)


class MultiWorkerMirroredStrategy(
    common.ReplicaRunner,
    tf.distribute.MultiWorkerMirroredStrategy,  # type: ignore[misc]
):
    """Synchronous training in several processes.

    The constructor first contacts the other workers. So mistakes in `TF_CONFIG`, a port in use and a missing
    worker raise errors instead of waiting for ever. Without `TF_CONFIG`, the ranks of an MPI start (`mpirun
    -n 2`) are the workers; without an MPI start, the strategy uses the devices of this process only.

    Args:
        cluster_resolver: a `tf.distribute.cluster_resolver.ClusterResolver`; None reads `TF_CONFIG`,
            or takes the ranks of an MPI start.
        communication_options: a `tf.distribute.experimental.CommunicationOptions`.
        communication: the transport: "auto", "ring", "nccl", "mpi", "tensorflow", or a value of TensorFlow's
            `CommunicationImplementation`; a short form of `communication_options`. "auto" chooses NCCL for
            GPUs, MPI if an MPI starter started all workers, and the ring otherwise; "tensorflow" is its own
            ring, over servers without authentication. The attribute `dtrain_communication` holds the choice
            and its reason.
        memory_growth: whether GPUs allocate memory as needed instead of all at once.
        gradient_hook: what replicas send: the name of a hook, such as "bfloat16", "power_sgd" or "local_sgd",
            also with arguments, as in "diloco:every=20"; a `GradientHook`; None all-reduces each step's
            gradients as they are.
        peer_timeout: seconds to wait for the other workers. None uses `DTRAIN_PEER_TIMEOUT`; if that is not
            set, no limit under `dtrain launch`, 120 under `dtrain.spawn` and 300 elsewhere.

    Raises:
        ClusterConfigError: `TF_CONFIG` is malformed or contradicts itself.
        PortInUseError: another process listens at this task's address.
        PeerMissingError: a worker did not report in time, or cannot be connected to another one.
        PeerMismatchError: the workers have different clusters or transports, or two have the same number.
        MPIError: the ranks of an MPI start cannot communicate, or MPI was asked for and cannot be used.
        ConfigurationError: TensorFlow has started already, and its own collectives are needed; the gradient
            hook or the communication is not known, or the communication was given twice; or the hook sends
            few bits, and the communication cannot.

    Example:
        ```python
        # train.py, to be run by: dtrain launch --workers 2 train.py
        import keras
        import numpy as np

        import dtrain

        strategy = dtrain.MultiWorkerMirroredStrategy()
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        model.fit(np.ones((64, 4)), np.ones((64, 1)), verbose=0)
        ```
    """

    def __init__(
        self,
        cluster_resolver: Any = None,
        communication_options: Any = None,
        *,
        communication: Any = None,
        memory_growth: bool = True,
        gradient_hook: str | GradientHook | None = None,
        peer_timeout: float | None = None,
    ) -> None:
        asked, options = _options(communication_options, communication)
        hook = hook_of(gradient_hook)
        by_program = cluster_resolver is not None
        job = current() if cluster_resolver is None else _topology_of(cluster_resolver)
        quorum = quorum_of(job, hook, type(self).__name__, by_program=by_program)
        topology = job if quorum is None else None  # a member of a quorum is its strategy's only worker
        common.prepare(memory_growth=memory_growth)
        if topology is not None and topology.world_size > 1:
            _connect_peers(topology, peer_timeout)
        if not by_program and topology is not None and not known_to_tensorflow():
            cluster_resolver = common.resolver_of(topology)
        replicas, gpus = _local_replicas(cluster_resolver)
        if quorum is not None:
            check_one_device(replicas)
            cluster_resolver = _alone(replicas if gpus else 0)
        layout = ReplicaLayout(
            workers=1 if topology is None else topology.world_size,
            worker=0 if topology is None or topology.world_size == 1 else topology.rank,
            local_replicas=replicas,
            gradient_hook=hook,
            members=1 if quorum is None else quorum.size,
            member=0 if quorum is None else quorum.rank,
        )
        hosts = topology.hosts if topology is not None and layout.workers > 1 else ("",)
        layout = replace(layout, shard_groups=self._shard_groups(layout, hosts))
        self.dtrain_communication, transport = connect(
            layout, asked, topology, gpus=gpus, given=self._given()
        )
        if hook is not None and hook.bits and layout.workers > 1 and transport is None:
            raise ConfigurationError(
                f"{type(hook).__name__} sends numbers in {hook.bits} bits, but the workers communicate by "
                f"{self.dtrain_communication.library} ({self.dtrain_communication.reason}), which cannot.",
                hint='set communication="ring" or "mpi", with one CPU for each worker, or use another hook; '
                "DiLoCo can do without compress",
            )
        if layout.workers > 1:
            chosen = self.dtrain_communication
            layout = replace(layout, sums=chosen.sums, overlap=chosen.overlap)
        self.dtrain_managed = ManagedStrategy(layout=layout, quorum=quorum)
        self._collective_key_base = common.next_collective_key_base()
        serverless = transport is not None or layout.workers == 1
        connected = peers.connected()
        if not serverless and connected is not None:
            connected.abort_steps_with(abort_collectives)
        if not serverless and topology is not None and topology.is_chief:
            common.warn_of_servers(topology)
        kind = self._extended_class(serverless=serverless)
        extended = _extended(kind, self, cluster_resolver, options)
        tf.distribute.Strategy.__init__(self, extended)
        if job is not None:
            join(job, by_program=by_program)
        calls = install(extended, layout, transport, gpus=gpus)
        self.dtrain_managed = replace(self.dtrain_managed, calls=calls)
        if layout.overlap:
            self.dtrain_managed = replace(self.dtrain_managed, reduction_groups=buckets)
        _seed_alike(layout)
        if quorum is not None:
            seed_alike()
        strategy_made(self)
        if layout.workers * layout.members > 1:
            channel.report_connected()

    def _shard_groups(self, layout: ReplicaLayout, hosts: Sequence[str]) -> ShardGroups | None:
        """Which workers divide the weights among them; None if each replica holds whole weights.

        Args:
            layout: the strategy's layout.
            hosts: the host of each worker.
        """
        del layout, hosts
        return None

    def _given(self) -> dict[str, Any]:
        """What was given to the strategy that must be alike on all workers, by name."""
        return {"strategy": type(self).__name__}

    def _extended_class(self, *, serverless: bool) -> Any:
        """The class of the strategy's `extended`; unless `serverless`, it starts TensorFlow's server."""
        return ServerlessExtended if serverless else MultiWorkerMirroredExtended


def _options(options: Any, communication: Any) -> tuple[str, Any]:
    """The transport's name and TensorFlow's options, from whichever of both arguments was given."""
    if options is not None and communication is not None:
        raise ConfigurationError(
            "communication and communication_options were both given, but they mean the same.",
            hint="give communication_options=CommunicationOptions(implementation=...)",
        )
    if options is not None:
        return asked_for(options.implementation), options
    asked = asked_for(communication)
    return asked, tf.distribute.experimental.CommunicationOptions(implementation=implementation_of(asked))


def _connect_peers(topology: Topology, timeout: float | None) -> None:
    """Connects this worker with its peers."""
    with channel.rendezvous():
        connected = peers.connect(topology, timeout=timeout)
    if connected.secret is None and topology.rank == 0:
        alone = on_loopback(topology)
        logger.warning(
            "The processes of this job share no secret, so %s can take a worker's place, and change what "
            "the workers tell each other. Hint: name one file of mode 600 with a secret in "
            "DTRAIN_SECRET_FILE for all of them; see docs/security.md.",
            "other users of this machine" if alone else "others in the network",
        )


def _local_replicas(resolver: Any) -> tuple[int, bool]:
    """How many replicas this process has, and whether they are on GPUs, as TensorFlow will decide it."""
    gpus = devices.planned("GPU")
    # Other resolvers count TensorFlow's logical devices, and so start TensorFlow before its collectives.
    if gpus and isinstance(resolver, _GIVEN_DEVICES):
        gpus = resolver.num_accelerators().get("GPU", 0)
    return (gpus, True) if gpus else (devices.planned("CPU"), False)


def _alone(gpus: int) -> Any:
    """The resolver of a worker that TensorFlow takes for a process without a job."""
    alone = tf.train.ClusterSpec({})
    return tf.distribute.cluster_resolver.SimpleClusterResolver(alone, num_accelerators={"GPU": gpus})


def _extended(kind: Any, strategy: Any, resolver: Any, options: Any) -> Any:
    """Makes the strategy's `extended`, of the given class."""
    try:
        return kind(strategy, cluster_resolver=resolver, communication_options=options)
    except RuntimeError as error:
        if "program startup" not in str(error):
            raise
        raise ConfigurationError(
            "MultiWorkerMirroredStrategy was made after TensorFlow had started: its collectives must be "
            "configured before the first tensor, dataset or list of logical devices.",
            hint="make the strategy at the top of the program, right after the imports",
        ) from error


def _topology_of(resolver: Any) -> Topology | None:
    """The topology that a resolver describes; None if it describes no cluster."""
    jobs = resolver.cluster_spec().as_dict()
    if not jobs:
        return None
    tasks = {job: tuple(addresses) for job, addresses in jobs.items()}
    return Topology(tasks, resolver.task_type, resolver.task_id)


def _seed_alike(layout: ReplicaLayout) -> None:
    """Sets one random seed on all workers that have none, so that they shuffle data in the same order."""
    if layout.workers == 1:
        return
    mine = tf_tracing.global_seed()
    seeds = exchange(
        layout, mine if mine is not None else (secrets.randbits(31) if layout.worker == 0 else None)
    )
    if mine is None and seeds[0] is not None:
        tf.random.set_seed(seeds[0])
        note_drawn(seeds[0])
        logger.info(
            "No seed was set: all workers take %d, so that they read the data in one order.", seeds[0]
        )
