"""Small objects between the workers of a job: who is here, what they say, all at one point.

It rides on TensorFlow's coordination service, not on the collectives, so it cannot fall out of step with
the training; tensors of a step do not go this way.
"""

from __future__ import annotations

import base64
import itertools
import math
import pickle
import time
from typing import Any

from dtrain import progress
from dtrain.cluster import mpi
from dtrain.errors import PeerMissingError
from dtrain.keras_engine.protocol import ReplicaLayout
from dtrain.upstream import tensorflow as upstream_tf

_rounds = itertools.count()
_POLL = 10.0  # seconds
_ANSWER = 20_000  # milliseconds that the service has for what it knows


def exchange(layout: ReplicaLayout, value: Any, *, timeout: float | None = None) -> list[Any]:
    """Every worker gives a value and gets those of all; returns when all have given theirs.

    All workers must call it, equally often.

    Args:
        layout: the strategy's.
        value: anything that can be pickled; small.
        timeout: seconds to wait for the others; None waits as long as TensorFlow finds them alive.

    Returns:
        The values, by worker.

    Raises:
        PeerMissingError: a worker gave none in time.
    """
    if layout.workers == 1:
        return [value]
    number = next(_rounds)
    message = base64.b64encode(pickle.dumps(value)).decode()
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    with progress.waiting():
        upstream_tf.set_shared(_key(number, layout.worker), message)
        return [_receive(layout, number, worker, timeout, deadline) for worker in range(layout.workers)]


def _key(number: int, worker: int) -> str:
    return f"dtrain/exchange/{number}/{worker}"


def _receive(layout: ReplicaLayout, number: int, worker: int, timeout: float | None, deadline: float) -> Any:
    import tensorflow as tf

    while True:
        left = max(0.001, min(_POLL, deadline - time.monotonic()))
        try:
            text = upstream_tf.get_shared(_key(number, worker), max(1, int(left * 1000)))
            return pickle.loads(base64.b64decode(text))
        except (tf.errors.DeadlineExceededError, tf.errors.NotFoundError):
            mpi.check_ended()
            if not _service_answers(layout, number):
                raise PeerMissingError(
                    "The first worker, through which the workers talk, cannot be reached any more.",
                    hint="see whether it runs, and whether its machine can be reached from this one",
                ) from None
            if time.monotonic() >= deadline:
                raise PeerMissingError(
                    f"Worker {worker} did not reach this point within {timeout:g} s.",
                    hint="barrier, broadcast and fit must be called by every worker, equally often",
                ) from None


def _service_answers(layout: ReplicaLayout, number: int) -> bool:
    """Whether what this worker itself has said can be read: behind a broken link nothing can."""
    import tensorflow as tf

    try:
        upstream_tf.get_shared(_key(number, layout.worker), _ANSWER)
    except (tf.errors.DeadlineExceededError, tf.errors.NotFoundError):
        return False
    return True
