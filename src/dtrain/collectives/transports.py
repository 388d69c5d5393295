"""The available transports, and the choice among them: workers exchange facts, and all choose the same one.

A strategy calls `connect` once, before TensorFlow starts, and then `install`. No bytes are moved here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import tensorflow as tf

from dtrain.base.log import logger
from dtrain.collectives.calls import Calls
from dtrain.collectives.graph_calls import CallLauncher, CallOperations
from dtrain.collectives.mpi import MPI
from dtrain.collectives.reduction_rules import spare_cores
from dtrain.collectives.ring import NCCL, RingLauncher, TensorFlowRing
from dtrain.collectives.sockets import Sockets
from dtrain.collectives.transport import Communication, Facts, Transport
from dtrain.environments import settings
from dtrain.environments.topology import Topology
from dtrain.errors import ConfigurationError, PeerMismatchError
from dtrain.interfaces.replica_layout import ReplicaLayout
from dtrain.process_group import peers
from dtrain.process_group.value_exchange import exchange
from dtrain.upstream import servers, tf_replicas

AUTO = "auto"
"""The name that leaves the choice to dtrain."""

TRANSPORTS: dict[str, Transport] = {
    transport.name: transport for transport in (NCCL(), MPI(), TensorFlowRing(), Sockets())
}
"""The transports by name; "auto" chooses the first that has a reason, or the last."""


def register(transport: Transport) -> None:
    """Add a transport, before any strategy is made; all workers must add the same, in the same order.

    Args:
        transport: an instance of a subclass of `Transport`. "auto" asks it before those that are there.

    Raises:
        ConfigurationError: a transport of this name is registered already.
    """
    if transport.name in (AUTO, *TRANSPORTS):
        raise ConfigurationError(
            f"There is a transport {transport.name!r} already.", hint="give yours another name"
        )
    others = {**TRANSPORTS}
    TRANSPORTS.clear()
    TRANSPORTS.update({transport.name: transport, **others})


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
    """TensorFlow's `CommunicationImplementation` to use where its own collectives are used."""
    name = TRANSPORTS[asked].implementation if asked in TRANSPORTS else AUTO.upper()
    return tf.distribute.experimental.CommunicationImplementation(name)


def choose(facts: Sequence[Facts]) -> tuple[str, str]:
    """Chooses a transport by fixed rules, so that all workers make the same choice.

    Args:
        facts: the facts of all workers, in their order.

    Returns:
        The name of the transport, and the reason for it.

    Raises:
        PeerMismatchError: the workers were asked for different transports, or their strategies were given
            different values.
        ConfigurationError, MPIError: a transport was asked for that cannot be used.
    """
    by_worker = [{"communication": worker_facts.asked, **worker_facts.given} for worker_facts in facts]
    for name in by_worker[0]:
        values = [given.get(name) for given in by_worker]
        if values.count(values[0]) < len(values):
            given = ", ".join(f"{value} (worker {i})" for i, value in enumerate(values))
            raise PeerMismatchError(
                f"The workers were given different values of {name}: {given}.",
                hint="give all of them the same value, or none",
            )
    wanted = facts[0].asked
    if wanted == AUTO:
        for name, transport in TRANSPORTS.items():
            if why := transport.reason(facts):
                return name, why
        problems = (transport.problem(facts) for transport in TRANSPORTS.values())
        return name, next(filter(None, problems), "nothing else was found")
    problem = TRANSPORTS[wanted].problem(facts)
    if problem:
        raise TRANSPORTS[wanted].error(problem)
    return wanted, "it was asked for"


def overlaps(facts: Sequence[Facts], hosts: Sequence[str]) -> bool:
    """Whether reductions overlap with the backward pass: by `spare_cores`, where the user has not chosen.

    Args:
        facts: the facts of all workers, in their order. If the first worker's user has chosen, that counts.
        hosts: the host of each worker.
    """
    if facts[0].overlap is not None:
        return facts[0].overlap
    return spare_cores([worker_facts.cores for worker_facts in facts], hosts)


def connect(
    layout: ReplicaLayout,
    asked: str,
    topology: Topology | None,
    *,
    gpus: bool,
    given: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[Communication, Calls | None]:
    """Chooses a transport and connects the workers by it; every worker must call it.

    Args:
        layout: the layout of the strategy.
        asked: "auto" or the name of a transport.
        topology: the topology of the job; None for a single process.
        gpus: whether all replicas of this worker are on GPUs.
        given: as that of `Facts`.

    Returns:
        The chosen transport, and its collective calls; None for these if TensorFlow's collectives are used.

    Raises:
        PeerMismatchError, ConfigurationError, MPIError: as `choose`.
        ConfigurationError: a shard group has several workers, and the transport cannot gather in it.
    """
    tensorflow = f"TensorFlow {tf.__version__}"
    if layout.workers == 1 or topology is None:
        name = "nccl" if gpus else "ring"
        return Communication(name=name, reason="there is one worker", library=tensorflow), None
    own = {name: transport.own_facts() for name, transport in TRANSPORTS.items()}
    mine = Facts(
        asked=asked,
        gpus=gpus,
        replicas=layout.local_replicas,
        cores=sorted(os.sched_getaffinity(0)),
        overlap=settings.overlap(),
        given=dict(given),
        own=own,
    )
    facts: Sequence[Facts] = exchange(layout, mine)
    name, reason = choose(facts)
    started = TRANSPORTS[name].started(layout, facts)
    if started is not facts:
        facts = started
        name, reason = choose(facts)
    calls, library = TRANSPORTS[name].connect(layout, topology, facts)
    shards = layout.shard_groups
    if calls is None and shards is not None and shards.several and len(shards.own) > 1:
        raise ConfigurationError(
            f"The workers reduce over {name} ({reason}), by TensorFlow's collectives, which all workers must "
            "make: several workers of a host cannot gather weights alone.",
            hint='start one worker on each host, with all of its devices, or leave within="host" out',
        )
    chosen = Communication(name=name, reason=reason, library=library or tensorflow)
    if calls is not None:
        chosen = replace(chosen, overlap=overlaps(facts, topology.hosts))
        if (connected := peers.connected()) is not None:
            calls.operation, calls.explain = connected.operation, connected.explain_difference
    if layout.worker == 0:
        logger.info("The workers reduce over %s (%s): %s.", name, chosen.library, reason)
    return chosen, calls


def install(
    extended: Any, layout: ReplicaLayout, calls: Calls | None, *, gpus: bool
) -> CallOperations | None:
    """Makes a strategy of several workers use the transport that `connect` has connected.

    Args:
        extended: the strategy's `extended`, before its first reduction.
        layout: the strategy's layout.
        calls: the collective calls; None uses TensorFlow's collectives.
        gpus: as in `connect`.

    Returns:
        The calls as operations; None without calls.
    """
    operations = None if calls is None else CallOperations(calls, layout.shard_groups)

    def launcher(*rest: Any) -> Any:
        if operations is not None:
            return CallLauncher(operations, *rest)
        # If the devices of one process run collectives in different orders, they deadlock. A single CPU needs
        # no fixed order, which would only delay collectives.
        return RingLauncher(layout.local_replicas > 1 or gpus, *rest)

    servers.reduce_in_own_threads(extended)
    if layout.workers > 1:
        tf_replicas.replace_launchers(extended, launcher)
    return operations
