"""The objects of a job on Kubernetes: its Secret, its NetworkPolicy, and a JobSet or a TrainJob.

It returns plain dictionaries. `kubernetes` writes them as YAML and gives them to the cluster.
"""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

from dtrain.base.option_fields import flag
from dtrain.errors import ConfigurationError
from dtrain.submit import kubernetes_options as checked
from dtrain.submit import kubernetes_pod as pods
from dtrain.submit.kubernetes_options import KubernetesOptions
from dtrain.submit.kubernetes_pod import Object
from dtrain.submit.target import JobRequest

INSTANCE = "app.kubernetes.io/instance"
"""The label that all objects of a job have, with the job's name."""

_JOBSET_LABEL = "jobset.sigs.k8s.io/jobset-name"
_QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_RESTARTS = 3
_RUNTIME = "torch-distributed"
_NODE = "node"  # the name of Kubeflow's replicated job, and of its container
_SUFFIX = "-abcde"  # has the length of the suffix that Kubernetes appends to the name of a pod
_LONGEST = 63
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_NOT_IN_TRAINJOB = ("ps", "restarts", "priority_class", "image_pull_secret", "workdir")


def render(request: JobRequest, options: KubernetesOptions, secret: str) -> list[Object]:
    """The objects of a job, in the order in which they are created.

    Args:
        request: the command and the number of workers.
        options: the options of `dtrain submit --kubernetes`.
        secret: the job's secret.

    Raises:
        ConfigurationError: Kubernetes would refuse a value, or two options contradict each other.
    """
    is_jobset = options.kind == "jobset"
    counts = _counts(request, options)
    name = _checked(job_name(request), counts if is_jobset else {_NODE: counts["worker"]})
    secret_name = f"{name}-secret"
    plan = pods.plan_pods(request, options, secret_name)
    metadata = _metadata(name, options)
    hidden = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata | {"name": secret_name},
        "type": "Opaque",
        "immutable": True,
        "data": {pods.SECRET_KEY: base64.b64encode(secret.encode()).decode()},
    }
    if options.queue:
        queue = checked.label_value("--queue", options.queue)
        labelled = metadata | {"labels": metadata["labels"] | {_QUEUE_LABEL: queue}}
    else:
        labelled = metadata
    job = (
        _jobset(labelled, plan, options, counts) if is_jobset else _trainjob(labelled, plan, options, counts)
    )
    return [hidden, *_network_policy(metadata, options), job]


def job_name(request: JobRequest) -> str:
    """The job's name: the given one, or the script's as Kubernetes takes it, `my-model` for `my_model.py`."""
    is_module = list(request.command[:1]) == ["-m"]
    script = "".join(request.command[1:2] if is_module else request.command[:1])
    name = request.name or Path(script).stem
    own = name in (script, Path(script).stem)
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") if own else name


def _counts(request: JobRequest, options: KubernetesOptions) -> dict[str, int]:
    """The number of pods of each of TensorFlow's jobs."""
    workers = request.workers or 1
    return {"chief": 1, "worker": workers, "ps": options.ps} if options.ps else {"worker": workers}


def _checked(name: str, counts: dict[str, int]) -> str:
    """Check that the job's name fits the names of a Service and of the longest pod."""
    if not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"The job's name is {name!r}, which Kubernetes does not accept.",
            hint="Give --name with lower-case letters, digits and '-'. It begins with a letter and ends with "
            "a letter or a digit.",
        )
    longest = max((f"{name}-{role}-0-{number - 1}{_SUFFIX}" for role, number in counts.items()), key=len)
    if len(longest) > _LONGEST:
        raise ConfigurationError(
            f"The job's name, {name!r}, has {len(name)} characters. Its pods get names such as {longest!r}, "
            f"and a name has at most {_LONGEST} characters.",
            hint=f"Give a --name of at most {_LONGEST - len(longest) + len(name)} characters.",
        )
    return name


def _metadata(name: str, options: KubernetesOptions) -> Object:
    metadata: Object = {"name": name}
    if options.namespace:
        metadata["namespace"] = checked.label("--namespace", options.namespace)
    return metadata | {"labels": {"app.kubernetes.io/name": "dtrain", INSTANCE: name}}


