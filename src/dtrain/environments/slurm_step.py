"""A job whose workers are the tasks of a Slurm job step, such as `srun python train.py`.

This module reads only the variables that Slurm sets for each task, and calls no command of Slurm.
`dtrain.submit.slurm` writes batch scripts.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dtrain.base.counts import parse_count
from dtrain.base.tcp import host_problem
from dtrain.environments import settings
from dtrain.environments.environment import Environment, not_detected
from dtrain.environments.topology import MOST_TASKS, Topology
from dtrain.errors import ClusterConfigError

_PORTS = range(10_000, 32_000)  # below those that Linux gives to programs that ask for any
_PORTS_OF_A_JOB = 100  # the distance between the first ports of two consecutive jobs
_PORTS_OF_A_STEP = 7
_MOST_COMPONENTS = 1000
_KEPT_OUTSIDE = ("SLURM_CONF", "SLURM_CLUSTERS")  # set by users, not by Slurm for a job


@dataclass(frozen=True)
class JobStep:
    """A job step of several tasks.

    Attributes:
        rank: the number of this process's task.
        hosts: the host of each task, in the order of their numbers.
        first_port: the first port of the step's tasks on each host.
    """

    rank: int
    hosts: Sequence[str]
    first_port: int

    @property
    def addresses(self) -> tuple[str, ...]:
        """A `host:port` for each task; the tasks of one host have consecutive ports."""
        before: Counter[str] = Counter()
        addresses = []
        for host in self.hosts:
            addresses.append(f"{host}:{self.first_port + before[host]}")
            before[host] += 1
        return tuple(addresses)


class SlurmStep(Environment):
    """The job whose workers are the tasks of a Slurm job step; none for a single task, or without `srun`."""

    name = "slurm"
    label = "a Slurm job step"
    leave = "set DTRAIN_SLURM=0"
    variables = ("SLURM_PROCID", "SLURM_STEP_")

    def detected(self) -> bool:
        """Whether `srun` has started this process together with others.

        A batch script and an interactive shell have a job but no step of several tasks.
        """
        return task() is not None

    def topology(self) -> Topology:
        """The topology: worker N is task N of the step.

        Raises:
            ClusterConfigError: the variables are malformed or contradict each other, or the first host has no
                address.
        """
        step = read_step(os.environ)
        _check_name(step.hosts[0])
        return Topology({"worker": step.addresses}, "worker", step.rank)

    def secret_folder(self) -> Path | None:
        """A folder of the user's home, which the hosts of a Slurm cluster usually share."""
        with contextlib.suppress(RuntimeError):  # this user has no home
            return Path.home() / ".dtrain"
        return None


def task() -> tuple[int, int] | None:
    """The number of this task and the number of tasks of its step; None without a step of several tasks."""
    return _task_of(os.environ) if settings.slurm_enabled() else None


def launchers() -> JobStep | None:
    """The step whose tasks are launchers, if `srun` has started this launcher together with others.

    Raises:
        ClusterConfigError: as for `SlurmStep.topology`.
    """
    if not SlurmStep().detected():
        return None
    step = read_step(os.environ)
    _check_name(step.hosts[0])
    return step


def shares_host(step: JobStep) -> bool:
    """Whether the host of this task has other tasks of the step."""
    return step.hosts.count(step.hosts[step.rank]) > 1


def divides_gpus() -> bool:
    """Whether each task sees only its own GPUs, and not all GPUs of the step on its host."""
    names = ("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_GPU_BIND")
    return any(os.environ.get(name) for name in names)


