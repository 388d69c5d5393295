"""The specification of a job: every option of `launch_local`, checked once at construction.

It starts no process and reads no environment variable.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dtrain.base.tcp import split_address
from dtrain.base.words import check_seconds, counted
from dtrain.environments.topology import MOST_TASKS
from dtrain.errors import ConfigurationError
from dtrain.launch.job.ray_cluster import RayCluster

MAX_RESTARTS = 3
"""The default limit of a job's restarts within any hour."""


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """The hosts of a job that is started once on each of them.

    Attributes:
        rendezvous: where node 0 listens, as `host:port`; the same on all nodes.
        rank: the number of this node, from 0.
        fewest, most: the smallest number of nodes with which the job continues, and the largest number that
            have tasks. Further nodes wait as spares.
        per_node: the number of workers on each node.
        secret_file: the file with the secret that all nodes must know; None takes DTRAIN_SECRET_FILE, or, if
            the rendezvous is on the loopback interface, a file that this user's jobs share.
        join_timeout: seconds to wait for the other nodes.
        gpus: one value of CUDA_VISIBLE_DEVICES for each worker of this node; empty for all.
        interface: the network interface at whose address the others reach this node's tasks; None for the
            one that leads to node 0.

    Raises:
        ClusterConfigError: the rendezvous is no `host:port`.
    """

    rendezvous: str
    rank: int
    fewest: int
    most: int
    per_node: int
    secret_file: Path | None = None
    join_timeout: float = 55.0
    gpus: Sequence[str] = ()
    interface: str | None = None

    def __post_init__(self) -> None:
        split_address(self.rendezvous)
        check_seconds("join_timeout", self.join_timeout)


