"""Small objects between the workers of a job: who is here, what they say, all at one point.

It rides on TensorFlow's coordination service, not on the collectives, so it cannot fall out of step with
the training; tensors of a step do not go this way.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import math
import pickle
import secrets
import time
from typing import Any

import cloudpickle

from dtrain import cluster, events
from dtrain.cluster import mpi
from dtrain.cluster.secret import SIZE, Secret, job_secret, on_loopback
from dtrain.errors import AuthenticationError, ConfigurationError, PeerMissingError
from dtrain.keras_engine import messages
from dtrain.keras_engine.protocol import ReplicaLayout
from dtrain.keras_engine.signed_store import HINT, SignedStore
from dtrain.log import logger
from dtrain.plain_text import cleaned

_TOPIC = "exchange"
_POLL = 10.0  # seconds
_ANSWER = 20_000  # milliseconds that the service has for what it knows

_SHOWN = 2000  # characters of another worker's problem

# How a value is written: plain, pickled, or not at all, for this reason.
_PLAIN, _PICKLED, _REFUSED = "jpe"

_rounds = itertools.count()
_kept: list[int] = []  # rounds of which this worker's value is still in the service,
_all_read = 0  # and before which round nobody reads any
_nonce = secrets.token_hex(SIZE)
_store: SignedStore | None = None


def exchange(
    layout: ReplicaLayout, value: Any, *, timeout: float | None = None, objects: bool = False
) -> list[Any]:
    """Every worker gives a value and gets those of all; returns when all have given theirs.

    All workers must call it, equally often.

    Args:
        layout: the strategy's.
        value: what `messages.encode` takes; small.
        timeout: seconds to wait for the others; None waits as long as TensorFlow finds them alive.
        objects: take any value that can be pickled, where the workers share a secret. Reading it runs code of
            the worker that gave it, so all workers must say so.

    Returns:
        The values, by worker.

    Raises:
        PeerMissingError: a worker gave none in time.
        AuthenticationError: what is there for a worker was not signed by it.
        ConfigurationError: a worker's value cannot be sent; all workers raise it.
    """
    global _all_read
    if layout.workers == 1:
        return [value]
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    here = store(layout, timeout=timeout)
    body = _written(value, here.secret, objects=objects)
    number = next(_rounds)
    found = {layout.worker: body}
    with events.waiting_for_others():
        here.put(_TOPIC, number, layout.worker, body)
        # Here, where the service is needed anyway: at the end of a job it may be gone.
        _remove_read(here, layout.worker)
        _kept.append(number)
        for other in (worker for worker in range(layout.workers) if worker != layout.worker):
            found[other] = _wait(here, layout, _TOPIC, number, other, timeout, deadline)
    _all_read = number
    return [_read(found[worker], worker, here.secret, objects=objects) for worker in range(layout.workers)]


def store(layout: ReplicaLayout, *, timeout: float | None = None) -> SignedStore:
    """Where the workers of this job leave what they say; the first call waits for all workers.

    Each gives a number that nobody else has chosen, and all numbers together make the key of this start. So
    what was signed in an earlier one, with the same secret, counts as forged.

    Raises:
        PeerMissingError: a worker did not come in time.
        AuthenticationError: the workers have different secrets.
    """
    global _store
    if _store is not None:
        return _store
    topology = cluster.current()
    secret = None if topology is None else job_secret(topology)
    plain = SignedStore(None)
    plain.put("hello", 0, layout.worker, _hello(secret, layout.worker))
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    nonces = {layout.worker: _nonce}  # never what is there in its place: that may be of an earlier start
    with events.waiting_for_others():
        for other in (worker for worker in range(layout.workers) if worker != layout.worker):
            hello = _wait(plain, layout, "hello", 0, other, timeout, deadline)
            nonces[other] = _checked(hello, secret, other, layout.worker)
    if secret is None and layout.worker == 0:
        _warn(alone=topology is not None and on_loopback(topology))
    _store = SignedStore(
        None
        if secret is None
        else secret.derive("start", *(nonces[worker] for worker in range(layout.workers)))
    )
    return _store


def _hello(secret: Secret | None, worker: int) -> str:
    proof = "" if secret is None else secret.sign("hello", worker, _nonce).hex()
    return json.dumps([_nonce, proof])


def _checked(text: str, secret: Secret | None, worker: int, own: int) -> str:
    """The number of a worker that has this worker's secret, or none where this one has none."""
    nonce = proof = None
    with contextlib.suppress(ValueError):
        nonce, proof = json.loads(text)
    if not (isinstance(nonce, str) and isinstance(proof, str)):
        raise AuthenticationError(f"What is there for worker {worker} is no worker's word.", hint=HINT)
    if secret is None and not proof:
        return nonce
    with contextlib.suppress(ValueError):
        if secret is not None and secret.has_signed(bytes.fromhex(proof), "hello", worker, nonce):
            return nonce
    theirs = "another secret" if proof else "no secret"
    mine = "none" if secret is None else f"that from {secret.origin}"
    raise AuthenticationError(
        f"Worker {worker} has {theirs} of the job, and worker {own} has {mine}.",
        hint=HINT,
    )


