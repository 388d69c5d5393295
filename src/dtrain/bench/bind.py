"""A program that binds its process to cores or GPUs, and then becomes `dtrain` with the remaining arguments.

    python -m dtrain.bench.bind cores=0,1 train digits ...         # binds the process to these cores
    python -m dtrain.bench.bind gpus=0,1 train digits ...          # the process sees only these GPUs
    python -m dtrain.bench.bind cores-each=0,1 train digits ...    # binds worker i of a job to the i-th core
    python -m dtrain.bench.bind gpus-each=0,1 train digits ...     # worker i of a job sees only the i-th GPU

With `-each`, a chief and parameter servers may use all of the cores, and see no GPU. It starts no other
process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from dtrain.environments import current


def bind(binding: str) -> None:
    """Bind this process to cores, with one OpenMP thread if it is one core; or make only some GPUs visible.

    Args:
        binding: `cores=` or `gpus=`, or the same with `-each`, followed by numbers separated by commas.
    """
    kind, _, listed = binding.partition("=")
    numbers = [int(number) for number in listed.split(",")]
    what, _, suffix = kind.partition("-")
    if suffix:
        topology = current()
        worker = topology is not None and topology.task.job == "worker"
        if topology is not None and worker:
            numbers = [numbers[topology.task.index]]
        elif what == "gpus":
            numbers = [-1]
    if what == "gpus":
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, numbers))
        return
    os.sched_setaffinity(0, numbers)  # before TensorFlow is imported: it starts one thread for each core
    if len(numbers) == 1:
        os.environ["OMP_NUM_THREADS"] = "1"


def main(arguments: Sequence[str]) -> None:
    """Bind this process as the first argument says, then run `dtrain` with the rest; does not return."""
    bind(arguments[0])
    os.execv(sys.executable, [sys.executable, "-m", "dtrain", *arguments[1:]])


if __name__ == "__main__":
    main(sys.argv[1:])
