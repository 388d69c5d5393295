"""`--config FILE`: the arguments of a command in a TOML file, whose keys are those that its parser declares.

It knows no option by name, and checks values by the parser's own types. The command line takes precedence.
"""

from __future__ import annotations

import argparse
import re
import reprlib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dtrain.base import safe_files
from dtrain.base.counts import MOST
from dtrain.errors import ConfigurationError, known_are

_FLAG = "--config"
_MOST_BYTES = 256 << 10
_MOST_DOTS = 500


def add_config_argument(parser: argparse.ArgumentParser) -> None:
    """Declare `--config`; the parser calls `with_config` before it parses."""
    parser.add_argument(
        _FLAG,
        metavar="FILE.toml",
        help="a TOML file of options: each key is an option without its leading dashes. Options on "
        "the command line take precedence",
    )


def with_config(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> list[str]:
    """The arguments, extended by those of the file that `--config` among them names.

    The arguments take precedence over options of the file. The file's positional arguments follow the given
    ones.

    Raises:
        ConfigurationError: the file cannot be read, has an unknown key, or a value of a wrong type.
    """
    given, words = _typed(parser, arguments)
    path = given.get("config")
    if path is None:
        return list(arguments)
    options: list[str] = []
    positional: dict[str, list[str]] = {}
    for key, action, value in _entries(parser, Path(path).expanduser()):
        texts = _as_words(action, value, f"{path}: {key}")
        if not action.option_strings:
            positional[action.dest] = texts
        elif action.dest not in given:
            options += texts
    missing = [declared.dest for declared in _positionals(parser)][len(words) :]
    # A positional argument needs all earlier ones; if one is missing, the parser names it.
    end = next((number for number, name in enumerate(missing) if name not in positional), len(missing))
    return [*options, *arguments, *(word for name in missing[:end] for word in positional[name])]


def _typed(
    parser: argparse.ArgumentParser, arguments: Sequence[str]
) -> tuple[dict[str, str | None], list[str]]:
    """The options among the arguments, by the attribute that they set, and the words that are no options."""
    owns_rest = any(action.nargs == argparse.REMAINDER for action in parser._actions)
    given: dict[str, str | None] = {}
    words: list[str] = []
    waiting = list(arguments)
    while waiting:
        word = waiting.pop(0)
        if word == "--":
            return given, [*words, *waiting]
        name, equals, value = word.partition("=")
        action = parser._option_string_actions.get(name)
        if action is None and not word.startswith("--"):
            action = parser._option_string_actions.get(word[:2])  # a value attached, such as -n2
            equals = "="
        if action is None:
            words.append(word)
            if owns_rest:
                return given, [*words, *waiting]
            continue
        takes = action.nargs is None and not equals and bool(waiting)
        given[action.dest] = waiting.pop(0) if takes else value
    return given, words


def _positionals(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if not action.option_strings]


def _entries(parser: argparse.ArgumentParser, path: Path) -> list[tuple[str, argparse.Action, Any]]:
    """The keys of the file with the action of each, and its value."""
    own = [action for action in parser._actions if action.dest not in ("help", "config")]
    names = [option.lstrip("-") for action in own for option in action.option_strings or [action.dest]]
    actions = {
        option.lstrip("-").replace("-", "_"): action
        for action in own
        for option in action.option_strings or [action.dest]
    }
    entries: dict[str, tuple[str, argparse.Action, Any]] = {}
    for key, value in _read(path).items():
        action = actions.get(key.replace("-", "_"))
        if action is None:
            raise ConfigurationError(f"{path}: there is no option {key!r}.", hint=known_are(names, key))
        if action.dest in entries:
            raise ConfigurationError(
                f"{path}: {entries[action.dest][0]} and {key} are the same option.", hint="Keep one of them."
            )
        entries[action.dest] = key, action, value
    return list(entries.values())


def _read(path: Path) -> Mapping[str, Any]:
    try:
        text = safe_files.read_text(path, _MOST_BYTES, links=True)
        # The time that tomllib takes for a key grows with the square of its parts.
        if any(part.count(".") > _MOST_DOTS for part in re.split("[=,\n]", text)):
            raise RecursionError
        return tomllib.loads(text)
    except RecursionError:
        raise ConfigurationError(
            f"The file of {_FLAG}, {path}, is nested too deeply to be read.",
            hint='Write one option on a line, such as workers = 2 or script = "train.py".',
        ) from None
    except OSError as error:
        raise ConfigurationError(
            f"The file of {_FLAG}, {path}, cannot be read: {error.strerror}.", hint="Check the path."
        ) from error
    except ValueError as error:  # also an encoding error
        raise ConfigurationError(
            f"The file of {_FLAG}, {path}, is not valid TOML: {error}.",
            hint='Write one option on a line, such as workers = 2 or script = "train.py".',
        ) from error


def _as_words(action: argparse.Action, value: Any, place: str) -> list[str]:
    """The words of the command line that stand for an entry of the file."""
    flag = max(action.option_strings, key=len, default="")
    if action.nargs == 0 or (action.nargs == "?" and isinstance(value, bool)):
        if not isinstance(value, bool):
            raise _wrong(place, value, "true or false")
        return [flag] if value else []
    if action.nargs == argparse.REMAINDER or isinstance(action, argparse._AppendAction):
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise _wrong(place, value, 'a list of strings, such as ["a", "b"]')
        return [f"{flag}={item}" for item in value] if flag else value
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise _wrong(place, value, "one value")
    if isinstance(value, int) and abs(value) > MOST:
        raise ConfigurationError(f"{place} is more than {MOST}.", hint=f"Write a number up to {MOST}.")
    text = value if isinstance(value, str) else repr(value)
    if action.type in (None, str):
        if not isinstance(value, str):
            raise _wrong(place, value, "a string, in quotes")
    elif callable(action.type):
        try:
            parsed = action.type(text)
        except (argparse.ArgumentTypeError, TypeError, ValueError) as error:
            problem = (
                str(error) if isinstance(error, argparse.ArgumentTypeError) else "this is not a valid number"
            )
            raise ConfigurationError(
                f"{place} is {reprlib.repr(value)}: {problem}.",
                hint=f"Give a value that {flag or action.dest} accepts.",
            ) from None
        if isinstance(value, str) and isinstance(parsed, int | float) and _is_number(value):
            raise _wrong(place, value, "a number, without quotes")
    return [f"{flag}={text}" if flag else text]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _wrong(place: str, value: object, wanted: str) -> ConfigurationError:
    kinds = {bool: "a boolean", str: "a string", list: "a list", dict: "a table"}
    kind = kinds.get(type(value), "a number" if isinstance(value, int | float) else "a date or time")
    return ConfigurationError(f"{place} is {reprlib.repr(value)}, {kind}.", hint=f"Write {wanted}.")
