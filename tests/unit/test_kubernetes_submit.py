"""`dtrain submit --kubernetes` where something is wrong, its file, and the start of a pod; `--tpu`."""

from __future__ import annotations

import os
import shlex
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dtrain.cli import main
from dtrain.process_group.secret import read_secret

yaml = pytest.importorskip("yaml")

SUBMIT = ["submit", "--kubernetes", "--image", "registry.example/train:1"]

WRONG = (
    ("--name Train_1", "'Train_1'", "lower-case"),
    ("--name 1st", "'1st'", "begins with a letter"),
    ("--name " + "a" * 50, "50 characters", "--name of at most 46 characters"),
    ("--name " + "a" * 43 + " --workers 100000", "at most 63", "--name of at most"),
    ("--namespace Team", "--namespace is 'Team'", "lower-case"),
    ("--namespace " + "a" * 64, "64 characters", ""),
    ("--cpus 0", "not a positive quantity", "500m"),
    ("--cpus 4cores", "not a positive quantity", "500m"),
    ("--cpus 1u", "less than 1m", ""),
    ("--memory 16GB", "not a positive quantity", "16Gi"),
    ("--memory 512m", "less than a mebibyte", "thousandth"),
    ("--memory -1Gi", "not a positive quantity", "16Gi"),
    ("--memory 1Gi --shared-memory 2Gi", "of which it is a part", "more memory"),
    ("--user 0", "root", "1000"),
    ("--user 2147483648", "--user is 2,147,483,648", "smaller"),
    ("--workers 99999999999", "--workers is 99,999,999,999", "smaller"),
    ("--ps 2147483648", "--ps is", "smaller"),
    ("--gpus 2147483648", "--gpus is", "smaller"),
    ("--restarts 2147483648", "--restarts is", "smaller"),
    ("--grace 1e12", "--grace is", "smaller"),
    ("--shared-memory 99999999999999999999", "more than Kubernetes can count", "16Gi"),
    ("--cpus 10E", "more than Kubernetes can count", "500m"),
    ("--python=", "--python is empty", "python"),
    ("--network closed", "closed", "job, ingress, open"),
    ("--kind job", "job", "jobset"),
    ("--volume pvc:data", "not a volume", "pvc:NAME:/PATH"),
    ("--volume hostpath:/etc:/etc", "not a volume", "pvc:NAME:/PATH"),
    ("--volume pvc:Data:/data", "'Data'", "lower-case"),
    ("--volume pvc:data:data", "not an absolute path", "/data"),
    ("--volume pvc:data:/a/../b", "not an absolute path", "/data"),
    ("--volume pvc:a:/x --volume pvc:b:/x/", "mounted at /x", "another path"),
    ("--volume emptydir:/run/dtrain", "mounted at /run/dtrain", "the job's own"),
    ("--env PATH", "without a '='", "KEY=VALUE"),
    ("--env A-B=1", "'A-B'", "no digit"),
    ("--env A=1 --env A=2", "given twice", ""),
    ("--env TF_CONFIG={}", "set by the job itself", ""),
    ("--env DTRAIN_SECRET_FILE=/x", "set by the job itself", ""),
    ("--node-selector pool", "without a '='", "KEY=VALUE"),
    ("--node-selector a/b/c=x", "'a/b/c'", "letters"),
    ("--node-selector pool=a/b", "'a/b'", "letters"),
    ("--toleration gpu:Never", "'Never'", "NoSchedule"),
    ("--queue -a", "'-a'", "letters"),
    ("--priority-class High", "'High'", "lower-case"),
    ("--runtime torch", "--runtime is for --kind trainjob", ""),
    ("--kind trainjob --ps 1", "--ps cannot be set by a TrainJob", "jobset"),
    ("--kind trainjob --restarts 3 --workdir /a", "--restarts, --workdir cannot be set", "jobset"),
    ("--tpu-name gpu", "--tpu-name is for --tpu", ""),
)  # fmt: skip


@pytest.mark.parametrize(("options", "message", "hint"), WRONG, ids=[each[0][:40] for each in WRONG])
def test_what_kubernetes_would_refuse_is_refused_here(
    options: str, message: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = options.replace("--queue -a", "--queue=-a").replace("--memory -1Gi", "--memory=-1Gi").split()
    assert main([*SUBMIT, "--dry-run", *given, "train.py"]) != 0
    out, err = capsys.readouterr()
    assert out == "" and message in err and hint in err, err


def test_an_image_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    for image in ([], ["--image", "a b"], ["--image", "-x"]):
        given = [f"{image[0]}={image[1]}"] if image else []
        assert main(["submit", "--kubernetes", "--dry-run", *given, "train.py"]) != 0
        err = capsys.readouterr().err
        assert ("No container image was given" if not image else "The image is") in err


def test_the_file_is_for_this_user_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("old")
    path.chmod(0o644)
    assert main([*SUBMIT, "--output", str(path), "train.py"]) == 0
    assert capsys.readouterr().out == ""
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each["kind"] for each in yaml.safe_load_all(path.read_text())][-1] == "JobSet"
    assert main([*SUBMIT, "--output", str(tmp_path / "none" / "job.yaml"), "train.py"]) != 0
    assert "cannot be written" in capsys.readouterr().err


