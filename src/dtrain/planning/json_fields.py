"""Reads the JSON files of a plan: checked field by field, with an error that names the file and the field.

A file may come from anybody. So its size, lists and numbers have limits, and unknown fields are errors.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dtrain.base import safe_files
from dtrain.errors import ConfigurationError, known_are

_MOST_BYTES = 8 << 20
_MOST_ENTRIES = 100_000
_LONGEST_TEXT = 2000
MOST = 1e18
"""The largest number that a file may have."""


class JsonFields:
    """The fields of one JSON object, taken one after another.

    Args:
        content: what the file has there.
        place: what errors call it, such as "model.json: layers[3]".
    """

    def __init__(self, content: Any, place: str) -> None:
        if not isinstance(content, dict):
            raise _wrong(place, content, "an object, such as {...}")
        self.place = place
        self._content = content
        self._taken: list[str] = []

    def text(self, name: str, default: str | None = None) -> str:
        """A text; required without a default."""
        value = self._take(name, default)
        if not isinstance(value, str) or len(value) > _LONGEST_TEXT or not value.isprintable():
            raise _wrong(f"{self.place}: {name}", value, "a text of one line")
        return value

    def word(self, name: str, known: Sequence[str], default: str | None = None) -> str:
        """One of the known words."""
        value = self.text(name, default)
        if value not in known:
            raise ConfigurationError(
                f"{self.place}: {name} is {reprlib.repr(value)}.", hint=known_are(known, value)
            )
        return value

    def number(
        self, name: str, default: float | None = None, *, least: float = 0, most: float = MOST
    ) -> float:
        """A finite number from `least` to `most`; required without a default."""
        value = self.number_or_none(name, least=least, most=most)
        if value is None and default is None:
            raise ConfigurationError(f"{self.place} has no {name}.", hint=f"Add {name}, a number.")
        return default if value is None else value  # type: ignore[return-value]

    def number_or_none(self, name: str, *, least: float = 0, most: float = MOST) -> float | None:
        """A number as `number`; None if the field is null or is not there."""
        value = self._take(name, None, optional=True)
        return None if value is None else _number(f"{self.place}: {name}", value, least, most)

    def whole(self, name: str, default: int | None = None, *, least: int = 0, most: int = 10**15) -> int:
        """A whole number from `least` to `most`; required without a default."""
        value = self.number(name, default, least=least, most=most)
        if value != int(value):
            raise _wrong(f"{self.place}: {name}", value, "a whole number")
        return int(value)

    def flag_or_none(self, name: str) -> bool | None:
        """True or false; None if the field is null or is not there."""
        value = self._take(name, None, optional=True)
        if value is not None and not isinstance(value, bool):
            raise _wrong(f"{self.place}: {name}", value, "true or false")
        return value

    def numbers(self, name: str) -> list[float]:
        """A list of numbers of at least 0."""
        values = self._entries(name, self._take(name, None))
        return [_number(f"{self.place}: {name}[{i}]", value, 0, MOST) for i, value in enumerate(values)]

    def object(self, name: str) -> JsonFields:
        """An object."""
        return JsonFields(self._take(name, None), f"{self.place}: {name}")

    def object_or_none(self, name: str) -> JsonFields | None:
        """An object; None if the field is null or is not there."""
        value = self._take(name, None, optional=True)
        return None if value is None else JsonFields(value, f"{self.place}: {name}")

    def objects(self, name: str, *, optional: bool = False) -> list[JsonFields]:
        """A list of one object or more; also of none, or no such field, if it is optional."""
        given = self._take(name, None, optional=optional)
        values = [] if optional and given is None else self._entries(name, given)
        if not values and not optional:
            raise _wrong(f"{self.place}: {name}", values, "a list of one object or more")
        return [JsonFields(value, f"{self.place}: {name}[{i}]") for i, value in enumerate(values)]

    def check_all_taken(self) -> None:
        """Raises a ConfigurationError if there is a field that nothing has asked for."""
        for name in self._content:
            if name not in self._taken:
                raise ConfigurationError(
                    f"{self.place} has an unknown field {reprlib.repr(name)}.",
                    hint=known_are(self._taken, str(name)[:100]),
                )

    def _take(self, name: str, default: Any, *, optional: bool = False) -> Any:
        self._taken.append(name)
        value = self._content.get(name, default)
        if value is None and not optional:
            raise ConfigurationError(f"{self.place} has no {name}.", hint=f"Add the field {name}.")
        return value

    def _entries(self, name: str, value: Any) -> list[Any]:
        if not isinstance(value, list) or len(value) > _MOST_ENTRIES:
            raise _wrong(f"{self.place}: {name}", value, f"a list of at most {_MOST_ENTRIES:,} entries")
        return value


def read_fields(path: Path) -> JsonFields:
    """The object in a file of JSON.

    Raises:
        ConfigurationError: the file cannot be read, is too large, or has no JSON object.
    """
    try:
        content = safe_files.read_json(path, _MOST_BYTES, links=True)
    except OSError as error:
        raise ConfigurationError(
            f"{path} cannot be read: {error.strerror or error}.", hint="Check the path."
        ) from error
    except ValueError as error:
        raise ConfigurationError(
            f"{path} is not valid JSON: {error}.", hint="docs/planning.md shows the form of the file."
        ) from error
    return JsonFields(content, path.name)


def _number(place: str, value: Any, least: float, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong(place, value, "a number")
    if not least <= value <= most:
        raise _wrong(place, value, f"a number from {least:g} to {most:g}")
    return float(value)


def _wrong(place: str, value: Any, wanted: str) -> ConfigurationError:
    return ConfigurationError(f"{place} is {reprlib.repr(value)}.", hint=f"Write {wanted}.")
