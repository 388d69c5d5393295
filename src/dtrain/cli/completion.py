"""Shell completion of `dtrain` by argcomplete: `eval "$(register-python-argcomplete dtrain)"`.

It only declares the possible words. It is imported only when a shell asks for completions.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable, Mapping
from typing import Any

import argcomplete
from argcomplete.completers import FilesCompleter

from dtrain.cli.parser import Parser
from dtrain.recipes import RECIPES
from dtrain.strategies.registry import names

_VALUES = {"recipe": list(RECIPES), "strategy": list(names())}


class _Completer(FilesCompleter):
    """Completes an argument by its known values; by file names if it has none."""

    def __call__(self, prefix: str, **facts: Any) -> list[str]:
        return _VALUES.get(facts["action"].dest) or super().__call__(prefix, **facts)


def answer(commands: Mapping[str, Callable[[ArgumentParser], None]]) -> None:
    """Print the completions of the typed words for the shell, and end the process.

    Args:
        commands: each command's name, and the function that declares its arguments.
    """
    parser = Parser(prog="dtrain")
    parsers = parser.add_subparsers()
    for name, add_arguments in commands.items():
        add_arguments(parsers.add_parser(name))
    argcomplete.autocomplete(parser, default_completer=_Completer())
