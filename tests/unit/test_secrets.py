"""What only the processes of a job know: where it comes from, what it signs, and who else may read it."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dtrain.checkpoint.coordinator import SaveProposal
from dtrain.collectives.transport import Facts
from dtrain.environments.topology import Topology
from dtrain.errors import ConfigurationError
from dtrain.launch.job.job_session import Session
from dtrain.launch.local_processes.local_launcher import LocalLauncher
from dtrain.launch.mpi import rank_placeholder
from dtrain.process_group import plain_values
from dtrain.process_group import secret as secrets
from dtrain.process_group.secret import (
    Secret,
    job_secret,
    on_loopback,
    read_secret,
    user_folder,
    write_secret,
)
from processes import wait_until
from refusals import refused

HERE = Topology({"worker": ("127.0.0.1:4000", "localhost:4001")}, "worker", 0)
FAR = Topology({"worker": ("127.0.0.1:4000", "192.0.2.7:4001")}, "worker", 0)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    write_secret(path)
    return path


def test_a_file_is_this_users_alone(file: Path, tmp_path: Path) -> None:
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert read_secret(file).sign("a") == read_secret(file).sign("a")
    other = tmp_path / "other"
    write_secret(other)
    assert read_secret(other).sign("a") != read_secret(file).sign("a")
    with pytest.raises(FileExistsError):
        write_secret(other)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o777])
def test_a_file_that_others_may_open_is_refused(file: Path, mode: int) -> None:
    file.chmod(mode)
    with refused(ConfigurationError, file, f"{mode:o}", "600"):
        read_secret(file)


def test_a_file_that_is_none_or_anothers_is_refused(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "short").write_bytes(b"hunter2\n")
    (tmp_path / "short").chmod(0o600)
    for name, problem in (
        ("none", "No such file"),
        (".", "is no file"),
        ("pipe", "is no file"),
        ("short", "7 bytes"),
    ):
        with refused(ConfigurationError, tmp_path / name, problem) as raised:
            read_secret(tmp_path / name)
        assert "hunter2" not in str(raised.value)
    owner = file.stat().st_uid
    if owner == 0:
        os.chown(file, 12345, 12345)
        with refused(ConfigurationError, file, "user 12345", "as 0"):
            read_secret(file)


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder of this user, which has no session."""
    for name in ("DTRAIN_SECRET_FILE", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    return home


def test_where_a_jobs_secret_comes_from(file: Path, user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert on_loopback(HERE) and not on_loopback(FAR)
    assert job_secret(FAR) is None
    here = job_secret(HERE)  # of this user's, for processes that were started by hand
    assert here is not None and Path(here.origin).name == "secret"
    again = job_secret(HERE)
    assert again is not None and here.sign("a") == again.sign("a")
    monkeypatch.setenv("DTRAIN_SECRET_FILE", str(file))
    for topology in (HERE, FAR):
        named = job_secret(topology)
        assert named is not None and named.sign("a") == read_secret(file).sign("a")
    monkeypatch.setenv("DTRAIN_SECRET_FILE", f"{file}.not")
    with refused(ConfigurationError, f"{file}.not", "No such file"):
        job_secret(HERE)


def test_the_folder_of_a_users_secret(user: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that another process of this user finds too: without its session, and without its variables."""
    monkeypatch.setattr(secrets, "SYSTEM_RUNTIME", tmp_path / "run")
    shared = tmp_path / f"dtrain-secret-{os.geteuid()}"
    monkeypatch.setattr("pwd.getpwuid", lambda user: SimpleNamespace(pw_dir=str(tmp_path / "none")))
    monkeypatch.setenv("HOME", "/")  # as in a container for any user
    if os.geteuid() != 0:
        assert user_folder(tmp_path) == shared
    monkeypatch.delenv("HOME")
    assert user_folder(tmp_path) == shared
    monkeypatch.setattr("pwd.getpwuid", lambda user_id: SimpleNamespace(pw_dir=str(user)))
    assert user_folder(tmp_path) == user / ".dtrain"
    monkeypatch.setenv("HOME", str(user))
    assert user_folder(tmp_path) == user / ".dtrain"
    session = tmp_path / "run" / str(os.geteuid())
    session.mkdir(parents=True, mode=0o700)
    assert user_folder(tmp_path) == session / "dtrain"  # a process without the session's variables
    other = tmp_path / "session"
    other.mkdir(mode=0o755)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(other))
    assert user_folder(tmp_path) == session / "dtrain"  # it is open to others
    other.chmod(0o700)
    assert user_folder(tmp_path) == other / "dtrain"
    if os.geteuid() == 0:
        os.chown(other, 12345, 12345)  # as `sudo` may keep it
        assert user_folder(tmp_path) == session / "dtrain"


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder in which every user may make files, as /tmp."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


def test_another_user_does_not_switch_the_secret_off(
    shared: Path, user: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name can be guessed, so another user may have made the folder before."""
    monkeypatch.setattr(secrets, "user_folder", lambda shared: shared / f"dtrain-secret-{os.geteuid()}")
    folder = shared / f"dtrain-secret-{os.geteuid()}"
    real = shared / "real"
    real.mkdir(mode=0o700)
    folder.symlink_to(real)
    with refused(ConfigurationError, folder, "is no folder", "DTRAIN_SECRET_FILE"):
        job_secret(HERE, shared)
    folder.unlink()
    folder.write_text("")
    with refused(ConfigurationError, folder, "is no folder"):
        job_secret(HERE, shared)
    folder.unlink()
    folder.mkdir()
    folder.chmod(0o770)
    with refused(ConfigurationError, folder, "770"):
        job_secret(HERE, shared)
    folder.rmdir()
    if os.geteuid() == 0:
        subprocess.run(["mkdir", "-m", "700", str(folder)], user=65534, check=True)
        with refused(ConfigurationError, folder, "belongs to user 65534", "as 0"):
            job_secret(HERE, shared)
        folder.rmdir()
    folder.mkdir(mode=0o700)
    (folder / "secret").write_text("short")
    (folder / "secret").chmod(0o600)
    with refused(ConfigurationError, folder / "secret", "5 bytes"):
        job_secret(HERE, shared)
    (folder / "secret").unlink()
    assert job_secret(HERE, shared) is not None
    assert [path.name for path in folder.iterdir()] == ["secret"]
    assert job_secret(HERE, shared / "not" / "there") is None  # no user can make it


def test_a_signature_is_of_these_parts_and_a_secret_is_not_shown(file: Path) -> None:
    found = read_secret(file)
    signature = found.sign("value", 1, 23, b"x")
    assert found.has_signed(signature, "value", 1, 23, b"x")
    for parts in (("value", 12, 3, b"x"), ("value", 1, 23), ("value1", "", 23, b"x"), ("value", 1, 23, "y")):
        assert not found.has_signed(signature, *parts)
    assert not found.has_signed(b"", "value", 1, 23, b"x")
    assert found.derive("a").sign("b") != found.derive("b").sign("b")
    content = file.read_text().strip()
    assert content not in f"{found!r} {found} {vars(secrets)}"
    with pytest.raises(TypeError):
        pickle.dumps(found)


PLAIN: list[Any] = [
    *(None, True, 0, -(2**63), 10**30, 0.1, -0.0, float("inf"), 1 + 2j, "", "é\ud800\n", b"", b"\0\xff"),
    *([], (), set(), {}, [1, (2, [3.5, None])], {"a": {1: (b"x",)}, (1, 2): []}, {1, "a"}, frozenset({(1,)})),
    Path("/tmp/x"),
    SaveProposal(True, "a notice", False, 0.25),
    Facts(asked="auto", gpus=False, own={"mpi": {"size": 0, "problem": ""}}),
]
ARRAYS: list[Any] = [
    *(np.float32(0.1), np.int64(-7), np.bool_(True), np.array(3.0), np.zeros((2, 0, 3), "int8")),
    *(np.arange(12, dtype=">i4").reshape(3, 4).T, np.array(["a", "bcd"]), np.array("2020-01-01", "M8[D]")),
]


def test_plain_values_come_back_as_they_were() -> None:
    for value in PLAIN:
        found = plain_values.decode(plain_values.encode(value))
        assert type(found) is type(value) and found == value and repr(found) == repr(value)
    for value in ARRAYS:
        found = plain_values.decode(plain_values.encode(value))
        assert type(found) is type(value) and found.dtype == value.dtype
        np.testing.assert_array_equal(found, value)
    assert np.isnan(plain_values.decode(plain_values.encode(float("nan"))))
    assert plain_values.decode(plain_values.encode(np.zeros(2))).flags.writeable


def test_what_is_not_plain_is_no_message() -> None:
    around: list[Any] = []
    around.append(around)
    kinds = [
        lambda: None,
        object(),
        around,
        np.array([object()]),
        type("Text", (str,), {})("a"),
        ValueError("a"),
    ]
    for value in [*kinds, *([kind] for kind in kinds), Secret(b"k" * 16, "a test")]:
        with pytest.raises(plain_values.NotPlainError):
            plain_values.encode(value)


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "{}", '{"a": 1}', '{"tuple": 1}', '{"dict": [[[], 1]]}', '{"bytes": "?"}', '{"int": [1]}'),
        *('{"tuple": [], "set": []}', '{"record": ["Popen", {}]}', '{"record": ["SaveProposal", {}]}'),
        "[" * 100_000,
        *('{"array": ["O", [1], "AAAAAAAAAAA="]}', '{"array": ["<f4", [-1, -1], "AAAAAA=="]}'),
        *('{"array": ["<f4", [1000000000], "AAAAAA=="]}', "9" * 5000, '{"complex": ["1", 2]}'),
        *('{"array": ["i4,(", [1], ""]}', '{"array": [4, [1], ""]}', '{"record": ["SaveProposal", []]}'),
    ],
)
def test_a_damaged_message_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="holds no value"):
        plain_values.decode(text)


