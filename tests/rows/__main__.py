"""Runs the tests that depend on a version in each row of TensorFlow and Keras, and writes what holds.

    python -m tests.rows                          # every row, every part
    python -m tests.rows --row tf218-k38          # one row; several by commas
    python -m tests.rows --part names,mirrored    # some parts of each row
    python -m tests.rows --programs 4             # every fourth program of the contract
    python -m tests.rows --essentials             # what CI runs of the oldest row; writes nothing
    python -m tests.rows --record                 # adds each row's versions to upstream/record.json
    python -m tests.rows --table                  # writes the table again, from results.json

What holds goes into `results.json` and, as a table, into docs/installation.md; other cells stay as they were.
Environments and logs are in `build/rows`, or in the folder that ROWS_FOLDER names.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.contract.harness import HELD_KINDS
from tests.contract.rotation import lot
from tests.programs.registry import listed

from . import results
from .environments import KEPT, ROOT, Row, UnavailableError, refusal, rows, versions
from .results import Cell

TESTS = {
    "names": ["tests/multidevice/test_upstream.py"],
    "checkpoints": ["tests/multidevice/test_backup_and_restore.py"],
    "killed worker": ["tests/multiprocess/test_fault_short.py", "-k", "one_kill"],
    "killed server's worker": [
        "tests/faults/test_parameter_server_workers.py",
        "-k",
        "lost_workers or job_ends",
    ],
}
STRATEGIES = ("mirrored", "multi_worker", "central_storage", "parameter_server")
PARTS = (*TESTS, *STRATEGIES)
# Parts of a row that are run one after the other, beside the other group of parts.
GROUPS = (tuple(TESTS), STRATEGIES)
# What CI runs of the oldest row: programs that meet what differs between the versions.
_INTERRUPTED = "test_an_interrupted_fit_ends_as_one_that_was_left_alone"
ESSENTIALS = {
    "names": TESTS["names"],
    "checkpoints": [
        f"tests/multidevice/test_backup_and_restore.py::{_INTERRUPTED}",
        "-k",
        "mirrored and unknown_length",
    ],
    "killed worker": TESTS["killed worker"],
    "mirrored": [
        "accumulation_clipped",
        "embedding_mask_lstm",
        "export_for_serving",
        "fit_numpy_shuffled",
        "float16_overflow_in_the_second_half",
        "jit_compile",
        "metrics_of_one_hot_labels",
        "own_metrics_in_fit",
        "save_whole_model",
    ],
    "multi_worker": ["fit_numpy_shuffled", "jit_compile", "own_metrics_in_fit", "save_whole_model"],
    "parameter_server": ["fit_numpy_shuffled", "metrics_of_one_hot_labels", "own_metrics_in_fit"],
}
_PART_SECONDS = 3600.0


def run(row: Row, python: Path, part: str, asked: list[str]) -> Cell:
    """Runs one part in a row's environment: tests, or programs of the contract under a strategy."""
    if part in TESTS:
        command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *asked]
    else:
        command = [
            "-m",
            "tests.contract.harness",
            "--traceback",
            "--strategy",
            part,
            "--only",
            ",".join(asked),
        ]
    log = KEPT / f"{row.name}.{part.replace(' ', '-')}.txt"
    begun = time.monotonic()
    with log.open("wb") as file:
        try:
            subprocess.run([str(python), *command], cwd=ROOT, stdout=file, stderr=file, timeout=_PART_SECONDS)
        except subprocess.TimeoutExpired:
            file.write(f"\nlonger than {_PART_SECONDS:.0f} s\n".encode())
    cell = results.read(log.read_text(errors="replace"))
    where = "" if cell.holds else f", see {log}"
    print(f"{row.name}: {part}: {cell} in {time.monotonic() - begun:.0f} s{where}", flush=True)
    return cell


def run_all(chosen: list[Row], asked: dict[str, list[str]]) -> dict[str, results.Result]:
    """Runs parts of rows, two at a time; says which rows cannot be made, and which dtrain refuses."""
    found: dict[str, results.Result] = {}
    pythons: dict[str, Path] = {}

    def prepare(row: Row) -> None:
        try:
            pythons[row.name] = row.prepare()
        except UnavailableError as error:
            print(
                f"{row.name}: skipped, its environment cannot be made: {error}", file=sys.stderr, flush=True
            )
            return
        refused = refusal(pythons[row.name])
        found[row.name] = results.Result(
            **versions(pythons[row.name]), may_fail=row.may_fail, refused=refused
        )
        if refused:
            print(f"{row.name}: refused: {refused}", flush=True)

    def run_group(row: Row, parts: list[str]) -> None:
        for part in parts:
            found[row.name].parts[part] = run(row, pythons[row.name], part, asked[part])

    with ThreadPoolExecutor(max_workers=2) as pool:
        _each(pool, prepare, [(row,) for row in chosen])
        ready = [row for row in chosen if row.name in found and not found[row.name].refused]
        groups = [[part for part in group if part in asked] for group in GROUPS]
        _each(pool, run_group, [(row, parts) for row in ready for parts in groups])
    return found


def _each(pool: ThreadPoolExecutor, function: Callable[..., None], calls: list[tuple[object, ...]]) -> None:
    for future in [pool.submit(function, *call) for call in calls]:
        future.result()


def record(chosen: list[Row]) -> None:
    """Adds the versions of each row to the record of private names."""
    for row in chosen:
        subprocess.run([str(row.prepare()), "-m", "dtrain.upstream", "--write"], cwd=ROOT, check=True)


def parse(known: dict[str, Row]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.rows", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--row", default=",".join(known), help="the rows to run, by commas")
    parser.add_argument("--part", default=",".join(PARTS), help="the parts to run, by commas")
    parser.add_argument("--programs", type=int, default=1, help="run every so manieth program only")
    parser.add_argument(
        "--essentials", action="store_true", help="the oldest row, a few minutes; writes nothing"
    )
    parser.add_argument(
        "--record", action="store_true", help="add the rows with exact versions to the record"
    )
    parser.add_argument("--table", action="store_true", help="write the table again, and run nothing")
    options = parser.parse_args()
    options.row, options.part = options.row.split(","), options.part.split(",")
    for kind, asked, names in (("row", options.row, known), ("part", options.part, PARTS)):
        if unknown := [each for each in asked if each not in names]:
            parser.error(f"--{kind} {unknown[0]}: it is one of {', '.join(names)}")
    return options


def main() -> int:
    known = rows()
    options = parse(known)
    KEPT.mkdir(parents=True, exist_ok=True)
    chosen = [known[name] for name in options.row]
    if options.table:
        results.write({})
        return 0
    if options.record:
        record([row for row in chosen if not row.may_fail])
        return 0
    if options.essentials:
        asked, chosen = ESSENTIALS, [next(iter(known.values()))]
    else:
        programs = [each.name for each in listed(*HELD_KINDS) if lot(each.name) % options.programs == 0]
        asked = {part: TESTS.get(part, programs) for part in options.part}
    found = run_all(chosen, asked)
    if not options.essentials:
        results.write(found)
        print(results.table(results.load()))
    return 0 if all(result.holds or result.may_fail for result in found.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
