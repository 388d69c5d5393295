"""Checks between hosts: reachability, the same job and versions, clocks, the network, a shared directory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dtrain.base.clock import Clock
from dtrain.diagnosis.check import CheckContext, CheckResult
from dtrain.diagnosis.installation import versions

_CLOCK_WARN, _CLOCK_FAIL = 1.0, 60.0  # seconds
_LATENCY = 5e-3  # seconds
_BANDWIDTH = 8e8  # bits a second: what a link of 1 Gbit/s must reach
_TOKEN = re.compile(r"\.dtrain-doctor-[0-9a-f]{32}")

FRESH = 5.0
"""Seconds after which a shared directory must show the files of other hosts; NFS shows them with a delay."""


def check_peers(context: CheckContext) -> Iterator[CheckResult]:
    """Every other task can be reached, and the process there is the task that TF_CONFIG names."""
    if context.alone and context.topology is not None and context.peers:
        yield CheckResult(
            status="warn",
            found=f"tried alone: {context.alone}",
            remedy="run `dtrain doctor` on every host at once, with the same secret in a file of "
            "mode 600 that DTRAIN_SECRET_FILE names",
        )
    for task, peer in context.peers.items():
        address = context.topology.address_of(task) if context.topology else ""
        if not peer.answers:
            yield CheckResult(
                status="fail",
                found=f"{task} at {address} cannot be reached: {peer.problem}",
                remedy="start that host, or let its firewall and the network pass this port",
            )
        elif peer.problem and not context.alone:
            yield CheckResult(
                status="warn" if "refused" in peer.problem else "fail",
                found=f"the host of {task} answers, but no `dtrain doctor` of this job answers at "
                f"{address}: {peer.problem}",
                remedy=f"run `dtrain doctor` there at the same time, as {task} and with the same secret",
            )
        elif not context.alone and peer.facts.get("task") != str(task):
            yield CheckResult(
                status="fail",
                found=f"the process at {address} says that it is {peer.facts.get('task')}, not {task}",
                remedy='correct "task" of TF_CONFIG there',
            )
        else:
            yield CheckResult(status="ok", found=f"{task} at {address} answers")


def check_same_cluster(context: CheckContext) -> Iterator[CheckResult]:
    """All tasks have the same list of addresses."""
    mine = cluster_of(context)
    for name, peer in context.reached().items():
        if peer.facts.get("cluster") != mine:
            yield CheckResult(
                status="fail",
                found=f'{name} has a different "cluster" in its TF_CONFIG',
                remedy='give all tasks the same "cluster", with the addresses in the same order',
            )


def check_same_versions(context: CheckContext) -> Iterator[CheckResult]:
    """All tasks have the same versions."""
    mine = versions()
    for name, peer in context.reached().items():
        theirs = peer.facts.get("versions")
        if not isinstance(theirs, dict):
            theirs = {}
        different = [package for package in mine if theirs.get(package) != mine[package]]
        differences = ", ".join(
            f"{package} {theirs.get(package) or 'missing'} (here {mine[package]})" for package in different
        )
        if different:
            remedy = "install the same versions on all hosts, from one list (pip freeze, pip install -r)"
            yield CheckResult(status="fail", found=f"{name} has {differences}", remedy=remedy)
        else:
            yield CheckResult(status="ok", found=f"{name} has the same versions")


def check_clocks(context: CheckContext) -> Iterator[CheckResult]:
    """The hosts' clocks agree; otherwise the times in files and logs mislead."""
    for name, peer in context.reached().items():
        apart = abs(peer.clock)
        difference = (
            f"the clock of {name} is {apart:.3f} s {'ahead of' if peer.clock > 0 else 'behind'} this host's"
        )
        if apart < _CLOCK_WARN:
            yield CheckResult(status="ok", found=difference)
        else:
            status: Any = "fail" if apart >= _CLOCK_FAIL else "warn"
            yield CheckResult(
                status=status, found=difference, remedy="set both by NTP (timedatectl set-ntp true)"
            )


def check_network(context: CheckContext) -> Iterator[CheckResult]:
    """Latency and bandwidth over TCP are sufficient; they limit how fast a step can be."""
    for name, peer in context.reached().items():
        speed = f"to {name}: {peer.latency * 1e3:.2f} ms one way, {peer.bandwidth / 1e9:.2f} Gbit/s"
        if peer.latency > _LATENCY or peer.bandwidth < _BANDWIDTH:
            remedy = "gradients will take long; use a faster network, or gradient accumulation or local SGD"
            yield CheckResult(status="warn", found=speed, remedy=remedy)
        else:
            yield CheckResult(status="ok", found=speed)


def check_checkpoint_directory(context: CheckContext) -> Iterator[CheckResult]:
    """This host can write to the directory, and sees what the others have written."""
    folder = context.checkpoint_dir
    if folder is None:
        return
    if context.checkpoint_problem:
        yield CheckResult(
            status="fail",
            found=f"{folder} cannot be written to: {context.checkpoint_problem}",
            remedy="make the directory on this host, and let this user write to it",
        )
        return
    yield CheckResult(status="ok", found=f"{folder} can be written to")
    tokens = {str(peer.facts.get("token")) for peer in context.reached().values()}
    missing = _missing(folder, {token for token in tokens if _TOKEN.fullmatch(token)}, context.clock)
    for name, peer in context.reached().items():
        token = str(peer.facts.get("token"))
        if not _TOKEN.fullmatch(token):
            yield CheckResult(
                status="warn",
                found=f"{name} has written nothing to compare",
                remedy="run `dtrain doctor --checkpoint-dir` with the same directory on every host",
            )
        elif token not in missing:
            yield CheckResult(status="ok", found=f"{name} shares {folder}")
        else:
            yield CheckResult(
                status="fail",
                found=f"{folder} is not shared: what {name} has written is not there",
                remedy="mount one shared file system there on all hosts, or name a directory on one",
            )


def cluster_of(context: CheckContext) -> dict[str, list[str]]:
    """The addresses of the job, as JSON holds them."""
    jobs = context.topology.jobs if context.topology else {}
    return {job: [*addresses] for job, addresses in jobs.items()}


def _missing(folder: Path, names: set[str], clock: Clock) -> set[str]:
    """The files that do not appear in a directory within `FRESH` seconds."""
    deadline = clock.deadline(FRESH)
    while missing := {name for name in names if not (folder / name).exists()}:
        if deadline.passed():
            break
        clock.sleep(0.1)
    return missing
