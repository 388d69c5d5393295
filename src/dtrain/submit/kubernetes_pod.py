"""The pods of a job on Kubernetes: their command, user, resources, volumes and variables.

It makes the parts that a JobSet and a TrainJob have in common. `kubernetes_objects` puts them together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from dtrain.environments import jobset, kubeflow
from dtrain.errors import ConfigurationError, RunAgain
from dtrain.process_group.secret import VARIABLE as SECRET_VARIABLE
from dtrain.submit import kubernetes_options as checked
from dtrain.submit.kubernetes_options import KubernetesOptions
from dtrain.submit.target import JobRequest

Object = dict[str, Any]

SECRET_KEY = "secret"
"""The key of the job's secret in its Secret."""

_SECRET_FOLDER = "/etc/dtrain"
_RUN_FOLDER = "/run/dtrain"
_PEER_TIMEOUT = "DTRAIN_PEER_TIMEOUT"
_THREADS = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
_DEFAULTS = {"grace": 60.0, "join_timeout": 1800.0, "user": 1000}
_LONGEST_LIST = 128  # of arguments, variables and volumes in a TrainJob

# Kubernetes mounts a Secret's files with root as owner, and with an fsGroup it lets the group read them. As
# dtrain accepts no such secret, each container makes a copy, in memory, that only its user can read.
_ENTRY = f"""\
umask 077
cat {_SECRET_FOLDER}/{SECRET_KEY} > {_RUN_FOLDER}/{SECRET_KEY} || exit 1
if ! "$1" -c 'import dtrain'; then
  echo "dtrain: the Python of the image $0 ($1) cannot import dtrain. Install it in the image." >&2
  exit 1
fi
exec "$@"
"""


@dataclass(frozen=True, kw_only=True)
class PodPlan:
    """The checked parts of the pods, each as Kubernetes takes it.

    Attributes:
        command: the start of the container's argument vector, without the user's part.
        args: the Python, the script and its arguments.
        env: variables, without those that tell a pod its place.
        limits: resources of each pod, without GPUs.
        gpus: the resource of the GPUs.
        volumes: the pod's volumes.
        mounts: where the container has them.
        pod_security: the pod's security context.
        security: the container's security context.
    """

    image: str
    command: list[str]
    args: list[str]
    env: list[Object]
    limits: Object
    gpus: Object
    volumes: list[Object]
    mounts: list[Object]
    pod_security: Object
    security: Object
    node_selector: Object
    tolerations: list[Object]
    grace: int


def plan_pods(request: JobRequest, options: KubernetesOptions, secret_name: str) -> PodPlan:
    """Check the options that concern the pods, and convert them to Kubernetes' form.

    Raises:
        ConfigurationError: Kubernetes would refuse a value, or two contradict each other.
    """
    checked.numbers(options, request.workers)
    if not options.python.strip():
        raise ConfigurationError("--python is empty.", hint="Give the image's Python, such as python.")
    user = _DEFAULTS["user"] if options.user is None else options.user
    if user == 0:
        raise ConfigurationError(
            "--user is 0, which is root, and the pods of a job do not run as root.",
            hint="Give the number of a user, such as 1000; it needs no entry in the image's /etc/passwd.",
        )
    image = checked.image(options.image)
    volumes, mounts = _volumes(options, secret_name)
    return PodPlan(
        image=image,
        command=["/bin/sh", "-c", literal(_ENTRY), image],
        args=[literal(_text("An argument", word)) for word in (options.python, *request.command)],
        env=_variables(options),
        limits=_limits(options),
        gpus={"nvidia.com/gpu": options.gpus} if options.gpus else {},
        volumes=volumes,
        mounts=mounts,
        pod_security={
            "runAsNonRoot": True,
            "runAsUser": user,
            "runAsGroup": user,
            "fsGroup": user,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        security={
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            **({"readOnlyRootFilesystem": True} if options.read_only else {}),
        },
        node_selector=_node_selector(options),
        tolerations=[_toleration(text) for text in options.toleration or ()],
        grace=math.ceil(options.grace or _DEFAULTS["grace"]),
    )


def jobset_pod(plan: PodPlan, options: KubernetesOptions, role: str, tasks: str) -> Object:
    """The template of the pods of one replicated job.

    Args:
        plan: the parts of the pods.
        options: the options, of which those for a JobSet alone are read here.
        role: the replicated job's name, which is that of TensorFlow's job.
        tasks: the number of pods of each replicated job, as `environments.jobset` reads it.
    """
    limits = plan.limits | (plan.gpus if role == "worker" else {})
    place = [
        _from_annotation("JOBSET_NAME", "jobset.sigs.k8s.io/jobset-name"),
        _from_annotation("REPLICATED_JOB_NAME", "jobset.sigs.k8s.io/replicatedjob-name"),
        {"name": jobset.TASKS_VARIABLE, "value": tasks},
    ]
    container = {
        "name": "train",
        "image": plan.image,
        "command": plan.command,
        "args": plan.args,
        **({"workingDir": checked.path("--workdir", options.workdir)} if options.workdir else {}),
        "env": [*place, *plan.env],
        **({"resources": {"requests": limits, "limits": limits}} if limits else {}),
        "securityContext": plan.security,
        "volumeMounts": plan.mounts,
    }
    spec: Object = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": plan.grace,
        "enableServiceLinks": False,
        # Without a requested account, the pod gets no API token, because training needs none.
        "automountServiceAccountToken": options.service_account is not None,
        "securityContext": plan.pod_security,
        "containers": [container],
        "volumes": plan.volumes,
    }
    spec |= placement(plan, options)
    if options.image_pull_secret:
        spec["imagePullSecrets"] = [
            {"name": checked.subdomain("--image-pull-secret", options.image_pull_secret)}
        ]
    if options.priority_class:
        spec["priorityClassName"] = checked.subdomain("--priority-class", options.priority_class)
    return {"spec": spec}


