"""`dtrain init`: asks five questions about a job, and writes the answers into a file for `dtrain launch`.

An answer is checked as `dtrain launch` checks the option. It starts nothing, and replaces no file.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dtrain.base import safe_files
from dtrain.base.option_fields import count
from dtrain.base.paths import check_script
from dtrain.cli import worker_counts
from dtrain.errors import ConfigurationError

HELP = "ask about a job, and write job.toml for dtrain launch --config"

_FILE = "job.toml"
_USUAL_SCRIPT = "train.py"
_HEADER = """\
# A job for: dtrain launch --config {name}
# Each key is an option of `dtrain launch`, without its dashes; `dtrain launch --help` lists them all.
"""


@dataclass(frozen=True)
class _Question:
    """A question about one option; the answer "" takes the default, and without a default leaves the key out.

    Attributes:
        key: the option's name in the file.
        text: the question.
        check: raises an error that says what is wrong with an answer.
        default: the answer of those who answer nothing.
        otherwise: what holds without the key, for the question.
    """

    key: str
    text: str
    check: Callable[[str], object]
    default: str = ""
    otherwise: str = ""

    def as_prompt(self) -> str:
        """The text that is shown."""
        return f"{self.text} [{self.default or self.otherwise}]: "


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `dtrain init`."""
    parser.add_argument(
        "script", nargs="?", help=f"the script (default: {_USUAL_SCRIPT}, or the folder's only one)"
    )
    parser.add_argument(
        "--output", type=Path, default=Path(_FILE), metavar="FILE", help=f"the file (default: {_FILE})"
    )
    parser.add_argument("-y", "--yes", action="store_true", help="ask nothing, and take all defaults")


def run(args: argparse.Namespace) -> int:
    """Ask, write the file and say how to start the job; return 0.

    Raises:
        ConfigurationError: the file exists or cannot be written, there is no script, nobody answers, or
            answers contradict each other.
    """
    if args.output.exists() or args.output.is_symlink():
        raise ConfigurationError(
            f"{args.output} exists, and is kept.", hint="Move it away, or give another name by --output."
        )
    if args.yes and not (args.script or _likely_script()):
        raise ConfigurationError(
            f"There is no {_USUAL_SCRIPT} in {Path.cwd()}, and not one script alone.",
            hint="Name the script: dtrain init --yes SCRIPT",
        )
    answers: dict[str, str] = {}
    for question in _questions(args.script):
        if question.key == "workers" and "hosts" in answers:
            continue  # the hosts say how many
        if answer := question.default if args.yes else _ask(question):
            question.check(answer)
            answers[question.key] = answer
    _check_together(answers)
    text = _HEADER.format(name=args.output) + "".join(
        f"{key} = {_as_toml(answer)}\n" for key, answer in answers.items()
    )
    try:
        with os.fdopen(safe_files.create(args.output), "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigurationError(f"{args.output} cannot be written: {error.strerror}.") from error
    sys.stdout.write(f"{text}\nWritten to {args.output}. Start it: dtrain launch --config {args.output}\n")
    return 0


def _questions(script: str | None) -> list[_Question]:
    return [
        _Question("script", "Which script trains?", check_script, script or _likely_script(), "none found"),
        _Question("hosts", "On which machines, as HOST:WORKERS,...?", _check_hosts, "", "this one"),
        _Question(
            "workers",
            "How many workers, or MIN:MAX?",
            worker_counts.workers,
            "",
            f"one for each GPU, else {worker_counts.DEFAULT_WORKERS}",
        ),
        _Question("ps", "How many parameter servers?", count, "", "none"),
        _Question("log-dir", "Which folder for a log file of each task?", str, "", "none"),
    ]


def _likely_script() -> str:
    """The script of the current folder that trains, as far as names tell; "" if they do not."""
    scripts = sorted(path.name for path in Path().glob("*.py"))
    if _USUAL_SCRIPT in scripts:
        return _USUAL_SCRIPT
    return scripts[0] if len(scripts) == 1 else ""


def _check_hosts(text: str) -> None:
    from dtrain.launch.hosts.host_list import parse_hosts

    parse_hosts(text)


def _check_together(answers: Mapping[str, str]) -> None:
    """Raises `ConfigurationError` for answers that contradict each other, as `dtrain launch` does."""
    from dtrain.launch.job.spec import JobSpec

    asked = worker_counts.workers(answers.get("workers", "1"))
    fewest = asked.fewest if asked.fewest < asked.most else None
    JobSpec(command=["script"], workers=asked.most, min_workers=fewest, ps=int(answers.get("ps", 0)))


def _ask(question: _Question) -> str:
    """The answer, asked for until it can be used."""
    while True:
        try:
            answer = input(question.as_prompt()).strip() or question.default
        except EOFError:
            raise ConfigurationError(
                f"Nobody answers: {question.text}", hint="Give --yes to take all defaults."
            ) from None
        if question.key == "script" and not answer:
            continue
        try:
            if answer:
                question.check(answer)
        except (argparse.ArgumentTypeError, ConfigurationError) as error:
            sys.stdout.write(f"{error.message if isinstance(error, ConfigurationError) else error}\n")
            continue
        return "" if (question.key, answer) == ("ps", "0") else answer


def _as_toml(answer: str) -> str:
    """An answer as a value of TOML, whose basic strings are those of JSON."""
    return answer if answer.isascii() and answer.isdigit() else json.dumps(answer, ensure_ascii=False)
