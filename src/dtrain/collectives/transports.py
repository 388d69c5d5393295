"""The transports that there are, and which of them a job takes: the workers say what they have, and choose.

`install` is called once, when a strategy is made and its workers are connected by TensorFlow.
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
    """TensorFlow's collectives over NVIDIA's library."""

    name = "nccl"
    implementation = "NCCL"

    def reason(self, facts: Sequence[Facts]) -> str:
        """Where all replicas are on GPUs."""
        return "all replicas are on GPUs" if all(each.gpus for each in facts) else ""


class MPI(Transport):
    """The MPI library that started the workers."""

    name = "mpi"

    def reason(self, facts: Sequence[Facts]) -> str:
        """Where an MPI starter started all of them."""
        return "" if self.problem(facts) else f"an MPI starter started all {len(facts)} workers"

    def problem(self, facts: Sequence[Facts]) -> str:
        """Why the job cannot reduce over MPI."""
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
        """MPI begins for all or for none, and only where everything else speaks for it."""
        problems = exchange(layout, mpi.problem())
        return [replace(each, mpi_problem=found) for each, found in zip(facts, problems, strict=True)]

    def connect(
        self, layout: ReplicaLayout, topology: Topology, facts: Sequence[Facts]
    ) -> tuple[Calls | None, str]:
        """By a communicator of dtrain's own: what others send over theirs must not meet what is sent here."""
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
    """Sockets between each two workers; TensorFlow's ring where these cannot be, and for several replicas."""

    name = "ring"

    def reason(self, facts: Sequence[Facts]) -> str:
        """Where nothing faster can be had."""
        return MPI().problem(facts) or "nothing else was found"

    def connect(
        self, layout: ReplicaLayout, topology: Topology, facts: Sequence[Facts]
    ) -> tuple[Calls | None, str]:
        """By sockets, if every two workers can be connected."""
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
"""By name; where nothing was asked for, the first is taken that has a reason."""


def asked_for(communication: Any) -> str:
    """The name that a user gave, as a word or as TensorFlow's `CommunicationImplementation`.

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
    """TensorFlow's collectives that serve until the workers have chosen."""
    name = TRANSPORTS[asked].implementation if asked in TRANSPORTS else AUTO.upper()
    return tf.distribute.experimental.CommunicationImplementation(name)


def choose(facts: Sequence[Facts]) -> tuple[str, str]:
    """The transport's name and the reason for it: plain rules, so all workers come to the same answer.

    Args:
        facts: of all workers, in their order.

    Raises:
        PeerMismatchError: the workers were told different things.
        MPIError: MPI was asked for, and cannot be had.
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
    """Makes a strategy's workers reduce by the transport that suits them all; each of them must call it.

    Args:
        extended: the strategy's, connected, before it has reduced anything.
        layout: the strategy's.
        asked: "auto" or the name of a transport.
        topology: of the job; None where the process is alone.

    Returns:
        What was chosen, and the operations of our own that it goes by; None where they are TensorFlow's.

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
        # Devices of one process wait for each other for ever where each runs its sums in another order. A
        # single CPU needs no order, which would only make sums wait for each other.
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
