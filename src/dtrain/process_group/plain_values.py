"""Writes plain values as text and reads them back, without running code of the process that wrote them.

Reading creates only numbers, text, arrays, containers of these, and dataclasses of dtrain's own that are
registered here.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

_ARRAY_KINDS = "biufcSUMm"  # numbers, text and times; arrays of objects would have to be pickled
# `dtype.str` of these. NumPy reads more from a text, by Python's parser, whose errors are of any type.
_DTYPE = re.compile(rf"[<>|=][{_ARRAY_KINDS}]\d{{1,9}}(\[\d{{0,9}}[a-zA-Z]{{1,2}}\])?")
_LARGE = 2**63
# What reading a damaged text can raise.
_UNREADABLE = ValueError, TypeError, LookupError, AttributeError, OverflowError, MemoryError, RecursionError

Class = TypeVar("Class", bound=type)
_classes: dict[str, type] = {}


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
        return [_packed(item) for item in value]
    if kind is dict:
        return {"dict": [[_packed(name), _packed(item)] for name, item in value.items()]}
    if kind in (tuple, set, frozenset):
        return {kind.__name__: [_packed(item) for item in value]}
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
        return [_unpacked(item) for item in found]
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
    return _classes[name](**{field: _unpacked(value) for field, value in fields.items()})


def _as_text(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _as_bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


_READERS: dict[str, Callable[[Any], Any]] = {
    "int": lambda content: int(content, 16),
    "dict": lambda content: {_unpacked(name): _unpacked(value) for name, value in content},
    "tuple": lambda content: tuple(_unpacked(item) for item in content),
    "set": lambda content: {_unpacked(item) for item in content},
    "frozenset": lambda content: frozenset(_unpacked(item) for item in content),
    "bytes": _as_bytes,
    "complex": lambda content: complex(*content),
    "path": Path,
    "array": _array,
    "scalar": lambda content: _array(content)[()],
    "record": _record,
}
