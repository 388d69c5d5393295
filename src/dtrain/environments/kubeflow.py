"""The job of a Kubeflow TrainJob, from the variables that a runtime for PyTorch sets in its pods.

Kubeflow Trainer sets the number of the nodes, the index of this one, and the first node's host name; those of
the others differ from it in the index. A TFJob sets TF_CONFIG, which has a module of its own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from dtrain.environments.environment import Environment, checked_topology, not_detected, whole_number
from dtrain.environments.topology import Topology

_NUMBER, _INDEX, _FIRST, _PORT = "PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"
_FIRST_HOST = re.compile(r"(?P<stem>[a-z0-9-]+-0-)0(?P<domain>\.[a-z0-9.-]+)")
_HINT = "Kubeflow Trainer sets these variables. Unset them to start a job of one process."


class KubeflowTrainJob(Environment):
    """The nodes of a TrainJob whose runtime has the policy `torch`; each node is a worker.

    It is detected if PET_MASTER_ADDR is a host name of a JobSet's first pod, as Kubeflow Trainer writes it.
    """

    name = "kubeflow"
    label = "a Kubeflow TrainJob"
    leave = f"unset {_FIRST}"
    variables = (_NUMBER, _INDEX, _FIRST, _PORT, "PET_NPROC_PER_NODE")

    def detected(self) -> bool:
        """Whether Kubeflow Trainer has set the variables of a distributed job."""
        given = all(os.environ.get(name, "").strip() for name in (_NUMBER, _INDEX))
        return given and _FIRST_HOST.fullmatch(os.environ.get(_FIRST, "").strip()) is not None

    def topology(self) -> Topology:
        """The topology that the variables describe.

        Raises:
            ClusterConfigError: the variables describe no valid job.
        """
        first = _FIRST_HOST.fullmatch(os.environ[_FIRST].strip())
        if first is None:
            raise not_detected(f"{_FIRST} names no first node.")
        port = whole_number(_PORT, os.environ.get(_PORT, "29500"), hint=_HINT)
        number, index = (whole_number(name, os.environ[name], hint=_HINT) for name in (_NUMBER, _INDEX))
        workers = tuple(f"{first['stem']}{node}{first['domain']}:{port}" for node in range(number))
        return checked_topology({"worker": workers}, "worker", index, label=self.label, hint=_HINT)

    def without(self, env: Mapping[str, str]) -> dict[str, str]:
        """The variables of `env` for a process that is no task; those that torchrun itself has set stay."""
        return super().without(env) if _FIRST_HOST.fullmatch(env.get(_FIRST, "").strip()) else dict(env)
