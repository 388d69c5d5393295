"""The manifests of `dtrain submit --kubernetes`: valid for any combination of options, YAML for any text."""

from __future__ import annotations

import base64
import itertools
import random
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dtrain.cli import main
from kubernetes_schemas import check_core, check_custom

yaml = pytest.importorskip("yaml")

BOTH: dict[str, Sequence[Sequence[str]]] = {
    "workers": ([], ["--workers", "1"], ["--workers", "12"]),
    "namespace": ([], ["--namespace", "team-a"]),
    "cpus": ([], ["--cpus", "4"], ["--cpus", "500m"], ["--cpus", "2.5"]),
    "memory": ([], ["--memory", "16Gi"], ["--memory", "2e9"]),
    "gpus": ([], ["--gpus", "8"]),
    "shared_memory": ([], ["--shared-memory", "1Gi"]),
    "volume": (
        [],
        ["--volume", "pvc:data:/data:ro", "--volume", "emptydir:/scratch"],
        ["--volume", "configmap:code.v1:/code", "--volume", "pvc:runs:/runs"],
    ),
    "env": ([], ["--env", "KERAS_HOME=/tmp", "--env", "EMPTY=", "--env", "X=$(Y) $HOME: - 'a'"]),
    "node_selector": ([], ["--node-selector", "cloud.example/pool=a100", "--node-selector", "zone="]),
    "toleration": (
        [],
        [
            "--toleration",
            "nvidia.com/gpu",
            "--toleration",
            "spot=true:NoSchedule",
            "--toleration",
            "x:NoExecute",
        ],
    ),
    "service_account": ([], ["--service-account", "trainer"]),
    "queue": ([], ["--queue", "team-a"]),
    "grace": ([], ["--grace", "90.5"]),
    "join_timeout": ([], ["--join-timeout", "600"]),
    "user": ([], ["--user", "65532"]),
    "read_only": ([], ["--read-only"]),
    "network": ([], ["--network", "job"], ["--network", "ingress"], ["--network", "open"]),
    "python": ([], ["--python", "/opt/venv/bin/python3"]),
}
JOBSET: dict[str, Sequence[Sequence[str]]] = BOTH | {
    "ps": ([], ["--ps", "2"]),
    "restarts": ([], ["--restarts", "0"], ["--restarts", "7"]),
    "priority_class": ([], ["--priority-class", "high"]),
    "image_pull_secret": ([], ["--image-pull-secret", "registry"]),
    "workdir": ([], ["--workdir", "/app/"]),
}
TRAINJOB: dict[str, Sequence[Sequence[str]]] = BOTH | {"runtime": ([], ["--runtime", "torch-2.7"])}
SCRIPTS = (["train.py"], ["train_it.py", "--lr", "1e3", "-x"], ["-m", "my.package", "--epochs=3"])


def combination(kind: str, seed: int) -> list[str]:
    """Options of a kind, drawn by the seed, and a script with arguments."""
    draw = random.Random(f"{kind} {seed}")
    options = [draw.choice(choices) for choices in (JOBSET if kind == "jobset" else TRAINJOB).values()]
    return ["--kind", kind, *itertools.chain(*options), *draw.choice(SCRIPTS)]


