"""How many cores this process may use, and how many threads TensorFlow starts for them.

TensorFlow respects the binding of a process to cores. It does not know how many cores a scheduler has granted
without binding.
"""

from __future__ import annotations

import os

from dtrain.environments import settings, slurm_step

_INTRA_OP = "TF_NUM_INTRAOP_THREADS"
_VARIABLES = (_INTRA_OP, "TF_NUM_INTEROP_THREADS")


def usable_cores() -> int:
    """The number of cores that this process may use: those it is bound to, or fewer if Slurm gave fewer."""
    bound = len(os.sched_getaffinity(0))
    return min(bound, slurm_step.cores_of_task() or bound)


def limit_threads() -> None:
    """Give TensorFlow a thread for each usable core, in this process and in those that it starts.

    Call it before TensorFlow starts its threads. Numbers that the user has set are not changed.
    """
    cores = usable_cores()
    if cores < len(os.sched_getaffinity(0)):
        for name in _VARIABLES:
            os.environ.setdefault(name, str(cores))


def threads(configured: int) -> int:
    """The number of threads that compute one operation.

    Args:
        configured: what `tf.config.threading.get_intra_op_parallelism_threads` returns; 0 if nothing is set.
    """
    return configured or settings.whole_number(_INTRA_OP) or len(os.sched_getaffinity(0))