def cores_of_task() -> int | None:
    """The number of cores that Slurm gives to a task of this host; None if it does not tell.

    Slurm binds a task to its cores only with its plugins task/affinity or task/cgroup.
    """
    if not (settings.slurm_enabled() and os.environ.get("SLURM_JOB_ID")):
        return None
    per_task = _number(os.environ, "SLURM_CPUS_PER_TASK")
    if per_task:
        return per_task
    host = _number(os.environ, "SLURM_CPUS_ON_NODE")
    if not host:
        return None
    tasks = 1
    with contextlib.suppress(ClusterConfigError):
        if _task_of(os.environ) is not None:
            step = read_step(os.environ)
            tasks = step.hosts.count(step.hosts[step.rank])
    return max(1, host // tasks)


def outside_job(env: Mapping[str, str]) -> dict[str, str]:
    """The variables of `env` for a command that submits a new job: without those that describe this job."""
    inside = "SLURM_JOB_ID" in env
    return {n: value for n, value in env.items() if not (inside and _of_job(n)) or n in _KEPT_OUTSIDE}


def read_step(env: Mapping[str, str]) -> JobStep:
    """The step that a task's variables describe.

    Raises:
        ClusterConfigError: they are malformed, or contradict each other.
    """
    task = _task_of(env)
    if task is None:
        raise not_detected("SLURM_PROCID and SLURM_STEP_NUM_TASKS describe no task of a step.")
    rank, size = task
    nodes = expand_hosts(_text(env, "SLURM_STEP_NODELIST"))
    counts = expand_counts(_text(env, "SLURM_STEP_TASKS_PER_NODE"))
    if len(nodes) != len(counts) or sum(counts) != size or rank >= size or size > MOST_TASKS:
        raise _wrong(
            f"the step has {len(nodes)} nodes, {len(counts)} counts of tasks with a sum of {sum(counts)}, "
            f"and {size} tasks, of which this is {rank}"
        )
    grouped = _in_order_of_groups(env, nodes)
    if grouped:  # Slurm lists the hosts of a heterogeneous step by name; its tasks are numbered by component
        counted = dict(zip(nodes, counts, strict=True))
        hosts = [node for node in grouped for _ in range(counted[node])]
    else:
        plane = _number(env, "SLURM_DIST_PLANESIZE") or 1
        hosts = [nodes[node] for node in _placed(counts, env.get("SLURM_DISTRIBUTION", ""), plane)]
    own = env.get("SLURMD_NODENAME", hosts[rank])
    if own != hosts[rank]:
        raise ClusterConfigError(
            f"Task {rank} of the Slurm step runs on {own[:80]}, but Slurm's variables place it on "
            f"{hosts[rank]}; the distribution is {env.get('SLURM_DISTRIBUTION') or 'block'!r}.",
            hint="Take srun's own distribution (--distribution=block), and hosts of its own for each "
            "component of a heterogeneous step; or set TF_CONFIG.",
        )
    return JobStep(rank, hosts, _first_port(env, max(Counter(hosts).values())))


def expand_hosts(text: str) -> list[str]:
    """The names in a list of hosts, such as `gpu[1-3,07],login` or `rack[1-2]node[01-12]`.

    Raises:
        ClusterConfigError: the list is malformed, or has more than 100,000 names.
    """
    hosts: list[str] = []
    for word in _split(text):
        parts = re.split(r"\[([^][]*)\]", word)  # alternately text outside and inside of brackets
        if any(set(part) & set("[]") for part in parts) or not word.strip("[]"):
            raise _wrong(f"{text[:80]!r} is not a list of hosts")
        names = [""]
        for number, part in enumerate(parts):
            choices = _ranges(part, text) if number % 2 else [part]
            # Counted before they are made: each pair of brackets multiplies the names.
            if len(hosts) + len(names) * len(choices) > MOST_TASKS:
                raise _wrong(f"{text[:80]!r} has more than {MOST_TASKS} names")
            names = [before + choice for before in names for choice in choices]
        hosts += names
        if problem := next(filter(None, map(host_problem, names)), ""):
            raise _wrong(f"{text[:80]!r} has a name that {problem}")
    return hosts


def expand_counts(text: str) -> list[int]:
    """The numbers in a list such as `2(x3),1`, which is 2, 2, 2, 1.

    Raises:
        ClusterConfigError: the list is malformed.
    """
    counts: list[int] = []
    for word in text.split(","):
        match = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", word)
        if match is None or len(counts) + int(match[2] or 1) > MOST_TASKS:
            raise _wrong(f"{text[:80]!r} is not a list of counts, such as 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _split(text: str) -> list[str]:
    """The parts of a list between the commas that are outside of brackets."""
    return re.findall(r"(?:[^,\[]|\[[^\]]*\]?)+", text)


def _ranges(text: str, whole: str) -> list[str]:
    padded: list[str] = []
    for word in text.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", word)
        if match is None or not int(match[1]) <= int(match[2] or match[1]) < int(match[1]) + MOST_TASKS:
            raise _wrong(f"{whole[:80]!r} is not a list of hosts: {word[:40]!r} is not a range of numbers")
        if len(padded) + int(match[2] or match[1]) - int(match[1]) >= MOST_TASKS:
            raise _wrong(f"{whole[:80]!r} has more than {MOST_TASKS} names")
        numbers = range(int(match[1]), int(match[2] or match[1]) + 1)
        padded += [f"{number:0{len(match[1])}}" for number in numbers]
    return padded


def _placed(counts: Sequence[int], distribution: str, plane: int) -> list[int]:
    """The node of each task: its number among those of the step.

    Args:
        counts: the number of tasks of each node.
        distribution: as `srun --distribution` takes it; only the part about nodes counts.
        plane: the number of consecutive tasks on a node, for the distribution "plane".
    """
    kind = re.split(r"[:,=]", distribution.lower())[0]
    chunk = {"cyclic": 1, "plane": plane}.get(kind)
    if chunk is None:
        return [node for node, count in enumerate(counts) for _ in range(count)]
    placed: list[int] = []
    left = dict(enumerate(counts))
    while left:
        for node, count in left.items():
            placed += [node] * min(chunk, count)
        left = {node: count - chunk for node, count in left.items() if count > chunk}
    return placed


def _in_order_of_groups(env: Mapping[str, str], nodes: Sequence[str]) -> list[str]:
    """The nodes of a step of a heterogeneous job, component by component; [] if it is none."""
    ordered: dict[str, None] = {}
    own = {*nodes}
    components = _number(env, "SLURM_HET_SIZE") or 0
    if components > _MOST_COMPONENTS:
        raise _wrong(f"SLURM_HET_SIZE is {components}, more than {_MOST_COMPONENTS}")
    for group in range(components):
        names = (f"SLURM_JOB_NODELIST_{kind}_GROUP_{group}" for kind in ("HET", "PACK"))
        listed = next((env[name] for name in names if name in env), "")
        ordered |= dict.fromkeys(node for node in expand_hosts(listed) if node in own)
    return [*ordered] if len(ordered) == len({*nodes}) == len(nodes) else []


def _first_port(env: Mapping[str, str], most: int) -> int:
    """The first port of the tasks on each host: the user's, one reserved by Slurm, or one of the job's own.

    Args:
        env: the variables.
        most: how many ports a host needs.
    """
    asked = settings.first_port()
    if asked is not None:
        return asked
    reserved = re.fullmatch(r"([0-9]{1,5})-([0-9]{1,5})", env.get("SLURM_STEP_RESV_PORTS", ""))
    if reserved is not None and int(reserved[2]) - int(reserved[1]) + 1 >= most:
        return int(reserved[1])
    job, step = _number(env, "SLURM_JOB_ID") or 0, _number(env, "SLURM_STEP_ID") or 0
    return _PORTS[(job * _PORTS_OF_A_JOB + step * _PORTS_OF_A_STEP) % max(1, len(_PORTS) - most)]


def _task_of(env: Mapping[str, str]) -> tuple[int, int] | None:
    """The number of the task and the number of tasks; None if this is no task of a step of several tasks."""
    rank, size = _number(env, "SLURM_PROCID"), _number(env, "SLURM_STEP_NUM_TASKS")
    return None if rank is None or size is None or size < 2 else (rank, size)


def _number(env: Mapping[str, str], name: str) -> int | None:
    text = env.get(name, "").strip()
    return parse_count(text, 10**11)


def _text(env: Mapping[str, str], name: str) -> str:
    text = env.get(name, "").strip()
    if not text:
        raise _wrong(f"{name} is not set")
    return text


def _of_job(name: str) -> bool:
    return name.startswith(("SLURM_", "SLURMD_", "SRUN_"))


@functools.cache  # a name server may be slow, and the topology is asked for often
def _check_name(host: str) -> None:
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        raise ClusterConfigError(
            f"The first host of the Slurm step is {host}, and this host finds no address for it: "
            f"{error.strerror or error}.",
            hint="Workers reach each other by the names of Slurm's nodes: give them DNS or /etc/hosts, or "
            "set TF_CONFIG.",
        ) from error


def _wrong(what: str) -> ClusterConfigError:
    return ClusterConfigError(
        f"Slurm's variables of this task cannot be used: {what}.",
        hint="Unset what the program or its shell has set itself; or set DTRAIN_SLURM=0, and this process is "
        "a job of its own.",
    )
