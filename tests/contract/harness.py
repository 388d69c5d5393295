"""Run the contract's programs for one strategy and compare what they return with one device.

    python -m tests.contract.harness --strategy mirrored
    python -m tests.contract.harness --strategy multi_worker --only fit_numpy,save_whole_model
    python -m tests.contract.harness --strategy multi_worker --communication mpi
    python -m tests.contract.harness --list

All programs of a run share one process for each worker, since starting TensorFlow takes seconds. A program
that hangs, or that ends its process, is reported by name and the others go on in new processes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from tests.programs.registry import ATOL, RTOL, Listed, keras_version, listed
from tests.programs.strategies import LAYOUTS

from dtrain.upstream.versions import installed_tensorflow

from .mpi_starter import mpi_command, mpi_environment

ROOT = Path(__file__).resolve().parents[2]
Report = dict[str, Any]

# What the contract holds; the other programs are for the comparison of two commits.
HELD_KINDS = ("program", "property_check")
# Only what hangs reaches these limits. A program takes a second or two; on a machine that is busy with other
# work it may take some hundred times as long.
START_SECONDS = 1200.0
PROGRAM_SECONDS = 1200.0
# How long a worker may lag behind another that has failed already: it may wait for that one for ever.
LAG_SECONDS = 120.0
# What a strategy cannot do, and says so: (strategy, program) -> why.
_XLA_READS_ITS_OWN = "a function that a program compiles by XLA itself reads weights on its own device only"
_NO_REPLICA_FUNCTION = "divided weights are read in steps of `fit`, and not in strategy.run"
_OF_ONE_WORKER = "Keras' own callback saves on one worker, and all of them hold a part"
LIMITS = {
    **{
        ("fully_sharded", name): _NO_REPLICA_FUNCTION
        for name in (
            "loop_dataset_from_function",
            "loop_eager",
            "loop_gradients_reduced_by_one_call",
            "loop_gradients_reduced_then_applied",
            "loop_in_graph",
            "loop_jit_compiled_replica_step",
            "loop_keras_loss_and_metrics",
            "loop_over_the_iterator_in_graph",
            "loop_plain_variables",
            "loop_reduce_and_gather",
            "loop_test_step",
            "loop_two_optimizers",
            "loop_uneven_last_batch",
            "loop_with_replica_function_compiled",
            "loop_with_replica_function_compiled_in_graph",
            "own_metrics_in_loops",
        )
    },
    ("fully_sharded", "backup_and_restore"): _OF_ONE_WORKER,
    ("central_storage", "loop_jit_compiled_replica_step"): _XLA_READS_ITS_OWN,
    ("parameter_server", "loop_jit_compiled_replica_step"): _XLA_READS_ITS_OWN,
}


@dataclass
class Job:
    """The processes of one strategy, which run one program at a time."""

    strategy: str
    out: Path
    communication: str | None = None
    source: Path | None = None  # the `src` folder to import dtrain from; None takes the installed one
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    serving: list[subprocess.Popen[bytes]] = field(default_factory=list)
    pipes: list[Path] = field(default_factory=list)
    kept_open: list[int] = field(default_factory=list)

    @property
    def workers(self) -> int:
        return LAYOUTS[self.strategy].workers

    def start(self) -> None:
        layout = LAYOUTS[self.strategy]
        tasks = [("worker", rank) for rank in range(layout.workers)]
        if layout.served:
            tasks = [("chief", 0), *layout.served]
        cluster: dict[str, list[str]] = {}
        for (job, _), port in zip(tasks, free_ports(len(tasks)), strict=True):
            cluster.setdefault(job, []).append(f"127.0.0.1:{port}")
        environment = os.environ | {
            "CUDA_VISIBLE_DEVICES": "-1",
            "KERAS_BACKEND": "tensorflow",
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "PYTHONUNBUFFERED": "1",
        }
        environment.pop("TF_CONFIG", None)
        if self.source is not None:
            path = [str(self.source), *filter(None, [environment.get("PYTHONPATH")])]
            environment["PYTHONPATH"] = os.pathsep.join(path)
        for rank in range(len(tasks)):
            (self.out / f"ready.{rank}").unlink(missing_ok=True)
        command = [sys.executable, "-m", "tests.contract.worker"]
        command += ["--strategy", self.strategy, "--out", str(self.out)]
        if self.communication is not None:
            command += ["--communication", self.communication]
        if self.communication == "mpi":
            self._start_by_mpi(command, environment, cluster)
            tasks_started_here: list[tuple[str, int]] = []
        else:
            tasks_started_here = tasks
        for rank, (job, index) in enumerate(tasks_started_here):
            if len(tasks) > 1:
                task = {"type": job, "index": index}
                environment["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
            with self._log(rank).open("ab") as log:
                process = subprocess.Popen(
                    [*command, "--rank", str(rank)],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    cwd=ROOT,
                )
            (self.processes if rank < layout.workers else self.serving).append(process)
        ready = [self.out / f"ready.{rank}" for rank in range(layout.workers)]
        wait_until(lambda: all(p.exists() for p in ready) or self._dead(), START_SECONDS)
        if not all(p.exists() for p in ready):
            tails = "\n".join(self._tail(rank) for rank in range(len(tasks)))
            self.stop()
            raise RuntimeError(f"the workers of {self.strategy} did not start:\n{tails}")

    def _start_by_mpi(
        self, command: list[str], environment: dict[str, str], cluster: dict[str, list[str]]
    ) -> None:
        """One starter for all workers; each reads the names of its programs from a named pipe."""
        self.pipes = [self.out / f"pipe.{rank}" for rank in range(self.workers)]
        for pipe in self.pipes:
            pipe.unlink(missing_ok=True)
            os.mkfifo(pipe)
        with self._log(0).open("ab") as log:
            self.processes.append(
                subprocess.Popen(
                    [*mpi_command(self.workers), *command, "--cluster", json.dumps(cluster)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environment | mpi_environment(),
                    cwd=ROOT,
                    start_new_session=True,  # what the starter does to its process group is not for us
                )
            )

    def _send(self, name: str) -> None:
        """A program's name to every worker."""
        line = f"{name}\n".encode()
        for pipe in self.pipes:
            # Opened for both, so that it does not wait for a worker that is gone.
            descriptor = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
            os.write(descriptor, line)
            self.kept_open.append(descriptor)
        for process in self.processes:
            if process.stdin:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.write(line)
                    process.stdin.flush()

    def run(self, name: str, seconds: float) -> Report:
        """Run one program on every worker; a hang or a crash is a report like any other."""
        if not self.processes:
            self.start()
        files = [self.out / f"{name}.{rank}.pickle" for rank in range(self.workers)]
        for file in files:
            file.unlink(missing_ok=True)
        reports: dict[int, Report] = {}

        def all_have_reported() -> bool:
            for rank, file in enumerate(files):
                if rank not in reports and file.exists():
                    reports[rank] = pickle.loads(file.read_bytes())
            return len(reports) == len(files)

        def one_has_failed() -> bool:
            return self._dead() or any(report["status"] == "error" for report in reports.values())

        self._send(name)
        wait_until(lambda: all_have_reported() or one_has_failed(), seconds)
        # What a process has written before it ended is there; the others may wait for it.
        if not all_have_reported() and reports:
            wait_until(all_have_reported, LAG_SECONDS)
        report = self._collect([reports.get(rank) for rank in range(len(files))], seconds)
        if report["fatal"]:
            self.stop()
        return report

    def stop(self) -> None:
        if self.pipes:
            for ready in self.out.glob("ready.*"):
                with contextlib.suppress(OSError, ValueError):
                    os.kill(int(ready.read_text()), signal.SIGKILL)
            for process in self.processes:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(60)  # it removes what it keeps on disk
            for descriptor in self.kept_open:
                os.close(descriptor)
            self.kept_open.clear()
            self.pipes.clear()
        for process in (*self.processes, *self.serving):
            process.kill()
        for process in (*self.processes, *self.serving):
            process.wait()
            if process.stdin:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()
        self.processes.clear()
        self.serving.clear()

    def _collect(self, reports: list[Report | None], seconds: float) -> Report:
        """One report for those of all workers, None where a worker has written none."""
        missing = [rank for rank, report in enumerate(reports) if report is None]
        failed = [report for report in reports if report and report["status"] == "error"]
        if missing and not failed:
            started = self.processes * (self.workers if self.pipes else 1)
            codes = {rank: started[rank].poll() for rank in missing}
            died = {rank: code for rank, code in codes.items() if code is not None}
            what = f"worker {missing} ended with status {died}" if died else f"HANG: none in {seconds:.0f} s"
            tail = "\n".join(f"--- worker {rank}\n{self._tail(rank)}" for rank in missing)
            return broken(what, tail, fatal=True)
        if failed:
            fatal = bool(missing) or any(report["fatal"] for report in failed)
            only = f" (worker {missing} was left waiting)" if missing else ""
            return failed[0] | {"error": failed[0]["error"] + only, "fatal": fatal}
        for rank, report in enumerate(reports[1:], start=1):
            different = unequal_bits(reports[0]["values"], report["values"])
            if different:
                return reports[0] | {"status": "error", "error": f"worker {rank} differs from 0: {different}"}
        return reports[0]

    def _dead(self) -> bool:
        return any(process.poll() is not None for process in self.processes)

    def _log(self, rank: int) -> Path:
        return self.out / f"log.{rank}.txt"

    def _tail(self, rank: int) -> str:
        log = self._log(rank)
        return "\n".join(log.read_text(errors="replace").splitlines()[-15:]) if log.exists() else ""


