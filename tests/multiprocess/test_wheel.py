"""The built wheel, installed away from the source tree: the command runs and the types are declared.

Its dependencies are those of the environment of this test, so that nothing is downloaded.
"""

import email
import os
import re
import site
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]


def _run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TF_CONFIG")}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy of the files that belong to it: building writes beside what it builds.

    `make dist` names one that it has built already.
    """
    if "WHEEL" in os.environ:
        return Path(os.environ["WHEEL"]).resolve()
    source = tmp_path_factory.mktemp("source")
    out = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        (source / name).write_bytes((_ROOT / name).read_bytes())
    for file in (_ROOT / "src" / "dtrain").rglob("*"):
        if file.is_file() and "__pycache__" not in file.parts:
            target = source / file.relative_to(_ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation")
    _run(*pip, "--wheel-dir", out, source, cwd=source)
    (built,) = out.glob("dtrain-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A fresh environment with the wheel, which sees this one's packages behind its own."""
    place = tmp_path_factory.mktemp("venv")
    venv.create(place, with_pip=False)
    (packages,) = place.glob("lib/python*/site-packages")
    install = (sys.executable, "-m", "pip", "--python", place / "bin" / "python", "install")
    _run(*install, "--quiet", "--no-deps", "--no-index", wheel, cwd=place)
    # Plain paths do not run the .pth files in them, so an editable dtrain there stays out of sight.
    (packages / "behind.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    return place


def test_what_is_in_it(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert "dtrain/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    modules = {str(file.relative_to(_ROOT / "src")) for file in (_ROOT / "src" / "dtrain").rglob("*.py")}
    assert modules <= set(names)
    assert not [name for name in names if name.startswith("tests")]


def test_its_metadata(wheel):
    archive = zipfile.ZipFile(wheel)
    (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    text = archive.read(metadata).decode()
    for line in (
        "License-Expression: Apache-2.0",
        "Provides-Extra: cpu",
        "Provides-Extra: gpu",
        "Provides-Extra: tpu",
    ):
        assert line in text
    required = [
        line for line in text.splitlines() if line.startswith("Requires-Dist") and "extra" not in line
    ]
    assert not any("tensorflow" in line for line in required), (
        "TensorFlow comes by extra: its wheels exclude each other"
    )


def test_the_readme_of_a_package_index_has_links_that_lead_to_the_repository(wheel):
    archive = zipfile.ZipFile(wheel)
    (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    fields = email.message_from_string(archive.read(metadata).decode())
    urls = dict(field.split(", ") for field in fields.get_all("Project-URL"))
    assert {"Repository", "Issues", "Changelog", "Documentation"} <= set(urls)
    assert all(urls[name].startswith(urls["Repository"]) for name in ("Issues", "Changelog"))
    assert fields["Description-Content-Type"] == "text/markdown"
    text = fields.get_payload()
    links = re.findall(r"\]\(([^()\s]+)\)", text)
    assert len(links) > 20 and all(link.startswith("https://") for link in links)
    # Each leads to a file of the repository, pictures as the files themselves.
    inside = [link.removeprefix(urls["Repository"]) for link in links if link.startswith(urls["Repository"])]
    for link in inside:
        kind, _, path = link.removeprefix("/").partition("/main/")
        assert kind == ("raw" if path.endswith(".svg") else "blob")
        assert (_ROOT / path.partition("#")[0]).exists(), link
    assert "/raw/main/docs/images/kill.svg" in inside


def test_it_is_the_installed_one_that_runs(installed, tmp_path):
    where = _run(installed / "bin" / "python", "-c", "import dtrain; print(dtrain.__file__)", cwd=tmp_path)
    assert where.stdout.startswith(str(installed))
    assert (Path(where.stdout.strip()).parent / "py.typed").exists()


@pytest.mark.long
def test_it_trains(installed, tmp_path):
    assert "train" in _run(installed / "bin" / "dtrain", "--help", cwd=tmp_path).stdout
    done = _run(
        installed / "bin" / "dtrain", "train", "digits", "--epochs", "1", "--run-dir", "out", cwd=tmp_path
    )
    assert "test accuracy" in done.stdout
    assert (tmp_path / "out" / "model.keras").exists()