def _network_policy(metadata: Object, options: KubernetesOptions) -> list[Object]:
    """The policy that lets only the job's pods reach each other; [] if the network is to be open."""
    if options.network == "open":
        return []
    selector = {"matchLabels": {_JOBSET_LABEL: metadata["name"]}}
    peers = [{"podSelector": selector}]
    spec: Object = {"podSelector": selector, "policyTypes": ["Ingress"], "ingress": [{"from": peers}]}
    if options.network == "job":
        dns = [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]
        spec["policyTypes"] = ["Ingress", "Egress"]
        # DNS to any address: a cache on the node is no pod, so no selector finds it.
        spec["egress"] = [{"to": peers}, {"ports": dns}]
    return [
        {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": metadata,
            "spec": spec,
        }
    ]


def _jobset(
    metadata: Object, plan: pods.PodPlan, options: KubernetesOptions, counts: dict[str, int]
) -> Object:
    """A JobSet with a replicated job for each of TensorFlow's jobs; JobSet makes its headless Service.

    The workers of a synchronous job cannot go on without one of them: a failed pod fails its Job, and JobSet
    starts all pods again. With parameter servers, a lost worker is replaced alone.
    """
    if options.runtime:
        raise ConfigurationError("--runtime is for --kind trainjob.", hint="Leave it out.")
    restarts = _RESTARTS if options.restarts is None else options.restarts
    tasks = ",".join(f"{role}={number}" for role, number in counts.items())
    jobs = []
    for role, number in counts.items():
        alone = role == "worker" and "ps" in counts
        spec = {
            "completionMode": "Indexed",
            "parallelism": number,
            "completions": number,
            "backoffLimit": restarts if alone else 0,
            "podFailurePolicy": {"rules": pods.exit_rules("Ignore" if alone else "FailJob")},
            "template": pods.jobset_pod(plan, options, role, tasks),
        }
        jobs.append({"name": role, "replicas": 1, "template": {"spec": spec}})
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            # The job has succeeded when its chief has; the serving tasks need not end by themselves.
            **(
                {"successPolicy": {"operator": "All", "targetReplicatedJobs": ["chief"]}}
                if "ps" in counts
                else {}
            ),
            "failurePolicy": {
                "maxRestarts": restarts,
                # All pods of an attempt are gone before those of the next one start.
                "restartStrategy": "BlockingRecreate",
                "rules": [
                    {
                        "name": "preempted",
                        "action": "RestartJobSetAndIgnoreMaxRestarts",
                        "onJobFailureReasons": ["PodFailurePolicy"],
                    }
                ],
            },
            "replicatedJobs": jobs,
        },
    }


def _trainjob(
    metadata: Object, plan: pods.PodPlan, options: KubernetesOptions, counts: dict[str, int]
) -> Object:
    """A TrainJob over a runtime for PyTorch, whose variables `environments.kubeflow` reads."""
    unfit = [name for name in _NOT_IN_TRAINJOB if getattr(options, name) is not None]
    if unfit:
        raise ConfigurationError(
            f"{', '.join(map(flag, unfit))} cannot be set by a TrainJob.",
            hint="Use --kind jobset, or set it in the runtime that --runtime names.",
        )
    pods.too_long("arguments", len(plan.args))
    pods.too_long("variables", len(plan.env))
    pods.too_long("volumes", len(plan.volumes))
    runtime = checked.subdomain("--runtime", options.runtime or _RUNTIME)
    resources = plan.limits | plan.gpus
    spec: Object = {
        "terminationGracePeriodSeconds": plan.grace,
        "securityContext": plan.pod_security,
        "containers": [{"name": _NODE, "securityContext": plan.security, "volumeMounts": plan.mounts}],
        "volumes": plan.volumes,
    }
    spec |= pods.placement(plan, options)
    job = {"name": _NODE, "template": {"spec": {"template": {"spec": spec}}}}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": metadata,
        "spec": {
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org",
                "kind": "ClusterTrainingRuntime",
                "name": runtime,
            },
            "trainer": {
                "image": plan.image,
                "command": plan.command,
                "args": plan.args,
                "env": plan.env,
                "numNodes": counts["worker"],
                "numProcPerNode": 1,
                **({"resourcesPerNode": {"requests": resources, "limits": resources}} if resources else {}),
            },
            "runtimePatches": [
                {
                    "manager": "dtrain",
                    "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [job]}}},
                }
            ],
        },
    }


def hide(text: str, objects: list[Object]) -> str:
    """A text in which the secrets of the objects are replaced."""
    for manifest in objects:
        values: dict[str, Any] = manifest.get("data", {}) if manifest["kind"] == "Secret" else {}
        for value in values.values():
            for secret in (value, base64.b64decode(value).decode()):
                text = text.replace(secret, "(hidden)")
    return text