@dataclass(frozen=True, kw_only=True)
class SSHHosts:
    """The hosts of a job that is started from one machine, which reaches them by SSH.

    Attributes:
        slots: the number of workers on each host, by the name that `ssh` takes. This machine is `localhost`,
            or its host name.
        env: the names of variables of this process that the tasks on all hosts get, besides
        `ssh_launcher.PASSED`. join_timeout: seconds to wait for the hosts. most: the largest number of hosts
        that have tasks; the others are spares. None means all. fewest: the smallest number of hosts with
        which the job continues; None means `most`. gpus_per_worker: as for `gpu_shares`. interface: the
        network interface at whose address the tasks of each host are reached; None for the one
            that `ssh` has used.

    Raises:
        ConfigurationError: `most` is more than there are hosts.
    """

    slots: Mapping[str, int]
    env: Sequence[str] = ()
    join_timeout: float = 55.0
    most: int | None = None
    fewest: int | None = None
    gpus_per_worker: int | None = None
    interface: str | None = None

    def __post_init__(self) -> None:
        check_seconds("join_timeout", self.join_timeout)
        if self.most is not None and self.most > len(self.slots):
            raise ConfigurationError(
                f"--nnodes asks for {self.most} hosts, and {len(self.slots)} are named: "
                f"{', '.join(self.slots)}.",
                hint="Name more hosts, or ask for fewer.",
            )

    @property
    def workers(self) -> int:
        """The number of workers of the job."""
        return sum([*self.slots.values()][: self.most])

    @property
    def fewest_workers(self) -> int:
        """The smallest number of workers with which the job continues: any `fewest` hosts have that room."""
        if self.fewest is None or self.fewest == self.most:
            return self.workers
        return sum(sorted(self.slots.values())[: self.fewest])


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """A job: one command, which every task of the job runs.

    Attributes:
        command: the argument vector, such as `[sys.executable, "train.py"]`.
        workers: the number of workers, at least 1.
        min_workers: the smallest number of workers with which the job continues; None means all of them.
            A worker's index changes when other workers are absent; its place, from 0 to `workers` - 1, does
            not. Each worker finds its place in DTRAIN_PLACE. Not with parameter servers.
        quorum: the fewest workers whose contributions a round of local SGD or DiLoCo needs; None for a job
            in which all workers are needed. A worker that is lost is then started again by itself. Only with
            the launcher "local".
        ps: the number of parameter servers. With at least one, the job also has a chief.
        max_restarts: the limit of restarts within any hour; None means 3. With a quorum it is that of each
            worker, and None means 10. A restart that a task asks for
            after saving a checkpoint, because its machine is about to be taken away, does not count.
        spares: the number of processes that import TensorFlow in advance and become tasks of the next
            attempt, at most one per worker. None means one per worker if the job may be restarted. Not with
            parameter servers.
        hang_timeout: seconds without progress after which the job is considered hung and the stuck worker
            failed; None derives the limit from the duration of the steps. Not with parameter servers.
        start_timeout: seconds that tasks wait for one that has not made its strategy before it counts as
            failed; None means 600.
        devices_per_worker: the number of logical devices in each worker, at least 1; None leaves the choice
            to the process. Not with parameter servers, whose workers have one device.
        gpus: one value of CUDA_VISIBLE_DEVICES per worker, so that each worker sees only its own GPU. If
            empty, the environment decides. Not with parameter servers.
        env: variables to add to this process's environment, or to replace in it.
        grace: seconds between asking tasks to end (SIGTERM, or the signal that this process received) and
            SIGKILL; None means 5, or 30 for tasks that save a checkpoint first.
        launcher: what starts the tasks: a name in `launchers.LAUNCHERS`. With "mpi", an MPI starter such as
            `mpirun` makes the workers the ranks of an MPI start, a new one for each attempt, so that they can
            communicate over MPI; not with parameter servers.
        mpi_starter: the starter's path or name, optionally with arguments, such as "srun --mpi=pmix"; None
            takes the `mpirun` beside this Python, or the one in PATH. Only with the launcher "mpi".
        log_dir: the folder where each task's lines are also written to files, one for each task and attempt;
            None for no files.
        nodes: the hosts of the job, of which this is node 0. Only with the launcher "nodes".
        hosts: the hosts of the job. Only with the launchers "ssh" and "mpi".
        ray: the cluster of the job. Only with the launcher "ray".

    Raises:
        ConfigurationError: a number is out of range, the command is empty, or two options exclude each
            other.
    """

    command: Sequence[str]
    workers: int
    min_workers: int | None = None
    quorum: int | None = None
    ps: int = 0
    max_restarts: int | None = None
    spares: int | None = None
    hang_timeout: float | None = None
    start_timeout: float | None = None
    devices_per_worker: int | None = None
    gpus: Sequence[str] = ()
    env: Mapping[str, str] | None = None
    grace: float | None = None
    launcher: str = "local"
    mpi_starter: str | None = None
    log_dir: str | Path | None = None
    nodes: Nodes | None = None
    hosts: SSHHosts | None = None
    ray: RayCluster | None = None

    def __post_init__(self) -> None:
        if not self.command:
            raise ConfigurationError(
                "No command was given to launch.", hint="Pass a script, or -m and a module."
            )
        check_integer("workers", self.workers, least=1)
        for name in ("ps", "max_restarts", "spares"):
            check_integer(name, getattr(self, name), least=0)
        check_integer("devices_per_worker", self.devices_per_worker, least=1)
        if self.workers + self.ps > MOST_TASKS:
            raise ConfigurationError(
                f"The job has {counted(self.workers, 'worker')} and {counted(self.ps, 'parameter server')}, "
                f"more than {MOST_TASKS} tasks.",
                hint="Ask for fewer.",
            )
        for name in ("hang_timeout", "start_timeout", "grace"):
            if (value := getattr(self, name)) is not None:
                check_seconds(name, value)
        self._check_elastic()
        self._check_mpi()
        self._check_quorum()
        if self.gpus and len(self.gpus) < self.workers:
            raise ConfigurationError(
                f"gpus has {counted(len(self.gpus), 'value')} ({', '.join(self.gpus)}), but the job has "
                f"{counted(self.workers, 'worker')}, and each sees only its own GPU.",
                hint="Give one value of CUDA_VISIBLE_DEVICES for each worker, or none at all.",
            )
        if self.ps:
            self._check_servers()
        elif self.spares and not self._can_have_spares():
            raise ConfigurationError(
                f"spares is {self.spares}, but only a Python script or module can wait for its start.",
                hint="Leave it out, or launch the script itself.",
            )

    @property
    def restarts(self) -> int:
        """The limit of restarts within any hour."""
        return MAX_RESTARTS if self.max_restarts is None else self.max_restarts

    @property
    def spare_count(self) -> int:
        """The number of spares that the job keeps ready; 0 where spares are impossible or never used."""
        if not self._can_have_spares() or not self.restarts or self.quorum is not None:
            return 0
        return self.workers if self.spares is None else min(self.spares, self.workers)

    def _can_have_spares(self) -> bool:
        """Whether the command runs a script or module with this Python; a spare can hold back only those."""
        if len(self.command) < 2 or self.command[0] != sys.executable:
            return False
        return not self.command[1].startswith("-") or (self.command[1] == "-m" and len(self.command) > 2)

    def _check_elastic(self) -> None:
        fewest = self.min_workers
        if fewest is None:
            return
        if isinstance(fewest, bool) or not isinstance(fewest, int) or not 1 <= fewest <= self.workers:
            raise ConfigurationError(
                f"min_workers is {fewest!r}, not an integer from 1 to {self.workers} (workers)."
            )
        if self.ps:
            raise ConfigurationError(
                f"min_workers is {fewest}, but with parameter servers a lost worker is started again alone.",
                hint="Leave it out: such a job continues with the workers that it has.",
            )
        if not self.restarts and fewest < self.workers:
            raise ConfigurationError(
                f"min_workers is {fewest}, but max_restarts is 0: nothing is started again with fewer.",
                hint="Leave one of them out.",
            )

    def _check_quorum(self) -> None:
        if self.quorum is None:
            return
        check_integer("quorum", self.quorum, least=1)
        check_integer("workers of a job with a quorum", self.workers, least=2)
        if self.quorum > self.workers:
            raise ConfigurationError(
                f"quorum is {self.quorum}, but the job has {self.workers} workers.",
                hint="Set it to as many contributions as a round needs at least, such as "
                f"{max(1, self.workers * 3 // 4)}.",
            )
        if self.launcher != "local":
            raise ConfigurationError(
                f"quorum is {self.quorum}, and the launcher is {self.launcher!r}: a job with a quorum runs "
                "on this machine, by the launcher 'local'.",
                hint="Leave one of them out.",
            )
        others = {
            "ps": self.ps,
            "min_workers": self.min_workers,
            "spares": self.spares,
            "hang_timeout": self.hang_timeout,
        }
        for name, value in others.items():
            if value:
                raise ConfigurationError(
                    f"quorum is {self.quorum}, and {name} is {value:g}: with a quorum, a lost worker is "
                    "started again by itself, and a slow one holds nobody up.",
                    hint="Leave one of them out.",
                )
        if (self.devices_per_worker or 1) > 1:
            raise ConfigurationError(
                f"quorum is {self.quorum}, and devices_per_worker is {self.devices_per_worker}, but a worker "
                "of such a job has one device.",
                hint="Start more workers instead.",
            )

    def _check_servers(self) -> None:
        if self.devices_per_worker is not None:
            raise ConfigurationError(
                f"devices_per_worker is {self.devices_per_worker}, but a worker of parameter servers has one "
                "device.",
                hint="Start more workers instead.",
            )
        if self.gpus:
            raise ConfigurationError(
                f"gpus has {counted(len(self.gpus), 'value')}, but the job has parameter servers, and its "
                "tasks see all GPUs.",
                hint="Leave it out, or set CUDA_VISIBLE_DEVICES for all tasks.",
            )
        for name, value in (("spares", self.spares), ("hang_timeout", self.hang_timeout)):
            if value:
                raise ConfigurationError(
                    f"{name} is {value:g}, but the job has parameter servers: it is for jobs of workers "
                    "alone.",
                    hint="Leave it out; the chief notices workers that are stuck, and starts them again "
                    "alone.",
                )

    def _check_mpi(self) -> None:
        by_mpi = self.launcher == "mpi"
        if self.mpi_starter is not None and not by_mpi:
            raise ConfigurationError(
                f"mpi_starter is {self.mpi_starter!r}, but the job is not started by MPI.",
                hint="Set launcher='mpi' too (--mpi).",
            )
        if by_mpi and self.ps:
            raise ConfigurationError(
                f"The launcher is 'mpi', but the job has {counted(self.ps, 'parameter server')}, which talk "
                "over TensorFlow's connections.",
                hint="Take another launcher (without --mpi), or leave out the parameter servers (--ps).",
            )


def check_integer(name: str, value: int | None, *, least: int) -> None:
    """Check an option that is an integer or None.

    Raises:
        ConfigurationError: the value is neither None nor an integer of at least `least`.
    """
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
        raise ConfigurationError(f"{name} is {value!r}, not an integer of at least {least}.")