def broken(error: str, trace: str, *, fatal: bool) -> Report:
    return {
        "status": "error",
        "values": {},
        "error": error,
        "traceback": trace,
        "fatal": fatal,
        "seconds": 0.0,
    }


def free_ports(count: int) -> list[int]:
    """Ports that are free now; all are held until the last is found, so that none is given twice."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    limit = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > limit:
            return False
        time.sleep(0.02)
    return True


def unequal_bits(first: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> str:
    """The names whose values are not the same to the last bit."""
    names = sorted(set(first) | set(other))
    same = {n for n in first if n in other and first[n].tobytes() == other[n].tobytes()}
    return ", ".join(n for n in names if n not in same)


def run_strategy(
    strategy: str,
    names: Iterable[str],
    *,
    seconds: float = PROGRAM_SECONDS,
    communication: str | None = None,
    tell: Callable[[str, Report], None] = lambda name, report: None,
) -> dict[str, Report]:
    """Run the named programs under one strategy; the reports by program name."""
    results: dict[str, Report] = {}
    out = Path(tempfile.mkdtemp(prefix="contract-"))
    job = Job(strategy, out, communication)
    try:
        for name in names:
            results[name] = job.run(name, seconds)
            tell(name, results[name])
    finally:
        job.stop()
        shutil.rmtree(out, ignore_errors=True)
    return results


def reference(entries: list[Listed], *, fresh: bool = False) -> dict[str, Report]:
    """What one device gives for these programs, from the cache where the program has not changed since."""
    versions = "-".join((keras_version(), version("numpy"), *installed_tensorflow()))
    cache = Path(tempfile.gettempdir()) / f"contract-reference-{os.getuid()}-{versions}.pickle"
    known: dict[str, tuple[str, Report]] = {}
    # A pickle runs code when it is read, and a temporary directory is everyone's: read only one's own file.
    if not fresh and cache.exists() and cache.stat().st_uid == os.getuid():
        with contextlib.suppress(Exception):
            known = pickle.loads(cache.read_bytes())
    wanted = [e for e in entries if not e.is_property]
    missing = [e for e in wanted if known.get(e.name, ("",))[0] != e.digest]
    if missing:
        reports = run_strategy("default", [e.name for e in missing])
        for entry in missing:
            if reports[entry.name]["status"] == "ok":
                known[entry.name] = (entry.digest, reports[entry.name])
        partial = cache.with_suffix(f".{os.getpid()}")
        partial.write_bytes(pickle.dumps(known))
        partial.replace(cache)
    absent = broken("the one-device run of this program fails", "", fatal=False)
    return {e.name: known[e.name][1] if known.get(e.name, ("",))[0] == e.digest else absent for e in wanted}


@dataclass(frozen=True)
class Verdict:
    """Whether a program holds, how far off it is at worst, and where."""

    ok: bool
    text: str


def judge(entry: Listed, report: Report, expected: Report | None) -> Verdict:
    """Compare a report with the one-device report (None for a property check, which judges itself)."""
    if report["status"] == "error":
        return Verdict(False, f"ERROR {report['error']}")
    if expected is None:
        return Verdict(True, "")
    if expected["status"] == "error":
        return Verdict(False, f"ERROR in the reference: {expected['error']}")
    return compare(report["values"], expected["values"], rtol=entry.rtol, atol=entry.atol)


def compare(
    values: dict[str, np.ndarray], expected: dict[str, np.ndarray], *, rtol: float = RTOL, atol: float = ATOL
) -> Verdict:
    """Every name, shape and number must be equal: integers and text exactly, floats within the tolerance."""
    if set(values) != set(expected):
        return Verdict(False, f"FAIL other names: {sorted(set(values) ^ set(expected))}")
    worst, where = 0.0, ""
    for name, wanted in expected.items():
        found = values[name]
        if found.shape != wanted.shape:
            return Verdict(False, f"FAIL shape {found.shape}, not {wanted.shape}, in {name}")
        if not np.issubdtype(wanted.dtype, np.floating):
            if not np.array_equal(found, wanted):
                return Verdict(False, f"FAIL {found.tolist()!s:.80}, not {wanted.tolist()!s:.80}, in {name}")
            continue
        far = distance(found.astype(np.float64), wanted.astype(np.float64), floor=atol / rtol)
        if far > worst:
            worst, where = far, name
    return Verdict(worst <= rtol, f"{'ok  ' if worst <= rtol else 'FAIL'} {worst:.1e} {where}")


def distance(found: np.ndarray, wanted: np.ndarray, *, floor: float) -> float:
    """The largest relative difference; the same infinity or NaN on both sides is no difference."""
    same = (found == wanted) | (np.isnan(found) & np.isnan(wanted))
    with np.errstate(invalid="ignore"):
        far = np.where(same, 0.0, np.abs(found - wanted) / (np.abs(wanted) + floor))
    return float(np.max(np.where(np.isnan(far), np.inf, far), initial=0.0))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.contract.harness", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--strategy", choices=sorted(LAYOUTS), default="mirrored")
    parser.add_argument("--communication", help="what multi_worker's values travel by: ring, mpi")
    parser.add_argument("--only", help="program names, or beginnings of them, by commas")
    parser.add_argument("--out", type=Path, help="write the reports to this pickle")
    parser.add_argument(
        "--compare", type=Path, help="a pickle of --out to compare with, instead of one device"
    )
    parser.add_argument("--fresh", action="store_true", help="run the one-device reference again")
    parser.add_argument("--traceback", action="store_true", help="print the errors' whole tracebacks")
    parser.add_argument("--timeout", type=float, default=PROGRAM_SECONDS, help="seconds for one program")
    parser.add_argument("--list", action="store_true", help="print the programs' names and exit")
    return parser.parse_args()


def select(only: str | None) -> list[Listed]:
    """The programs to run: all, or those whose name is given, or begins with what is given."""
    entries = listed(*HELD_KINDS)
    if not only:
        return entries
    asked = [name for name in only.split(",") if name]
    exact = {e.name for e in entries} & set(asked)
    begun = tuple(name for name in asked if name not in exact)
    chosen = [e for e in entries if e.name in exact or (begun and e.name.startswith(begun))]
    if not chosen:
        raise SystemExit(f"--only {only}: no such program; --list names them all")
    return chosen


def end(number: int, frame: Any) -> None:
    """Terminated, too, stop the workers and remove their directory; a second signal must not cut that off."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def main() -> int:
    options = parse()
    signal.signal(signal.SIGTERM, end)
    entries = select(options.only)
    if options.list:
        print("\n".join(e.name + (" (property)" if e.is_property else "") for e in entries))
        return 0
    by_name = {
        e.name: e
        for e in entries
        if e.runs_under(options.strategy) and (options.strategy, e.name) not in LIMITS
    }
    expected = (
        pickle.loads(options.compare.read_bytes())
        if options.compare
        else reference(list(by_name.values()), fresh=options.fresh)
    )
    good = 0

    def tell(name: str, report: Report) -> None:
        nonlocal good
        verdict = judge(by_name[name], report, None if by_name[name].is_property else expected[name])
        good += verdict.ok
        print(f"{name:42} {report['seconds']:5.1f} s  {verdict.text or 'ok'}", flush=True)
        if options.traceback and report["traceback"]:
            print(report["traceback"], flush=True)

    begun = time.monotonic()
    results = run_strategy(
        options.strategy,
        by_name,
        seconds=options.timeout,
        communication=options.communication,
        tell=tell,
    )
    if options.out:
        options.out.write_bytes(pickle.dumps(results))
    took = time.monotonic() - begun
    print(f"{options.strategy}: {good} of {len(by_name)} programs hold, in {took:.0f} s")
    return 0 if good == len(by_name) else 1


if __name__ == "__main__":
    raise SystemExit(main())
