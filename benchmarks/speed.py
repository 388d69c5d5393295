"""How fast training is: dtrain beside stock TensorFlow, Keras' own `fit`, PyTorch DDP and the machine.

    python benchmarks/speed.py [--rounds 7] [--only small-mpi ...] [--out DIR]

Jobs of one case live side by side and measure by turns, so that what disturbs one disturbs the other;
ratios are taken round by round. In the cases with workers each worker has one core and one thread.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jobs
import peers
from cases import CASES, Case, Side
from networks import NETWORKS

HERE = Path(__file__).parent

# Benchmarks that write JSON of their own; each is a key of this one's, too.
OTHERS = {
    "transports": ["transports.py"],
    "parameter-servers": ["parameter_server.py", "--rounds", "5"],
}
OTHER_SECONDS = 900


class AbsentError(RuntimeError):
    """A side cannot be measured here; the message is why."""


def command(side: Side, network: str, address: str, torch: tuple[str | None, str]) -> list[str]:
    """What starts a side's job.

    Raises:
        AbsentError: there is no PyTorch, or no MPI.
    """
    file, *arguments = (word.format(network=network, address=address) for word in side.program)
    program = [str(HERE / file), *arguments]
    python, alone = sys.executable, [str(HERE / "workers.py"), str(side.processes)]
    if side.starter == "alone":
        return [python, *program]
    if side.starter == "workers":
        return [python, *alone, *program]
    if side.starter == "pair":
        return [python, *alone, "--apart", *program]
    if side.starter == "mpirun":
        starter = shutil.which("mpirun", path=os.pathsep.join([str(Path(python).parent), os.environ["PATH"]]))
        if starter is None:
            raise AbsentError("there is no mpirun")
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        return [starter, *root, "--bind-to", "none", "-n", str(side.processes), python, *program]
    if side.starter == "torch":
        if torch[0] is None:
            raise AbsentError(torch[1])
        return [torch[0], *alone, *program]
    launch = ["-m", "dtrain", *side.starter.split(), "--workers", str(side.processes)]
    return [python, *launch, "--spares", "none", "--max-restarts", "0", *program]


def starting(case: Case, name: str, torch: tuple[str | None, str]) -> Callable[[], jobs.Job]:
    """What starts the job of a side."""
    side = case.sides[name]
    return lambda: jobs.Job(
        str(HERE / side.program[0]), name, workers=side.processes, servers=0, answering=side.processes,
        command=lambda address: command(side, case.network, address, torch),
    )  # fmt: skip


def measure(case: Case, rounds: int, torch: tuple[str | None, str]) -> dict[str, Any]:
    """One case, its sides by turns; a side that fails is left out from then on, with its reason."""
    steps = case.steps or NETWORKS[case.network].steps
    absent: dict[str, str] = {}
    with jobs.opened({name: starting(case, name, torch) for name in case.sides}, absent=absent) as started:
        ways = {
            name: functools.partial(job.measure, case.sides[name].data, steps)
            for name, job in started.items()
        }
        taken = jobs.turns(ways, rounds, absent=absent)
    return {"steps": steps, **judged(case, taken), "absent": absent}


def judged(case: Case, taken: dict[str, list[jobs.Taken]]) -> dict[str, Any]:
    """Times, ratios and whether the aims are met."""
    first = next(iter(case.sides))
    others = {name: times for name, times in taken.items() if name != first}
    for name, parts in case.together.items():
        if taken.keys() >= {*parts}:
            rounds = zip(*(taken[part] for part in parts), strict=True)
            others[name] = [
                measurements[0]._replace(wall=sum(part.wall for part in measurements))
                for measurements in rounds
            ]
    ratios: dict[str, Any] = {}
    for name, times in others.items() if first in taken else ():
        ratio = jobs.ratio(times, taken[first])
        ratio.pop("processor", None)
        aim = case.aims.get(name)
        ratios[name] = ratio if aim is None else {**ratio, "aim": aim, "met": ratio["median"] >= aim}
    times = {name: jobs.summary(measurements) for name, measurements in taken.items()}
    for name, summary in times.items():
        # Of one process, over several epochs; whatever else it does meanwhile counts too.
        summary["processor"] = round(summary["processor"] / jobs.EPOCHS / case.sides[name].processes, 3)
    batch = NETWORKS[case.network].batch
    return {
        "milliseconds_a_step": times,
        "examples_a_second": {
            name: round(1e3 * batch * case.sides[name].processes / summary["median"])
            for name, summary in times.items()
        },
        "times_faster": ratios,
        "commands": {name: " ".join(("python", *side.program)) for name, side in case.sides.items()},
    }


def other(name: str) -> dict[str, Any]:
    """What another benchmark finds, or why it does not."""
    file, *arguments = OTHERS[name]
    if not (HERE / file).exists():
        return {"absent": f"there is no benchmarks/{file}"}
    with tempfile.TemporaryDirectory(prefix="dtrain-benchmark-") as folder:
        out = Path(folder, "found.json")
        try:
            done = subprocess.run(
                [sys.executable, str(HERE / file), *arguments, "--out", str(out)],
                capture_output=True, text=True, timeout=OTHER_SECONDS,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"absent": f"it took more than {OTHER_SECONDS} seconds"}
        if done.returncode:
            return {"absent": jobs.reason(RuntimeError(done.stderr))}
        return {"table": done.stdout.strip(), "found": json.loads(out.read_text(encoding="utf-8"))}


def table(found: dict[str, Any]) -> str:
    """Markdown: a row a side."""
    from dtrain.base.text_table import markdown_of

    heads = ["", "", "ms a step", "min to max", "processor ms of a process", "examples/s", "memory"]
    heads += ["dtrain is faster by", "aim", ""]
    rows = []
    for key, case in found["cases"].items():
        about = CASES[key]
        for name, side in about.sides.items():
            times = case["milliseconds_a_step"].get(name)
            if times is None:
                rows.append([about.title, f"{side.title} not measured: {case['absent'].get(name, '')}"])
                continue
            ratio = case["times_faster"].get(name)
            digits = 3 if times["median"] < 10 else 1
            row = [f"{times['median']:.{digits}f}", f"{times['min']:.{digits}f} to {times['max']:.{digits}f}"]
            row += [f"{times['processor']:.{digits}f}"]
            row += [
                f"{case['examples_a_second'][name]:,}" if side.data != "sum" else "",
                f"{times['memory_mib']:,} MiB",
            ]
            rows.append([about.title, side.title, *row, *(_ratio(ratio) if ratio else [])])
        for name in about.together:
            if name in case["times_faster"]:
                rows.append([about.title, f"{name} together", *[""] * 5, *_ratio(case["times_faster"][name])])
    lines = [markdown_of(heads, rows)]
    for name, result in found["others"].items():
        lines += ["", f"**{name}**", "", result.get("table") or f"Not measured: {result['absent']}"]
    return "\n".join(lines)


def _ratio(ratio: dict[str, Any]) -> list[str]:
    """The last three cells of a row."""
    cells = [f"{ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})"]
    if "aim" not in ratio:
        return cells
    return [*cells, f"{ratio['aim']:.2f}", "met" if ratio["met"] else "missed"]


def main() -> None:
    """Runs all, prints the table, and writes it and the JSON."""
    parser = argparse.ArgumentParser(
        description="dtrain beside stock TensorFlow, Keras, PyTorch DDP, the limits"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--only", nargs="+", choices=[*CASES, *OTHERS], metavar="NAME", help=", ".join([*CASES, *OTHERS])
    )
    parser.add_argument("--torch", metavar="PYTHON", help="a Python that has PyTorch (default: one is made)")
    parser.add_argument("--no-install", action="store_true", help="make no environment for PyTorch")
    parser.add_argument(
        "--out", type=Path, default=HERE / "results", help="the folder of speed.json and speed.md"
    )
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # jobs are closed on the way out
    chosen = asked.only or [*CASES, *OTHERS]
    wants_torch = any(s.starter == "torch" for c in chosen if c in CASES for s in CASES[c].sides.values())
    torch = (
        peers.torch_python(asked.torch, install=not asked.no_install)
        if wants_torch
        else (None, "no case needs PyTorch")
    )
    results: dict[str, Any] = jobs.circumstances()
    results["versions"] |= {"torch": torch[1]} if torch[0] else {}
    results["cases"], results["others"] = {}, {}
    for name in chosen:
        print(f"{name} ...", file=sys.stderr, flush=True)
        if name in CASES:
            results["cases"][name] = measure(CASES[name], asked.rounds, torch)
        else:
            results["others"][name] = other(name)
    results["hardware"]["load_after"] = os.getloadavg()[0]
    text = table(results)
    print(text)
    asked.out.mkdir(parents=True, exist_ok=True)
    (asked.out / "speed.md").write_text(text + "\n", encoding="utf-8")
    jobs.write(results, str(asked.out / "speed.json"))


if __name__ == "__main__":
    main()
