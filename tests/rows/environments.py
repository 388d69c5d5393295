"""The rows and their environments: makes one, keeps it between runs, and says what is installed in it.

A row is a file of this folder with what pip installs. Most files have exact versions; those without are
of the newest versions that the index has, and may fail. The row of `.venv` is the lock file.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
KEPT = Path(os.environ.get("ROWS_FOLDER", ROOT / "build" / "rows")).resolve()
_LOCK = ROOT / "requirements-dev.lock"
_PIP = ("-m", "pip", "--disable-pip-version-check")
_VERSIONS = """
import json, platform
from dtrain.upstream.versions import installed_keras, installed_tensorflow
found = {"tensorflow": installed_tensorflow()[1], "keras": installed_keras()[1]}
print(json.dumps(found | {"python": platform.python_version()}))
"""


class UnavailableError(Exception):
    """The index does not have what a row asks for, for this Python and machine, or cannot be reached."""


@dataclass(frozen=True)
class Row:
    """One combination of TensorFlow and Keras.

    Attributes:
        name: the name of its environment.
        file: what pip installs.
    """

    name: str
    file: Path

    @property
    def pins(self) -> dict[str, str]:
        """The exact versions of the file, by package; the wheel of TensorFlow is `tensorflow_cpu`."""
        lines = self.file.read_text(encoding="utf-8").splitlines()
        return dict(line.split("==", 1) for line in lines if "==" in line and not line.startswith("#"))

    @property
    def may_fail(self) -> bool:
        """Whether the row has no exact versions, so that an upstream release can break it at any time."""
        return "keras" not in self.pins

    @property
    def digest(self) -> str:
        """A hash of the file, by which an environment is known to be up to date."""
        return hashlib.sha256(self.file.read_bytes()).hexdigest()

    def prepare(self) -> Path:
        """The Python of the row's environment, which is made first if there is none of this file.

        The environment imports dtrain from this tree's `src`. Wheels are downloaded once for all rows.

        Raises:
            UnavailableError: the index does not have the packages.
            RuntimeError: pip failed otherwise.
        """
        if self.file == _LOCK:
            return Path(sys.executable)
        folder, wheels = KEPT / self.name, KEPT / "wheels"
        python, stamp = folder / "bin" / "python", folder / "made-of"
        if self.may_fail or not stamp.exists() or stamp.read_text() != self.digest:
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
            asked = ("--requirement", str(self.file))
            self._pip(python, "download", "--dest", str(wheels), *asked)
            self._pip(python, "install", "--no-compile", "--no-index", "--find-links", str(wheels), *asked)
            stamp.write_text(self.digest)
        # Written each time: the folder of the environments may be shared by several clones.
        (packages,) = (folder / "lib").glob("python*/site-packages")
        (packages / "dtrain-source.pth").write_text(f"{ROOT / 'src'}\n")
        return python

    def _pip(self, python: Path, *arguments: str) -> None:
        command = [str(python), *_PIP, *arguments, "--quiet"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:
            return
        errors = re.findall(r"^ERROR: (.+)", done.stderr, re.MULTILINE) or [done.stderr[-2000:]]
        if any(each.startswith("No matching distribution found") for each in errors):
            raise UnavailableError(errors[-1])
        raise RuntimeError(f"{self.name}: {' '.join(command)} failed: {'; '.join(errors)}")


def rows() -> dict[str, Row]:
    """All rows by name, the oldest versions first, those without exact versions last."""
    found = [Row(path.stem, path) for path in HERE.glob("*.txt")] + [Row("locked", _LOCK)]
    return {row.name: row for row in sorted(found, key=_age)}


def versions(python: Path) -> dict[str, str]:
    """The versions of TensorFlow, Keras and Python in an environment."""
    done = subprocess.run(
        [str(python), "-c", _VERSIONS], capture_output=True, text=True, check=True, cwd=ROOT
    )
    found: dict[str, str] = json.loads(done.stdout)
    return found


def refusal(python: Path) -> str:
    """Why dtrain refuses the versions of an environment, in a sentence; "" if it does not."""
    command = [str(python), "-m", "dtrain.upstream", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode == 0:
        return ""
    found = re.findall(r"UnsupportedVersionError: (.+?\.)(?= |$)", done.stderr, re.MULTILINE)
    return found[-1] if found else "its check of private names fails"


def _age(row: Row) -> tuple[bool, list[int], str]:
    pins = row.pins
    text = f"{pins.get('tensorflow_cpu', '')}.{pins.get('keras', '')}"
    return row.may_fail, [int(each) for each in re.findall(r"\d+", text)], row.name
