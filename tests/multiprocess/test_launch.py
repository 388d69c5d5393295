"""`dtrain launch` as a command, and the launcher of this machine: real processes, ports, output, signals.

What every launcher does is in `test_launchers.py`.
"""

from __future__ import annotations

import contextlib
import io
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from dtrain.errors import ConfigurationError
from dtrain.launch import launch_local
from dtrain.launch.job.task_output import visible_line
from dtrain.launch.local_processes.guard import marked_processes
from dtrain.launch.local_processes.ports import reserve_ports
from processes import alive, traces, wait_until
from refusals import refused

PRELUDE = """
import json, os, signal, subprocess, sys, time
config = json.loads(os.environ["TF_CONFIG"])
index = config["task"]["index"]
"""


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        path = tmp_path / "job.py"
        path.write_text(PRELUDE + textwrap.dedent(text))
        return str(path)

    return write


def launch(workers: int, *command: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dtrain", "launch", "--workers", str(workers), *options, *command],
        capture_output=True,
        text=True,
    )


@contextlib.contextmanager
def launched(workers: int, *command: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "dtrain", "launch", "--workers", str(workers), *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def pids_written(folder: Path, count: int) -> list[int]:
    """Wait for the ids that the script's processes wrote as names of files in a folder."""
    wait_until(lambda: len(list(folder.glob("[0-9]*"))) >= count)
    return [int(path.name) for path in folder.glob("[0-9]*")]


def test_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "job_module.py").write_text("import sys; print(__name__, sys.argv[1:])")
    monkeypatch.chdir(tmp_path)
    done = launch(1, "job_module", "-v", options=("-m",))
    assert (done.returncode, done.stdout) == (0, "[worker 0] __main__ ['-v']\n")


def test_progress_bars_and_bytes_that_are_no_text(script: Callable[[str], str]) -> None:
    path = script(
        r"""
        for i in range(50):
            sys.stdout.write("\b" * 20 + "\r" + f"step {i}/49")
            sys.stdout.flush()
        sys.stdout.write("\n")
        sys.stdout.flush()
        os.write(1, b"caf\xe9 \xff\n")
        """
    )
    assert launch(1, path).stdout == "[worker 0] step 49/49\n[worker 0] caf\ufffd \ufffd\n"


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        (b"plain", "plain"),
        (b"dos\r", "dos"),
        (b"one\rtwo", "two"),
        (b"one\r     \r", "one"),
        (b"12\b\b34", "34"),
        (b"\b\b\bab", "ab"),
        (b"", ""),
        ("\u00e9\u6f22".encode(), "\u00e9\u6f22"),
    ],
)
def test_visible_line(raw: bytes, shown: str) -> None:
    assert visible_line(raw) == shown


def test_a_worker_that_raises_ends_the_job(script: Callable[[str], str]) -> None:
    path = script(
        """
        if index == 1:
            raise ValueError("what went wrong")
        while True:
            signal.pause()
        """
    )
    done = launch(3, path)
    assert done.returncode == 1
    end = done.stderr[done.stderr.index("[dtrain] worker 1 failed") :]
    assert "ended with exit status 1" in end
    assert "[worker 1] ValueError: what went wrong" in end


def test_only_the_last_lines_are_shown_again(script: Callable[[str], str]) -> None:
    path = script(
        """
        for i in range(100):
            print("line", i)
        sys.exit(1)
        """
    )
    again = [line for line in launch(1, path).stderr.splitlines() if line.startswith("[worker 0]")]
    assert again == [f"[worker 0] line {i}" for i in range(80, 100)]


def test_a_command_that_does_not_exist() -> None:
    errors = io.StringIO()
    assert launch_local(["/no/such/program"], workers=1, stdout=io.StringIO(), stderr=errors) == 127
    assert "cannot run '/no/such/program': No such file" in errors.getvalue()


