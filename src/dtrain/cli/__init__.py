"""The `dtrain` command: finds the module of a sub-command, runs it, and shows errors as one message.

Each command is a module with `HELP`, `add_arguments(parser)` and `run(args) -> int`. It is imported only when
it is needed, and it must not import TensorFlow before `run`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence
from typing import Protocol, cast

from dtrain.cli.parser import Parser
from dtrain.environments import mpi_start, settings
from dtrain.errors import DtrainError, known_are
from dtrain.process_group import control

COMMANDS = {
    "init": "dtrain.cli.init",
    "launch": "dtrain.cli.launch",
    "submit": "dtrain.cli.submit",
    "report": "dtrain.cli.report",
    "runs": "dtrain.cli.runs",
    "train": "dtrain.cli.train",
    "strategies": "dtrain.cli.strategies",
    "bench": "dtrain.cli.bench",
    "plan": "dtrain.cli.plan",
    "conformance": "dtrain.cli.conformance",
    "env": "dtrain.cli.env",
    "doctor": "dtrain.cli.doctor",
    "explain": "dtrain.cli.explain",
}
"""The module of each command, by the command's name."""

_WORDS = {"help": "--help", "version": "--version"}  # words accepted as commands, and their options


class Command(Protocol):
    """The interface of a command's module; `HELP` is its one-line description."""

    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the command's arguments."""

    def run(self, args: argparse.Namespace) -> int:
        """Run the command and return its exit status."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `dtrain` with these arguments (by default the process's own) and return its exit status.

    Invalid arguments, and every DtrainError that a command raises, print one message to standard error and
    return 2; Ctrl-C returns 130. Any other exception is raised again after its message.
    """
    if argv is None and "_ARGCOMPLETE" in os.environ:  # a shell asks for completions
        from dtrain.cli import completion

        completion.answer({name: _load(name).add_arguments for name in COMMANDS})
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is None and not settings.launched():  # a task's arguments are not what the user typed
        os.environ["DTRAIN_COMMAND"] = json.dumps(["dtrain", *arguments])
    try:
        if arguments and arguments[0] in _WORDS:
            arguments = [*arguments[1:], _WORDS[arguments[0]]]
        if arguments and not arguments[0].startswith("-"):
            return _run_command(arguments[0], arguments[1:])
        return _run_top(arguments)
    except DtrainError as error:
        control.note_failure(error.message)  # if this process is a chief, its servers must end as failed too
        mpi_start.note_failure()
        sys.stdout.flush()
        print(f"dtrain: error: {error}", file=sys.stderr)
        return 2
    except Exception as error:  # Python then prints the traceback
        sys.stdout.flush()
        print(f"dtrain: error: {type(error).__name__}: {error}", file=sys.stderr)
        raise
    except KeyboardInterrupt:
        print("dtrain: interrupted", file=sys.stderr)
        return 130
    except SystemExit as stop:  # argparse exits by SystemExit, but main() returns a number
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)


def _run_command(name: str, arguments: Sequence[str]) -> int:
    if name not in COMMANDS:
        print(f"dtrain: error: there is no command {name!r}. {known_are(COMMANDS, name)}", file=sys.stderr)
        return 2
    command = _load(name)
    parser = Parser(prog=f"dtrain {name}", description=command.HELP)
    command.add_arguments(parser)
    return command.run(parser.parse_args(arguments))


def _run_top(arguments: Sequence[str]) -> int:
    parser = Parser(
        prog="dtrain",
        usage="dtrain [--help] [--version] COMMAND ...",
        description="Distributed training for Keras 3 on TensorFlow.",
        epilog=_command_list() if {"-h", "--help"} & set(arguments) or not arguments else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-V", "--version", action="store_true", help="show the version and exit")
    options = parser.parse_args(arguments)
    if options.version:
        from importlib.metadata import version

        print(f"dtrain {version('dtrain')}")
        return 0
    parser.print_help(sys.stderr)
    return 2


def _command_list() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {_load(name).HELP}" for name in COMMANDS]
    return "\n".join(
        [
            "commands:",
            *lines,
            "",
            "dtrain help COMMAND or dtrain COMMAND --help shows the options of a command.",
        ]
    )


def _load(name: str) -> Command:
    return cast(Command, importlib.import_module(COMMANDS[name]))
