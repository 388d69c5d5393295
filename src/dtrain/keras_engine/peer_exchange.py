"""Exchanges small Python values between the workers of a job, at a point that all workers reach.

It uses TensorFlow's coordination service, not the collectives, so it cannot mix with the all-reduces of
training. The service accepts values from anyone who can reach the first worker's port, so a value counts only
if a worker of this start of the job has signed it. The module is not for the tensors of a step.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import math
import pickle
import secrets
import socket
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import cloudpickle

from dtrain import cluster, events
from dtrain.cluster import mpi
from dtrain.cluster.secret import SIZE, Secret, job_secret, on_loopback
from dtrain.errors import AuthenticationError, ConfigurationError, PeerMissingError
from dtrain.keras_engine import messages
from dtrain.keras_engine.protocol import ReplicaLayout
from dtrain.log import logger
from dtrain.plain_text import cleaned
from dtrain.upstream import processes

HINT = (
    "Another user or machine can reach the first worker's port, or the workers have not the same "
    "DTRAIN_SECRET_FILE; see docs/security.md."
)

_TOPIC = "exchange"
_POLL = 10.0  # seconds between two checks that the service can still be reached
_ANSWER = 20_000  # milliseconds in which the service must return a value that it has

_SHOWN = 2000  # the most characters shown of another worker's error message
_HOST = 100  # the most characters kept of the name of another worker's host

# The first character of a message: a plain value, a pickled one, or the reason why the value cannot be sent.
_PLAIN, _PICKLED, _REFUSED = "jpe"


class SignedStore:
    """A key-value store for signed values, in TensorFlow's coordination service.

    A value that no worker of this start has signed for its key raises an error.

    Args:
        secret: the secret of this start of the job; None if the workers share none, and values are not
            signed.
        hosts: the name of each worker's host, by worker; empty until the workers have met.
    """

    def __init__(self, secret: Secret | None, hosts: Mapping[int, str] = MappingProxyType({})) -> None:
        self.secret = secret
        self.hosts = hosts

    def put(self, topic: str, number: int, worker: int, body: str) -> None:
        """Publishes a value.

        Args:
            topic: the topic of the value.
            number: the number of the value, among this worker's values of the topic.
            worker: this worker's number.
            body: the value, in ASCII.

        Raises:
            AuthenticationError: another value is published at this key already.
        """
        import tensorflow as tf

        key, text = self._key(topic, number, worker), self._signature(topic, number, worker, body) + body
        try:
            processes.set_shared(key, text)
        except tf.errors.AlreadyExistsError:
            # An equal value is this worker's own: the first request arrived, and only its answer was lost.
            if processes.get_shared(key, 1000) != text:
                raise _forged(topic, worker) from None

    def get(self, topic: str, number: int, worker: int, milliseconds: int) -> str | None:
        """A worker's value; None if the worker publishes none within `milliseconds`.

        Raises:
            AuthenticationError: no worker of this job has signed the value for this key.
        """
        import tensorflow as tf

        try:
            text = processes.get_shared(self._key(topic, number, worker), max(1, milliseconds))
        except (tf.errors.DeadlineExceededError, tf.errors.NotFoundError):
            return None
        if self.secret is None:
            return text
        signature, body = text[: 2 * SIZE], text[2 * SIZE :]
        if not self.secret.has_signed(_bytes(signature), "value", topic, number, worker, body):
            raise _forged(topic, worker)
        return body

    def remove(self, topic: str, number: int, worker: int) -> None:
        """Deletes a value that no worker will read any more."""
        import tensorflow as tf

        with contextlib.suppress(tf.errors.OpError):  # a service that has stopped keeps no values
            processes.delete_shared(self._key(topic, number, worker))

    def _key(self, topic: str, number: int, worker: int) -> str:
        """The key of a value; without the secret, the keys of later values cannot be guessed."""
        if self.secret is None:
            return f"dtrain/{topic}/{number}/{worker}"
        return f"dtrain/{topic}/{self.secret.sign('key', topic, number, worker).hex()[:32]}"

    def _signature(self, topic: str, number: int, worker: int, body: str) -> str:
        return "" if self.secret is None else self.secret.sign("value", topic, number, worker, body).hex()


def _bytes(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        return b""


def _forged(topic: str, worker: int) -> AuthenticationError:
    return AuthenticationError(
        f"At the place of a value of worker {worker} ({topic}) is one that this worker has not signed. It is "
        "not used.",
        hint=HINT,
    )


_rounds = itertools.count()
_kept: list[int] = []  # rounds of which this worker's value is still in the service
_all_read = 0  # no worker reads values of earlier rounds than this one any more
_nonce = secrets.token_hex(SIZE)
_store: SignedStore | None = None


def exchange(
    layout: ReplicaLayout, value: Any, *, timeout: float | None = None, objects: bool = False
) -> list[Any]:
    """All-gathers one small value per worker: publishes this worker's value and waits for the others'.

    All workers must call it, equally often.

    Args:
        layout: the layout of the strategy.
        value: a small value that `messages.encode` accepts.
        timeout: seconds to wait for the other workers; None waits as long as TensorFlow finds them alive.
        objects: whether to accept any value that can be pickled, if the workers share a secret. Unpickling
            runs code of the worker that sent the value. All workers must pass the same.

    Returns:
        The values, by worker.

    Raises:
        PeerMissingError: a worker published no value in time.
        AuthenticationError: the value found for a worker was not signed by a worker.
        ConfigurationError: a worker's value cannot be sent; all workers raise it.
        messages.NotPlainError: without `objects`, `messages.encode` does not accept the value.
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
        # Deleted here, where the service is needed anyway: at the end of a job it may have stopped.
        _remove_read(here, layout.worker)
        _kept.append(number)
        for other in (worker for worker in range(layout.workers) if worker != layout.worker):
            found[other] = _wait(here, layout, _TOPIC, number, other, timeout, deadline)
    _all_read = number
    return [_read(found[worker], worker, here.secret, objects=objects) for worker in range(layout.workers)]


