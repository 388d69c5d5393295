"""Checks of this host alone: TF_CONFIG, names, the task's port, limits, memory, and what is installed."""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import resource
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from dtrain.base import safe_files
from dtrain.base.free_memory import free_memory
from dtrain.base.tcp import split_address
from dtrain.diagnosis.check import CheckContext, CheckResult
from dtrain.diagnosis.installation import PROBE_SECONDS, nccl_version
from dtrain.environments.topology import Task, Topology
from dtrain.errors import DtrainError
from dtrain.strategies.machine import find_mpi_problem, probe_devices

_OPEN_FILES = 1024
_SHARED_MEMORY = 64 << 20  # bytes
_MEMORY = 1 << 30  # bytes; a process that has imported TensorFlow and trains nothing holds 0.6 GB


def check_tf_config(context: CheckContext) -> Iterator[CheckResult]:
    """TF_CONFIG is valid: JSON, known jobs, no address twice, an index that exists."""
    message, remedy = context.problem
    if message:
        yield CheckResult(status="fail", found=message, remedy=remedy)
    elif context.topology is None:
        yield CheckResult(status="ok", found="TF_CONFIG is not set: this process is a job of its own")
    else:
        tasks = len(context.topology.tasks())
        yield CheckResult(status="ok", found=f"{context.topology.task} of a job of {tasks} tasks")


def check_names(context: CheckContext) -> Iterator[CheckResult]:
    """The host name of every task resolves."""
    topology = context.topology
    for task in topology.tasks() if topology else ():
        host = split_address(topology.address_of(task))[0] if topology else ""
        try:
            addresses = _addresses(host)
        except OSError as error:
            yield CheckResult(
                status="fail",
                found=f"the name {host!r} of {task} does not resolve here: {error.strerror or error}",
                remedy="write the IP address into TF_CONFIG, or add the name to DNS or /etc/hosts here",
            )
        else:
            yield CheckResult(status="ok", found=f"{task}: {host} is {', '.join(sorted(addresses))}")


def check_own_address(context: CheckContext) -> Iterator[CheckResult]:
    """The address of this task is one of this host; otherwise TF_CONFIG may have another host's index."""
    topology = context.topology
    if topology is None or not topology.has_address or _is_here(topology, topology.task):
        return
    here = [task for task in topology.tasks() if _is_here(topology, task)]
    if here:
        yield CheckResult(
            status="fail",
            found=f"TF_CONFIG says that this process is {topology.task}, whose address {topology.address} "
            f"is not one of this host; that of {here[0]} is",
            remedy=f'set "task" to {{"type": "{here[0].job}", "index": {here[0].index}}} on this host',
        )
    else:
        yield CheckResult(
            status="warn",
            found=f"no interface of this host has the address of {topology.task}, {topology.address}",
            remedy="correct the address in TF_CONFIG, unless a router or container translates it",
        )


def check_port(context: CheckContext) -> Iterator[CheckResult]:
    """This task's port is free."""
    topology = context.topology
    if topology is None or not topology.has_address:
        return
    port = split_address(topology.address)[1]
    if context.port_problem:
        yield CheckResult(
            status="fail",
            found=f"port {port} of {topology.task} cannot be used: {context.port_problem}{_used_by(port)}",
            remedy="end the process that uses it, or choose another port in TF_CONFIG on all hosts",
        )
    else:
        yield CheckResult(status="ok", found=f"port {port} is free")


