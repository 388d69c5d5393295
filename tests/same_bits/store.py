"""Keeps the base's numbers, and the checkpoints that its programs left, in one file of the repository.

It runs no program. The numbers are those of one kind of processor and of exact versions: `misfit` says where
they cannot be compared with.
"""

from __future__ import annotations

import base64
import json
import platform
import re
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from tests.contract.harness import Report
from tests.programs.registry import keras_version

from dtrain.upstream.versions import installed_tensorflow

from .plan import AFTER, BEFORE, Comparison

FILE = Path(__file__).with_name("stored.zip")
_CPUINFO = Path("/proc/cpuinfo")
# Units that compute with floating-point numbers: kernels are chosen by them, and sum in other orders.
_DECIDING = re.compile(r"s?sse|avx|fma|f16c|amx|asimd|sve|bf16|i8mm")
_NUMBERS = "numbers.json"
_DATE = (1980, 1, 1, 0, 0, 0)  # the first that a zip file can tell


@dataclass(frozen=True)
class Files:
    """The files below a folder, by their relative paths."""

    contents: dict[str, bytes]

    @classmethod
    def read(cls, folder: Path) -> Files:
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        return cls({path.relative_to(folder).as_posix(): path.read_bytes() for path in files})

    def write(self, folder: Path) -> None:
        for name, content in self.contents.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


@dataclass(frozen=True)
class Case:
    """What one program gave.

    Attributes:
        program: the digest of its source.
        values: what it returned, by name.
    """

    program: str
    values: dict[str, np.ndarray]

    @property
    def report(self) -> Report:
        """As of a program that has run."""
        return {"status": "ok", "values": self.values}

    def as_json(self) -> dict[str, Any]:
        return {"program": self.program, "values": {name: _text(v) for name, v in self.values.items()}}

    @classmethod
    def from_json(cls, program: str, values: dict[str, list[Any]]) -> Case:
        return cls(program, {name: _array(*text) for name, text in values.items()})


@dataclass(frozen=True)
class Stored:
    """The numbers of one commit on one kind of processor.

    Attributes:
        commit: whose numbers they are.
        key: what decides the bits beside the package, as `key_here` gives it.
        cases: by "strategy/program".
        left: the files that interrupted programs left, by case.
    """

    commit: str
    key: dict[str, str]
    cases: dict[str, Case] = field(default_factory=dict)
    left: dict[str, Files] = field(default_factory=dict)

    def misfit(self, commit: str, key: dict[str, str]) -> str:
        """Why they are not the numbers of a commit on a machine with this key; "" if they are."""
        if commit != self.commit:
            return f"they are those of {self.commit}, not of {commit}"
        other = [name for name in sorted({*key, *self.key}) if key.get(name) != self.key.get(name)]
        return "; ".join(f"{name} is {key.get(name)}, not {self.key.get(name)}" for name in other)

    def programs(self, plan: Comparison, digests: dict[str, str]) -> list[str]:
        """The programs of a comparison whose numbers are there, and whose source has not changed since.

        Args:
            plan: the comparison.
            digests: those of the programs' source now, by name.
        """
        cases = {program: self.cases.get(plan.case(program)) for program in plan.programs}
        there = [program for program, case in cases.items() if case and case.program == digests[program]]
        return [program for program in there if program.replace(AFTER, BEFORE, 1) in there]

    def write(self, file: Path = FILE) -> None:
        """Writes the file; the same numbers give the same bytes."""
        numbers = {
            "commit": self.commit,
            "key": self.key,
            "cases": {name: case.as_json() for name, case in self.cases.items()},
        }
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
            text = json.dumps(numbers, sort_keys=True, separators=(",", ":"))
            archive.writestr(_member(_NUMBERS), text)
            for case, files in sorted(self.left.items()):
                for name, content in sorted(files.contents.items()):
                    archive.writestr(_member(f"{case}/{name}"), content)

    @classmethod
    def read(cls, file: Path = FILE) -> Stored:
        """Reads the file.

        Raises:
            SystemExit: it is damaged.
        """
        try:
            with zipfile.ZipFile(file) as archive:
                members = {name: archive.read(name) for name in archive.namelist()}
            numbers = json.loads(members.pop(_NUMBERS))
            cases = {name: Case.from_json(**case) for name, case in numbers["cases"].items()}
            left: dict[str, dict[str, bytes]] = {}
            for path, content in members.items():
                strategy, program, name = path.split("/", 2)
                left.setdefault(f"{strategy}/{program}", {})[name] = content
            files = {case: Files(contents) for case, contents in left.items()}
            if lost := [case for case in cases if f"/{BEFORE}" in case and case not in files]:
                raise ValueError(f"no checkpoint of {lost[0]}")
            return cls(numbers["commit"], numbers["key"], cases, files)
        except (zipfile.BadZipFile, zlib.error, KeyError, TypeError, ValueError, EOFError) as error:
            why = f"{file} is damaged ({error}): restore it from git, or write it by --record"
            raise SystemExit(why) from error


def key_here() -> dict[str, str]:
    """What decides the bits on this machine: versions, the kind of processor and its units.

    The number of cores does not: programs of the contract compute each operation in one thread.
    """
    text = _CPUINFO.read_text(errors="replace") if _CPUINFO.exists() else ""
    units = next(_fields(text, "flags", "Features"), "").split()
    return {
        "tensorflow": " ".join(installed_tensorflow()),
        "keras": keras_version(),
        "numpy": version("numpy"),
        "machine": platform.machine(),
        "maker": next(_fields(text, "vendor_id", "CPU implementer"), ""),
        "units": " ".join(sorted(filter(_DECIDING.match, units))),
    }


def _text(value: np.ndarray) -> list[Any]:
    """Type, shape and bits of an array."""
    if value.dtype.hasobject:
        raise TypeError(f"an array of objects has no bits to compare: {value!r:.80}")
    return [value.dtype.str, list(value.shape), base64.b64encode(value.tobytes()).decode()]


def _array(kind: str, shape: list[int], bits: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(bits), np.dtype(kind)).reshape(shape)


def _fields(text: str, *names: str) -> Iterator[str]:
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in names:
            yield value.strip()


def _member(name: str) -> Any:
    info = zipfile.ZipInfo(name, _DATE)
    info.compress_type = zipfile.ZIP_DEFLATED
    info.external_attr = 0o644 << 16
    return info
