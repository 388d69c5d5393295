"""Gives each process of a benchmark its core, and starts workers for peers that have no launcher here.

    python workers.py 2 program.py [args]    # two processes, with RANK, TF_CONFIG and MASTER_ADDR set
    python workers.py 2 --apart program.py   # two that know nothing of each other; only RANK is set

It is no launcher: the first process to fail ends the others, and nothing is started again.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time

END_SECONDS = 15.0
RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID", "RANK")


def rank() -> int:
    """The number of this process among the workers, by whoever started it; 0 where it is alone."""
    task = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task")
    if task is not None:
        return int(task["index"])
    return next((int(os.environ[name]) for name in RANKS if name in os.environ), 0)


def pin(*, threads: bool = True) -> None:
    """Gives this process one core, by its rank; to be called before TensorFlow or PyTorch is imported.

    Where a starter has bound the process to one core, it stays there.

    Args:
        threads: whether it gets one thread, too.
    """
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank() % len(cores)]})
    if threads:
        os.environ["OMP_NUM_THREADS"] = "1"


def one_thread_each() -> None:
    """TensorFlow computes one operation at a time, with one thread."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)


def start(count: int, command: list[str], *, apart: bool = False) -> int:
    """Runs a command in so many processes; the status of the first that fails, or 0.

    Args:
        count: how many.
        command: the program and its arguments.
        apart: whether they are no job: each gets its number alone, by which it takes a core.
    """
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count + 1)]
        *ports, port = (listener.getsockname()[1] for listener in sockets)
    addresses = [f"127.0.0.1:{number}" for number in ports]
    processes = []
    for index in range(count):
        task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        environment = {**os.environ, "RANK": str(index)}
        if not apart:
            environment |= {
                "TF_CONFIG": json.dumps(task),
                "WORLD_SIZE": str(count),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
        processes.append(subprocess.Popen([sys.executable, *command], env=environment))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        limit = None  # the others end soon after the first, or wait for it in vain
        while True:
            states = [process.poll() for process in processes]
            failed = [state for state in states if state]
            if failed or None not in states:
                return failed[0] if failed else 0
            if limit is None and states.count(None) < count:
                limit = time.monotonic() + END_SECONDS
            if limit is not None and time.monotonic() > limit:
                return 1
            time.sleep(0.1)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


if __name__ == "__main__":
    apart = "--apart" in sys.argv[2:3]
    sys.exit(start(int(sys.argv[1]), sys.argv[3 if apart else 2 :], apart=apart))
