"""How long a job stands still when a worker is killed: `dtrain launch` beside `torchrun`.

    python benchmarks/recovery.py [--rounds 5] [--kills 4] [--torch PYTHON] [--out FILE.json]

PYTHON is one that has PyTorch; without it dtrain is measured alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jobs

WORKERS = 2
STEPS_BEFORE = 30  # that every worker makes before one is killed
START_SECONDS = 300.0
RECOVERY_SECONDS = 60.0  # after which a job has not recovered
STARTS = 3  # tries to start a job that ends by itself
HERE = Path(__file__).parent

WAYS = {
    "spares": "dtrain launch",
    "cold": "dtrain launch --spares none",
    "torchrun": "torchrun, DDP over gloo",
}


class Step(NamedTuple):
    """A step that a worker has completed, at a time of `time.monotonic`."""

    process: int
    rank: int
    number: int
    at: float


@dataclass(frozen=True)
class Kill:
    """What came of one.

    Attributes:
        ready: seconds from the attempt's first step until the processes in waiting were ready; None without.
        seconds: from the signal until every worker has completed a step of the next attempt; None: never.
        repeated: steps that had been done and had to be done again.
    """

    ready: float | None
    seconds: float | None
    repeated: int | None


class Training:
    """One job, which loses a worker now and then.

    Args:
        way: a key of WAYS.
        torch: the Python that has PyTorch.
        pause: seconds that each step waits beside what it computes.
    """

    def __init__(self, way: str, torch: str, pause: float) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="dtrain-recovery-", ignore_cleanup_errors=True)
        folder = Path(self._folder.name)
        self._log = folder / "log"
        self._steps: list[Step] = []
        self._file = (folder / "steps").open("a+", encoding="utf-8")
        self._spares = WORKERS if way == "spares" else 0
        options = [str(folder), str(pause)]
        if way == "torchrun":
            command = [torch, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
            command += [str(WORKERS), "--max-restarts", "1000", str(HERE / "recovery_torch.py"), *options]
        else:
            command = [sys.executable, "-m", "dtrain", "launch", "--workers", str(WORKERS)]
            command += ["--max-restarts", "1000", *([] if self._spares else ["--spares", "none"])]
            command += [str(HERE / "recovery_keras.py"), *options]
        environment = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1", **os.environ}
        with self._log.open("w", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        self._old: set[int] = set()  # processes of earlier attempts

    def kill(self, rank: int) -> Kill:
        """SIGKILL of one worker, once the job is at work and the processes in waiting are ready."""
        begun = self._wait(lambda: self._after(1), START_SECONDS)
        ready = None
        if self._spares:
            self._wait(self._spares_are_ready, START_SECONDS)
            ready = time.monotonic() - begun
        self._wait(lambda: self._after(STEPS_BEFORE), START_SECONDS)
        victim = next(s.process for s in reversed(self._read()) if s.rank == rank)
        at = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        self._old = {step.process for step in self._steps}
        try:
            again = self._wait(lambda: self._after(1), RECOVERY_SECONDS)
        except TimeoutError:
            return Kill(ready, None, None)
        last = max(s.number for s in self._steps if s.process in self._old)
        first = min(s.number for s in self._steps if s.process not in self._old)
        return Kill(ready, again - at, last - first + 1)

    def close(self) -> None:
        """Ends the job."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._file.close()
        self._folder.cleanup()

    def log(self) -> str:
        """The end of what the job printed."""
        return self._log.read_text(encoding="utf-8", errors="replace")[-5000:]

    def _wait(self, happened: Callable[[], float | None], seconds: float) -> float:
        """When something happened.

        Raises:
            TimeoutError: it did not in time, or the job ended.
        """
        deadline = time.monotonic() + seconds
        while (moment := happened()) is None:
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise TimeoutError
            time.sleep(0.01)
        return moment

    def _read(self) -> list[Step]:
        for line in self._file:
            process, rank, number, at = line.split()
            self._steps.append(Step(int(process), int(rank), int(number), float(at)))
        return self._steps

    def _after(self, steps: int) -> float | None:
        """When every worker of the running attempt had completed so many; None before."""
        ends = []
        for rank in range(WORKERS):
            made = [s.at for s in self._read() if s.rank == rank and s.process not in self._old]
            if len(made) < steps:
                return None
            ends.append(made[steps - 1])
        return max(ends)

    def _spares_are_ready(self) -> float | None:
        """Now, if all are; a spare closes the pipe over which it says so."""
        ready = 0
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text("ascii")
        workers = {step.process for step in self._read()}
        for child in children.split():
            with contextlib.suppress(OSError):
                variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
                spare = next((v for v in variables if v.startswith(b"DTRAIN_SPARE=")), None)
                if spare is None or int(child) in workers:
                    continue
                pipe = spare.rpartition(b":")[2].decode()
                ready += not os.path.lexists(f"/proc/{child}/fd/{pipe}")
        return time.monotonic() if ready >= self._spares else None


