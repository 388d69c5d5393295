"""The list of checks, and the function that runs them: it reads TF_CONFIG, probes the other tasks, runs each.

To add a check, write a function with the interface `Check`, and list it in `CHECKS`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
from collections.abc import Iterator
from pathlib import Path

from dtrain.base import safe_files
from dtrain.base.clock import REAL, Clock
from dtrain.base.tcp import bind_everywhere, split_address
from dtrain.diagnosis import host_checks, peer_checks
from dtrain.diagnosis.check import Check, CheckContext, CheckResult
from dtrain.diagnosis.installation import versions
from dtrain.diagnosis.peer_probe import PeerProbe, PeerResult, connected
from dtrain.environments.tf_config import TFConfig
from dtrain.environments.topology import Task
from dtrain.errors import ConfigurationError, DtrainError
from dtrain.process_group.secret import job_secret

CHECKS: dict[str, Check] = {
    "TF_CONFIG": host_checks.check_tf_config,
    "names": host_checks.check_names,
    "own address": host_checks.check_own_address,
    "port": host_checks.check_port,
    "peers": peer_checks.check_peers,
    "cluster": peer_checks.check_same_cluster,
    "versions": peer_checks.check_same_versions,
    "clocks": peer_checks.check_clocks,
    "network": peer_checks.check_network,
    "checkpoint directory": peer_checks.check_checkpoint_directory,
    "open files": host_checks.check_open_files,
    "memory": host_checks.check_memory,
    "shared memory": host_checks.check_shared_memory,
    "TensorFlow": host_checks.check_tensorflow,
    "MPI": host_checks.check_mpi,
}
"""The checks by name, in the order of the report."""

_MEASURING = 1.0  # seconds for each peer by which measurements may delay the end of the peers' probes


def run_checks(
    checkpoint_dir: Path | None, wait: float, *, clock: Clock = REAL
) -> Iterator[tuple[str, CheckResult]]:
    """Runs all checks.

    Args:
        checkpoint_dir: a directory that all hosts should share; None for none.
        wait: seconds to wait for the other tasks.
        clock: decides how long other tasks, and what they do, are awaited.

    Yields:
        The name of the check, and a result; a check that raises an exception gives a failed one.
    """
    with _prepared_context(checkpoint_dir, wait, clock) as context:
        for name, check in CHECKS.items():
            try:
                for finding in check(context):
                    yield name, finding
            except Exception as error:
                problem = f"the check itself failed: {type(error).__name__}: {error}"
                yield (
                    name,
                    CheckResult(status="fail", found=problem, remedy="report it, with `dtrain env --json`"),
                )


@contextlib.contextmanager
def _prepared_context(checkpoint_dir: Path | None, wait: float, clock: Clock) -> Iterator[CheckContext]:
    try:
        topology = TFConfig().topology() if TFConfig().detected() else None
        context = CheckContext(topology=topology, checkpoint_dir=checkpoint_dir, clock=clock)
    except DtrainError as error:
        problem = error.message, error.hint or ""
        context = CheckContext(problem=problem, checkpoint_dir=checkpoint_dir, clock=clock)
    token = f".dtrain-doctor-{secrets.token_hex(16)}"
    if checkpoint_dir is not None:
        unwritable = host_checks.writes_to(checkpoint_dir, token, "dtrain doctor\n")
        context = dataclasses.replace(context, checkpoint_problem=unwritable)
    try:
        context = _with_peers(context, token, wait)
        begun = clock.now()
        yield context
        if checkpoint_dir is not None and context.reached():  # peers may still look for this task's file
            seconds = peer_checks.FRESH + _MEASURING * len(context.reached())
            clock.sleep(max(0.0, begun + seconds - clock.now()))
    finally:
        if checkpoint_dir is not None:
            with contextlib.suppress(OSError):
                safe_files.remove(checkpoint_dir / token)


def _with_peers(context: CheckContext, token: str, wait: float) -> CheckContext:
    """The context, completed by what is found out about the other tasks."""
    topology = context.topology
    if topology is None:
        return context
    secret, alone = None, ""
    try:
        secret = job_secret(topology)
    except ConfigurationError as error:
        alone = error.message
    if secret is None:
        alone = alone or "the tasks share no secret (DTRAIN_SECRET_FILE is not set)"
    elif not topology.has_address:
        alone = f"{topology.task} has no address"
    if secret is not None and not alone:
        written = context.checkpoint_dir is not None and not context.checkpoint_problem
        facts = {"versions": versions(), "cluster": peer_checks.cluster_of(context)}
        facts |= {"token": token} if written else {}
        try:
            probe = PeerProbe(topology, secret, facts, clock=context.clock)
        except OSError as error:
            problem = error.strerror or str(error)
            return dataclasses.replace(
                context,
                port_problem=problem,
                alone="this task's port cannot be used",
                peers=_peers_without_messages(context),
            )
        with probe:
            return dataclasses.replace(context, peers=probe.run(wait))
    return dataclasses.replace(
        context, alone=alone, peers=_peers_without_messages(context), port_problem=_port_problem(context)
    )


def _peers_without_messages(context: CheckContext) -> dict[Task, PeerResult]:
    """The other tasks, each with whether its host answers a connection; no message is exchanged."""
    topology = context.topology
    peers: dict[Task, PeerResult] = {}
    for task in topology.tasks() if topology else ():
        if topology is not None and task != topology.task:
            peers[task] = PeerResult()
            try:
                with connected(topology.address_of(task), peers[task]):
                    peers[task].problem = ""
            except OSError as error:
                peers[task].problem = error.strerror or str(error)
    return peers


def _port_problem(context: CheckContext) -> str:
    topology = context.topology
    if topology is None or not topology.has_address:
        return ""
    try:
        with bind_everywhere(split_address(topology.address)[1]) as sock:
            sock.listen(1)
    except OSError as error:
        return error.strerror or str(error)
    return ""
