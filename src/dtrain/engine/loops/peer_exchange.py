"""Exchanges small Python values between the workers of a job.

`exchange` is for a point that all workers reach. `WorkerTimes` sends the times of each epoch to the first
worker, and no worker waits for them. The values travel over dtrain's own connections
(`process_group/peers.py`), not over the transport, so they cannot mix with the all-reduces of training. The
module is not for the tensors of a step.

Plain values are written as text (`encode`). Reading them (`decode`) runs no code of the sender: it creates
only numbers, text, arrays, containers of these, and dataclasses of dtrain's own that are registered here.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import itertools
import json
import math
import pickle
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle
import numpy as np

from dtrain.base.plain_text import cleaned
from dtrain.engine.loops.operation import words
from dtrain.errors import AuthenticationError, ConfigurationError
from dtrain.interfaces.replica_layout import ReplicaLayout
from dtrain.process_group import peers
from dtrain.process_group.peer_link import HINT
from dtrain.telemetry import events
from dtrain.telemetry.training_clock import Totals

_SHOWN = 2000  # the most characters shown of another worker's error message

# The first character of a message: a plain value, a pickled one, or the reason why the value cannot be sent.
_PLAIN, _PICKLED, _REFUSED = "jpe"

_ARRAY_KINDS = "biufcSUMm"  # numbers, text and times; arrays of objects would have to be pickled
# `dtype.str` of these. NumPy reads more from a text, by Python's parser, whose errors are of any type.
_DTYPE = re.compile(rf"[<>|=][{_ARRAY_KINDS}]\d{{1,9}}(\[\d{{0,9}}[a-zA-Z]{{1,2}}\])?")
_LARGE = 2**63
# The fields of a message of `WorkerTimes`.
_TIMES = {"fit", "epoch", "step_seconds", "own_step_seconds", "reading", "between", "parts"}
_INTERVAL = 1.0  # the least seconds between two of these messages of a worker
# What reading a damaged text can raise.
_UNREADABLE = ValueError, TypeError, LookupError, AttributeError, OverflowError, MemoryError, RecursionError

Class = TypeVar("Class", bound=type)
_classes: dict[str, type] = {}
_fits = itertools.count()  # numbers of `fit` calls, the same on every worker


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
        layout: the layout of the strategy.
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
    if layout.workers == 1:
        return [value]
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
        found = connected.all_gather(body.encode(), timeout, operation=operation)
    texts = [each.decode("ascii", "replace") for each in found]
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
        found = decode(content)
    except ValueError:
        found, kind = None, ""
    if kind == _PLAIN:
        return found
    if kind == _REFUSED and isinstance(found, list) and len(found) == 2:
        problem, hint = (cleaned(str(each), _SHOWN) for each in found)  # without a secret, it may be forged
        raise ConfigurationError(problem, hint=hint)
    raise AuthenticationError(f"The message of worker {worker} does not hold a value.", hint=HINT)


class WorkerTimes:
    """The times of all workers of a job, as far as the first worker has received them.

    Args:
        layout: the strategy's layout; None under parameter servers, where workers do not wait for each other.

    Attributes:
        first: whether this is the first worker, which receives the others' times.
    """

    def __init__(self, layout: ReplicaLayout | None) -> None:
        self._layout = ReplicaLayout() if layout is None else layout
        self.first = self._layout.worker == 0
        self._fit = next(_fits)
        self._mine: dict[str, Any] | None = None
        self._unsent = False
        self._sent_at = -_INTERVAL
        self._found: dict[int, dict[str, Any]] = {}

    def publish(self, epoch: int, before: Totals, now: Totals, parts: dict[str, float]) -> None:
        """Publishes this worker's times of an epoch, at most once a second.

        Args:
            epoch: the number of the epoch, from 0.
            before: the totals at the beginning of the epoch.
            now: the totals at its end.
            parts: seconds of the epoch by part (`events.PARTS`).
        """
        each, own, reading, between = now.per_step(before)
        if each is None:
            return
        self._mine = {
            "epoch": epoch,
            "step_seconds": round(each, 6),
            "own_step_seconds": None if own is None else round(own, 6),
            "reading": reading,
            "between": between,
            "parts": dict(parts),
        }
        self._unsent = True
        if time.monotonic() - self._sent_at >= _INTERVAL:
            self.publish_rest()

    def publish_rest(self) -> None:
        """Publishes times that were held back to limit the messages."""
        connected = peers.connected()
        if connected is not None and self._mine is not None and self._unsent and not self.first:
            message = encode({"fit": self._fit, **self._mine})
            connected.send_to_first(message.encode())
        self._unsent, self._sent_at = False, time.monotonic()

    def known(self) -> list[dict[str, Any]]:
        """The newest times received from each worker, possibly of different epochs; [] on other workers.

        Raises:
            AuthenticationError: a message was not written by its worker.
        """
        if not self.first or self._layout.workers == 1:
            return []
        if self._mine is not None:
            self._found[0] = self._mine
        connected = peers.connected()
        for worker, text in [] if connected is None else connected.receive_notes():
            message = _decoded(text.decode("ascii", "replace"), worker)
            if message.pop("fit") == self._fit:  # else it is left from a `fit` that ended with an error
                self._found[worker] = message
        hosts = {} if connected is None else connected.hosts
        return [
            {"task": f"worker {worker}", "host": hosts.get(worker, ""), **found}
            for worker, found in sorted(self._found.items())
        ]


def _decoded(text: str, worker: int) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        found = decode(text)
        if isinstance(found, dict) and set(found) == _TIMES:
            return found
    raise AuthenticationError(f"The message of worker {worker} does not hold step times.", hint=HINT)


class NotPlainError(TypeError):
    """A value is not of the types that `encode` knows."""


def sendable(kind: Class) -> Class:
    """Registers a dataclass of plain values, whose constructor must do nothing but store them."""
    _classes[kind.__name__] = kind
    return kind


def encode(value: Any) -> str:
    """Writes a value as ASCII text.

    The types are None, bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict, `Path`,
    NumPy's arrays and scalars of numbers, text and times, and `sendable` dataclasses; no subclasses of these.

    Raises:
        NotPlainError: the value, or a part of it, has another type, or it contains itself.
    """
    try:
        return json.dumps(_packed(value), separators=(",", ":"))
    except RecursionError:
        raise NotPlainError("the value contains itself, or is nested too deep") from None


def decode(text: str) -> Any:
    """Reads the value back from a text that `encode` has written.

    Raises:
        ValueError: the text was not written by `encode`.
    """
    try:
        return _unpacked(json.loads(text))
    except _UNREADABLE as error:
        raise ValueError(f"the text holds no value: {type(error).__name__}") from None


def _packed(value: Any) -> Any:
    kind = type(value)
    if value is None or kind in (bool, str, float):
        return value
    if kind is int:
        return value if -_LARGE < value < _LARGE else {"int": hex(value)}
    if kind is list:
        return [_packed(each) for each in value]
    if kind is dict:
        return {"dict": [[_packed(name), _packed(each)] for name, each in value.items()]}
    if kind in (tuple, set, frozenset):
        return {kind.__name__: [_packed(each) for each in value]}
    if kind is bytes:
        return {"bytes": _as_text(value)}
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    if kind is type(Path()):
        return {"path": str(value)}
    if (kind is np.ndarray or isinstance(value, np.generic)) and value.dtype.kind in _ARRAY_KINDS:
        name = "array" if kind is np.ndarray else "scalar"
        return {name: [value.dtype.str, list(value.shape), _as_text(value.tobytes())]}
    if _classes.get(kind.__name__) is kind:
        fields = {field.name: _packed(getattr(value, field.name)) for field in dataclasses.fields(kind)}
        return {"record": [kind.__name__, fields]}
    raise NotPlainError(f"a {kind.__name__} is no plain value")


def _unpacked(found: Any) -> Any:
    if isinstance(found, list):
        return [_unpacked(each) for each in found]
    if not isinstance(found, dict):
        return found
    ((name, content),) = found.items()
    return _READERS[name](content)


def _array(content: Any) -> np.ndarray:
    name, shape, text = content
    if not _DTYPE.fullmatch(name):
        raise ValueError("no type of an array")
    dtype = np.dtype(name)
    raw = _as_bytes(text)
    if min([0, *shape]) < 0 or math.prod(shape) * dtype.itemsize != len(raw):
        raise ValueError("no array")
    return np.ndarray(tuple(shape), dtype, raw).copy()


def _record(content: Any) -> Any:
    name, fields = content
    return _classes[name](**{field: _unpacked(each) for field, each in fields.items()})


def _as_text(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _as_bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


_READERS: dict[str, Callable[[Any], Any]] = {
    "int": lambda content: int(content, 16),
    "dict": lambda content: {_unpacked(name): _unpacked(each) for name, each in content},
    "tuple": lambda content: tuple(_unpacked(each) for each in content),
    "set": lambda content: {_unpacked(each) for each in content},
    "frozenset": lambda content: frozenset(_unpacked(each) for each in content),
    "bytes": _as_bytes,
    "complex": lambda content: complex(*content),
    "path": Path,
    "array": _array,
    "scalar": lambda content: _array(content)[()],
    "record": _record,
}
