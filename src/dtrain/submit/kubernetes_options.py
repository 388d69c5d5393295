"""The options of `dtrain submit --kubernetes`, and the checks of their names and quantities.

Each check says what Kubernetes would refuse, before anything is sent. This module makes no manifest.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

from dtrain.base.option_fields import count, flag, option, positive_integer, seconds
from dtrain.errors import ConfigurationError

KINDS = ("jobset", "trainjob")
NETWORKS = ("job", "ingress", "open")

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(rf"{_LABEL.pattern}(\.{_LABEL.pattern})*")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?")
_LABEL_KEY = re.compile(rf"({_SUBDOMAIN.pattern}/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_IMAGE = re.compile(r"[A-Za-z0-9][-A-Za-z0-9._/:@+]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][-+]?[0-9]{1,2})?")
_SUFFIXES = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY = "KMGTPE"
_MEBIBYTE = 2**20
_MOST, _LARGEST = 2**31 - 1, 2**63 - 1  # the largest number, and the largest quantity
_LONGEST_LABEL, _LONGEST_SUBDOMAIN, _LONGEST_IMAGE = 63, 253, 500


@dataclass(frozen=True, kw_only=True)
class KubernetesOptions:
    """The options of `dtrain submit --kubernetes`."""

    image: str | None = option(None, "container image with dtrain and the script; required", metavar="IMAGE")
    kind: str = option(
        "jobset", "object to submit: a jobset, or a trainjob of Kubeflow", metavar="KIND", words=KINDS
    )
    output: str | None = option(
        None, "write the manifest to this file, and submit nothing", metavar="FILE"
    )  # fmt: skip
    context: str | None = option(None, "kubectl's context (default: its current one)", metavar="NAME")
    namespace: str | None = option(None, "namespace (default: that of kubectl's context)", metavar="NAME")
    ps: int | None = option(
        None,
        "number of parameter servers; a job with parameter servers also has a chief",
        metavar="M",
        type=positive_integer,
    )
    cpus: str | None = option(None, "cores of each pod, such as 4 or 500m", metavar="N")
    memory: str | None = option(None, "memory of each pod, such as 16Gi", metavar="SIZE")
    gpus: int | None = option(
        None, "GPUs of NVIDIA for each worker's pod", metavar="N", type=positive_integer
    )  # fmt: skip
    shared_memory: str | None = option(
        None, "size of /dev/shm, which counts as memory of the pod", metavar="SIZE"
    )  # fmt: skip
    volume: Sequence[str] | None = option(
        None,
        "volume of the pods: pvc:NAME:/PATH, configmap:NAME:/PATH or emptydir:/PATH; :ro at the end makes it "
        "read-only; can be given several times",
        metavar="VOLUME",
        many=True,
    )
    env: Sequence[str] | None = option(
        None, "an environment variable; can be given several times", metavar="NAME=VALUE", many=True
    )
    node_selector: Sequence[str] | None = option(
        None, "a label of the nodes to run on; can be given several times", metavar="KEY=VALUE", many=True
    )
    toleration: Sequence[str] | None = option(
        None,
        "a taint of nodes that the pods tolerate; can be given several times",
        metavar="KEY[=VALUE][:EFFECT]",
        many=True,
    )
    service_account: str | None = option(None, "service account of the pods", metavar="NAME")
    image_pull_secret: str | None = option(None, "secret by which the image is pulled", metavar="NAME")
    priority_class: str | None = option(None, "priority class of the pods", metavar="NAME")
    queue: str | None = option(None, "local queue of Kueue", metavar="NAME")
    restarts: int | None = option(
        None,
        "restarts of the job before it fails; restarts after a preemption do not count (default: 3)",
        metavar="R",
        type=count,
    )
    grace: float | None = option(
        None,
        "seconds that a pod has to save when it is asked to end (default: 60)",
        metavar="S",
        type=seconds,
    )
    join_timeout: float | None = option(
        None, "seconds that the first pods wait for the others (default: 1800)", metavar="S", type=seconds
    )
    user: int | None = option(
        None, "user and group number of the processes, not 0 (default: 1000)", metavar="UID", type=count
    )
    read_only: bool = option(False, "make the image's files read-only; /tmp stays writable")
    network: str = option(
        "job",
        "what the NetworkPolicy allows: job (the pods reach each other and DNS), ingress (the pods reach "
        "everything, but only the job's pods reach them), or open (there is no NetworkPolicy)",
        metavar="WHICH",
        words=NETWORKS,
    )
    python: str = option("python", "the image's Python", metavar="PATH")
    workdir: str | None = option(None, "folder to run in (default: the image's)", metavar="PATH")
    runtime: str | None = option(
        None, "the TrainJob's ClusterTrainingRuntime (default: torch-distributed)", metavar="NAME"
    )


def numbers(options: KubernetesOptions, workers: int | None) -> None:
    """Check that the numbers fit Kubernetes' signed 32-bit integers.

    Raises:
        ConfigurationError: one is larger.
    """
    names = ("ps", "gpus", "restarts", "grace", "user")
    counts = {"workers": workers, **{name: getattr(options, name) for name in names}}
    for name, number in counts.items():
        if number is not None and number > _MOST:
            raise ConfigurationError(
                f"{flag(name)} is {number:,}, and Kubernetes takes at most {_MOST:,}.",
                hint="Write a smaller number.",
            )


def label(what: str, text: str) -> str:
    """Check a DNS-1123 label, such as the name of a namespace; returns it."""
    return _named(what, text, _LABEL, _LONGEST_LABEL, "lower-case letters, digits and '-'")


def subdomain(what: str, text: str) -> str:
    """Check a DNS-1123 subdomain, such as the name of a claim or of a service account; returns it."""
    return _named(what, text, _SUBDOMAIN, _LONGEST_SUBDOMAIN, "lower-case letters, digits, '-' and '.'")


def label_value(what: str, text: str) -> str:
    """Check the value of a label; returns it."""
    return _named(what, text, _LABEL_VALUE, _LONGEST_LABEL, "letters, digits, '-', '_' and '.'")


def label_key(what: str, text: str) -> str:
    """Check the key of a label or a taint; returns it."""
    longest = _LONGEST_SUBDOMAIN + 1 + _LONGEST_LABEL
    key = _named(
        what, text, _LABEL_KEY, longest, "letters, digits, '-', '_', '.', and a domain and '/' before"
    )
    if len(key.rpartition("/")[2]) > _LONGEST_LABEL:
        raise ConfigurationError(f"{what} is {text!r}, whose name has more than {_LONGEST_LABEL} characters.")
    return key


def image(text: str | None) -> str:
    """Check the reference of a container image; returns it."""
    if not text:
        raise ConfigurationError(
            "No container image was given, and each pod runs one.",
            hint="Give --image IMAGE, one that has Python, dtrain and your script. docker/ has Dockerfiles.",
        )
    return _named("The image", text, _IMAGE, _LONGEST_IMAGE, "letters, digits and -._/:@+")


def cpus(text: str) -> str:
    """Check a number of cores; returns it."""
    amount = quantity("--cpus", text, "4, 0.5 or 500m")
    if amount < Decimal("0.001"):
        raise ConfigurationError(f"--cpus is {text!r}, which is less than 1m.", hint="A core is 1 or 1000m.")
    return text


def memory(name: str, text: str) -> str:
    """Check an amount of memory of at least 1Mi; returns it."""
    if quantity(name, text, "16Gi or 500M") < _MEBIBYTE:
        raise ConfigurationError(
            f"{name} is {text!r}, which is less than a mebibyte (1Mi).",
            hint="Write the unit: Mi, Gi, M or G. A small m means a thousandth of a byte.",
        )
    return text


def quantity(name: str, text: str, example: str) -> Decimal:
    """The number that a quantity of Kubernetes stands for.

    Raises:
        ConfigurationError: the text is no positive quantity.
    """
    match = _QUANTITY.fullmatch(text)
    amount = Decimal(0)
    if match:
        number, suffix = Decimal(match[1]), match[2] or ""
        if suffix.endswith("i"):
            amount = number * 1024 ** (_BINARY.index(suffix[0]) + 1)
        elif suffix in _SUFFIXES:
            amount = number.scaleb(_SUFFIXES[suffix])
        else:
            amount = number.scaleb(int(suffix[1:]))
    if amount <= 0:
        raise ConfigurationError(
            f"{name} is {text!r}, which is not a positive quantity of Kubernetes.", hint=f"Write {example}."
        )
    if amount > _LARGEST:
        raise ConfigurationError(
            f"{name} is {text!r}, which is more than Kubernetes can count.", hint=f"Write {example}."
        )
    return amount


def bytes_of(text: str) -> Decimal:
    """The bytes of an amount of memory that was checked."""
    return quantity("The memory", text, "16Gi")


def variable_name(text: str) -> str:
    """Check the name of an environment variable; returns it."""
    if not _VARIABLE.fullmatch(text):
        raise ConfigurationError(
            f"--env names {text!r}, which is not a valid name of a variable.",
            hint="Write NAME=VALUE; a name has letters, digits and '_', and begins with no digit.",
        )
    return text


def pair(name: str, text: str) -> tuple[str, str]:
    """Split KEY=VALUE.

    Raises:
        ConfigurationError: there is no `=`.
    """
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigurationError(f"{flag(name)} is {text!r}, without a '='.", hint="Write KEY=VALUE.")
    return key, value


def path(what: str, text: str) -> str:
    """Check an absolute path in a container; returns it without a '/' at its end."""
    parts = text.split("/")
    if (
        not text.startswith("/")
        or ":" in text
        or ".." in parts
        or not text.isprintable()
        or text.strip("/") == ""
    ):
        raise ConfigurationError(
            f"{what} is {text!r}, which is not an absolute path below '/'.",
            hint="Write a path such as /data, without '..' and ':'.",
        )
    return text.rstrip("/")


def _named(what: str, text: str, form: re.Pattern[str], longest: int, of: str) -> str:
    if len(text) > longest:
        raise ConfigurationError(
            f"{what} is {text!r}, which has {len(text)} characters; at most {longest} are allowed."
        )
    if not form.fullmatch(text):
        raise ConfigurationError(
            f"{what} is {text!r}, which Kubernetes does not accept.",
            hint=f"It takes {of}, and begins and ends with a letter or a digit.",
        )
    return text
