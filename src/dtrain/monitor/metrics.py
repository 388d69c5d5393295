"""The numbers of a run by epoch, as Keras' CSVLogger has written them to `metrics.csv`.

It reads them, and cuts off what a job that is started again will write a second time; it logs nothing.
"""

from __future__ import annotations

import csv
from pathlib import Path


def read_metrics(path: Path) -> dict[str, list[float]]:
    """Every column but `epoch`: its name, and its value for each epoch.

    An epoch without a value, as those without validation, is left out, as Keras' `History` does; so is a
    column without any.
    """
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
    names = [name for name in reader.fieldnames or () if name != "epoch"]
    values = {name: [_number(row[name]) for row in rows] for name in names}
    found = {name: [value for value in column if value is not None] for name, column in values.items()}
    return {name: column for name, column in found.items() if column or not rows}


def _number(text: str | None) -> float | None:
    """What Keras has written; None for "NA", where it had nothing."""
    try:
        return float(text or "")
    except ValueError:
        return None


def keep_epochs(path: Path, epochs: int) -> None:
    """Cut off all rows but those of the first `epochs` epochs, so that each stands there once."""
    if not path.exists():
        return
    header, *rows = path.read_text(encoding="utf-8").splitlines() or [""]
    # A row that was being written when the process was killed belongs to an epoch that is not done.
    kept = [row for row in rows if row.partition(",")[0].isdigit() and int(row.partition(",")[0]) < epochs]
    unfinished = path.with_name(f".{path.name}.tmp")
    unfinished.write_text("".join(f"{line}\n" for line in [header, *kept]), encoding="utf-8")
    unfinished.replace(path)
