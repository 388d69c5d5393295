"""Converts a frozen dataclass to command-line options and back; each field is one option.

A field declares the help, the type, the least value and the known words of its option in one place. This
module knows no command and no recipe; rules across several fields are checked by the dataclass itself.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, field, fields
from typing import Any

from dtrain.base.counts import MOST, parse_count
from dtrain.base.words import check_word
from dtrain.errors import ConfigurationError

_KINDS = {"bool": bool, "float": float, "int": int, "str": str}  # by annotation


def option(
    default: Any,
    help: str,
    *,
    metavar: str = "",
    type: Callable[[str], Any] | None = None,
    least: int | None = None,
    words: Sequence[str] = (),
    near: Mapping[str, str] | None = None,
    noun: str = "",
    many: bool = False,
) -> Any:
    """A dataclass field that is also a command-line option.

    Args:
        default: the value if the option is not given.
        help: the option's help; the default is appended automatically.
        metavar: the placeholder for the value in the help.
        type: converts the option's text to its value; by default the field's own type. An option of type
            `bool` is a flag without a value.
        least: the least value, for a number.
        words: the only values that are allowed; empty allows all.
        near: further words that may have been meant, each with the allowed word to suggest for it.
        noun: the option's name in error messages; by default the field's name.
        many: whether the option can be given several times; the value is the list of all.
    """
    limits = {"least": least, "words": tuple(words), "near": near, "noun": noun, "many": many}
    return field(default=default, metadata={"help": help, "metavar": metavar, "type": type, **limits})


def positive_integer(text: str) -> int:
    """Parse an integer of at least 1; the `type` of an argument of `argparse`.

    Raises:
        argparse.ArgumentTypeError: the text is no such integer.
    """
    return _counted(text, 1)


def count(text: str) -> int:
    """Parse an integer of at least 0; the `type` of an argument of `argparse`.

    Raises:
        argparse.ArgumentTypeError: the text is no such integer.
    """
    return _counted(text, 0)


def _counted(text: str, least: int) -> int:
    number = parse_count(text)
    if number is None or number < least:
        highest = f" and at most {MOST}" if text.isascii() and text.isdigit() and number is None else ""
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not an integer of at least {least}{highest}")
    return number


def seconds(text: str) -> float:
    """Parse a positive, finite number of seconds; the `type` of an argument of `argparse`.

    Raises:
        argparse.ArgumentTypeError: the text is no such number.
    """
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a positive number of seconds")
    return number


def flag(name: str) -> str:
    """The command-line flag of a field, such as `--run-dir` for `run_dir`."""
    return "--" + name.replace("_", "-")


def own_fields(options: type, *, beyond: type | None = None) -> list[Field[Any]]:
    """The fields of a dataclass that are options, without those of the base class `beyond`."""
    known = {f.name for f in fields(beyond)} if beyond is not None else set()
    return [f for f in fields(options) if f.metadata and f.name not in known]


def check(options: Any) -> None:
    """Check each option separately against its own limits.

    Raises:
        ConfigurationError: a number is below its least value, or a word is not allowed.
    """
    for setting in own_fields(type(options)):
        value, limits = getattr(options, setting.name), setting.metadata
        noun = limits["noun"] or setting.name.replace("_", " ")
        if limits["words"]:
            check_word(noun, value, limits["words"], near=limits["near"])
        if None not in (value, limits["least"]) and value < limits["least"]:
            raise ConfigurationError(
                f"The {noun} is {value}, which is below {limits['least']}.",
                hint=f"Set {flag(setting.name)} to {limits['least']} or more.",
            )


def declare(parser: argparse._ActionsContainer, options: list[Field[Any]]) -> dict[str, argparse.Action]:
    """Declare one option per field, in a parser or in one of its groups.

    An option that is not given does not appear in the parsed arguments.

    Returns:
        The parser's action for each field's name.
    """
    declared = {}
    for setting in options:
        many = setting.metadata["many"]
        kind = setting.metadata["type"] or (
            str if many else _KINDS[str(setting.type).removesuffix(" | None")]
        )
        more: dict[str, Any] = {"type": kind, "metavar": setting.metadata["metavar"]}
        if kind is bool:
            more = {"action": "store_true"}
        if many:
            more["action"] = "append"
        declared[setting.name] = parser.add_argument(
            flag(setting.name), default=argparse.SUPPRESS, help=help_of(setting), **more
        )
    return declared


def help_of(option: Field[Any]) -> str:
    """The help of an option, followed by its default if it has one."""
    default = "" if option.default in (None, False) else f" (default: {option.default})"
    return f"{option.metadata['help']}{default}".replace("%", "%%")


def given_options(arguments: argparse.Namespace, options: list[Field[Any]]) -> dict[str, Any]:
    """The names and values of those options that were given on the command line."""
    return {f.name: getattr(arguments, f.name) for f in options if hasattr(arguments, f.name)}


def to_arguments(options: Any) -> list[str]:
    """The command-line arguments that give the same options."""
    values = {flag(f.name): getattr(options, f.name) for f in own_fields(type(options))}
    given = {name: value for name, value in values.items() if value is not None and value is not False}
    return [name if value is True else f"{name}={value}" for name, value in given.items()]
