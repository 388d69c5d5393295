"""The topology of a job: its tasks, their addresses, and which of them this process is.

It parses, validates and writes the text of TF_CONFIG, TensorFlow's description of a cluster. It reads no
environment variable, opens no socket and starts no process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from dtrain.base.plain_text import shortened
from dtrain.base.tcp import split_address
from dtrain.errors import ClusterConfigError

TRAINING_JOBS = ("chief", "worker")
"""The jobs whose tasks train, in the order of their ranks."""

SERVING_JOBS = ("worker", "ps")
"""The jobs whose tasks serve the chief if the chief alone runs the program."""

KNOWN_JOBS = (*TRAINING_JOBS, "ps", "evaluator")
"""Every job that a cluster may name."""

MOST_TASKS = 100_000
"""The most tasks that a job may have; what asks for more is a mistake, and would fill the memory."""

_SINGLE_TASK_JOBS = ("chief", "evaluator")
_EXAMPLE = '{"cluster": {"worker": ["host0:2222", "host1:2222"]}, "task": {"type": "worker", "index": 0}}'
_LOOKS = f"It should look like {_EXAMPLE}."
_KINDS: dict[type, str] = {
    dict: "object",
    list: "list",
    str: "string",
    bool: "boolean",
    int: "number",
    float: "number",
    type(None): "null",
}


@dataclass(frozen=True)
class Task:
    """One process of a job, such as `worker 1`. Only messages are checked by the fields' ranges."""

    job: Annotated[str, KNOWN_JOBS]
    index: Annotated[int, range(MOST_TASKS)]

    def __str__(self) -> str:
        return f"{self.job} {self.index}"


