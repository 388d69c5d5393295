"""Encodes dataclasses as JSON objects and parses them; the types of a dataclass's fields are its schema.

This module knows no message. The type of a field is a scalar of JSON, another dataclass, `Sequence`,
`Mapping` with texts as keys, a union of these, or one of them `Annotated` with rules. A rule is a container
of the allowed values, such as `range(10)`, or a function that returns the field's value or raises ValueError.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any


class Malformed(ValueError):  # noqa: N818 - callers catch it
    """Received bytes are not a message of the schema."""


def to_json(message: Any) -> dict[str, Any]:
    """The JSON object of a message: its fields, and the name of its class as "kind"."""
    return {"kind": type(message).__name__, **dataclasses.asdict(message)}


def load(text: bytes) -> dict[str, Any]:
    """The JSON object in a text; raises Malformed if it has none."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        raise Malformed("no JSON") from None
    if not isinstance(content, dict):
        raise Malformed("no object")
    return content


def from_json(content: dict[str, Any], messages: Any, *, tolerant: bool = False) -> Any:
    """The message of a JSON object.

    Args:
        content: the object.
        messages: the union of the dataclasses of all messages.
        tolerant: whether unknown fields are ignored, a field that is not there is null, and a field whose
            value does not fit takes its default if it has one. Otherwise an object that does not fit exactly
            is malformed.

    Raises:
        Malformed: the object is none of the messages.
    """
    kinds = {kind.__name__: kind for kind in typing.get_args(messages)}
    kind = content.get("kind")
    if not isinstance(kind, str) or kind not in kinds:
        raise Malformed("no known kind")
    fields = {name: value for name, value in content.items() if name != "kind"}
    return _dataclass(fields, kinds[kind], tolerant=tolerant)


@functools.cache
def _types(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def _dataclass(content: Any, kind: Any, *, tolerant: bool = False) -> Any:
    hints, values = _types(kind), {}
    if not isinstance(content, dict) or not (tolerant or content.keys() == hints.keys()):
        raise Malformed("other fields")
    for name, hint in hints.items():
        try:
            values[name] = _value(content.get(name), hint)
        except ValueError:
            if not (tolerant and hasattr(kind, name)):  # the class has the defaults as attributes
                raise Malformed(f"another value of {name}") from None
    return kind(**values)


def _value(value: Any, hint: Any) -> Any:
    """The value of a field; no number is a boolean, and every number is small and finite."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        value = _value(value, arguments[0])
        for rule in arguments[1:]:
            if callable(rule):
                value = rule(value)
            elif value not in rule:
                raise Malformed("out of range")
        return value
    if origin in (typing.Union, types.UnionType):
        for argument in arguments:
            try:
                return _value(value, argument)
            except ValueError:
                pass
    elif dataclasses.is_dataclass(hint):
        return _dataclass(value, hint)
    elif origin is Sequence and isinstance(value, list):
        return [_value(item, arguments[0]) for item in value]
    elif origin is Mapping and isinstance(value, dict):
        return {name: _value(item, arguments[1]) for name, item in value.items()}
    elif hint in (int, float):
        if type(value) in (int, hint) and abs(value) < 1 << 63:
            return value
    elif type(value) is hint:
        return value
    raise Malformed("another type")
