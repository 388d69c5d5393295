"""The program that gives a process its place, and then becomes `dtrain` with the arguments that follow.

    python -m dtrain.bench.seat cores=0,1 train digits ...         # these cores, for a process that is alone
    python -m dtrain.bench.seat cores-each=0,1 train digits ...    # worker i of a job: the i-th of them alone
    python -m dtrain.bench.seat gpus-each=0,1 train digits ...     # worker i of a job sees the i-th GPU alone

With `-each`, a chief and parameter servers may use all of the cores, and see no GPU. It starts no process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from dtrain.cluster import current


def place(seat: str) -> None:
    """Take a place: cores, with one thread where it is one; or GPUs.

    Args:
        seat: `cores=` or `gpus=`, or the same with `-each`, and numbers divided by commas.
    """
    kind, _, listed = seat.partition("=")
    numbers = [int(number) for number in listed.split(",")]
    what, _, each = kind.partition("-")
    if each:
        topology = current()
        worker = topology is not None and topology.task.job == "worker"
        if topology is not None and worker:
            numbers = [numbers[topology.task.index]]
        elif what == "gpus":
            numbers = [-1]
    if what == "gpus":
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, numbers))
        return
    os.sched_setaffinity(0, numbers)  # before TensorFlow is imported: it makes as many threads
    if len(numbers) == 1:
        os.environ["OMP_NUM_THREADS"] = "1"


def main(arguments: Sequence[str]) -> None:
    """Take the place that the first argument says, and run the rest; this does not return."""
    place(arguments[0])
    os.execv(sys.executable, [sys.executable, "-m", "dtrain", *arguments[1:]])


if __name__ == "__main__":
    main(sys.argv[1:])
