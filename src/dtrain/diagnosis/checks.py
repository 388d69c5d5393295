"""The list of checks, and the function that runs them: it reads TF_CONFIG, meets the other tasks, runs each.

To add a check, write a function with the interface `Check`, and list it in `CHECKS`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from dtrain.cluster.secret import job_secret
from dtrain.cluster.sockets import bind_everywhere
from dtrain.cluster.tf_config import TFConfig
from dtrain.diagnosis import host_checks, peer_checks
from dtrain.diagnosis.check import Check, CheckResult, Situation
from dtrain.diagnosis.installation import versions
from dtrain.diagnosis.meeting import Meeting, MetPeer, connected
from dtrain.errors import ConfigurationError, DtrainError
from dtrain.topology import Task, split_address

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
    "shared memory": host_checks.check_shared_memory,
    "TensorFlow": host_checks.check_tensorflow,
    "MPI": host_checks.check_mpi,
}
"""The checks by name, in the order of the report."""

_MEASURING = 1.0  # seconds for each peer by which measurements may delay the end of the peers' meetings


def run_checks(checkpoint_dir: Path | None, wait: float) -> Iterator[tuple[str, CheckResult]]:
    """Runs all checks.

    Args:
        checkpoint_dir: a directory that all hosts should share; None for none.
        wait: seconds to wait for the other tasks.

    Yields:
        The name of the check, and a result; a check that raises an exception gives a failed one.
    """
    with _looked_at(checkpoint_dir, wait) as situation:
        for name, check in CHECKS.items():
            try:
                for finding in check(situation):
                    yield name, finding
            except Exception as error:
                found = f"the check itself failed: {type(error).__name__}: {error}"
                yield (
                    name,
                    CheckResult(status="fail", found=found, remedy="report it, with `dtrain env --json`"),
                )


@contextlib.contextmanager
def _looked_at(checkpoint_dir: Path | None, wait: float) -> Iterator[Situation]:
    try:
        topology = TFConfig().topology() if TFConfig().detected() else None
        situation = Situation(topology=topology, checkpoint_dir=checkpoint_dir)
    except DtrainError as error:
        situation = Situation(problem=(error.message, error.hint or ""), checkpoint_dir=checkpoint_dir)
    token = f".dtrain-doctor-{secrets.token_hex(16)}"
    if checkpoint_dir is not None:
        problem = host_checks.writes_to(checkpoint_dir, token, "dtrain doctor\n")
        situation = dataclasses.replace(situation, checkpoint_problem=problem)
    try:
        situation = _met(situation, token, wait)
        begun = time.monotonic()
        yield situation
        if checkpoint_dir is not None and situation.met():  # peers may still look for this task's file
            seconds = peer_checks.FRESH + _MEASURING * len(situation.met())
            time.sleep(max(0.0, begun + seconds - time.monotonic()))
    finally:
        if checkpoint_dir is not None:
            with contextlib.suppress(OSError):
                (checkpoint_dir / token).unlink()


def _met(situation: Situation, token: str, wait: float) -> Situation:
    """The situation, completed by what is found out about the other tasks."""
    topology = situation.topology
    if topology is None:
        return situation
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
        written = situation.checkpoint_dir is not None and not situation.checkpoint_problem
        facts = {"versions": versions(), "cluster": peer_checks.cluster_of(situation)}
        facts |= {"token": token} if written else {}
        try:
            meeting = Meeting(topology, secret, facts)
        except OSError as error:
            problem = error.strerror or str(error)
            return dataclasses.replace(
                situation,
                port_problem=problem,
                alone="this task's port cannot be used",
                peers=_tried(situation),
            )
        with meeting:
            return dataclasses.replace(situation, peers=meeting.meet(wait))
    return dataclasses.replace(
        situation, alone=alone, peers=_tried(situation), port_problem=_port_problem(situation)
    )


def _tried(situation: Situation) -> dict[Task, MetPeer]:
    """The other tasks, each with whether its host answers a connection; no message is exchanged."""
    topology = situation.topology
    peers: dict[Task, MetPeer] = {}
    for task in topology.tasks() if topology else ():
        if topology is not None and task != topology.task:
            peers[task] = MetPeer()
            try:
                with connected(topology.address_of(task), peers[task]):
                    peers[task].problem = ""
            except OSError as error:
                peers[task].problem = error.strerror or str(error)
    return peers


def _port_problem(situation: Situation) -> str:
    topology = situation.topology
    if topology is None or not topology.has_address:
        return ""
    try:
        with bind_everywhere(split_address(topology.address)[1]) as sock:
            sock.listen(1)
    except OSError as error:
        return error.strerror or str(error)
    return ""
