"""The job of a TPU slice of several hosts, from the variables of Cloud TPU and GKE.

Each host is a worker. This module follows Cloud TPU's documentation and was not tried on a TPU. It does not
connect to the TPU; the strategy does.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from dtrain.environments.environment import Environment, checked_topology, whole_number
from dtrain.environments.topology import Topology

PORT = 2222
"""The port on which each host's task serves."""

_HOSTS, _INDEX = "TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID"


class TPUHosts(Environment):
    """The hosts of a TPU slice: TPU_WORKER_HOSTNAMES names them, TPU_WORKER_ID is the index of this one.

    A TPU VM of a single host is a job of its own, and is not detected.
    """

    name = "tpu_vm"
    label = "a TPU slice of several hosts"
    leave = f"unset {_INDEX}"
    variables = (_HOSTS, _INDEX)

    def detected(self) -> bool:
        """Whether the variables name several hosts, and which of them this is."""
        return len(_hosts(os.environ)) > 1 and bool(os.environ.get(_INDEX, "").strip())

    def topology(self) -> Topology:
        """The topology that the variables describe.

        Raises:
            ClusterConfigError: the variables describe no valid job.
        """
        index = os.environ.get(_INDEX, "").strip()
        hint = f"{_INDEX} is the number of this host in {_HOSTS}, from 0. Cloud TPU and GKE set both."
        number = whole_number(_INDEX, index, hint=hint)
        workers = tuple(f"{host}:{PORT}" for host in _hosts(os.environ))
        return checked_topology({"worker": workers}, "worker", number, label=self.label, hint=hint)

    def without(self, env: Mapping[str, str]) -> dict[str, str]:
        """The variables of `env` for a process that is no task; those of a TPU VM of one host stay."""
        return super().without(env) if len(_hosts(env)) > 1 else dict(env)


def _hosts(env: Mapping[str, str]) -> list[str]:
    return [host.strip() for host in env.get(_HOSTS, "").split(",") if host.strip()]
