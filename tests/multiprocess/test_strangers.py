"""Strangers at the port of a job's first worker: they run no code, and what they leave is never a value."""

from __future__ import annotations

import base64
import json
import os
import pickle
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from tests import stranger

import dtrain
from dtrain.errors import AuthenticationError
from dtrain.keras_engine import peer_exchange
from dtrain.keras_engine.protocol import ReplicaLayout
from dtrain.launch.ports import reserve_ports

pytestmark = pytest.mark.long

LIMIT = 120.0
FOLDER = "dtrain/exchange"


class Attack:
    """What runs a command where it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"id > {self.path}",)


def meet(owned: str) -> dict[str, Any]:
    """All attacks on one job of two workers; the first worker also stands for who sees what is there."""
    me = dtrain.rank()
    dtrain.MultiWorkerMirroredStrategy()
    address = json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"][0]
    forged = base64.b64encode(pickle.dumps(Attack(owned))).decode()
    seen: dict[str, Any] = {"forged": [], "values": [], "file": os.environ["DTRAIN_SECRET_FILE"]}
    dtrain.barrier()

    # What is where the next values would be, if their places were known.
    if me == 0:
        calls = [("insert", f"{FOLDER}/{n}/1", text) for n in range(40) for text in (forged, f"j{n}")]
        answers = stranger.ask(address, *calls)
        seen["inserted"] = answers.count("")
    seen["values"].append(dtrain.broadcast("told" if me == 0 else None))

    # A value of worker 1 is there, and is exchanged before worker 0 reads it.
    for kind in ("pickle", "plain", "replayed", "signed for another"):
        if me == 0:
            # As if the stranger had found out where worker 1's next value will be.
            store = peer_exchange.store(ReplicaLayout(workers=2))
            key = store._key("exchange", peer_exchange._kept[-1] + 1, 1)
            while key not in (known := stranger.ask(address, ("list", FOLDER, ""))[0]):
                time.sleep(0.05)
            other = next(text for name, text in known.items() if name != key)
            signature = other[:64]
            text = {"pickle": f"{signature}p{forged}", "plain": f"{signature}j42", "replayed": other}
            seen["forged"] += stranger.ask(address, ("overwrite", key, text.get(kind, f"{'0' * 64}jnull")))
            try:
                dtrain.barrier()
                seen["values"].append(f"{kind}: passed")
            except AuthenticationError as error:
                seen["forged"].append(error.message)
        else:
            dtrain.barrier()
        dtrain.broadcast(kind)  # and they meet again

    # Objects of the workers' own are pickled, as they share a secret.
    seen["object"] = dtrain.broadcast((lambda: 7) if me == 0 else None)()
    for number in range(300):
        seen["values"].append(dtrain.broadcast(number if me == 0 else None))
    if me == 0:
        there = stranger.ask(address, ("list", "dtrain", ""), ("list", FOLDER, ""))
        seen["keys"] = [key for key in {**there[0], **there[1]} if not key.rpartition("/")[2].isdigit()]
        seen["text"] = json.dumps(there)
        seen["secret"] = Path(seen["file"]).read_text().strip()
    dtrain.barrier()
    return seen


def test_forged_values_run_no_code_and_are_never_used(tmp_path: Path) -> None:
    owned = tmp_path / "owned"
    first, second = dtrain.spawn(meet, workers=2, args=(str(owned),), timeout=LIMIT)
    assert not owned.exists(), owned.read_text()
    assert first["inserted"] == 40, "the stranger came too late to any place"
    assert first["values"] == second["values"] == ["told", *range(300)]
    assert len(first["forged"]) == 8 and first["forged"][::2] == [""] * 4
    for message in first["forged"][1::2]:
        assert (
            "At the place of a value of worker 1 (exchange) is one that this worker has not signed" in message
        )
    assert first["object"] == second["object"] == 7
    # Of 320 exchanges the last values are kept: those that somebody may still read.
    assert len(first["keys"]) <= 2 * 3 + 2 * 5, first["keys"]
    assert first["secret"] not in first["text"]
    assert not Path(first["file"]).exists()


PROGRAM = """
import dtrain
from dtrain.errors import ConfigurationError

dtrain.MultiWorkerMirroredStrategy()
print("heard", dtrain.broadcast({"a": (1, b"x")} if dtrain.is_chief() else None))
try:
    print("object", dtrain.broadcast((lambda: 7) if dtrain.is_chief() else None)())
except ConfigurationError as error:
    print("no object:", error)
dtrain.barrier()
"""


def by_hand(folder: Path, secret: str) -> list[tuple[int, str]]:
    """Two workers at an address of this machine that others reach; their exit status and output."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no address but the loopback's")
        host = probe.getsockname()[0]
    program = folder / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    with reserve_ports(2) as ports:
        cluster = {"worker": [f"{host}:{port}" for port in ports]}
        workers = []
        for index in range(2):
            task = {"cluster": cluster, "task": {"type": "worker", "index": index}}
            env = {**os.environ, "TF_CONFIG": json.dumps(task), "DTRAIN_SECRET_FILE": secret}
            workers.append(
                subprocess.Popen(
                    [sys.executable, str(program)],
                    env=env,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        try:
            outputs = [worker.communicate(timeout=LIMIT)[0] for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
    return [(worker.returncode, output) for worker, output in zip(workers, outputs, strict=True)]


def test_without_a_secret_nothing_is_unpickled_and_a_warning_says_so(tmp_path: Path) -> None:
    workers = by_hand(tmp_path, "")
    for status, output in workers:
        assert status == 0, output
        assert "heard {'a': (1, b'x')}" in output
        assert "no object: broadcast was given what must be pickled (a function is no plain value)" in output
        assert "Hint: Name one file of mode 600 with a secret in DTRAIN_SECRET_FILE" in output
    assert "share no secret, so others in the network can change what its workers tell" in workers[0][1]


def test_with_a_secret_in_a_file_objects_may_be_sent(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.touch(mode=0o600)
    file.write_text("a secret of thirty-two bytes, more or less")
    for status, output in by_hand(tmp_path, str(file)):
        assert status == 0, output
        assert "object 7" in output and "share no secret" not in output
        assert "thirty-two" not in output