def arguments_of_guard() -> str:
    """Of the guard that this process has started."""
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    lines = (Path(f"/proc/{pid}/cmdline").read_text() for pid in children)
    return next((line.replace("\0", " ") for line in lines if "guard.py" in line), "")


def test_what_a_job_has_on_disk_and_in_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is made for this user alone; neither it nor the mark of the job can be read by others."""
    session = Session()
    launcher = LocalLauncher(session)
    with session.opened(), launcher.opened():
        env = launcher.environment({"DTRAIN_SECRET_FILE": "another job's", "A": "b"}, "mark")
        folders = [session.scratch(), *filter(None, [session.scratch_memory()])]
        for folder in folders:
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        path = Path(env["DTRAIN_SECRET_FILE"])
        assert path.parent == session.scratch() and stat.S_IMODE(path.stat().st_mode) == 0o600
        content = path.read_text().strip()
        assert content not in json.dumps(env)
        wait_until(lambda: bool(arguments_of_guard()))  # the system shows a new program's a moment later
        guard = arguments_of_guard()
        for word in (launcher._mark, content, *map(str, folders)):
            assert word not in guard
    assert not any(folder.exists() for folder in folders)


def test_a_launcher_without_a_place_for_its_folder_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/proc/no")
    with (
        refused(ConfigurationError, "/proc/no", "TMPDIR"),
        Session().opened(),
    ):
        pass


def test_a_rank_placeholder_sends_only_what_the_starter_has_added(tmp_path: Path) -> None:
    known = {"PATH": os.environ["PATH"], "TOKEN": "of the user", "CHANGED": "before"}
    (tmp_path / "known").write_text(
        json.dumps({n: rank_placeholder.digest(value) for n, value in known.items()})
    )
    with socket.socket(socket.AF_UNIX) as launcher:
        launcher.bind(str(tmp_path / "ranks"))
        launcher.listen(1)
        placeholder = subprocess.Popen(
            [
                sys.executable,
                "-I",
                "-S",
                rank_placeholder.__file__,
                str(tmp_path / "ranks"),
                str(tmp_path / "known"),
            ],
            env={**known, "CHANGED": "by the starter", "PMIX_RANK": "1"},
        )
        sock, _ = launcher.accept()
        with sock, sock.makefile("rb") as lines:
            sent = json.loads(lines.readline())
    assert placeholder.wait() == 0
    sent.pop("LC_CTYPE", None)  # Python's own
    assert sent == {"CHANGED": "by the starter", "PMIX_RANK": "1"}
