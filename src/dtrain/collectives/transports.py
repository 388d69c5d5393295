"""The available transports, and the choice among them: workers exchange facts, and all choose the same one.

A strategy calls `install` once, when TensorFlow has connected its workers. No bytes are moved here.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from dtrain.cluster import mpi
from dtrain.collectives.calls import Calls
from dtrain.collectives.connect import connect_all
from dtrain.collectives.launcher import CallLauncher, CallOperations
from dtrain.collectives.mpi import MPICalls
from dtrain.collectives.peer_liveness import PeerLiveness
from dtrain.collectives.ring import RingLauncher
from dtrain.collectives.sockets import SocketCalls
from dtrain.collectives.transport import Communication, Facts, Transport
from dtrain.errors import ConfigurationError, MPIError, PeerMismatchError
from dtrain.keras_engine.protocol import ReplicaLayout
from dtrain.keras_engine.talk import exchange
from dtrain.log import logger
from dtrain.topology import Topology, split_address
from dtrain.upstream import collectives as upstream_collectives

AUTO = "auto"


class NCCL(Transport):
    """TensorFlow's collectives over NVIDIA's NCCL."""

    name = "nccl"
    implementation = "NCCL"

    def reason(self, facts: Sequence[Facts]) -> str:
        """Chosen if all replicas are on GPUs."""
        return "all replicas are on GPUs" if all(each.gpus for each in facts) else ""


class MPI(Transport):
    """The MPI library whose starter started the workers."""

    name = "mpi"

    def reason(self, facts: Sequence[Facts]) -> str:
        """Chosen if an MPI starter started all workers."""
        return "" if self.problem(facts) else f"an MPI starter started all {len(facts)} workers"

    def problem(self, facts: Sequence[Facts]) -> str:
        """Why the job cannot use MPI."""
        if not any(each.mpi_size for each in facts):
            return "no MPI starter started the workers"
        for worker, each in enumerate(facts):
            if each.mpi_size != len(facts):
                found = f"one that started {each.mpi_size}" if each.mpi_size else "none"
                return (
                    f"the job has {len(facts)} workers, and worker {worker} reports of MPI starters {found}"
                )
            if each.replicas > 1:
                return f"worker {worker} has {each.replicas} replicas, and over MPI a worker has one"
            if each.mpi_problem:
                return f"worker {worker} cannot use MPI: {each.mpi_problem}"
        return ""

    def started(self, layout: ReplicaLayout, facts: Sequence[Facts]) -> Sequence[Facts]:
        """Initialises MPI, which is done only after the facts have led to this transport.

        Returns:
            The facts with each worker's problem, so that all workers use MPI or none does.
        """
        problems = exchange(layout, mpi.problem())
        return [replace(each, mpi_problem=found) for each, found in zip(facts, problems, strict=True)]

    def connect(
        self, layout: ReplicaLayout, topology: Topology, facts: Sequence[Facts]
    ) -> tuple[Calls | None, str]:
        """Duplicates MPI's world communicator, so that dtrain's messages cannot mix with a program's own.

        Raises:
            MPIError: the ranks in MPI differ from the workers' numbers.
        """
        import mpi4py.MPI

        world = mpi.world().Dup()
        if (world.Get_rank(), world.Get_size()) != (layout.worker, layout.workers):
            raise MPIError(
                f"Worker {layout.worker} of {layout.workers} is rank {world.Get_rank()} of "
                f"{world.Get_size()} in MPI's world.",
                hint="leave TF_CONFIG to dtrain, or number its workers as the ranks are",
            )
        peers = PeerLiveness(topology)

        def check() -> None:
            peers.check()
            mpi.check_ended()

        vendor, version = mpi4py.MPI.get_vendor()
        name = f"{vendor} {'.'.join(map(str, version))} (mpi4py {mpi4py.__version__})"
        return MPICalls(world, check=check), name


class Ring(Transport):
    """Sockets between each two workers; TensorFlow's ring on GPUs, for several replicas or as a fallback."""

    name = "ring"

    def reason(self, facts: Sequence[Facts]) -> str:
        """Always chosen, as the last transport in the list; the reason is why MPI was not."""
        return MPI().problem(facts) or "nothing else was found"

    def connect(
        self, layout: ReplicaLayout, topology: Topology, facts: Sequence[Facts]
    ) -> tuple[Calls | None, str]:
        """Connects by sockets, if every two workers can be connected and have one CPU replica each."""
        if any(each.gpus or each.replicas > 1 for each in facts):
            return None, ""
        peers = connect_all(layout, split_address(topology.address)[0])
        if peers is None:
            if layout.worker == 0:
                logger.warning(
                    "The workers could not be connected by sockets of their own (a firewall, perhaps): "
                    "values travel by TensorFlow's collectives, which are slower."
                )
            return None, ""
        kinds = sorted({"local" if each.family == socket.AF_UNIX else "TCP" for each in peers.values()})
        calls = SocketCalls(layout.worker, peers, check=PeerLiveness(topology).check)
        return calls, f"sockets ({' and '.join(kinds)})"


