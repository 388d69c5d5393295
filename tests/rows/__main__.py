"""Runs the tests that depend on a version in each supported row of TensorFlow and Keras; shows what holds.

    python -m tests.rows                        # every row, every part
    python -m tests.rows --row tf218-k38        # one row; several by commas
    python -m tests.rows --part mirrored        # one part of each row; several by commas
    python -m tests.rows --programs 4           # every fourth program of the contract

A row is a file of this folder: the exact versions that its environment has. The environments are kept in
`build/rows`, and made anew when their file has changed. They take the package from `src`. The newest row is
`.venv`, where the whole suite runs.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.contract.conftest import lot
from tests.contract.harness import HELD_KINDS
from tests.programs.registry import listed

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
KEPT = ROOT / "build" / "rows"
STRATEGIES = ("mirrored", "multi_worker", "central_storage", "parameter_server")
TESTS = {
    "names": ["tests/multidevice/test_upstream.py"],
    "checkpoints": ["tests/multidevice/test_backup_and_restore.py"],
    "killed worker": [
        "tests/faults/test_faults_in_jobs.py::"
        "test_a_kill_in_the_middle_of_an_epoch_with_each_kind_of_data[multi_worker]"
    ],
    "killed server's worker": ["tests/faults/test_parameter_server_workers.py"],
}
PARTS = (*TESTS, *STRATEGIES)
_PART_SECONDS = 3600.0


def environment(row: str) -> Path:
    """The Python of a row's environment, which is made if it is missing or another one than the file says."""
    wanted = HERE / f"{row}.txt"
    folder, digest = KEPT / row, hashlib.sha256(wanted.read_bytes()).hexdigest()
    python, stamp = folder / "bin" / "python", folder / "made-of"
    if stamp.exists() and stamp.read_text() == digest:
        return python
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, "--requirement", str(wanted)], check=True)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    (packages / "dtrain-source.pth").write_text(f"{ROOT / 'src'}\n")
    stamp.write_text(digest)
    return python


def run(python: Path, part: str, programs: Sequence[str]) -> str:
    """Runs one part in a row's environment; returns "ok", or how much of it holds."""
    if part in TESTS:
        command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS[part], "-m", "not soak"]
        sums = r"^(?:\d+ (?:failed|passed|skipped|errors?).*)$"
    else:
        command = ["-m", "tests.contract.harness", "--strategy", part, "--only", ",".join(programs)]
        sums = r"\d+ of \d+ programs hold"
    log = KEPT / f"{python.parents[1].name}.{part.replace(' ', '-')}.txt"
    with log.open("wb") as file:
        try:
            done = subprocess.run(
                [str(python), *command], cwd=ROOT, stdout=file, stderr=file, timeout=_PART_SECONDS
            )
        except subprocess.TimeoutExpired:
            return f"longer than {_PART_SECONDS:.0f} s"
    found = re.findall(sums, log.read_text(errors="replace"), re.MULTILINE)
    said = found[-1].partition(" in ")[0].removesuffix(" programs hold") if found else "did not end"
    return said if done.returncode == 0 else f"**{said}**, see {log.relative_to(ROOT)}"


def versions(row: str) -> str:
    """What a row is, in words: its versions of TensorFlow and Keras."""
    found = dict(line.split("==") for line in (HERE / f"{row}.txt").read_text().splitlines() if "==" in line)
    return f"TensorFlow {found['tensorflow_cpu']}, Keras {found['keras']}"


def main() -> int:
    rows = sorted(path.stem for path in HERE.glob("*.txt"))
    parser = argparse.ArgumentParser(prog="python -m tests.rows", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--row", default=",".join(rows), help="the rows to run, by commas")
    parser.add_argument("--part", default=",".join(PARTS), help="the parts to run, by commas")
    parser.add_argument("--programs", type=int, default=1, help="run every so manieth program only")
    options = parser.parse_args()
    parts = options.part.split(",")
    for kind, asked, known in (("row", options.row.split(","), rows), ("part", parts, PARTS)):
        if unknown := [each for each in asked if each not in known]:
            raise SystemExit(f"--{kind} {unknown[0]}: it is one of {', '.join(known)}")
    programs = [each.name for each in listed(*HELD_KINDS) if lot(each.name) % options.programs == 0]
    table = [["row", *parts], ["---"] * (1 + len(parts))]
    for row in options.row.split(","):
        python = environment(row)
        table.append([versions(row)])
        for part in parts:
            table[-1].append(run(python, part, programs))
            print(f"{table[-1][0]}: {part}: {table[-1][-1]}", flush=True)
    text = "\n".join("| " + " | ".join(line) + " |" for line in table)
    (KEPT / "table.md").write_text(text + "\n")
    print(text)
    return 1 if "**" in text else 0


if __name__ == "__main__":
    raise SystemExit(main())
