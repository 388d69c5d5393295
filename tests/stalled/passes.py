"""One pass of pytest over the chosen tests, whose processes are frozen or limited meanwhile by the caller.

Which tests are chosen is in `plugin` and `kinds`; what is done to processes, in `freezer` and `throttle`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .kinds import TESTS
from .processes import MARK, Process, Run, all_processes, descendants

ROOT = TESTS.parent
_FOLDERS = [
    f"tests/{name}" for name in ("unit", "multiprocess", "faults", "multihost", "contract", "multidevice")
]
_PYTEST = [sys.executable, "-m", "pytest", "-p", "tests.stalled.plugin", "-p", "no:cacheprovider", "-q"]
_NOT_SOAK = ["-m", "not soak"]
# Of pytest-timeout, for a test that has no limit of its own: disturbed processes take longer.
_TEST_SECONDS = 900
_OF_ALL_TESTS = "tests/zygote/"  # in the command of a process from which tests fork theirs
# A limited process has another cgroup than its zygote, so it is executed; these tests are about forking.
_NOT_LIMITED = "tests/unit/test_zygote.py"
_LOOK = 0.5  # seconds between two looks at the results
_TELL = 60.0  # seconds between two lines about the progress


def selection(folder: Path) -> str:
    """The tests of a pass and their kinds of start, a line each, as pytest finds them."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = [*_PYTEST, *_NOT_SOAK, "--collect-only", *_FOLDERS]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {MARK: str(folder)}, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"pytest cannot collect the tests:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return (folder / "selection.txt").read_text(encoding="utf-8")


def _answer_signals() -> None:
    """Undoes what `nohup` and `&` do: processes ignore what the one that started them ignores."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class Pass:
    """A pass of pytest, as a context; at its end none of its processes is left.

    Args:
        folder: what the pass writes; an older one is removed.
        tests: files or tests that run as a whole, or folders of which those tests run that `plugin` chooses;
            without any, all folders.
        at_once: how many tests run at the same time.
    """

    def __init__(self, folder: Path, tests: Sequence[str] = (), *, at_once: int = 3) -> None:
        self.folder = folder
        self.results: list[dict[str, Any]] = []
        self._tests = tests
        self._at_once = at_once
        self._disturbed: list[tuple[str, str]] = []
        self._as_named = not all((ROOT / name).is_dir() for name in tests)

    def __enter__(self) -> Pass:
        shutil.rmtree(self.folder, ignore_errors=True)
        (self.folder / "now").mkdir(parents=True)
        if self._as_named:
            (self.folder / "as-named").touch()
        with (self.folder / "pytest.txt").open("wb") as log:
            self._process = subprocess.Popen(
                self._command(),
                cwd=ROOT,
                env=os.environ | {MARK: str(self.folder)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_answer_signals,
            )
        self._run = Run(self._process.pid, str(self.folder))
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        while left := self._run.processes():
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
            time.sleep(_LOOK)  # wall clock: between two looks

    def _command(self) -> list[str]:
        return [
            *_PYTEST,
            *("--numprocesses", str(self._at_once), "--dist", "loadfile", "--no-loadscope-reorder"),
            *("--timeout", str(_TEST_SECONDS)),
            *([] if self._as_named else _NOT_SOAK),
            *(self._tests or _FOLDERS),
        ]

    def processes(self) -> list[Process]:
        """The processes that may be frozen, oldest first: those of tests, and pytest's that run the tests.

        There are none while no test runs, because pytest is starting or ending.
        """
        return self._run.processes() if self._workers() else []

    def of_tests(self) -> dict[str, list[Process]]:
        """The processes that each running test has started, or its module, oldest first."""
        known = all_processes()
        return {
            test: [each for each in descendants(pid, known) if _OF_ALL_TESTS not in each.command()]
            for pid, test in self._workers().items()
            if pid in known and not test.startswith(_NOT_LIMITED)
        }

    def note(self, what: str, process: Process, test: str = "") -> None:
        """Keeps what was done to a process, for the file of its test if that fails."""
        known, workers = all_processes(), self._workers()
        above: Process | None = process
        while not test and above is not None:
            test = workers.get(above.pid, "")
            above = known.get(above.parent)
        line = f"{time.strftime('%H:%M:%S')} {what} {process.pid}: {process.command()}"
        self._disturbed.append((test, line))
        with (self.folder / "disturbed.txt").open("a", encoding="utf-8") as file:
            file.write(f"{line}  [{test}]\n")

    def _workers(self) -> dict[int, str]:
        """The test that each of pytest's processes runs now."""
        found = {}
        for path in (self.folder / "now").glob("*[0-9]"):
            with contextlib.suppress(FileNotFoundError):
                found[int(path.name)] = path.read_text(encoding="utf-8")
        return found

    def wait(self, limit: float) -> str:
        """Shows the progress until pytest has ended.

        Returns: why the pass proves nothing, beside the failures of tests; "" if there is no such reason.
        """
        begun = told = time.monotonic()
        while self._process.poll() is None:
            now = time.monotonic()
            if now - begun > limit:
                return f"it did not end within {limit / 60:g} minutes"
            if now - told > _TELL:
                told = now
                print(f"{(now - begun) / 60:4.0f} min: {self.summary()}", flush=True)
            time.sleep(_LOOK)  # wall clock: between two looks
            self._read_results()
        self._read_results()
        if not self._disturbed:
            return "no process was disturbed"
        if self._process.returncode not in (0, 1) or not self.results:
            return f"pytest ended with status {self._process.returncode}, see {self.folder / 'pytest.txt'}"
        return ""

    def summary(self) -> str:
        """How many tests have ended, and how."""
        outcomes = Counter(result["outcome"] for result in self.results)
        parts = [f"{outcomes[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped")]
        return f"{', '.join(parts)}; {len(self._disturbed)} processes were disturbed"

    def failures(self) -> dict[str, Path]:
        """The tests that failed, and the file of each."""
        return {r["test"]: self._file(r["test"]) for r in self.results if r["outcome"] == "failed"}

    def _read_results(self) -> None:
        path = self.folder / "results.jsonl"
        if not path.exists():
            return
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]  # the last one may be incomplete
        for line in lines[len(self.results) :]:
            result = json.loads(line)
            self.results.append(result)
            if result["outcome"] == "failed":
                self._write_failure(result)

    def _write_failure(self, result: dict[str, Any]) -> None:
        test = result["test"]
        done = "".join(f"{line}\n" for of, line in self._disturbed if of in ("", test))
        file = self._file(test)
        file.write_text(f"{test}\n\n{result['failure']}\n--- disturbed\n{done}", encoding="utf-8")
        print(f"FAILED {test}  {file}", flush=True)

    def _file(self, test: str) -> Path:
        name = re.sub(r"[^\w.-]+", "-", test.removeprefix("tests/"))
        return self.folder / f"failed-{name[:180]}.txt"