TRANSPORTS: dict[str, Transport] = {each.name: each for each in (NCCL(), MPI(), Ring())}
"""The transports by name; "auto" chooses the first that has a reason."""


def asked_for(communication: Any) -> str:
    """The name of the transport that a user asked for; "auto" for None.

    Args:
        communication: a name, a value of TensorFlow's `CommunicationImplementation`, or None.

    Raises:
        ConfigurationError: there is no such transport.
    """
    name = getattr(communication, "value", communication) or AUTO
    if not isinstance(name, str) or name.lower() not in (AUTO, *TRANSPORTS):
        raise ConfigurationError(
            f"There is no communication {communication!r}.", hint=f"one of {', '.join((AUTO, *TRANSPORTS))}"
        )
    return name.lower()


def implementation_of(asked: str) -> Any:
    """TensorFlow's `CommunicationImplementation` to use until the workers have chosen a transport."""
    name = TRANSPORTS[asked].implementation if asked in TRANSPORTS else AUTO.upper()
    return tf.distribute.experimental.CommunicationImplementation(name)


def choose(facts: Sequence[Facts]) -> tuple[str, str]:
    """Chooses a transport by fixed rules, so that all workers make the same choice.

    Args:
        facts: the facts of all workers, in their order.

    Returns:
        The name of the transport, and the reason for it.

    Raises:
        PeerMismatchError: the workers were asked for different transports.
        MPIError: MPI was asked for, but cannot be used.
    """
    if len({each.asked for each in facts}) > 1:
        told = ", ".join(f"{each.asked} (worker {i})" for i, each in enumerate(facts))
        raise PeerMismatchError(
            f"The workers were given different communications: {told}.",
            hint="give all of them the same, or none",
        )
    wanted = facts[0].asked
    if wanted == AUTO:
        return next((name, why) for name, each in TRANSPORTS.items() if (why := each.reason(facts)))
    problem = TRANSPORTS[wanted].problem(facts)
    if problem:
        raise MPIError(
            f"communication={wanted!r} was set, but {problem}.",
            hint="start the program by `dtrain launch --mpi --workers N`, or by mpirun or srun "
            "(pip install 'dtrain[mpi]')",
        )
    return wanted, "it was asked for"


def install(
    extended: Any, layout: ReplicaLayout, asked: str, topology: Topology | None
) -> tuple[Communication, CallOperations | None]:
    """Chooses a transport and makes the strategy use it; every worker must call it.

    Args:
        extended: the strategy's `extended`, connected to the other workers, before its first reduction.
        layout: the strategy's layout.
        asked: "auto" or the name of a transport.
        topology: the topology of the job; None for a single process.

    Returns:
        The chosen transport, and dtrain's collective operations; None for these if TensorFlow's are used.

    Raises:
        PeerMismatchError, MPIError: as `choose`.
    """
    tensorflow, gpus = f"TensorFlow {tf.__version__}", _on_gpus(extended)
    if layout.workers == 1 or topology is None:
        name = "nccl" if gpus else "ring"
        return Communication(name=name, reason="there is one worker", library=tensorflow), None
    facts: Sequence[Facts] = exchange(layout, _facts(extended, asked))
    name, reason = choose(facts)
    started = TRANSPORTS[name].started(layout, facts)
    if started is not facts:
        facts = started
        name, reason = choose(facts)
    calls, library = TRANSPORTS[name].connect(layout, topology, facts)
    operations = None if calls is None else CallOperations(calls)

    def launcher(*rest: Any) -> Any:
        if operations is not None:
            return CallLauncher(operations, *rest)
        # If the devices of one process run collectives in different orders, they deadlock. A single CPU needs
        # no fixed order, which would only delay collectives.
        return RingLauncher(layout.local_replicas > 1 or gpus, *rest)

    upstream_collectives.replace_launchers(extended, launcher)
    chosen = Communication(name=name, reason=reason, library=library or tensorflow)
    if layout.worker == 0:
        logger.info("The workers reduce over %s (%s): %s.", name, chosen.library, reason)
    return chosen, operations


def _facts(extended: Any, asked: str) -> Facts:
    started = mpi.started_by_mpi()
    return Facts(
        asked=asked,
        gpus=_on_gpus(extended),
        mpi_size=mpi.size() if started else 0,
        mpi_problem="mpi4py is not installed" if started and not mpi.installed() else "",
        replicas=len(extended.worker_devices),
    )


def _on_gpus(extended: Any) -> bool:
    return all("GPU" in device for device in extended.worker_devices)
