"""Lists the environment variables that a bug report needs, without secrets, and names the schedulers.

A scheduler named here only runs the process; the environments that describe a job are in `detected_job`.
"""

from __future__ import annotations

import os
import re

_PREFIXES = (
    "AWS_BATCH_", "CUDA_", "DTRAIN_", "JOBSET_", "KERAS_", "KUBERNETES_SERVICE_HOST", "LOCAL_RANK",
    "LOCAL_WORLD_SIZE", "LSB_", "MASTER_ADDR", "MASTER_PORT", "NCCL_", "OMPI_", "PBS_", "PET_", "PMI_",
    "RANK", "RAY_", "SLURM_", "TF_", "TORCHELASTIC_", "TPU_", "WORLD_SIZE", "XLA_",
)  # fmt: skip
# Open MPI names a program's arguments and its transports' key, Ray the variables of a submitted job.
_SECRET_NAME = re.compile(
    r"SECRET|TOKEN|PASS|CREDENTIAL|KEY|AUTH|COOKIE|COMMAND|JWT|ARGV|ARGS|PRECONDITION|CONFIG_JSON",
    re.IGNORECASE,
)
_SECRET_IN_URL = re.compile(r"[?&][\w-]*(token|key|sig\w*|password)=", re.IGNORECASE)
_USER_IN_URL = re.compile(r"(://)[^/@\s]+@")
_SCHEDULERS = {
    "SLURM_JOB_ID": "Slurm",
    "PBS_JOBID": "PBS",
    "LSB_JOBID": "LSF",
    "AWS_BATCH_JOB_ID": "AWS Batch",
    "KUBERNETES_SERVICE_HOST": "Kubernetes",
    "RAY_RAYLET_PID": "Ray",  # in a task or an actor, and in what it starts
    "RAY_JOB_CONFIG_JSON_ENV_VAR": "Ray",  # in a program that ray job submit starts
}
HIDDEN = "(set, not shown)"


def shown_variables() -> dict[str, str]:
    """The variables that concern training, by name; values that may be secret are replaced by `HIDDEN`."""
    chosen = sorted(name for name in os.environ if name.startswith(_PREFIXES))
    return {name: _shown(name, os.environ[name]) for name in chosen}


def schedulers() -> list[str]:
    """The schedulers that run this process, by name."""
    return [*dict.fromkeys(name for variable, name in _SCHEDULERS.items() if os.environ.get(variable))]


def _shown(name: str, value: str) -> str:
    secret = _SECRET_NAME.search(name) or _SECRET_IN_URL.search(value)
    return HIDDEN if secret else _USER_IN_URL.sub(r"\1", value)