def container_of(*options: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The container of a JobSet's pod."""
    assert main([*SUBMIT, "--dry-run", *options]) == 0
    job = list(yaml.safe_load_all(capsys.readouterr().out))[-1]
    spec = job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    container: dict[str, Any] = spec["containers"][0]
    return container


def start_pod(
    container: dict[str, Any], folder: Path, *, before: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Run the container's command as Kubernetes would, with its folders in `folder`."""
    words = [*container["command"], *container["args"]]
    for name in ("/etc/dtrain", "/run/dtrain"):
        words = [word.replace(name, f"{folder}{name}") for word in words]
    words = [word.replace("$$", "$") for word in words]
    return subprocess.run([*before, *words], capture_output=True, text=True)


def mounted(folder: Path) -> Path:
    """A folder with a secret as Kubernetes mounts it, and one that is empty; returns the file of the copy."""
    for name in ("etc", "run"):
        (folder / name / "dtrain").mkdir(parents=True)
    secret = folder / "etc" / "dtrain" / "secret"
    secret.write_text("0123456789abcdef" * 4)
    secret.chmod(0o440)
    return folder / "run" / "dtrain" / "secret"


def test_a_pod_makes_its_secret_its_own_and_gives_the_arguments_to_the_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = mounted(tmp_path)
    words = ["$HOME", "a b", "'", "*", "-n"]
    command = ["--python", sys.executable, "-m", "json.tool", *words]
    container = container_of(*command, capsys=capsys)
    container["args"] = [sys.executable, "-c", "import sys; print(sys.argv[1:])", *container["args"][3:]]
    done = start_pod(container, tmp_path)
    assert done.stdout == f"{words}\n", done.stderr
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    assert read_secret(copy).origin == str(copy)


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="it needs root and setpriv")
def test_a_user_that_may_read_the_secret_by_its_group_alone_can_start(
    capsys: pytest.CaptureFixture[str],
) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as name:  # pytest's folders are closed to other users
        folder = Path(name)
        copy = mounted(folder)
        folder.chmod(0o755)
        os.chown(folder / "etc" / "dtrain" / "secret", 0, 4321)  # as fsGroup does
        (folder / "run" / "dtrain").chmod(0o777)
        container = container_of("--python", "/bin/true", "train.py", capsys=capsys)
        as_user = ("setpriv", "--reuid=4321", "--regid=4321", "--clear-groups")
        done = start_pod(container, folder, before=as_user)
        assert done.returncode == 0, done.stderr
        found = copy.stat()
        assert (found.st_uid, stat.S_IMODE(found.st_mode)) == (4321, 0o600)


def test_an_image_without_dtrain_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mounted(tmp_path)
    for python in ("/bin/false", "/no/python"):
        done = start_pod(container_of("--python", python, "train.py", capsys=capsys), tmp_path)
        assert done.returncode == 1
        assert f"of the image registry.example/train:1 ({python}) cannot import dtrain" in done.stderr


# What kubectl says, as its versions 1.20 to 1.32 do; a cluster for a real one cannot be had here.
REFUSALS = {
    'Error from server (Forbidden): jobsets.jobset.x-k8s.io is forbidden: User "eve" cannot create resource '
    '"jobsets" in API group "jobset.x-k8s.io" in the namespace "team"': "right to create",
    'error: resource mapping not found for name: "train" namespace: "" from "STDIN": no matches for kind '
    '"JobSet" in version "jobset.x-k8s.io/v1alpha2"': "ask its administrators for JobSet",
    'Error from server (NotFound): namespaces "team" not found': "kubectl create namespace",
    'The Secret "t-secret" is invalid: data: Forbidden: field is immutable when `immutable` is set': "--name",
    "error: You must be logged in to the server (Unauthorized)": "Log in",
    'error: context "c" does not exist': "get-contexts",
}


@pytest.mark.parametrize("words", REFUSALS, ids=lambda words: words[:30])
def test_a_refusal_quotes_kubectl_and_names_the_remedy(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    client = tmp_path / "kubectl"
    log = shlex.quote(str(tmp_path / "log"))
    secret = "$(grep -o 'secret: .*' | cut -d'\"' -f2)"
    client.write_text(f'#!/bin/sh\necho "$@" >> {log}\necho {shlex.quote(words)} "{secret}" >&2\nexit 1\n')
    client.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert main([*SUBMIT, "--context", "c", "train.py"]) != 0
    err = capsys.readouterr().err
    assert f"kubectl cannot create the job: {words} (hidden)" in err and REFUSALS[words] in err, err
    (call,) = (tmp_path / "log").read_text().splitlines()  # the cluster checks first; nothing was created
    assert "--context=c" in call and "--dry-run=server" in call


def test_without_a_cluster_or_a_client_nothing_is_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    if shutil.which("kubectl"):
        assert main([*SUBMIT, "train.py"]) != 0
        err = capsys.readouterr().err
        assert "kubectl cannot create the job:" in err and "refused" in err and "cluster-info" in err
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main([*SUBMIT, "train.py"]) != 0
    assert "There is no kubectl in PATH" in capsys.readouterr().err


def test_a_tpu_gets_a_command_for_all_of_its_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    tpu = ["submit", "--tpu", "--tpu-name", "my-slice", "--zone", "us-central2-b"]
    assert main([*tpu, "train.py", "--note", "it's; rm"]) == 0
    out, err = capsys.readouterr()
    *command, program = shlex.split(out)
    assert command[:5] == ["gcloud", "compute", "tpus", "tpu-vm", "ssh"]
    assert command[5:] == ["my-slice", "--zone=us-central2-b", "--worker=all"]
    assert shlex.split(program.removeprefix("--command=")) == ["python3", "train.py", "--note", "it's; rm"]
    assert "not tried" in err
    for wrong in (["submit", "--tpu", "train.py"], [*tpu[:3], "My TPU", "train.py"]):
        assert main(wrong) != 0
        assert "error" in capsys.readouterr().err
