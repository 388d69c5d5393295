"""Calls `kubectl`, the client of Kubernetes: it lets the cluster check objects, and creates them.

`kubectl` finds the cluster and the user's credentials. Errors quote its message, without secrets.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Sequence

from dtrain.base.plain_text import cleaned
from dtrain.errors import ConfigurationError, SchedulerError

_SECONDS = 120.0  # the time limit of a call of kubectl
_ANSWER = "--request-timeout=60s"
_QUOTED = 2000  # characters of what kubectl says

# Hints by words in kubectl's message; the first match counts.
_HINTS = (
    ("no matches for kind", "The cluster lacks that kind of object: ask its administrators for JobSet, or "
     "for Kubeflow Trainer with --kind trainjob. `kubectl api-resources` lists what it has."),
    ("immutable", "A job of this name is there. Give another --name, or delete it first."),
    ("forbidden: user", "Ask the administrators for the right to create these objects in the namespace, or "
     "name another --namespace. `kubectl auth can-i create jobsets` tells what you may."),
    ("forbidden", "A rule of the cluster does not allow it: see what it names. Ask for less, or ask the "
     "administrators."),
    ("namespaces", "Name an existing --namespace, or create it: kubectl create namespace NAME."),
    ("already exists", "A job of this name is there. Give another --name, or delete it first."),
    ("unauthorized", "Log in to the cluster again, and see whether `kubectl auth whoami` works."),
    ("logged in", "Log in to the cluster again, and see whether `kubectl auth whoami` works."),
    ("context", "`kubectl config get-contexts` lists the contexts; name one by --context."),
)  # fmt: skip
_UNREACHABLE = "See whether `kubectl cluster-info` reaches the cluster. --dry-run prints the manifest."


def apply(manifest: str, *, context: str | None, hide: Callable[[str], str]) -> None:
    """Create the objects of a manifest, all of them or none.

    Args:
        manifest: the text, as YAML.
        context: kubectl's context, or None for its current one.
        hide: replaces secrets in a text.

    Raises:
        ConfigurationError: there is no kubectl.
        SchedulerError: kubectl reaches no cluster, or the cluster refuses an object.
    """
    if shutil.which("kubectl") is None:
        raise ConfigurationError(
            "There is no kubectl in PATH, and it submits jobs to Kubernetes.",
            hint="Install it, or print the manifest by --dry-run, or write it by --output FILE.",
        )
    chosen = [] if context is None else [f"--context={context}"]
    # First the cluster checks all objects, with rights and quotas, so that not only some of them are created.
    _call([*chosen, "apply", "--dry-run=server", "-f", "-"], manifest, hide)
    try:
        _call([*chosen, "apply", "-f", "-"], manifest, hide)
    except BaseException:
        # The check would have refused another Secret of the same name, so these objects are new.
        _run([*chosen, "delete", "--ignore-not-found", "--wait=false", "-f", "-"], manifest)
        raise


def _call(arguments: Sequence[str], manifest: str, hide: Callable[[str], str]) -> None:
    status, output = _run(arguments, manifest)
    if status == 0:
        return
    output = cleaned(hide(output).strip(), _QUOTED) or f"it ended with status {status} and said nothing"
    hint = next((hint for words, hint in _HINTS if words in output.lower()), _UNREACHABLE)
    raise SchedulerError(f"kubectl cannot create the job: {output}", hint=hint)


def _run(arguments: Sequence[str], manifest: str) -> tuple[int, str]:
    """Runs kubectl; returns its exit status, and its standard error or why it could not be run."""
    try:
        done = subprocess.run(
            ["kubectl", _ANSWER, *arguments],
            input=manifest,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return 1, f"kubectl did not answer within {_SECONDS:g} seconds"
    except OSError as error:
        return 1, f"kubectl cannot be run: {error.strerror}"
    return done.returncode, done.stderr