@pytest.mark.parametrize(
    "options", [{"workers": 0}, {"workers": True}, {"workers": 1, "devices_per_worker": 0}]
)
def test_numbers_out_of_range(options: dict[str, int]) -> None:
    with refused(ConfigurationError, *list(options.items())[-1]):
        launch_local([sys.executable, "-c", ""], **options)


def test_fewer_gpus_than_workers() -> None:
    with refused(ConfigurationError, "gpus", "1 value (0)", "2 workers", "CUDA_VISIBLE_DEVICES"):
        launch_local([sys.executable, "-c", ""], workers=2, gpus=["0"])


def job_with_family(script: Callable[[str], str], folder: Path, extra: str = "") -> str:
    """A script whose processes tell their ids, each with a child in a session of its own, and then wait."""
    folder.mkdir()
    return script(
        f"{extra}\n"
        f"child = subprocess.Popen(['sleep', 'infinity'], start_new_session=True)\n"
        f"for pid in (os.getpid(), child.pid): open(f'{folder}/{{pid}}', 'w').close()\n"
        f"while True: signal.pause()\n"
    )


def test_a_second_interrupt_kills_at_once(script: Callable[[str], str], tmp_path: Path) -> None:
    asked = f"signal.signal(signal.SIGINT, lambda *_: open('{tmp_path}/asked', 'w').close())"
    path = job_with_family(script, tmp_path / "pids", asked)
    with launched(1, "--grace", "1e9", path) as process:
        pids = pids_written(tmp_path / "pids", 2)
        process.send_signal(signal.SIGINT)
        wait_until((tmp_path / "asked").exists)
        process.send_signal(signal.SIGINT)
        process.communicate()
    assert process.returncode == 130
    assert not any(map(alive, pids))


def test_nobody_reads_the_output(script: Callable[[str], str]) -> None:
    path = script(
        """
        while True:
            print("more")
        """
    )
    with launched(2, path) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        errors = process.stderr.read()
        assert process.wait() == 128 + signal.SIGPIPE
    assert "Traceback" not in errors and "Exception ignored" not in errors


def test_a_job_inside_a_job_ends_with_the_outer_one(script: Callable[[str], str], tmp_path: Path) -> None:
    inner = job_with_family(script, tmp_path / "pids")
    outer = tmp_path / "outer.py"
    outer.write_text(
        "import subprocess, sys\n"
        f"command = [sys.executable, '-m', 'dtrain', 'launch', '--workers', '2', {inner!r}]\n"
        "sys.exit(subprocess.call(command))\n"
    )
    with launched(1, str(outer)) as process:
        pids = pids_written(tmp_path / "pids", 4)
        parents = [psutil.Process(pid).ppid() for pid in pids]
        process.terminate()
        process.communicate()
    assert not any(map(alive, pids))
    wait_until(lambda: not any(map(traces, parents)))


def test_two_launches_at_the_same_time_share_no_port(script: Callable[[str], str], tmp_path: Path) -> None:
    path = script(
        f"""
        from dtrain import environments
        from dtrain.process_group.rendezvous import run_rendezvous
        topology = environments.current()
        run_rendezvous(topology)
        print(topology.address, flush=True)
        while not os.path.exists("{tmp_path}/both"):
            time.sleep(0.02)
        """
    )
    addresses = []
    with launched(3, path) as one, launched(3, path) as other:
        for process in (one, other):
            assert process.stdout is not None
            addresses += [process.stdout.readline().split()[-1] for _ in range(3)]
        (tmp_path / "both").touch()
        outputs = [process.communicate() for process in (one, other)]
    assert [one.returncode, other.returncode] == [0, 0], outputs
    assert len(set(addresses)) == 6


def test_reserved_ports_are_not_given_twice() -> None:
    with reserve_ports(200) as some, reserve_ports(200) as others:
        assert len({*some, *others}) == 400


def test_nothing_marked_is_found_for_an_unknown_mark() -> None:
    assert marked_processes("no-such-mark") == []
