"""A frozen dataclass as command-line options and back: one field an option, with its help and its limits.

A field says the help, the type, the least value and the known words of its option once. It knows no command
and no recipe; rules across several fields are the dataclass's own.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, field, fields
from typing import Any

from dtrain.errors import ConfigurationError
from dtrain.words import check_word


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
) -> Any:
    """A field that is an option of the command line too.

    Args:
        default: its value where it is not given.
        help: what it means; the default is added to it by itself.
        metavar: what stands for the value in the help.
        type: makes the value of its text; by default the type of the default, or `str`. An option of `bool`
            takes no value.
        least: the least value, of a number.
        words: the words that it may be.
        near: other words, each with the known one to suggest.
        noun: what an error calls it; by default its name.
    """
    kind = type or (str if default is None else default.__class__)
    limits = {"least": least, "words": tuple(words), "near": near, "noun": noun}
    return field(default=default, metadata={"help": help, "metavar": metavar, "type": kind, **limits})


def positive_integer(text: str) -> int:
    """The value of an option that counts something, so is an integer of at least 1."""
    if not (text.isascii() and text.isdigit() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    return int(text)


def count(text: str) -> int:
    """The value of an option that counts something which there may be none of."""
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 0")
    return int(text)


def seconds(text: str) -> float:
    """The value of an option that is a time."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return found


def flag(name: str) -> str:
    """How the field of this name is written on the command line."""
    return "--" + name.replace("_", "-")


def own_fields(options: type, *, beyond: type | None = None) -> list[Field[Any]]:
    """The fields of a dataclass that are options, without those of another, its base."""
    known = {f.name for f in fields(beyond)} if beyond is not None else set()
    return [f for f in fields(options) if f.metadata and f.name not in known]


def check(options: Any) -> None:
    """Check the limits of each option by itself.

    Raises:
        ConfigurationError: a number is below its least value, or a word is not known.
    """
    for each in own_fields(type(options)):
        value, limits = getattr(options, each.name), each.metadata
        noun = limits["noun"] or each.name.replace("_", " ")
        if limits["words"]:
            check_word(noun, value, limits["words"], near=limits["near"])
        if None not in (value, limits["least"]) and value < limits["least"]:
            raise ConfigurationError(
                f"The {noun} is {value}, which is below {limits['least']}.",
                hint=f"Set it to {limits['least']} or more.",
            )


def declare(parser: argparse._ActionsContainer, options: list[Field[Any]]) -> dict[str, argparse.Action]:
    """Declare one option a field, in a parser or in a group of it.

    What the command line does not say does not come into the parsed arguments.

    Returns:
        The name of each field, and what stands for it in the parser.
    """
    declared = {}
    for each in options:
        more: dict[str, Any] = {"type": each.metadata["type"], "metavar": each.metadata["metavar"]}
        if each.metadata["type"] is bool:
            more = {"action": "store_true"}
        declared[each.name] = parser.add_argument(
            flag(each.name), default=argparse.SUPPRESS, help=help_of(each), **more
        )
    return declared


def help_of(option: Field[Any]) -> str:
    """What the help says of an option, with its default where it has one."""
    default = "" if option.default in (None, False) else f" (default: {option.default})"
    return f"{option.metadata['help']}{default}".replace("%", "%%")


def said(arguments: argparse.Namespace, options: list[Field[Any]]) -> dict[str, Any]:
    """Name and value of those options that the command line holds."""
    return {f.name: getattr(arguments, f.name) for f in options if hasattr(arguments, f.name)}


def to_arguments(options: Any) -> list[str]:
    """The command-line arguments that say the same."""
    values = {f.name: getattr(options, f.name) for f in own_fields(type(options))}
    return [f"{flag(name)}={value}" for name, value in values.items() if value is not None]
