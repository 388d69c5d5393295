"""A program that a zygote has forked behaves as after `exec`: each is run both ways and compared."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.zygote import caller

from processes import alive, wait_until

Run = Callable[..., subprocess.CompletedProcess[str]]

# What a program can see of its own start; the C library's own two signals are left out.
SEEN = """
import json, os, signal, sys, threading
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
seen = {
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "name": __name__,
    "spec": __spec__ and __spec__.origin,
    "file": globals().get("__file__"), "names": sorted(globals()),
    "main": vars(sys.modules["__main__"]) is globals(),
    "env": dict(os.environ), "cwd": os.getcwd(), "stdin": sys.stdin.read(),
    "streams": [[s.name, s.mode, s.encoding, s.errors, s.line_buffering, s.write_through, s.fileno()]
                for s in (sys.stdin, sys.stdout, sys.stderr)],
    "leads": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()], "parent": os.getppid(),
    "handlers": {s.name: str(signal.getsignal(s)) for s in signal.Signals},
    "signals": [int(status[name], 16) & ~(3 << 31) for name in ("SigBlk", "SigIgn", "SigCgt")],
    "more": [status[name] for name in ("Umask", "Threads", "NoNewPrivs", "Cpus_allowed")],
    "descriptors": [n for n in range(400) if os.path.exists(f"/proc/self/fd/{n}")],
    "command": [each for each in open("/proc/self/cmdline").read().split("\\0") if each],
    "variables": [each for each in sorted(open("/proc/self/environ").read().split("\\0")) if each],
    "loaded": [name for name in ("tensorflow", "keras", "numpy", "rich", "dtrain") if name in sys.modules],
    "thread": threading.current_thread() is threading.main_thread(),
    "finders": [getattr(f, "__name__", type(f).__name__) for f in sys.meta_path],
}
print(json.dumps(seen))
"""


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Runs a program from a zygote, and checks that it was."""
    for _ in range(2):  # the second start with the same variables begins their zygote
        subprocess.run([sys.executable, *_naming(["-c", "pass"])], check=True)
    before = caller.started["fork"]
    runs = 0

    def run(arguments: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        nonlocal runs
        runs += 1
        options = {"capture_output": True, "text": True, **options}
        return subprocess.run([sys.executable, *_naming(arguments)], **options)

    yield run
    assert caller.started["fork"] >= before + runs, caller.started


@pytest.fixture
def executed() -> Run:
    """Runs a program by `exec`."""

    def run(arguments: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(subprocess, "_fork_exec", caller.system_fork_exec)
            options = {"capture_output": True, "text": True, **options}
            return subprocess.run([sys.executable, *_naming(arguments)], **options)

    return run


def _naming(arguments: list[str]) -> list[str]:
    """The same program, which names TensorFlow: others are not forked."""
    if arguments[0] != "-c":
        return arguments
    return ["-c", arguments[1] + "\n# tensorflow", *arguments[2:]]


@pytest.mark.parametrize("kind", ["script", "-m", "-c", "-P script"])
def test_a_program_sees_what_it_would_after_exec(
    kind: str, forked: Run, executed: Run, tmp_path: Path
) -> None:
    (tmp_path / "seen.py").write_text(SEEN, encoding="utf-8")  # names TensorFlow
    start = {"script": ["seen.py"], "-m": ["-m", "seen"], "-c": ["-c", SEEN], "-P script": ["-P", "seen.py"]}
    env = {**os.environ, "ONE": "1", "PYTHONUNBUFFERED": "1"}
    options: dict[str, Any] = {"cwd": tmp_path, "env": env, "input": "some\nlines", "start_new_session": True}
    found, expected = (
        json.loads(run([*start[kind], "a b", "-c"], **options).stdout) for run in (forked, executed)
    )
    # The zygote's modules are found first, and its libraries have finders.
    found["finders"] = [name for name in found["finders"] if name in expected["finders"]]
    assert found == expected


@pytest.mark.parametrize(
    "program",
    [
        "raise SystemExit(7)",
        "raise SystemExit('a word')",
        "import atexit; atexit.register(print, 'at exit'); print('no newline', end='')",
        "def f():\n    raise ValueError('wrong')\ntry:\n    f()\nexcept ValueError:\n    raise KeyError",
        "raise KeyboardInterrupt",
        "this is no Python",
        "import sys; sys.excepthook = lambda *a: print(*a[:2]); 1 / 0",
        "import os; os.abort()",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import os; print('lost', end=''); os._exit(9)",
        "import threading, sys; threading.Thread(target=lambda: print('later')).start(); sys.exit(3)",
        "import multiprocessing as m; p = m.get_context('fork').Process(target=print); p.start(); p.join()",
        "import logging; logging.error('once'); logging.info('never')",
        "import sys; print(sys.flags.hash_randomization, __annotations__, y := 2)\nz: int = 1",
    ],
)
def test_a_program_ends_as_after_exec(program: str, forked: Run, executed: Run, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(program + "\n# tensorflow", encoding="utf-8")
    found, expected = (run([str(script)]) for run in (forked, executed))
    assert (found.returncode, found.stdout) == (expected.returncode, expected.stdout)
    assert found.stderr == expected.stderr


def test_a_signal_finds_the_group_of_a_process_at_once(forked: Run) -> None:
    forked(["-c", ""])
    waits = [sys.executable, "-c", "import signal; signal.pause()  # tensorflow"]
    for _ in range(5):
        process = subprocess.Popen(waits, start_new_session=True)
        assert os.getsid(process.pid) == process.pid
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait() == -signal.SIGTERM


def test_ignored_and_blocked_signals_are_inherited(forked: Run, executed: Run) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    try:
        found, expected = (json.loads(run(["-c", SEEN], input="").stdout) for run in (forked, executed))
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})
        signal.signal(signal.SIGINT, before)
    assert found["signals"] == expected["signals"]
    assert found["handlers"] == expected["handlers"]


def test_two_programs_at_once_with_descriptors_of_their_own(forked: Run) -> None:
    forked(["-c", ""])
    echo = "import os, sys; n = int(sys.argv[1]); os.write(n, os.read(n + int(sys.argv[2]), 9))  # keras"
    pairs = [(os.pipe(), os.pipe()) for _ in range(2)]
    running = []
    for (inner, _), (_, outer) in pairs:
        arguments = [sys.executable, "-c", echo, str(outer), str(inner - outer)]
        running.append(subprocess.Popen(arguments, pass_fds=[inner, outer]))
        os.close(inner)
        os.close(outer)
    for word, ((_, say), (hear, _)), process in reversed(
        [*zip((b"one", b"two"), pairs, running, strict=True)]
    ):
        os.write(say, word)
        assert os.read(hear, 9) == word
        assert os.waitpid(process.pid, 0) == (process.pid, 0)
        process.returncode = 0
        assert os.read(hear, 9) == b""  # nothing else holds the other end
        os.close(say)
        os.close(hear)


def test_processes_draw_numbers_of_their_own(forked: Run) -> None:
    draw = (
        "import random, numpy, keras, tempfile, uuid; print(random.random(), numpy.random.rand(),"
        " uuid.uuid4(), keras.random.normal(()).numpy(), tempfile.mktemp())"
    )
    one, other = (forked(["-c", draw]).stdout.split() for _ in range(2))
    assert len(one) == len(other) == 5
    assert not set(one) & set(other)


def test_tensorflow_starts_in_the_process(forked: Run) -> None:
    program = """
import os, threading
import tensorflow as tf
before = len(os.listdir("/proc/self/task"))
tf.config.threading.set_intra_op_parallelism_threads(3)
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 3)
print(before, len(tf.config.list_logical_devices()), tf.config.threading.get_intra_op_parallelism_threads())
"""
    assert forked(["-c", program]).stdout == "1 3 3\n"


def test_keras_imports_tensorflow_before_a_variable_is_set(forked: Run, executed: Run) -> None:
    program = """
import os, sys
class Watch:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in ("keras", "tensorflow"):
            print(name, sorted({*os.environ} - before))
before = {*os.environ}
sys.meta_path.insert(0, Watch)
import keras
"""
    for run in (forked, executed):
        assert run(["-c", program]).stdout == "keras []\ntensorflow []\n"


def test_a_program_that_sets_a_variable_of_an_import_runs_in_a_new_interpreter(forked: Run) -> None:
    program = "import os, sys; os.environ['TF_ENABLE_ONEDNN_OPTS'] = '0'; import tensorflow; print(sys.argv)"
    done = forked(["-c", program, "a"])
    assert (done.returncode, done.stdout) == (0, "['-c', 'a']\n")
    assert "_Hidden" not in forked(["-c", program + "; print(sys.meta_path)"]).stdout


@pytest.mark.parametrize(
    "reason",
    ["no TensorFlow", "other variables", "holds keras", "options of the interpreter", "as installed"],
)
def test_what_cannot_be_forked_is_executed(reason: str, tmp_path: Path) -> None:
    command, env = [sys.executable, "-c", "import keras"], dict(os.environ)
    if reason == "no TensorFlow":
        command[2] = ""
    elif reason == "other variables":
        env["XLA_FLAGS"] = "--xla_dump_to=/nowhere"
        command[2] = "# keras"
    elif reason == "holds keras":
        (tmp_path / "keras.py").write_text("raise SystemExit(0)", encoding="utf-8")
        env["PYTHONPATH"] += os.pathsep + str(tmp_path)
    elif reason == "options of the interpreter":
        command[1:] = ["-S", "-c", ""]
    else:
        env["PYTHONPATH"] = ""
        command[2] = "# keras"
    before = caller.started.copy()
    subprocess.run(command, env=env, check=True)
    (found,) = caller.started - before
    assert reason in found


# A program whose zygote starts two programs that wait, one of them bound to it, and one that starts another.
PARENT = """
import os, subprocess, sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import dtrain.launch.local_processes.exec_child as bound
from tests.zygote import caller
caller.install()
waits = [sys.executable, "-c", "import signal; signal.pause()  # tensorflow"]
inner = "import subprocess as s, sys; p = s.Popen(sys.argv[1:]); print(p.pid, flush=True); p.wait()  # keras"
first = subprocess.Popen([sys.executable, "-I", "-S", bound.__file__, str(os.getpid()), *waits])
second = subprocess.Popen([sys.executable, "-c", inner, *waits], stdout=subprocess.PIPE, text=True)
assert caller.started["fork"] == 2, caller.started
children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
print(first.pid, second.pid, second.stdout.readline().strip(), *children, flush=True)
signal.pause()
"""


def test_the_end_of_a_caller_ends_its_zygotes_and_what_is_bound_to_it() -> None:
    root = str(Path(__file__).parents[2])
    with subprocess.Popen(
        [sys.executable, "-S", "-c", "import site; site.main()\n" + PARENT, root],
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        bound, free, inner, *children = map(int, parent.stdout.readline().split())
        assert len(children) == 3  # the two programs and the zygote
        assert all(map(alive, [bound, free, inner]))
        own = [int(each) for each in Path(f"/proc/{free}/task/{free}/children").read_text().split()]
        assert inner in own
        parent.kill()
    wait_until(lambda: not any(alive(each) for each in children if each != free))
    assert alive(free) and alive(inner)  # as after exec, they outlive what started them
    os.kill(free, signal.SIGKILL)
    wait_until(lambda: not any(alive(each) for each in own if each != inner))
    os.kill(inner, signal.SIGKILL)


def test_without_its_zygote_a_caller_executes(forked: Run) -> None:
    program = f"""
import os, signal, subprocess, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from pathlib import Path
from tests.zygote import caller
(zygote,) = Path(f"/proc/self/task/{{os.getpid()}}/children").read_text().split()
os.kill(int(zygote), signal.SIGKILL)
os.waitpid(int(zygote), 0)
print(subprocess.run([sys.executable, "-c", "print(5)  # keras"], capture_output=True, text=True).stdout)
"""
    assert forked(["-c", program]).stdout == "5\n\n"