def _warn(*, alone: bool) -> None:
    who = "other users of this machine, and others that reach it," if alone else "others in the network"
    logger.warning(
        "The processes of this job share no secret, so %s can change what its workers tell each other. No "
        "code is run by that, but it can end the job or change its course. TensorFlow's own servers carry "
        "out what anyone sends them. Hint: name one file of mode 600 with a secret in "
        "DTRAIN_SECRET_FILE for all of them, and keep their ports from others; see docs/security.md.",
        who,
    )


def _written(value: Any, secret: Secret | None, *, objects: bool) -> str:
    """A value as text, or why it is none."""
    try:
        return _PLAIN + messages.encode(value)
    except messages.NotPlainError as error:
        if not objects:
            raise
        problem = str(error)
    if secret is None:
        return _REFUSED + messages.encode(
            [
                f"broadcast was given what must be pickled ({problem}), but the processes of this job share "
                "no secret: whoever reaches the first worker's port could have them run code.",
                "Name one file of mode 600 with a secret in DTRAIN_SECRET_FILE for all of them, or broadcast "
                "numbers, text, arrays, and containers of them.",
            ]
        )
    try:
        return _PICKLED + base64.b64encode(cloudpickle.dumps(value)).decode()
    except Exception as error:  # picklers raise whatever the objects' own methods raise
        return _REFUSED + messages.encode([f"The value cannot be sent to other processes: {error}", ""])


def _read(text: str, worker: int, secret: Secret | None, *, objects: bool) -> Any:
    """The value in a text that `_written` made."""
    kind, content = text[:1], text[1:]
    if kind == _PICKLED and objects and secret is not None:  # which has signed it
        return pickle.loads(base64.b64decode(content))
    try:
        found = messages.decode(content)
    except ValueError:
        found, kind = None, ""
    if kind == _PLAIN:
        return found
    if kind == _REFUSED and isinstance(found, list) and len(found) == 2:
        problem, hint = (cleaned(str(each), _SHOWN) for each in found)  # unsigned, it may be a stranger's
        raise ConfigurationError(problem, hint=hint)
    raise AuthenticationError(f"What is there for worker {worker} is no worker's value.", hint=HINT)


def _remove_read(here: SignedStore, worker: int) -> None:
    """Deletes this worker's values that nobody reads any more.

    A worker publishes its value of a round when it has left the round before, with all values or an error.
    So who has got the values of all of round n knows that round n - 1 is over for everybody.
    """
    for number in [each for each in _kept if each < _all_read]:
        here.remove(_TOPIC, number, worker)
        _kept.remove(number)


def _wait(
    here: SignedStore,
    layout: ReplicaLayout,
    topic: str,
    number: int,
    worker: int,
    timeout: float | None,
    deadline: float,
) -> str:
    while True:
        left = max(0.001, min(_POLL, deadline - time.monotonic()))
        text = here.get(topic, number, worker, int(left * 1000))
        if text is not None:
            return text
        mpi.check_ended()
        # What this worker itself has said can be read, unless the link is broken: then nothing can.
        if here.get(topic, number, layout.worker, _ANSWER) is None:
            raise PeerMissingError(
                "The first worker, through which the workers talk, cannot be reached any more.",
                hint="see whether it runs, and whether its machine can be reached from this one",
            )
        if time.monotonic() >= deadline:
            raise PeerMissingError(
                f"Worker {worker} did not reach this point within {timeout:g} s.",
                hint="barrier, broadcast and fit must be called by every worker, equally often",
            )
