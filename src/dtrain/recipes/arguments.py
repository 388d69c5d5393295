"""A frozen dataclass as command-line arguments and back: one option a field, its help beside its default.

It knows no recipe and checks no value beyond its type; the dataclass does.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import Field, field, fields
from typing import Any


def option(default: Any, help: str, *, metavar: str, type: Callable[[str], Any] = str) -> Any:
    """A field that is an option of the command line too.

    Args:
        default: its value where it is not said.
        help: what it means; the default is added to it by itself.
        metavar: what stands for the value in the help.
        type: makes the value of its text.
    """
    return field(default=default, metadata={"help": help, "metavar": metavar, "type": type})


def flag(name: str) -> str:
    """How the field of this name is written on the command line."""
    return "--" + name.replace("_", "-")


def own_fields(options: type, *, beyond: type | None = None) -> list[Field[Any]]:
    """The fields of a dataclass that are options, without those of another, its base."""
    known = {f.name for f in fields(beyond)} if beyond is not None else set()
    return [f for f in fields(options) if f.metadata and f.name not in known]


def declare(parser: argparse._ActionsContainer, options: list[Field[Any]]) -> dict[str, argparse.Action]:
    """Declare one option a field, in a parser or in a group of it.

    What the command line does not say does not come into the parsed arguments.

    Returns:
        The name of each field, and what stands for it in the parser.
    """
    return {
        each.name: parser.add_argument(
            flag(each.name),
            type=each.metadata["type"],
            default=argparse.SUPPRESS,
            metavar=each.metadata["metavar"],
            help=help_of(each),
        )
        for each in options
    }


def help_of(option: Field[Any]) -> str:
    """What the help says of an option, with its default where it has one."""
    default = "" if option.default is None else f" (default: {option.default})"
    return f"{option.metadata['help']}{default}".replace("%", "%%")


def said(arguments: argparse.Namespace, options: list[Field[Any]]) -> dict[str, Any]:
    """Name and value of those options that the command line holds."""
    return {f.name: getattr(arguments, f.name) for f in options if hasattr(arguments, f.name)}


def to_arguments(options: Any) -> list[str]:
    """The command-line arguments that say the same."""
    values = {f.name: getattr(options, f.name) for f in own_fields(type(options))}
    return [f"{flag(name)}={value}" for name, value in values.items() if value is not None]
