"""The record of the versions that dtrain was tested with: compares what is installed with it, and extends it.

`record.json` holds each name's parameters, and hashes of its source, for every version of Keras and
TensorFlow that dtrain was tested with.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dtrain.base.log import logger
from dtrain.errors import UnsupportedVersionError
from dtrain.upstream.reach import Reach, installed_versions, of_installed
from dtrain.upstream.versions import minor, numbers

RECORD = Path(__file__).parent / "record.json"


def newest_tested() -> str:
    """The newest versions of Keras and TensorFlow that dtrain was tested with, in words."""
    row = read_record()["rows"][-1]
    return f"keras {row['keras']} and tensorflow {row['tensorflow']}"


def check(reaches: Iterable[Reach]) -> list[str]:
    """Compares the names that the installed versions have with the record.

    A package of a version that is not in the record also has the hashes of the sources compared. Another hash
    only logs a warning: sources change with every release, mostly without effect on dtrain.

    Returns:
        The labels of the names whose hash is not in the record.

    Raises:
        UnsupportedVersionError: a name is missing, or has other parameters than in the record.
    """
    record, installed = read_record(), installed_versions()
    tested = {package: [row[package] for row in record["rows"]] for package in installed}
    changed = []
    for reach in of_installed(reaches):
        recorded, package = record["places"].get(reach.place), reach.package
        if recorded is None:
            raise UnsupportedVersionError(
                f"dtrain's record of tested versions does not have {reach.place}.",
                hint="after adding a name, run: python -m dtrain.upstream --write",
            )
        try:
            signature = reach.signature()
        except (ImportError, AttributeError):
            signature = None
        if signature not in recorded:
            now = "is gone" if signature is None else f"takes {signature} and not {' or '.join(recorded)}"
            raise UnsupportedVersionError(
                f"dtrain uses {reach.place}, which {now} in the {package} {installed[package]} that is "
                "installed. Nothing was replaced.",
                hint=f"install {package} {_listed(tested[package])}, which this version of dtrain was "
                "tested with",
            )
        if installed[package] not in tested[package] and reach.source() not in recorded[signature]:
            changed.append(reach.label)
    _warn(installed, tested, changed)
    return changed


def _warn(installed: dict[str, str], tested: dict[str, list[str]], changed: list[str]) -> None:
    for package, version in installed.items():
        if minor(version) > max(map(minor, tested[package])):
            logger.warning(
                "%s %s is newer than all versions that dtrain was tested with (%s). All private names that "
                "dtrain uses are there with the same parameters. Training continues.",
                package,
                version,
                _listed(tested[package]),
            )
    if changed:
        logger.warning(
            "dtrain was not tested with %s, where the source of these names is new: %s. The first fit "
            "compares a training step with one device's before it trains.",
            " and ".join(f"{name} {version}" for name, version in installed.items()),
            ", ".join(changed),
        )


def read_record() -> dict[str, Any]:
    """The record: `rows`, the versions tested together, and `places`.

    Each place has the parameters that were found, for each of them the hashes of the source, and for each
    hash the versions of the package that have it.
    """
    record: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return record


def write_record(reaches: Iterable[Reach]) -> None:
    """Adds the installed versions to the record; what it has of other versions stays."""
    record, installed = read_record(), installed_versions()
    reaches = list(reaches)
    places = {reach.place: record["places"].get(reach.place, {}) for reach in reaches}
    for reach in of_installed(reaches):
        versions = {
            (parameters, source): {*text.split()} - {installed[reach.package]}
            for parameters, sources in places[reach.place].items()
            for source, text in sources.items()
        }
        versions.setdefault((reach.signature(), reach.source()), set()).add(installed[reach.package])
        made: dict[str, dict[str, str]] = {}
        places[reach.place] = made
        for (parameters, source), names in sorted(versions.items()):
            if names:
                made.setdefault(parameters, {})[source] = _spaced(names)
    rows = [row for row in record["rows"] if row != installed] + [installed]
    rows.sort(key=lambda row: (numbers(row["tensorflow"]), numbers(row["keras"])))
    record = {"rows": rows, "places": places}
    RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _spaced(versions: Iterable[str]) -> str:
    return " ".join(sorted(versions, key=numbers))


def _listed(versions: Iterable[str]) -> str:
    return " or ".join(sorted(set(versions), key=numbers))
