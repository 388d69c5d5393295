"""`dtrain submit`: queues a script as a job of Slurm or Kubernetes, or prints the command for a TPU VM.

This module only parses the arguments; the modules of `dtrain.submit` write and submit the job.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from dtrain.base.option_fields import declare, flag, given_options, own_fields
from dtrain.errors import ConfigurationError
from dtrain.submit.target import TARGETS, JobRequest, load_target

HELP = "queue a script as a job of Slurm or Kubernetes"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `dtrain submit`."""
    parser.usage = "dtrain submit --slurm|--kubernetes|--tpu [options] [-m] script.py [args ...]"
    which = parser.add_mutually_exclusive_group(required=True)
    for name in TARGETS:
        which.add_argument(
            flag(name), dest="target", action="store_const", const=name, help=load_target(name).HELP
        )
    declare(parser, own_fields(JobRequest))
    for name in TARGETS:
        declare(parser.add_argument_group(f"with {flag(name)}"), own_fields(load_target(name).Options))
    parser.add_argument(
        "-m", dest="is_module", action="store_true", help="the script is the name of a module"
    )
    parser.add_argument("script", help="the Python script to run, or with -m the module")
    rest = parser.add_argument("args", nargs=argparse.REMAINDER, help="arguments of the script")
    rest.required = False


def run(args: argparse.Namespace) -> int:
    """Submit the job; returns 0 if the system has accepted it.

    Raises:
        ConfigurationError: an option belongs to another system, or the system's client is not installed.
        SchedulerError: the system refuses the job, or does not answer.
    """
    for name in TARGETS:
        others = given_options(args, own_fields(load_target(name).Options))
        if others and name != args.target:
            raise ConfigurationError(
                f"{', '.join(map(flag, others))} is for {flag(name)}, but {flag(args.target)} was given.",
                hint=f"Leave it out. dtrain submit --help lists the options of {flag(args.target)}.",
            )
    target = load_target(args.target)
    command = [*(["-m"] if args.is_module else []), args.script, *args.args]
    given = given_options(args, own_fields(JobRequest))
    name = given.pop("name", None) or (args.script if args.is_module else Path(args.script).stem)
    request = JobRequest(command=command, name=name, **given)
    return target.submit(request, target.Options(**given_options(args, own_fields(target.Options))))
