"""Submits a job to Kubernetes: it writes the manifest of a JobSet or a TrainJob, and gives it to `kubectl`.

Kubernetes starts and restarts the pods. In a pod, `dtrain.environments.jobset` or
`dtrain.environments.kubeflow` finds the process's place in the job.
"""

from __future__ import annotations

import re
import secrets
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dtrain.base import safe_files
from dtrain.base.option_fields import check
from dtrain.errors import ConfigurationError
from dtrain.process_group.secret import SIZE
from dtrain.submit import kubectl
from dtrain.submit.kubernetes_objects import INSTANCE, hide, job_name, render
from dtrain.submit.kubernetes_options import KubernetesOptions
from dtrain.submit.target import JobRequest

HELP = "submit to Kubernetes, by kubectl"

Options = KubernetesOptions

# Text that both YAML 1.1 and YAML 1.2 read as a string without quotes.
_PLAIN = re.compile(r"(?!(?:y|yes|n|no|on|off|true|false|null)$)[a-z_/][-\w./]*", re.ASCII | re.IGNORECASE)


def submit(request: JobRequest, options: KubernetesOptions) -> int:
    """Create the job's objects by `kubectl`, or print or write the manifest; returns 0.

    Raises:
        ConfigurationError: an option cannot be used, there is no `kubectl`, or the file cannot be written.
        SchedulerError: kubectl reaches no cluster, or the cluster refuses the job; the message quotes it.
    """
    check(options)
    request = replace(request, name=job_name(request))
    objects = render(request, options, secrets.token_hex(SIZE))
    text = as_yaml(objects)
    if options.output:
        _write(Path(options.output).expanduser(), text)
    if request.dry_run:
        sys.stdout.write(text)
    if options.output or request.dry_run:
        return 0
    kubectl.apply(text, context=options.context, hide=lambda output: hide(output, objects))
    kind = objects[-1]["kind"]
    client = f"kubectl -n {options.namespace}" if options.namespace else "kubectl"
    removed = f"{kind.lower()},networkpolicy,secret"
    sys.stdout.write(
        f"Submitted as {kind} {request.name}.\n"
        f"{client} get pods -l jobset.sigs.k8s.io/jobset-name={request.name} shows its pods.\n"
        f"{client} delete {removed} -l {INSTANCE}={request.name} ends and removes it.\n"
    )
    return 0


def as_yaml(objects: Sequence[dict[str, Any]]) -> str:
    """The objects as documents of YAML. A text stays a text, whatever it looks like.

    Raises:
        ConfigurationError: PyYAML is not installed.
    """
    try:
        import yaml
    except ImportError as error:
        raise ConfigurationError(
            "PyYAML writes the manifest, and is not installed.", hint="pip install 'dtrain[kubernetes]'"
        ) from error

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def of_text(dumper: Any, text: str) -> Any:
        style = "|" if text.endswith("\n") and text.isascii() and _is_block(text) else '"'
        plain = _PLAIN.fullmatch(text) is not None
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else style)

    Dumper.add_representer(str, of_text)
    text: str = yaml.dump_all(objects, Dumper=Dumper, sort_keys=False, width=10_000, explicit_start=True)
    return text


def _is_block(text: str) -> bool:
    """Whether a text can stand as a block of YAML: lines of printable characters, the first not indented."""
    return not text[0].isspace() and all(
        line.isprintable() and line == line.rstrip() for line in text.split("\n")
    )


def _write(path: Path, text: str) -> None:
    """Write the manifest, which holds the job's secret, to a file that only this user can read."""
    try:
        with safe_files.open_new(path, mode=0o600) as file:
            file.write(text.encode("utf-8"))
    except OSError as error:
        raise ConfigurationError(f"The file {path} cannot be written: {error.strerror}.") from error
