"""One command, once for each task of a job, on this machine.

It picks the ports and says to each process in TF_CONFIG which task it is; watching the processes is the
business of `processes`, what their deaths mean and how to report them that of `supervisor`.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import secrets
import signal
from collections.abc import Iterator, Mapping, Sequence
from typing import TextIO

from dtrain.cluster import mpi as mpi_start
from dtrain.cluster import settings
from dtrain.cluster.sockets import loopback_host
from dtrain.errors import ConfigurationError
from dtrain.launch.budget import MAX_RESTARTS
from dtrain.launch.limits import system_limits_told
from dtrain.launch.members import Members
from dtrain.launch.mpi_starter import find_starter
from dtrain.launch.mpi_worlds import Worlds
from dtrain.launch.ports import reserve_ports
from dtrain.launch.processes import TaskCommand
from dtrain.launch.reports import exit_status
from dtrain.launch.session import Session
from dtrain.launch.spares import Spares, can_have_spares
from dtrain.launch.supervisor import supervise
from dtrain.launch.synchronous import SynchronousJob, remove_all
from dtrain.topology import Task, Topology
from dtrain.upstream import noise

GRACE = 5.0
"""Seconds between asking the tasks of a job to end and killing them."""

# Variables that say to a task which it is; they may be there of a job around this one.
_OF_A_TASK = ("TF_CONFIG", "DTRAIN_JOB", "DTRAIN_ATTEMPT", "DTRAIN_PLACE", "DTRAIN_WORKERS_MAX")


@system_limits_told()
def launch_local(
    command: Sequence[str],
    *,
    workers: int,
    min_workers: int | None = None,
    ps: int = 0,
    max_restarts: int | None = None,
    spares: int | None = None,
    hang_timeout: float | None = None,
    devices_per_worker: int | None = None,
    gpus: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    grace: float | None = None,
    mpi: bool = False,
    mpi_starter: str | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
) -> int:
    """Run a command as every task of a job on this machine, until all have ended.

    Every line of output is marked with its task. Without parameter servers the tasks are workers: when one
    fails, all are ended and started again as `restart_rules` says, with fewer workers where that is allowed
    and one does not come up. With them, a chief is started too, and its end is the job's; what the failure of
    another means, and what is started again then, says `supervisor.ParameterServerPolicy`. All attempts of a
    job have one DTRAIN_JOB, and each its DTRAIN_ATTEMPT, from 0. The last lines of what failed are shown
    again. No process of the job, nor any that one started, is left when this returns.

    Args:
        command: the argument vector, such as `[sys.executable, "train.py"]`.
        workers: the number of workers, at least 1.
        min_workers: with how many of them the job still goes on; None for all. DTRAIN_PLACE says to each
            worker which of them all it is, whatever its index.
        ps: the number of parameter servers; with any, there is a chief beside them and the workers.
        max_restarts: how many restarts any hour may see; None means 3. What a task wants by itself, because
            its machine is taken away, does not count.
        spares: how many processes wait with TensorFlow imported, to take part in the next attempt; None means
            one for each worker of a job that may be started again. Not with parameter servers.
        hang_timeout: seconds without progress after which a job hangs, and the worker that is stuck has
            failed; None finds it from how long steps take. Not with parameter servers.
        devices_per_worker: the number of logical devices in each, at least 1; None leaves it to the process.
            Not with parameter servers, whose workers have one.
        gpus: names of GPUs, as CUDA_VISIBLE_DEVICES takes them, one for each worker, which sees no other;
            none leaves it to the environment. Not with parameter servers.
        env: what to add to this process's environment, or to replace in it.
        grace: seconds between asking tasks to end (SIGTERM, or the signal that this process got) and SIGKILL;
            None means 5, or 30 for tasks that save a checkpoint first.
        mpi: let MPI's own starter make the workers the ranks of an MPI start, in each attempt anew, so that
            they can talk over MPI. Not with parameter servers.
        mpi_starter: its path or name, perhaps with arguments, as "srun --mpi=pmix"; None takes the `mpirun`
            beside this Python, or the one in PATH. Only with `mpi`.
        stdout, stderr: where the marked lines go; by default this process's own streams.

    Returns:
        0 if the job ended well; the exit status of the first task that failed, 128 + the signal if one killed
        it; or 128 + the signal that this process was sent (130 for Ctrl-C), but 75 where every task answered
        it by saving a checkpoint, so that the job wants to be run again.

    Raises:
        ConfigurationError: a number is out of range, the command is empty, two arguments exclude each other,
            or there are no free ports.
        MPIError: mpi4py or the starter is missing, or the starter failed.
    """
    if not command:
        raise ConfigurationError("No command was given to launch.", hint="Pass a script, or -m and a module.")
    tasks = worker_tasks(workers)
    _check_counts(ps=ps, max_restarts=max_restarts, spares=spares)
    _check_seconds(hang_timeout=hang_timeout, grace=grace)
    _check_elastic(workers, min_workers, ps, max_restarts)
    _check_servers(ps, devices_per_worker, spares, hang_timeout)
    _check_mpi(ps, mpi, mpi_starter)
    common = task_environment(None, devices_per_worker, env)
    restarts = MAX_RESTARTS if max_restarts is None else max_restarts
    if ps:
        tasks = [Task("chief", 0), *tasks, *(Task("ps", index) for index in range(ps))]
        return _run_with_servers(command, tasks, common, restarts, grace, stdout, stderr)
    common["DTRAIN_WORKERS_MAX"] = str(workers)
    starter = find_starter(mpi_starter) if mpi else None
    if starter is not None:
        common = {**starter.for_ranks(), **common}
    members = Members(min_workers or workers, workers, rejoin=settings.rejoin_seconds())
    session = Session(stdout=stdout, stderr=stderr, hears_tasks=True, notices=(signal.SIGUSR1,))
    name = _new_name()
    with session.opened():
        worlds = None if starter is None else Worlds(starter, session)
        reserve = Spares(command, common, _spares(spares, workers, restarts, command), session)
        job = SynchronousJob(
            lambda attempt, places: _workers(
                command, common, _of_attempt(restarts, attempt, name), places, worlds, gpus
            ),
            members=members,
            max_restarts=restarts,
            hang_timeout=hang_timeout,
            grace=GRACE if grace is None else grace,
            own_grace=grace,
            session=session,
            spares=reserve,
            over_mpi=worlds is not None,
        )
        try:
            outcome = job.run()
        finally:
            reserve.close()
    status = exit_status(outcome)
    job.record.note_all(session.left_over())
    session.say(job.record.connections.advice(outcome))
    if status == 0:
        remove_all(job.record.removals)
    return status


def _run_with_servers(
    command: Sequence[str],
    tasks: Sequence[Task],
    common: Mapping[str, str],
    max_restarts: int,
    grace: float | None,
    stdout: TextIO | None,
    stderr: TextIO | None,
) -> int:
    name = _new_name()
    with reserve_ports(len(tasks)) as ports:
        topologies = local_topologies(tasks, ports)
        outcome = supervise(
            lambda attempt: [
                TaskCommand(t.task, command, {**_own(common, t), **_of_attempt(1, attempt, name)})
                for t in topologies
            ],
            addresses={t.task: t.address for t in topologies},
            max_restarts=max_restarts,
            usual_grace=GRACE,
            grace=grace,
            stdout=stdout,
            stderr=stderr,
        )
    return exit_status(outcome)


@contextlib.contextmanager
def _workers(
    command: Sequence[str],
    common: Mapping[str, str],
    extra: Mapping[str, str],
    places: Sequence[int],
    worlds: Worlds | None,
    gpus: Sequence[str],
) -> Iterator[list[TaskCommand]]:
    tasks = worker_tasks(len(places))
    with reserve_ports(len(tasks)) as ports, _ranks(worlds, len(tasks), common) as ranks:
        yield [
            TaskCommand(t.task, command, {**_own(common, t), **extra, **rank, **_of_place(place, gpus)})
            for t, place, rank in zip(local_topologies(tasks, ports), places, ranks, strict=True)
        ]


def _of_place(place: int, gpus: Sequence[str]) -> dict[str, str]:
    """What says to a task which of all places of the job is its own, and the GPU that goes with it."""
    own = {"CUDA_VISIBLE_DEVICES": gpus[place]} if gpus else {}
    return {"DTRAIN_PLACE": str(place), **own}


@contextlib.contextmanager
def _ranks(worlds: Worlds | None, size: int, common: Mapping[str, str]) -> Iterator[list[dict[str, str]]]:
    """What makes each task a rank of an MPI start; nothing where there is none."""
    if worlds is None:
        yield [{} for _ in range(size)]
        return
    with worlds.world(size, common) as ranks:
        yield ranks


def _own(common: Mapping[str, str], topology: Topology) -> dict[str, str]:
    return {**common, "TF_CONFIG": topology.to_tf_config()}


def _of_attempt(max_restarts: int, attempt: int, name: str) -> dict[str, str]:
    """What says to a task which attempt it is part of; nothing where there is but one."""
    return {"DTRAIN_JOB": name, "DTRAIN_ATTEMPT": str(attempt)} if max_restarts else {}


def _new_name() -> str:
    return f"{datetime.datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(4)}"


def _spares(asked: int | None, workers: int, max_restarts: int, command: Sequence[str]) -> int:
    possible = can_have_spares(command)
    if asked and not possible:
        raise ConfigurationError(
            f"spares is {asked}, but only a Python script or module can wait for its start, on Linux.",
            hint="Leave it out, or launch the script itself.",
        )
    if not possible or not max_restarts:
        return 0
    return workers if asked is None else min(asked, workers)


def _check_counts(**counts: int | None) -> None:
    for name, value in counts.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise ConfigurationError(f"{name} is {value!r}, not an integer of at least 0.")


def _check_seconds(**times: float | None) -> None:
    for name, value in times.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ConfigurationError(f"{name} is {value!r}, not a positive number of seconds.")


def _check_elastic(workers: int, min_workers: int | None, ps: int, max_restarts: int | None) -> None:
    if min_workers is None:
        return
    if isinstance(min_workers, bool) or not isinstance(min_workers, int) or not 1 <= min_workers <= workers:
        raise ConfigurationError(
            f"min_workers is {min_workers!r}, not an integer from 1 to {workers} (workers)."
        )
    if ps:
        raise ConfigurationError(
            f"min_workers is {min_workers}, but with parameter servers a lost worker is started again alone.",
            hint="Leave it out: such a job goes on with the workers that it has.",
        )
    if max_restarts == 0 and min_workers < workers:
        raise ConfigurationError(
            f"min_workers is {min_workers}, but max_restarts is 0: nothing is started again with fewer.",
            hint="Leave one of them out.",
        )


def _check_servers(
    ps: int, devices_per_worker: int | None, spares: int | None, hang_timeout: float | None
) -> None:
    if not ps:
        return
    if devices_per_worker is not None:
        raise ConfigurationError(
            f"devices_per_worker is {devices_per_worker}, but a worker of parameter servers has one device.",
            hint="Start more workers instead.",
        )
    for name, value in (("spares", spares), ("hang_timeout", hang_timeout)):
        if value:
            raise ConfigurationError(
                f"{name} is {value:g}, but the job has parameter servers: it is for jobs of workers alone.",
                hint="Leave it out; the chief notices workers that are stuck, and starts them again alone.",
            )


def _check_mpi(ps: int, mpi: bool, starter: str | None) -> None:
    if starter is not None and not mpi:
        raise ConfigurationError(
            f"mpi_starter is {starter!r}, but the job is not started by MPI.", hint="Set mpi too (--mpi)."
        )
    if mpi and ps:
        raise ConfigurationError(
            f"mpi is set, but the job has {ps} parameter servers, which talk over TensorFlow's connections.",
            hint="Leave out mpi (--mpi), or the parameter servers (--ps).",
        )


def worker_tasks(workers: int) -> list[Task]:
    """The tasks of a job that has only workers; ConfigurationError if there are none."""
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise ConfigurationError(f"workers is {workers!r}, not an integer of at least 1.")
    return [Task("worker", index) for index in range(workers)]


def local_topologies(tasks: Sequence[Task], ports: Sequence[int]) -> list[Topology]:
    """The view that each task has of a job on this machine, given the tasks of every job in index order."""
    host = loopback_host()
    jobs: dict[str, tuple[str, ...]] = {}
    for task, port in zip(tasks, ports, strict=True):
        jobs[task.job] = (*jobs.get(task.job, ()), f"{host}:{port}")
    return [Topology(jobs, task.job, task.index) for task in tasks]


def task_environment(
    topology: Topology | None, devices_per_worker: int | None, extra: Mapping[str, str] | None
) -> dict[str, str]:
    """The whole environment of one task: this process's, then `extra`, then what says which task it is.

    Without a topology, what all tasks have in common.

    Raises:
        ConfigurationError: `devices_per_worker` is below 1.
    """
    # A rank of an MPI start may launch a job; its tasks are not that rank.
    env = {**mpi_start.without_start(os.environ), **(extra or {})}
    for variable in _OF_A_TASK:
        env.pop(variable, None)
    if topology is not None:
        env["TF_CONFIG"] = topology.to_tf_config()
    env["DTRAIN_LAUNCHED"] = "1"
    env["PYTHONUNBUFFERED"] = "1"
    env.setdefault(noise.LEVEL, "1")  # TensorFlow's warnings and errors stay
    if devices_per_worker is not None:
        if isinstance(devices_per_worker, bool) or devices_per_worker < 1:
            raise ConfigurationError(
                f"devices_per_worker is {devices_per_worker!r}, not an integer of at least 1."
            )
        env["DTRAIN_DEVICES_PER_WORKER"] = str(devices_per_worker)
    return env