@dataclass(frozen=True)
class Topology:
    """The tasks of a job, and which of them this process is.

    Training tasks are the chief, if there is one, and the workers. Their ranks start with the chief.
    Parameter servers (`ps`) and the `evaluator` belong to the cluster but have no rank. As in TensorFlow, the
    chief of parameter servers may be outside the cluster; it then has no address.

    Args:
        jobs: the addresses (`host:port`) of each job's tasks, in the order of their index.
        task_type: the name of this process's job.
        task_index: the index of this process within that job.

    Raises:
        ClusterConfigError: the arguments describe no valid cluster; the message names what is wrong.
    """

    jobs: Mapping[str, tuple[str, ...]] = field(hash=False)
    task_type: str
    task_index: int

    def __post_init__(self) -> None:
        jobs = {name: tuple(self.jobs[name]) for name in sorted(self.jobs, key=_job_order)}
        object.__setattr__(self, "jobs", jobs)
        _check_jobs(jobs)
        _check_task(jobs, self.task_type, self.task_index)

    @property
    def task(self) -> Task:
        """The task that this process is."""
        return Task(self.task_type, self.task_index)

    @property
    def is_training_task(self) -> bool:
        """Whether this process trains, and so has a rank."""
        return self.task_type in TRAINING_JOBS

    @property
    def rank(self) -> int:
        """The rank of this process among the training tasks, from 0.

        Raises:
            ClusterConfigError: this process is a parameter server or an evaluator.
        """
        if not self.is_training_task:
            raise ClusterConfigError(
                f"{self.task} does not train, so it has no rank.",
                hint="Ask for the rank only where Topology.is_training_task is true.",
            )
        return self.training_tasks().index(self.task)

    @property
    def world_size(self) -> int:
        """The number of training tasks, at least 1."""
        return len(self.training_tasks())

    @property
    def is_chief(self) -> bool:
        """Whether this process is the training task of rank 0, which logs and writes files for the job."""
        return self.is_training_task and self.rank == 0

    @property
    def is_coordinated(self) -> bool:
        """Whether the chief alone runs the program, while workers and parameter servers serve it.

        If the cluster names no chief, this is true only in the chief itself, which is outside the cluster.
        """
        return "ps" in self.jobs and ("chief" in self.jobs or self.task_type == "chief")

    @property
    def local_rank(self) -> int:
        """The number of this process among the training tasks of its host, from 0."""
        return self.local_tasks.index(self.task) if self.has_address else 0

    @property
    def local_tasks(self) -> tuple[Task, ...]:
        """The training tasks of this process's host; none if the cluster does not list this process.

        A host is what stands before the port in an address. In a coordinated job, and without a rank, tasks
        of this process's own name are counted.
        """
        if not self.has_address:
            return ()
        if self.is_training_task and not self.is_coordinated:
            tasks = self.training_tasks()
        else:
            tasks = tuple(task for task in self.tasks() if task.job == self.task_type)
        host = split_address(self.address)[0]
        return tuple(task for task in tasks if split_address(self.address_of(task))[0] == host)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The host of each training task: what stands before the port in its address."""
        return tuple(split_address(self.address_of(task))[0] for task in self.training_tasks())

    def servers(self) -> tuple[Task, ...]:
        """The tasks that serve the chief of a coordinated job: workers, then parameter servers."""
        return tuple(task for task in self.tasks() if task.job in SERVING_JOBS)

    @property
    def address(self) -> str:
        """The address on which this process serves, as `host:port`.

        Raises:
            ClusterConfigError: this process is an evaluator or a chief that the cluster does not list.
        """
        return self.address_of(self.task)

    @property
    def has_address(self) -> bool:
        """Whether the cluster lists this process."""
        return self.task in self.tasks()

    def with_chief_at(self, address: str) -> Topology:
        """The same topology with this address (`host:port`) for the chief."""
        return replace(self, jobs={**self.jobs, "chief": (address,)})

    def address_of(self, task: Task) -> str:
        """The address on which a task serves, as `host:port`.

        Raises:
            ClusterConfigError: the cluster does not list the task.
        """
        addresses = self.jobs.get(task.job, ())
        if not 0 <= task.index < len(addresses):
            raise ClusterConfigError(
                f"{task} has no address: the cluster has {', '.join(map(str, self.tasks()))}.",
                hint="Only tasks of the cluster can be reached.",
            )
        return addresses[task.index]

    def tasks(self) -> tuple[Task, ...]:
        """All tasks with an address: chief, workers, parameter servers, evaluator, in this order."""
        return tuple(Task(job, i) for job, addresses in self.jobs.items() for i in range(len(addresses)))

    def training_tasks(self) -> tuple[Task, ...]:
        """The tasks that train, in the order of their rank."""
        listed = tuple(task for task in self.tasks() if task.job in TRAINING_JOBS)
        return listed if not self.is_training_task or self.task in listed else (self.task, *listed)

    @classmethod
    def from_tf_config(cls, text: str | None) -> Topology | None:
        """Parse the text of TF_CONFIG.

        Returns:
            The topology; None if there is no cluster, because the text is None, blank or `{}`.

        Raises:
            ClusterConfigError: the text is invalid; the message names what is wrong and what to write.
        """
        if text is None or not text.strip():
            return None
        try:
            config = _parse(text)
            if not config:
                return None
            return cls(_jobs_of(config), *_task_of(config))
        except ClusterConfigError as error:
            raise ClusterConfigError(f"TF_CONFIG is wrong: {error.message}", hint=error.hint) from None

    def to_tf_config(self) -> str:
        """The text of TF_CONFIG for this process."""
        return json.dumps(
            {
                "cluster": {job: list(addresses) for job, addresses in self.jobs.items()},
                "task": {"type": self.task_type, "index": self.task_index},
            }
        )


def _job_order(name: Any) -> tuple[int, str]:
    return (KNOWN_JOBS.index(name), "") if name in KNOWN_JOBS else (len(KNOWN_JOBS), str(name))


def _check_jobs(jobs: Mapping[str, tuple[str, ...]]) -> None:
    if not jobs:
        raise ClusterConfigError(
            '"cluster" is empty.',
            hint=f"List the addresses of every job, as in {_EXAMPLE}; or unset TF_CONFIG.",
        )
    for job, addresses in jobs.items():
        if job not in KNOWN_JOBS:
            raise ClusterConfigError(
                f'"cluster" names the unknown job {job!r}.', hint=f"The jobs are {', '.join(KNOWN_JOBS)}."
            )
        if not addresses:
            raise ClusterConfigError(
                f'the job "{job}" has no address.', hint="Give it at least one, or leave the job out."
            )
        if job in _SINGLE_TASK_JOBS and len(addresses) > 1:
            raise ClusterConfigError(
                f'the job "{job}" has {len(addresses)} addresses: {", ".join(map(str, addresses))}.',
                hint=f"A cluster has at most one {job}; further processes are workers.",
            )
    if not any(job in TRAINING_JOBS for job in jobs):
        raise ClusterConfigError(
            f"the cluster has no task that trains, only {', '.join(jobs)}.", hint="Add a worker or a chief."
        )
    _check_addresses(jobs)


def _check_addresses(jobs: Mapping[str, tuple[str, ...]]) -> None:
    seen: dict[tuple[str, int], Task] = {}
    for job, addresses in jobs.items():
        for index, address in enumerate(addresses):
            task = Task(job, index)
            if not isinstance(address, str):
                raise ClusterConfigError(
                    f"the address of {task} is {address!r}, not a string.", hint='Write it as "host:port".'
                )
            try:
                host, port = split_address(address)
            except ClusterConfigError as error:
                raise ClusterConfigError(f"the address of {task}: {error.message}", hint=error.hint) from None
            # `localhost` and 127.0.0.1 are often mixed in one file, so they count as equal.
            end = ("127.0.0.1" if host.lower() == "localhost" else host.lower(), port)
            if end in seen:
                raise ClusterConfigError(
                    f"the address {shortened(address)!r} is repeated: {seen[end]} and {task} both have it.",
                    hint="Give every task an address of its own.",
                )
            seen[end] = task


def _check_task(jobs: Mapping[str, tuple[str, ...]], job: Any, index: Any) -> None:
    if job not in KNOWN_JOBS:
        raise ClusterConfigError(
            f'the type in "task" is the unknown job {job!r}.', hint=f"The jobs are {', '.join(KNOWN_JOBS)}."
        )
    if isinstance(index, bool) or not isinstance(index, int):
        raise ClusterConfigError(
            f'the index in "task" is {index!r}, a {type(index).__name__}, not an integer.',
            hint="Write the index as a plain number, such as 0.",
        )
    if job not in jobs:
        # TensorFlow allows these outside the cluster. No task connects to the evaluator. A chief of parameter
        # servers connects to its servers itself, and only then takes an address.
        if index == 0 and (job == "evaluator" or (job == "chief" and "ps" in jobs)):
            return
        raise ClusterConfigError(
            f'"task" says that this process is {Task(job, index)}, but the cluster has no job "{job}", only '
            f"{', '.join(jobs)}.",
            hint=f'Add the addresses of "{job}" to "cluster", or correct the type in "task".',
        )
    if not 0 <= index < len(jobs[job]):
        raise ClusterConfigError(
            f'the index in "task" is {index}, but the job "{job}" has {len(jobs[job])} address(es).',
            hint=f"Indices of {job} here run from 0 to {len(jobs[job]) - 1}.",
        )


def _parse(text: str) -> dict[str, Any]:
    try:
        config = json.loads(text, object_pairs_hook=_unique_keys)
    except ClusterConfigError:
        raise
    except (ValueError, RecursionError) as error:  # also for huge numbers and deep nesting
        raise ClusterConfigError(f"it is not JSON ({error}): {shortened(text)}", hint=_LOOKS) from None
    return _object(config, "it")


def _unique_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    # Of two equal keys, json silently keeps only the last, so a part of the cluster would be lost.
    entries: dict[str, Any] = {}
    for key, value in pairs:
        if key in entries:
            raise ClusterConfigError(f'the key "{key}" appears twice.', hint="Merge the two entries.")
        entries[key] = value
    return entries


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        kind = _KINDS[type(value)]
        raise ClusterConfigError(
            f"{what} is a JSON {kind}, not an object: {shortened(json.dumps(value))}", hint=_LOOKS
        )
    return value


def _entry(parent: Mapping[str, Any], name: str, what: str) -> Any:
    if name not in parent:
        raise ClusterConfigError(f'{what} has no "{name}": {shortened(json.dumps(parent))}', hint=_LOOKS)
    return parent[name]


def _jobs_of(config: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    jobs: dict[str, tuple[str, ...]] = {}
    for job, addresses in _object(_entry(config, "cluster", "it"), '"cluster"').items():
        if not isinstance(addresses, list):
            raise ClusterConfigError(
                f'"cluster" gives the job "{job}" a JSON {_KINDS[type(addresses)]}, not a list of addresses.',
                hint=f'Write ["host:port", ...], as in {_EXAMPLE}.',
            )
        jobs[job] = tuple(addresses)
    return jobs


def _task_of(config: Mapping[str, Any]) -> tuple[Any, Any]:
    task = _object(_entry(config, "task", "it"), '"task"')
    return _entry(task, "type", '"task"'), _entry(task, "index", '"task"')