def placement(plan: PodPlan, options: KubernetesOptions) -> Object:
    """The part of a pod that says on which nodes it may run, and as which account."""
    spec: Object = {}
    if plan.node_selector:
        spec["nodeSelector"] = plan.node_selector
    if plan.tolerations:
        spec["tolerations"] = plan.tolerations
    if options.service_account:
        spec["serviceAccountName"] = checked.subdomain("--service-account", options.service_account)
    return spec


def exit_rules(action: str) -> list[Object]:
    """The rules of a Job for pods that were asked to end: those that have saved, and those of a lost node."""
    return [
        {
            "action": action,
            "onExitCodes": {"containerName": "train", "operator": "In", "values": [RunAgain.STATUS]},
        },
        {"action": action, "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]


def literal(text: str) -> str:
    """A text escaped for a command or a variable of a pod, in which Kubernetes would replace `$(NAME)`."""
    return text.replace("$", "$$")


def too_long(what: str, number: int) -> None:
    """Refuse a list that is longer than a TrainJob's may be."""
    if number > _LONGEST_LIST:
        raise ConfigurationError(
            f"The job has {number} {what}, and a TrainJob takes at most {_LONGEST_LIST}.",
            hint="Use --kind jobset, or put them into a file.",
        )


def _variables(options: KubernetesOptions) -> list[Object]:
    own: dict[str, str] = {
        SECRET_VARIABLE: f"{_RUN_FOLDER}/{SECRET_KEY}",
        _PEER_TIMEOUT: f"{options.join_timeout or _DEFAULTS['join_timeout']:g}",
        "PYTHONUNBUFFERED": "1",
    }
    if options.cpus:  # a container sees all cores of its node, and would start a thread for each
        cores = max(1, math.ceil(float(checked.quantity("--cpus", options.cpus, "4 or 500m"))))
        own |= dict.fromkeys(_THREADS, f"{cores}")
    fixed = {SECRET_VARIABLE, "TF_CONFIG", *jobset.JobSet.variables, *kubeflow.KubeflowTrainJob.variables}
    given: dict[str, str] = {}
    for text in options.env or ():
        name, value = checked.pair("env", text)
        checked.variable_name(name)
        if name in fixed or name in given:
            why = "is set by the job itself" if name in fixed else "is given twice"
            raise ConfigurationError(f"--env names {name}, which {why}.", hint="Leave it out.")
        given[name] = _text(f"The variable {name}", value)
    return [{"name": name, "value": literal(value)} for name, value in (own | given).items()]


def _limits(options: KubernetesOptions) -> Object:
    limits: Object = {}
    if options.cpus:
        limits["cpu"] = checked.cpus(options.cpus)
    if options.memory:
        limits["memory"] = checked.memory("--memory", options.memory)
    shared = options.shared_memory
    if shared:
        checked.memory("--shared-memory", shared)
    if shared and options.memory and checked.bytes_of(shared) >= checked.bytes_of(options.memory):
        raise ConfigurationError(
            f"--shared-memory is {shared}, and --memory is {options.memory}, of which it is a part.",
            hint="Give more memory than shared memory.",
        )
    return limits


def _volumes(options: KubernetesOptions, secret_name: str) -> tuple[list[Object], list[Object]]:
    """A pair: the volumes of the pod, and where the container mounts them."""
    secret = {"secretName": secret_name, "defaultMode": 0o400}
    # Each entry: the mount's path, what Kubernetes calls the volume, and whether it is read-only.
    entries: list[tuple[str, Object, bool]] = [
        (_SECRET_FOLDER, {"secret": secret}, True),
        (_RUN_FOLDER, {"emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}}, False),
    ]
    if options.shared_memory:
        entries.append(
            ("/dev/shm", {"emptyDir": {"medium": "Memory", "sizeLimit": options.shared_memory}}, False)
        )
    given = [_volume(text) for text in options.volume or ()]
    if options.read_only and "/tmp" not in [path for path, _, _ in given]:
        entries.append(("/tmp", {"emptyDir": {}}, False))
    paths: set[str] = set()
    for path, _, _ in (*entries, *given):
        if path in paths:
            raise ConfigurationError(
                f"Two volumes are mounted at {path}.",
                hint=f"Choose another path. {_SECRET_FOLDER} and {_RUN_FOLDER} are the job's own.",
            )
        paths.add(path)
    volumes, mounts = [], []
    for number, (path, source, read_only) in enumerate((*entries, *given)):
        volumes.append({"name": f"volume-{number}", **source})
        mounts.append(
            {"name": f"volume-{number}", "mountPath": path, **({"readOnly": True} if read_only else {})}
        )
    return volumes, mounts


def _volume(text: str) -> tuple[str, Object, bool]:
    """The mount's path, the source and whether it is read-only, of an option `--volume`."""
    read_only = text.endswith(":ro")
    kind, *rest = text.removesuffix(":ro").split(":")
    kind = kind.lower()
    if kind in ("pvc", "configmap") and len(rest) == 2:
        name, path = rest[0], checked.path("The path of --volume", rest[1])
        checked.subdomain(f"The name in --volume {text}", name)
        if kind == "pvc":
            claim = {"claimName": name, **({"readOnly": True} if read_only else {})}
            return path, {"persistentVolumeClaim": claim}, read_only
        return path, {"configMap": {"name": name}}, True
    if kind == "emptydir" and len(rest) == 1 and not read_only:
        return checked.path("The path of --volume", rest[0]), {"emptyDir": {}}, False
    raise ConfigurationError(
        f"--volume is {text!r}, which is not a volume.",
        hint="Write pvc:NAME:/PATH, pvc:NAME:/PATH:ro, configmap:NAME:/PATH or emptydir:/PATH.",
    )


def _node_selector(options: KubernetesOptions) -> Object:
    selector: Object = {}
    for text in options.node_selector or ():
        key, value = checked.pair("node_selector", text)
        checked.label_key("The key of --node-selector", key)
        if key in selector:
            raise ConfigurationError(f"--node-selector names {key} twice.", hint="Leave one out.")
        selector[key] = checked.label_value("The value of --node-selector", value)
    return selector


def _toleration(text: str) -> Object:
    """A toleration of KEY, KEY=VALUE, KEY:EFFECT or KEY=VALUE:EFFECT."""
    before, colon, effect = text.partition(":")
    key, equals, value = before.partition("=")
    checked.label_key("The key of --toleration", key)
    if colon and effect not in _EFFECTS:
        raise ConfigurationError(
            f"--toleration is {text!r}, with the unknown effect {effect!r}.",
            hint=f"The effects are {', '.join(_EFFECTS)}; without one, all are tolerated.",
        )
    toleration: Object = {"key": key, "operator": "Equal" if equals else "Exists"}
    if equals:
        toleration["value"] = checked.label_value("The value of --toleration", value)
    return toleration | ({"effect": effect} if colon else {})


def _from_annotation(name: str, annotation: str) -> Object:
    return {
        "name": name,
        "valueFrom": {"fieldRef": {"fieldPath": f"metadata.annotations['{annotation}']"}},
    }


def _text(what: str, text: str) -> str:
    """Check that a text can be an argument or a variable of a process in a container."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigurationError(f"{what} is {text!r}, which is not UTF-8.") from None
    if "\0" in text:
        raise ConfigurationError(f"{what} is {text!r}, with a null character.")
    return text
