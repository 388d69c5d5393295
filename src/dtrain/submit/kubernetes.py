"""Submits a job to Kubernetes. It starts no task itself."""

from __future__ import annotations

from dataclasses import dataclass

from dtrain.submit.target import JobRequest

HELP = "submit to Kubernetes"


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `dtrain submit --kubernetes`."""


def submit(request: JobRequest, options: Options) -> int:
    """Submit the job."""
    raise NotImplementedError
