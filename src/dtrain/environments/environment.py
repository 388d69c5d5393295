"""The base class of environments, which tell a process which job it is part of, and who its peers are.

The environments and the rule of precedence among them are in `detected_job`. Nothing is read here.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from dtrain.base.counts import parse_count
from dtrain.environments.topology import MOST_TASKS, Topology
from dtrain.errors import ClusterConfigError


class Environment(abc.ABC):
    """A way in which a process can learn its job, such as TF_CONFIG or the variables of a scheduler.

    To add one, write a subclass in a file of its own, and list an instance in `detected_job.ENVIRONMENTS`. A
    program adds its own by `seams.register_environment`.

    Attributes:
        name: its key in the registry.
        label: its name in messages, such as "an MPI start".
        leave: what a user does so that a process ignores it, such as "unset TF_CONFIG"; "" if nothing helps.
        variables: the prefixes of the environment variables that make a process a task of such a job.
        known_to_tensorflow: whether TensorFlow's strategies find the job without a cluster resolver.
    """

    name: ClassVar[str]
    label: str
    leave: ClassVar[str] = ""
    variables: ClassVar[tuple[str, ...]] = ()
    known_to_tensorflow: ClassVar[bool] = False

    @abc.abstractmethod
    def detected(self) -> bool:
        """Whether this process is part of such a job. It is fast, and communicates with no other process."""

    @abc.abstractmethod
    def topology(self) -> Topology:
        """The job, if it was detected. It may communicate; then all processes of the job must call it.

        Raises:
            ClusterConfigError: the description of the job is invalid.
        """

    def secret(self) -> bytes | None:
        """A secret that the environment has given to all processes of the job, and to nobody else."""
        return None

    def local_rank(self) -> int | None:
        """The number of this process among the job's processes on its host; None if it is not known."""
        return None

    def secret_folder(self) -> Path | None:
        """A folder that all hosts of the job share, for a secret of this user's jobs; None for none."""
        return None

    def without(self, env: Mapping[str, str]) -> dict[str, str]:
        """The variables of `env` for a process that is no task of such a job."""
        return {name: value for name, value in env.items() if not name.startswith(self.variables)}


def not_detected(problem: str) -> ClusterConfigError:
    """The error of a call of `Environment.topology` in a process that is part of no such job."""
    return ClusterConfigError(problem, hint="Call topology() only if the environment was detected.")


def checked_topology(
    jobs: Mapping[str, tuple[str, ...]], job: str, index: int, *, label: str, hint: str
) -> Topology:
    """The topology of a job that variables describe.

    Raises:
        ClusterConfigError: the job is invalid.
    """
    try:
        return Topology(jobs, job, index)
    except ClusterConfigError as error:
        problem = f"The variables of {label} describe no valid job: {error.message}"
        raise ClusterConfigError(problem, hint=hint) from None


def whole_number(name: str, text: str, *, hint: str) -> int:
    """The whole number in the text of a variable, at most the number of tasks that a job may have.

    Raises:
        ClusterConfigError: the text is no such number.
    """
    text = text.strip()
    number = parse_count(text, MOST_TASKS)
    if number is None:
        raise ClusterConfigError(
            f"{name} is {text[:80]!r}, not a whole number up to {MOST_TASKS}.", hint=hint
        )
    return number
