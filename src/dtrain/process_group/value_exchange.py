"""Exchanges small Python values between the workers of a job, at a point that all of them reach.

The values travel over dtrain's own connections (`peers.py`), not over the transport, so they cannot mix with
the all-reduces of training. The module is not for the tensors of a step.
"""

from __future__ import annotations

import base64
import pickle
from typing import Any

import cloudpickle

from dtrain.base.plain_text import cleaned
from dtrain.errors import AuthenticationError, ConfigurationError
from dtrain.interfaces.replica_layout import ReplicaLayout
from dtrain.process_group import peers
from dtrain.process_group.peer_link import HINT
from dtrain.process_group.plain_values import NotPlainError, decode, encode
from dtrain.process_group.running_operations import words
from dtrain.telemetry import events

_SHOWN = 2000  # the most characters shown of another worker's error message

# The first character of a message: a plain value, a pickled one, or the reason why the value cannot be sent.
_PLAIN, _PICKLED, _REFUSED = "jpe"


def exchange(
    layout: ReplicaLayout,
    value: Any,
    *,
    timeout: float | None = None,
    objects: bool = False,
    call: str = "",
    what: str = "",
) -> list[Any]:
    """All-gathers one small value per worker: sends this worker's value and waits for the others'.

    All workers must call it, equally often.

    Args:
        layout: the layout of the strategy. Where its workers exchange nothing (`apart`), all are taken to
            have this worker's value.
        value: a small value that `encode` accepts.
        timeout: seconds to wait for the other workers; None waits as long as they are alive.
        objects: whether to accept any value that can be pickled, if the workers share a secret. Unpickling
            runs code of the worker that sent the value. All workers must pass the same.
        call: the call of the user's program that exchanges, if it is one: "barrier".
        what: what is exchanged, for the error of workers that exchange different things.

    Returns:
        The values, by worker.

    Raises:
        PeerMissingError: a worker is lost, or sent no value in time.
        OperationMismatchError: another worker does not exchange this, but does something else.
        AuthenticationError: a value was not sent by a worker of this job.
        ConfigurationError: the workers are not connected, or a worker's value cannot be sent; all raise it.
        NotPlainError: without `objects`, `encode` does not accept the value.
    """
    if layout.workers == 1 or layout.apart:
        return [value] * layout.workers
    connected = peers.connected()
    if connected is None:
        raise ConfigurationError(
            f"No strategy of dtrain's connects the {layout.workers} processes of this job.",
            hint="make dtrain.MultiWorkerMirroredStrategy() in place of tf.distribute's, before this call",
        )
    signed = connected.secret is not None
    body = _written(value, signed=signed, objects=objects)
    with events.waiting_for_others():
        operation = words(f"{call}\n{what or 'an exchange of values'}")
        gathered = connected.all_gather(body.encode(), timeout, operation=operation)
    texts = [item.decode("ascii", "replace") for item in gathered]
    return [_read(text, worker, pickled=objects and signed) for worker, text in enumerate(texts)]


def _written(value: Any, *, signed: bool, objects: bool) -> str:
    """A value as text, or the reason why it cannot be sent, which every worker then raises."""
    try:
        return _PLAIN + encode(value)
    except NotPlainError as error:
        if not objects:
            raise
        problem = str(error)
    if not signed:
        return _REFUSED + encode(
            [
                f"broadcast was given a value that must be pickled ({problem}), but the processes of "
                "this job share no secret: anyone who changes their messages could make them run code.",
                "Name one file of mode 600 with a secret in DTRAIN_SECRET_FILE for all of them, or broadcast "
                "numbers, text, arrays, and containers of them.",
            ]
        )
    try:
        return _PICKLED + base64.b64encode(cloudpickle.dumps(value)).decode()
    except Exception as error:  # picklers raise whatever the objects' own methods raise
        return _REFUSED + encode([f"The value cannot be sent to other processes: {error}", ""])


def _read(text: str, worker: int, *, pickled: bool) -> Any:
    """The value in a text that `_written` made.

    Args:
        text: the text.
        worker: the worker that sent it.
        pickled: whether the value may be pickled; then the text's signature was checked.

    Raises:
        ConfigurationError: the text gives the reason why the value cannot be sent.
        AuthenticationError: `_written` did not make the text.
    """
    kind, content = text[:1], text[1:]
    if kind == _PICKLED and pickled:
        return pickle.loads(base64.b64decode(content))
    try:
        value = decode(content)
    except ValueError:
        value, kind = None, ""
    if kind == _PLAIN:
        return value
    if kind == _REFUSED and isinstance(value, list) and len(value) == 2:
        problem, hint = (cleaned(str(part), _SHOWN) for part in value)  # without a secret, it may be forged
        raise ConfigurationError(problem, hint=hint)
    raise AuthenticationError(f"The message of worker {worker} does not hold a value.", hint=HINT)