def store(layout: ReplicaLayout, *, timeout: float | None = None) -> SignedStore:
    """The store in which the workers of this job publish values; the first call waits for all workers.

    Each worker publishes a random number and the name of its host. The signing key of this start is derived
    from all numbers. So a value that was signed in an earlier start, with the same secret, counts as forged.

    Args:
        layout: the layout of the strategy.
        timeout: seconds to wait for the other workers; None waits as long as TensorFlow finds them alive.

    Raises:
        PeerMissingError: a worker did not publish its number in time.
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
    # Its own is not read back: the service may hold one of an earlier start.
    nonces, hosts = {layout.worker: _nonce}, {layout.worker: socket.gethostname()}
    with events.waiting_for_others():
        for other in (worker for worker in range(layout.workers) if worker != layout.worker):
            hello = _wait(plain, layout, "hello", 0, other, timeout, deadline)
            nonces[other], hosts[other] = _checked(hello, secret, other, layout.worker)
    if secret is None and layout.worker == 0:
        _warn(alone=topology is not None and on_loopback(topology))
    ordered = [nonces[worker] for worker in range(layout.workers)]
    _store = SignedStore(None if secret is None else secret.derive("start", *ordered), hosts)
    return _store


def _hello(secret: Secret | None, worker: int) -> str:
    host = socket.gethostname()
    proof = "" if secret is None else secret.sign("hello", worker, _nonce, host).hex()
    return json.dumps([_nonce, host, proof])


def _checked(text: str, secret: Secret | None, worker: int, own: int) -> tuple[str, str]:
    """A worker's random number and its host, if it has the same secret as this worker, or neither has one.

    Raises:
        AuthenticationError: it has another secret, or the text is not a worker's.
    """
    nonce = host = proof = None
    with contextlib.suppress(ValueError):
        nonce, host, proof = json.loads(text)
    if not (isinstance(nonce, str) and isinstance(host, str) and isinstance(proof, str)):
        raise AuthenticationError(f"What is there for worker {worker} is no worker's word.", hint=HINT)
    if secret is None and not proof:
        return nonce, cleaned(host, _HOST)
    with contextlib.suppress(ValueError):
        if secret is not None and secret.has_signed(bytes.fromhex(proof), "hello", worker, nonce, host):
            return nonce, cleaned(host, _HOST)
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
    """A value as text, or the reason why it cannot be sent, which every worker then raises."""
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
    """The value in a text that `_written` made.

    Raises:
        ConfigurationError: the text gives the reason why the value cannot be sent.
        AuthenticationError: `_written` did not make the text.
    """
    kind, content = text[:1], text[1:]
    if kind == _PICKLED and objects and secret is not None:  # with a secret, the store checked the signature
        return pickle.loads(base64.b64decode(content))
    try:
        found = messages.decode(content)
    except ValueError:
        found, kind = None, ""
    if kind == _PLAIN:
        return found
    if kind == _REFUSED and isinstance(found, list) and len(found) == 2:
        problem, hint = (cleaned(str(each), _SHOWN) for each in found)  # without a secret, it may be forged
        raise ConfigurationError(problem, hint=hint)
    raise AuthenticationError(f"What is there for worker {worker} is no worker's value.", hint=HINT)


def _remove_read(here: SignedStore, worker: int) -> None:
    """Deletes this worker's values that no worker reads any more.

    A worker publishes its value of a round only after it has left the previous round, with all values or an
    error. So a worker that has all values of round n knows that every worker has left round n - 1.
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
        # This worker's own value is in the service. If it cannot be read, the service cannot be reached.
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
