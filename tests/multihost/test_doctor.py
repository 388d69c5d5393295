"""`dtrain doctor` on two hosts finds what is wrong with each of them, and with what lies between them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from dtrain.diagnosis import host_checks
from dtrain.diagnosis.check import CheckContext
from dtrain.diagnosis.checks import CHECKS
from hosts import Host, MakeHosts

PORT = 20300
# Where Debian and Ubuntu have it, by `apt-get install faketime`.
FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")
Findings = dict[str, list[dict[str, str]]]


def doctors(
    made: Sequence[Host],
    folder: Path,
    *options: str,
    indices: Sequence[int] = (0, 1),
    variables: Sequence[dict[str, str]] = ({}, {}),
    port: int = PORT,
) -> list[tuple[int, Findings]]:
    """Runs the command on every host at once; each exit status, and the findings by the name of the check."""
    secret = folder / "secret"
    secret.touch(mode=0o600)
    secret.write_text("0123456789abcdef0123456789abcdef")
    cluster = {"worker": [f"{host.name}:{port}" for host in made]}
    started = []
    for host, index, own in zip(made, indices, variables, strict=True):
        config = {"cluster": cluster, "task": {"type": "worker", "index": index}}
        env = os.environ | {"TF_CONFIG": json.dumps(config), "DTRAIN_SECRET_FILE": str(secret)} | own
        command = [sys.executable, "-m", "dtrain", "doctor", "--json", *options]
        pipe = subprocess.PIPE
        started.append(host.popen(command, env=env, stdout=pipe, stderr=pipe, text=True))
    outcomes = []
    for process in started:
        try:
            output, errors = process.communicate()
        finally:
            process.kill()
        assert output, errors
        findings: Findings = {}
        for entry in json.loads(output)["findings"]:
            findings.setdefault(entry["check"], []).append(entry)
        outcomes.append((process.returncode, findings))
    return outcomes


def failed(findings: Findings) -> set[str]:
    return {name for name, entries in findings.items() if any(entry["status"] == "fail" for entry in entries)}


def finding(findings: Findings, check: str, status: str) -> str:
    """What a check says with this status; its remedy must be there."""
    assert check in findings, findings
    chosen = [entry for entry in findings[check] if entry["status"] == status]
    assert all(entry["remedy"] for entry in chosen)
    return "; ".join(entry["found"] for entry in chosen)


def test_two_sound_hosts_then_a_slow_network_and_a_port_in_use(make_hosts: MakeHosts, tmp_path: Path) -> None:
    made = make_hosts()
    for status, findings in doctors(made, tmp_path, "--checkpoint-dir", str(tmp_path)):
        assert status == 0, findings
        for check in ("peers", "versions", "clocks", "checkpoint directory"):
            assert {entry["status"] for entry in findings[check]} == {"ok"}, findings[check]
        assert "fail" not in {entry["status"] for entry in findings["network"]}  # a busy machine may be slow
    assert not [*tmp_path.glob(".dtrain-doctor-*")]

    for host in made:
        host.limit(1e8)
    program = (
        "import signal, socket; "
        f"s = socket.create_server(('', {PORT + 1})); print('ready', flush=True); signal.pause()"
    )
    listening = made[1].popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert listening.stdout is not None and listening.stdout.readline() == "ready\n"
    for status, findings in doctors(made, tmp_path):
        assert status == 0 and "Gbit/s" in finding(findings, "network", "warn")
    (first, second) = doctors(made, tmp_path, "--wait", "3", port=PORT + 1)
    assert second[0] == 1 and "port 20301" in finding(second[1], "port", "fail")
    assert "Address already in use" in finding(second[1], "port", "fail")
    assert first[0] == 1 and "no `dtrain doctor` of this job" in finding(first[1], "peers", "fail")


@pytest.mark.parametrize(("free", "status"), [(700, "warn"), (5000, "ok")])
def test_the_memory_that_is_free(free: int, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_checks, "free_memory", lambda: free << 20)
    (result,) = CHECKS["memory"](CheckContext())
    assert result.status == status and f"{free} MiB" in result.found
    assert bool(result.remedy) == (status == "warn")


def test_the_index_of_another_host(make_hosts: MakeHosts, tmp_path: Path) -> None:
    (first, second) = doctors(make_hosts(), tmp_path, "--wait", "20", indices=(0, 0))
    assert second[0] == 1 and "worker 1 is" in finding(second[1], "own address", "fail")
    assert '"index": 1' in second[1]["own address"][0]["remedy"]
    assert first[0] == 1 and "says that it is worker 0" in finding(first[1], "peers", "fail")


def test_a_host_that_cannot_be_reached(make_hosts: MakeHosts, tmp_path: Path) -> None:
    made = make_hosts()
    made[1].cut()
    for status, findings in doctors(made, tmp_path, "--wait", "1"):
        assert status == 1 and failed(findings) == {"peers"}
        assert "cannot be reached" in finding(findings, "peers", "fail")


def test_other_versions_and_a_directory_that_is_not_shared(make_hosts: MakeHosts, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    package = tmp_path / "other" / "numpy-0.9.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 0.9\n")
    path = os.pathsep.join([str(package.parent), os.environ.get("PYTHONPATH", "")])
    made = make_hosts(own=[tmp_path / "own"])
    (first, second) = doctors(
        made, tmp_path, "--checkpoint-dir", str(tmp_path / "own"), variables=({}, {"PYTHONPATH": path})
    )
    for status, findings in (first, second):
        assert status == 1 and {"versions", "checkpoint directory"} <= failed(findings)
        assert "is not shared" in finding(findings, "checkpoint directory", "fail")
    assert "worker 1 has numpy 0.9" in finding(first[1], "versions", "fail")


@pytest.mark.skipif(not FAKETIME.exists(), reason="libfaketime is not installed")
def test_a_clock_that_is_an_hour_ahead(make_hosts: MakeHosts, tmp_path: Path) -> None:
    fake = {"LD_PRELOAD": str(FAKETIME), "FAKETIME": "+1h", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    (first, second) = doctors(make_hosts(), tmp_path, variables=({}, fake))
    assert "ahead of" in finding(first[1], "clocks", "fail") and "behind" in finding(
        second[1], "clocks", "fail"
    )
    assert first[0] == second[0] == 1
