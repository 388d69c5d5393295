"""The interface of systems to which a job is submitted, and the registry of them.

A system is a module with a dataclass of its options and a function that submits. It runs no task itself.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from dtrain.base.option_fields import option, positive_integer

TARGETS = {
    "slurm": "dtrain.submit.slurm",
    "kubernetes": "dtrain.submit.kubernetes",
    "tpu": "dtrain.submit.tpu_command",
}
"""The module of each system, by the name of its flag."""


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """What every system is asked for: a command, and the number of processes that run it.

    Attributes:
        command: the arguments after the name of the Python, such as `["train.py", "--epochs", "3"]`.
    """

    command: Sequence[str] = ()
    name: str | None = option(None, "the job's name (default: that of the script)", metavar="NAME")
    workers: int | None = option(
        None, "number of worker processes (default: 1)", metavar="N", type=positive_integer
    )
    dry_run: bool = option(False, "print what would be submitted, and submit nothing")


class Target(Protocol):
    """The interface of a system's module.

    Attributes:
        HELP: one line for the help.
        Options: a frozen dataclass of this system's own options; no two systems have an option of one name.
            The class is named after the system, such as `SlurmOptions`.
    """

    HELP: str
    Options: type[Any]

    def submit(self, request: JobRequest, options: Any) -> int:
        """Submit the job, or with `dry_run` print what would be submitted; returns the exit status.

        Raises:
            ConfigurationError: the options exclude each other, or the system's client is not installed.
            SchedulerError: the system refuses the job, or does not answer.
        """


def load_target(name: str) -> Target:
    """The module of a system."""
    return cast(Target, importlib.import_module(TARGETS[name]))