def check_open_files(context: CheckContext) -> Iterator[CheckResult]:
    """The limit of open files leaves room for the connections and files of a job."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES + 8 * len(context.topology.tasks() if context.topology else ())
    if limit != resource.RLIM_INFINITY and limit < wanted:
        yield CheckResult(
            status="warn",
            found=f"a process may open {limit} files; this job may need {wanted}",
            remedy=f"ulimit -n {max(wanted, 4096)}, before the job starts",
        )
    else:
        yield CheckResult(status="ok", found=f"a process may open {limit} files")


def check_memory(context: CheckContext) -> Iterator[CheckResult]:
    """A process of TensorFlow has room in the memory of this machine, and of the container around it."""
    try:
        free = free_memory()
    except OSError as error:
        free, reason = 0, f"the free memory cannot be read: {error.strerror or error}"
    else:
        reason = f"{free >> 20} MiB of memory are free for this process"
    if free < _MEMORY:
        remedy = "end other programs, or give the container or the job's step more memory"
        yield CheckResult(status="warn", found=reason, remedy=remedy)
    else:
        yield CheckResult(status="ok", found=reason)


def check_shared_memory(context: CheckContext) -> Iterator[CheckResult]:
    """/dev/shm has room, because MPI and NCCL use it between processes of one host."""
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError as error:
        free, reason = 0, f"/dev/shm cannot be used: {error.strerror}"
    else:
        reason = f"/dev/shm has {free >> 20} MiB free"
    if free < _SHARED_MEMORY:
        remedy = (
            "give the container more shared memory (docker run --shm-size=1g), or delete what is in /dev/shm"
        )
        yield CheckResult(status="warn", found=reason, remedy=remedy)
    else:
        yield CheckResult(status="ok", found=reason)


def check_tensorflow(context: CheckContext) -> Iterator[CheckResult]:
    """TensorFlow and Keras can be imported, and their versions are supported."""
    try:
        probed = probe_devices(PROBE_SECONDS)
    except DtrainError as error:
        yield CheckResult(status="fail", found=error.message.rstrip("."), remedy=error.hint or "")
        return
    gpus = len(probed["gpus"])
    yield CheckResult(
        status="ok", found=f"TensorFlow {probed['tensorflow']}, Keras {probed['keras']}, {gpus or 'no'} GPUs"
    )
    if gpus and not nccl_version():
        yield CheckResult(
            status="warn",
            found="no NCCL package is installed beside TensorFlow",
            remedy="pip install 'dtrain[gpu]', unless NCCL is installed on the system",
        )
    if not _is_stored("tensorflow"):
        yield CheckResult(
            status="warn",
            found="the compiled modules of TensorFlow are not stored, so each process compiles them again",
            remedy='PYTHONDONTWRITEBYTECODE= python -c "import keras", as the user who installed them',
        )


def check_mpi(context: CheckContext) -> Iterator[CheckResult]:
    """Whether processes can be started by MPI; a job over sockets or NCCL does not need it."""
    problem = find_mpi_problem()
    yield CheckResult(
        status="ok",
        found=f"not available, and not needed over sockets: {problem}" if problem else "available",
    )


def _is_stored(package: str) -> bool:
    """Whether Python finds a package's compiled module, after a process has imported the package."""
    spec = importlib.util.find_spec(package)
    return not (spec and spec.origin) or Path(importlib.util.cache_from_source(spec.origin)).exists()


def _addresses(host: str) -> set[str]:
    return {str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}


def _is_here(topology: Topology, task: Task) -> bool:
    """Whether an interface of this host has the address of a task; also if its name does not resolve."""
    try:
        addresses = _addresses(split_address(topology.address_of(task))[0])
    except OSError:
        return task == topology.task  # `check_names` reports this problem
    return any(map(_can_bind, addresses))


def _can_bind(address: str) -> bool:
    plain = address.partition("%")[0]
    family = socket.AF_INET6 if ipaddress.ip_address(plain).version == 6 else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.bind((plain, 0))
    except OSError:
        return False
    return True


def _used_by(port: int) -> str:
    """The process that listens on a port, if the system shows it; on Linux only."""
    import psutil

    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                return f" by process {connection.pid} ({psutil.Process(connection.pid).name()})"
    except (psutil.Error, OSError):
        pass
    return ""


def writes_to(directory: Path, name: str, content: str) -> str:
    """Write a file to a directory; returns why that failed, or ""."""
    try:
        with os.fdopen(safe_files.create(directory / name), "wb") as file:
            file.write(content.encode("ascii"))
    except OSError as error:
        return error.strerror or str(error)
    return ""
