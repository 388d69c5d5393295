"""Prints the command that runs a script on all hosts of a TPU VM; the command was not tried on a TPU.

`gcloud` connects to the hosts, on which `dtrain.environments.tpu_vm` finds the job from Cloud TPU's
variables.
"""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass

from dtrain.base.option_fields import option
from dtrain.errors import ConfigurationError
from dtrain.submit.target import JobRequest

HELP = "print the command for all hosts of a TPU VM; not tried on a TPU"

_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


@dataclass(frozen=True, kw_only=True)
class TPUOptions:
    """The options of `dtrain submit --tpu`."""

    tpu_name: str | None = option(None, "name of the TPU VM or slice; required", metavar="NAME")
    zone: str | None = option(None, "zone of the TPU VM (default: that of gcloud)", metavar="ZONE")
    project: str | None = option(None, "project of the TPU VM (default: that of gcloud)", metavar="NAME")


Options = TPUOptions


def submit(request: JobRequest, options: TPUOptions) -> int:
    """Print the command; returns 0.

    Raises:
        ConfigurationError: the TPU has no name, a name is none of Google Cloud's, or workers were asked for.
    """
    if request.workers is not None:
        raise ConfigurationError(
            "--workers was given, and a TPU has a process on each of its hosts.", hint="Leave it out."
        )
    if options.tpu_name is None:
        raise ConfigurationError(
            "No TPU was named.", hint="Give --tpu-name NAME; `gcloud compute tpus tpu-vm list` lists them."
        )
    command = ["gcloud", "compute", "tpus", "tpu-vm", "ssh", _checked("--tpu-name", options.tpu_name)]
    if options.zone:
        command.append(f"--zone={_checked('--zone', options.zone)}")
    if options.project:
        command.append(f"--project={_checked('--project', options.project)}")
    program = shlex.join(["python3", *request.command])  # the hosts' shell splits it again
    sys.stdout.write(shlex.join([*command, "--worker=all", f"--command={program}"]) + "\n")
    sys.stderr.write("dtrain: this command was not tried on a TPU. It runs the script on all of its hosts.\n")
    return 0


def _checked(name: str, text: str) -> str:
    if not _NAME.fullmatch(text) or len(text) > 63:
        raise ConfigurationError(
            f"{name} is {text!r}, which Google Cloud does not accept.",
            hint="It has at most 63 lower-case letters, digits and '-', and begins with a letter.",
        )
    return text
