"""The job of a Kubernetes JobSet whose pods `dtrain submit --kubernetes` described.

The pod's variables name the JobSet, the replicated job and the pod's index; the host names follow from them
by JobSet's rule. This module asks no Kubernetes API and resolves no name.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from dtrain.environments.environment import Environment, checked_topology, whole_number
from dtrain.environments.topology import MOST_TASKS, Topology
from dtrain.errors import ClusterConfigError

PORT = 2222
"""The port on which each task serves; each has a pod, and so an address, of its own."""

TASKS_VARIABLE = "DTRAIN_JOBSET_TASKS"
"""The variable with the number of pods of each replicated job, such as `chief=1,worker=4,ps=2`."""

_NAME, _REPLICATED_JOB = "JOBSET_NAME", "REPLICATED_JOB_NAME"
_POD_INDEX, _JOB_INDEX = "JOB_COMPLETION_INDEX", "JOB_INDEX"
_HINT = "Write the manifest by `dtrain submit --kubernetes --dry-run`, or correct the pod's variables."


class JobSet(Environment):
    """The pods of a JobSet, in which each replicated job has the name of one of TensorFlow's jobs.

    JOBSET_NAME and REPLICATED_JOB_NAME come from the pod's annotations `jobset.sigs.k8s.io/jobset-name` and
    `jobset.sigs.k8s.io/replicatedjob-name`, and JOB_COMPLETION_INDEX from Kubernetes. DTRAIN_JOBSET_TASKS
    is the number of pods of each replicated job, which no annotation holds.
    """

    name = "jobset"
    label = "a Kubernetes JobSet"
    leave = f"unset {TASKS_VARIABLE}"
    variables = (TASKS_VARIABLE, _NAME, _REPLICATED_JOB, _POD_INDEX, _JOB_INDEX)

    def detected(self) -> bool:
        """Whether this is a pod of a JobSet with a task."""
        return all(os.environ.get(name, "").strip() for name in (TASKS_VARIABLE, _NAME, _REPLICATED_JOB))

    def topology(self) -> Topology:
        """The topology that the variables describe.

        Raises:
            ClusterConfigError: the variables describe no valid job.
        """
        jobset, job = os.environ[_NAME].strip(), os.environ[_REPLICATED_JOB].strip()
        index = whole_number(_POD_INDEX, os.environ.get(_POD_INDEX, ""), hint=_HINT)
        if whole_number(_JOB_INDEX, os.environ.get(_JOB_INDEX, "0"), hint=_HINT):
            raise ClusterConfigError(
                f"{_JOB_INDEX} is {os.environ[_JOB_INDEX]}, but here each replicated job has one Job.",
                hint=_HINT,
            )
        jobs = {
            name: tuple(f"{host_name(jobset, name, pod)}:{PORT}" for pod in range(number))
            for name, number in _numbers(os.environ[TASKS_VARIABLE]).items()
        }
        return checked_topology(jobs, job, index, label=self.label, hint=_HINT)

    def without(self, env: Mapping[str, str]) -> dict[str, str]:
        """The variables of `env` for a process that is no task; those of a pod of another job stay."""
        return super().without(env) if TASKS_VARIABLE in env else dict(env)


def host_name(jobset: str, replicated_job: str, pod: int) -> str:
    """The host name of a pod, as JobSet makes it in the namespace of the job."""
    return f"{jobset}-{replicated_job}-0-{pod}.{jobset}"


def _numbers(text: str) -> dict[str, int]:
    """The number of pods of each replicated job."""
    counts: dict[str, int] = {}
    for part in text.split(","):
        name, equals, number = part.strip().partition("=")
        if not equals or name in counts:
            raise ClusterConfigError(
                f"{TASKS_VARIABLE} is {text[:80]!r}, which is not a list of names with numbers.",
                hint="It should look like worker=4 or chief=1,worker=4,ps=2.",
            )
        counts[name] = whole_number(TASKS_VARIABLE, number, hint=_HINT)
        if sum(counts.values()) > MOST_TASKS:
            raise ClusterConfigError(
                f"{TASKS_VARIABLE} is {text[:80]!r}, which is more than {MOST_TASKS} pods.", hint=_HINT
            )
    return counts