def rendered(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    """The documents of the manifest that the command prints."""
    image = ["--image", "registry.example/team/train:1.0@sha256:" + "a" * 64]
    status = main(["submit", "--kubernetes", *image, "--dry-run", *arguments])
    out, err = capsys.readouterr()
    assert (status, err) == (0, "")
    return list(yaml.safe_load_all(out))


def pod_specs(job: dict[str, Any]) -> list[dict[str, Any]]:
    """The specifications of the pods of a JobSet."""
    jobs = job["spec"]["replicatedJobs"]
    return [each["template"]["spec"]["template"]["spec"] for each in jobs]


@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
@pytest.mark.parametrize("seed", range(20))
def test_any_combination_of_options_is_valid(
    kind: str, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    *core, job = rendered(capsys, *combination(kind, seed))
    assert [each["kind"] for each in core] in (["Secret", "NetworkPolicy"], ["Secret"])
    for each in core:
        check_core(each)
    for spec in pod_specs(job) if kind == "jobset" else ():
        check_core({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec})
        mounts = [mount["name"] for mount in spec["containers"][0]["volumeMounts"]]
        assert mounts == [volume["name"] for volume in spec["volumes"]]
    for each in job["spec"]["replicatedJobs"] if kind == "jobset" else ():
        check_core({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "j"}, **each["template"]})
    check_custom(job)


def test_a_field_that_the_definition_lacks_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    for kind in ("jobset", "trainjob"):
        job = rendered(capsys, "--kind", kind, "train.py")[-1]
        check_custom(job)
        job["spec"]["maxRestarts"] = 3
        with pytest.raises(jsonschema.ValidationError, match="maxRestarts"):
            check_custom(job)


def test_a_job_of_workers_restarts_as_a_whole_and_a_preemption_does_not_count(
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = rendered(capsys, "--workers", "3", "--restarts", "5", "--grace", "50", "train.py")[-1]
    policy, (worker,) = job["spec"]["failurePolicy"], job["spec"]["replicatedJobs"]
    assert policy["maxRestarts"] == 5
    assert policy["rules"][0]["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert policy["rules"][0]["onJobFailureReasons"] == ["PodFailurePolicy"]
    spec = worker["template"]["spec"]
    assert (spec["parallelism"], spec["completions"], spec["backoffLimit"]) == (3, 3, 0)
    saved, lost = spec["podFailurePolicy"]["rules"]
    assert saved["action"] == lost["action"] == "FailJob"
    assert saved["onExitCodes"]["values"] == [75]
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] == 50


def test_parameter_servers_have_a_chief_and_a_worker_is_replaced_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = rendered(capsys, "--workers", "2", "--ps", "1", "--gpus", "4", "--restarts", "2", "t.py")[-1]
    assert job["spec"]["successPolicy"]["targetReplicatedJobs"] == ["chief"]
    jobs = {each["name"]: each["template"]["spec"] for each in job["spec"]["replicatedJobs"]}
    assert {name: each["completions"] for name, each in jobs.items()} == {"chief": 1, "worker": 2, "ps": 1}
    assert {name: each["backoffLimit"] for name, each in jobs.items()} == {"chief": 0, "worker": 2, "ps": 0}
    assert jobs["worker"]["podFailurePolicy"]["rules"][0]["action"] == "Ignore"
    containers = {name: each["template"]["spec"]["containers"][0] for name, each in jobs.items()}
    assert containers["worker"]["resources"]["limits"] == {"nvidia.com/gpu": 4}
    assert "resources" not in containers["ps"] and "resources" not in containers["chief"]


@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
def test_the_pods_run_as_no_root_and_only_they_reach_each_other(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    secret, policy, job = rendered(capsys, "--kind", kind, "--user", "1234", "--read-only", "train.py")
    if kind == "jobset":
        (spec,) = pod_specs(job)
    else:
        (patch,) = job["spec"]["runtimePatches"]
        (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
        spec = node["template"]["spec"]["template"]["spec"]
    pod, container = spec["securityContext"], spec["containers"][0]["securityContext"]
    assert pod["runAsNonRoot"] and pod["runAsUser"] == pod["fsGroup"] == 1234
    assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["allowPrivilegeEscalation"] is False and container["readOnlyRootFilesystem"] is True
    assert container["capabilities"] == {"drop": ["ALL"]}
    label = {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": "train"}}
    assert policy["spec"]["podSelector"] == label
    assert policy["spec"]["ingress"] == [{"from": [{"podSelector": label}]}]
    to_peers, dns = policy["spec"]["egress"]
    assert to_peers == {"to": [{"podSelector": label}]} and {each["port"] for each in dns["ports"]} == {53}
    assert spec["volumes"][0]["secret"] == {"secretName": "train-secret", "defaultMode": 0o400}
    assert (
        secret["metadata"]["name"] == "train-secret" and len(base64.b64decode(secret["data"]["secret"])) == 64
    )
    assert secret["data"] != rendered(capsys, "train.py")[0]["data"]


HOSTILE = (
    "1e3", "0x1F", "0o17", "1_000", ".inf", ".nan", "1.", "12:30", "2001-01-01", "yes", "No", "on", "y",
    "null", "~", "true", "", " a ", "- a", "a: b", "a #b", "#a", "&a", "*a", "!a", "%a", "@a", "`a`", "{a",
    "[a", "'", '"', "\\", "a\nb: c\n", "\ta", "a\r\n", "\u2028", "\x85", "\x7f", "\x1b[0m", "é", "😀", "|",
    ">", "?", "=", "<<", "---", "...", "a\n---\nkind: Secret\n", " \n", "$(HOME)", "$$(A)", "$", "<a>&b",
    "\ufeff", "-", "_", "/", "a" * 3000,
)  # fmt: skip


def manifest_with(texts: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """A manifest with these texts as variables and as arguments."""
    env = itertools.chain(*(["--env", f"V{number}={text}"] for number, text in enumerate(texts)))
    arguments = ["--name", "train", *env, "train.py", *texts]
    assert main(["submit", "--kubernetes", "--image", "r", "--dry-run", *arguments]) == 0
    return capsys.readouterr().out


def check_texts(manifest: str, texts: Sequence[str]) -> None:
    """Fail if the manifest has other texts than these, or other documents."""
    documents = {each["kind"]: each for each in yaml.safe_load_all(manifest)}
    assert sorted(documents) == ["JobSet", "NetworkPolicy", "Secret"]
    (container,) = pod_specs(documents["JobSet"])[0]["containers"]
    escaped = [each.replace("$", "$$") for each in texts]
    assert container["args"] == ["python", "train.py", *escaped]
    values = {each["name"]: each.get("value") for each in container["env"]}
    assert [values[f"V{number}"] for number in range(len(texts))] == escaped


def test_any_text_stays_the_text_that_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    check_texts(manifest_with(HOSTILE, capsys), HOSTILE)


def test_kubectl_reads_the_same_texts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    if not shutil.which("kubectl"):
        pytest.skip("there is no kubectl, whose reader of YAML is another one")
    # `kubectl kustomize` needs no cluster. It reads control characters, but refuses to write them.
    refused = {"\x7f", "\x1b", "\x85", "\ufeff"}
    texts = [each for each in HOSTILE if not refused & {*each} and each not in ("=", "<<")]
    (tmp_path / "manifest.yaml").write_text(manifest_with(texts, capsys), encoding="utf-8")
    (tmp_path / "kustomization.yaml").write_text("resources: [manifest.yaml]\n")
    command = ["kubectl", "kustomize", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr[-300:]
    check_texts(done.stdout, texts)