def main() -> None:
    """Starts job after job, kills, prints a table and writes JSON."""
    parser = jobs.parser("how long a job stands still when a worker is killed", rounds=5)
    parser.add_argument("--kills", type=int, default=4, help="workers killed in each job")
    parser.add_argument("--other-kills", type=int, help="the same, where there are no processes in waiting")
    parser.add_argument("--torch", help="a Python that has PyTorch")
    parser.add_argument("--pause", type=float, default=0.02, help="seconds added to each step")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    arguments = parser.parse_args()
    results = {**jobs.circumstances(), "workers": WORKERS, "pause": arguments.pause}
    ways = [way for way in arguments.ways if way != "torchrun" or arguments.torch]
    if arguments.torch:
        asked = [arguments.torch, "-c", "import torch; print(torch.__version__)"]
        results["versions"]["torch"] = subprocess.check_output(asked, text=True).strip()
    kills: dict[str, list[Kill]] = {way: [] for way in ways}
    for number in range(arguments.rounds):
        for way in ways if number % 2 else ways[::-1]:
            count = arguments.kills if way == "spares" else arguments.other_kills or arguments.kills
            kills[way] += measure(way, count, arguments.torch, arguments.pause)
            print(way, *kills[way][-count:], sep="\n  ", file=sys.stderr, flush=True)
        results["kills"] = {way: summary(of_way) for way, of_way in kills.items()}
        if arguments.out:
            jobs.write(results, arguments.out)
    print_table(results["kills"])
    jobs.write(results, arguments.out)


def measure(way: str, kills: int, torch: str, pause: float) -> list[Kill]:
    """As many kills; one after which a job has not recovered is followed by another job.

    Raises:
        RuntimeError: a job did not train, time and again.
    """
    done: list[Kill] = []
    starts = 0
    while len(done) < kills:
        training = Training(way, torch, pause)
        try:
            while len(done) < kills:
                done.append(training.kill(len(done) % WORKERS))
                if done[-1].seconds is None:
                    print(training.log(), file=sys.stderr)
                    break
        except TimeoutError:  # without a kill: it is not counted
            starts += 1
            print(f"a job of {way!r} does not train:\n{training.log()}", file=sys.stderr)
            if starts == STARTS:
                raise RuntimeError(f"jobs of {way!r} do not train") from None
        finally:
            training.close()
    return done


def summary(kills: Sequence[Kill]) -> dict[str, Any]:
    """Medians, least and most, and every kill."""
    seconds = [kill.seconds for kill in kills if kill.seconds is not None]
    ready = [kill.ready for kill in kills if kill.ready is not None]
    repeated = [kill.repeated for kill in kills if kill.repeated is not None]
    return {
        "kills": len(kills),
        "recovered": len(seconds),
        "seconds": _spread(seconds),
        "repeated_steps": _spread(repeated),
        "seconds_until_spares_are_ready": _spread(ready),
        "all": [asdict(kill) for kill in kills],
    }


def _spread(numbers: Sequence[float]) -> dict[str, float] | None:
    if not numbers:
        return None
    values = {"median": statistics.median(numbers), "min": min(numbers), "max": max(numbers)}
    return {name: round(value, 3) for name, value in values.items()}


def print_table(found: dict[str, dict[str, Any]]) -> None:
    """A row a way."""
    rows = []
    for way, result in found.items():
        row = [WAYS[way], f"{result['recovered']} of {result['kills']}"]
        if result["seconds"]:
            row += [jobs.spread(result["seconds"], 2), f"{result['repeated_steps']['median']:.0f}"]
        ready = result["seconds_until_spares_are_ready"]
        rows.append(row + ([f"{ready['median']:.1f} s"] if ready else []))
    heads = ["", "recovered", "seconds to the next step", "steps repeated", "spares ready after"]
    jobs.print_table(heads, rows)


if __name__ == "__main__":
    main()
