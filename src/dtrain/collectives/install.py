"""Puts the chosen transport under a strategy: the workers say what they have, choose, and connect.

It is called once, when a strategy is made and its workers are connected.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import tensorflow as tf

from dtrain.cluster import mpi
from dtrain.collectives.calls import Calls
from dtrain.collectives.choice import Communication, Facts, choose
from dtrain.collectives.connect import connect_all
from dtrain.collectives.launcher import CallLauncher, CallOperations
from dtrain.collectives.lookout import Lookout
from dtrain.collectives.mpi import MPICalls
from dtrain.collectives.ring import RingLauncher
from dtrain.collectives.sockets import SocketCalls
from dtrain.errors import MPIError
from dtrain.keras_engine.protocol import ReplicaLayout
from dtrain.keras_engine.talk import exchange
from dtrain.log import logger
from dtrain.topology import Topology, split_address
from dtrain.upstream import collectives as upstream_collectives


def install(
    extended: Any, layout: ReplicaLayout, asked: str, topology: Topology | None
) -> tuple[Communication, CallOperations | None]:
    """Makes a strategy's workers add up by the transport that suits them all; each of them must call it.

    Args:
        extended: the strategy's, connected, before it has reduced anything.
        layout: the strategy's.
        asked: one of `choice.NAMES`.
        topology: of the job; None where the process is alone.

    Returns:
        What was chosen, and the operations of our own that it goes by; None where they are TensorFlow's.

    Raises:
        PeerMismatchError, MPIError: as `choice.choose`.
    """
    if layout.workers == 1 or topology is None:
        name = "nccl" if _on_gpus(extended) else "ring"
        return Communication(name=name, reason="there is one worker", library=_tensorflow()), None
    facts = exchange(layout, _facts(extended, asked))
    name, reason = choose(facts)
    if name == "mpi":
        # MPI begins for all or for none, and only where everything else speaks for it.
        problems = exchange(layout, mpi.problem())
        facts = [replace(each, mpi_problem=found) for each, found in zip(facts, problems, strict=True)]
        name, reason = choose(facts)
    calls, library = None, _tensorflow()
    if name == "mpi":
        calls, library = _over_mpi(layout, topology), _mpi_library()
    elif name == "ring" and not any(each.gpus or each.replicas > 1 for each in facts):
        calls, library = _over_sockets(layout, topology)
    operations = None
    if calls is None:
        # Devices of one process wait for each other for ever where each runs its sums in another order. A
        # single CPU needs no order, which would only make sums wait for each other.
        ordered = layout.local_replicas > 1 or _on_gpus(extended)
        upstream_collectives.replace_launchers(extended, lambda *rest: RingLauncher(ordered, *rest))
    else:
        operations = CallOperations(calls)
        upstream_collectives.replace_launchers(extended, lambda *rest: CallLauncher(operations, *rest))
    chosen = Communication(name=name, reason=reason, library=library)
    if layout.worker == 0:
        logger.info("The workers add up over %s (%s): %s.", name, library, reason)
    return chosen, operations


def _facts(extended: Any, asked: str) -> Facts:
    started = mpi.started_by_mpi()
    absent = started and not mpi.installed()
    return Facts(
        asked=asked,
        gpus=_on_gpus(extended),
        mpi_size=mpi.size() if started else 0,
        mpi_problem="mpi4py is not installed" if absent else "",
        replicas=len(extended.worker_devices),
    )


def _over_mpi(layout: ReplicaLayout, topology: Topology) -> Calls:
    world = mpi.world().Dup()  # what others send over theirs must not meet what is sent here
    if (world.Get_rank(), world.Get_size()) != (layout.worker, layout.workers):
        raise MPIError(
            f"Worker {layout.worker} of {layout.workers} is rank {world.Get_rank()} of {world.Get_size()} in "
            "MPI's world.",
            hint="leave TF_CONFIG to dtrain, or number its workers as the ranks are",
        )
    return MPICalls(world, check=_of_ranks(Lookout(topology)))


def _over_sockets(layout: ReplicaLayout, topology: Topology) -> tuple[Calls | None, str]:
    peers = connect_all(layout, split_address(topology.address)[0])
    if peers is None:
        if layout.worker == 0:
            logger.warning(
                "The workers could not be connected by sockets of their own (a firewall, perhaps): they add "
                "up by TensorFlow's collectives, which are slower."
            )
        return None, _tensorflow()
    kinds = sorted({"local" if each.family == socket.AF_UNIX else "TCP" for each in peers.values()})
    calls = SocketCalls(layout.worker, peers, check=Lookout(topology).look)
    return calls, f"sockets ({' and '.join(kinds)})"


def _of_ranks(lookout: Lookout) -> Callable[[], None]:
    def look() -> None:
        lookout.look()
        mpi.check_ended()

    return look


def _on_gpus(extended: Any) -> bool:
    return all("GPU" in device for device in extended.worker_devices)


def _tensorflow() -> str:
    return f"TensorFlow {tf.__version__}"


def _mpi_library() -> str:
    import mpi4py
    from mpi4py import MPI

    vendor, version = MPI.get_vendor()
    return f"{vendor} {'.'.join(map(str, version))} (mpi4py {mpi4py.__version__})"
