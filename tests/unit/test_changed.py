"""Which groups of tests run after which change, and that the groups know what their tests depend on."""

from __future__ import annotations

import ast
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from tests import changed
from tests.changed import GROUPS, LEFT_OUT, ROOT, Group

ALL = {group.name for group in GROUPS}
NAMES = {group.name: group for group in GROUPS}


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    done = subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """One commit of two files."""
    git(tmp_path, "init", "--quiet")
    (tmp_path / ".gitignore").write_text("build/\n")
    (tmp_path / "kept.py").write_text("1\n")
    (tmp_path / "moved.py").write_text("a\nb\nc\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "first")
    return tmp_path


def test_what_has_changed_is_found_committed_or_not(repository: Path) -> None:
    first = git(repository, "rev-parse", "HEAD")
    assert changed.paths_since(first, repository) == []
    (repository / "new \u00e9.py").write_text("1\n")
    (repository / "build").mkdir()
    (repository / "build" / "made.txt").write_text("1\n")
    assert changed.paths_since(first, repository) == ["new \u00e9.py"]
    (repository / "moved.py").rename(repository / "there.py")
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "--message", "second")
    (repository / "kept.py").write_text("2\n")
    found = changed.paths_since(first, repository)
    assert found is not None
    assert sorted(found) == ["kept.py", "moved.py", "new \u00e9.py", "there.py"]


def test_without_the_commit_or_the_history_all_groups_run(
    repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert changed.paths_since("0123456789", repository) is None
    assert changed.paths_since("HEAD", tmp_path_factory.mktemp("bare")) is None
    assert changed.left_out(None) == []


@pytest.mark.parametrize(
    ("path", "run"),
    [
        ("src/dtrain/engine/step/steps.py", set()),
        ("tests/unit/test_peers.py", set()),
        ("CHANGELOG.md", set()),
        ("src/dtrain/launch/supervision/running_tasks.py", ALL - {"oldest-row"}),
        ("src/dtrain/collectives/mpi.py", {"engines"}),
        ("src/dtrain/base/tcp.py", ALL - {"oldest-row"}),
        ("src/dtrain/upstream/keras_models.py", {"oldest-row"}),
        ("src/dtrain/data/sources.py", {"recipes", "pages"}),
        ("docs/batches.md", {"pages"}),
        ("docs/slurm.md", {"engines", "pages"}),
        ("tests/multihost/test_ssh.py", {"engines"}),
        ("tests/faults/test_recipes.py", {"recipes"}),
        ("pyproject.toml", ALL),
        ("requirements-dev.lock", ALL),
    ],
)
def test_what_runs_after_a_change(path: str, run: set[str]) -> None:
    left = {group.name for group in changed.left_out(["README.txt", path])}
    assert left == ALL - run


def files(group: Group) -> list[Path]:
    patterns = [pattern.partition("::")[0] for pattern in group.tests]
    names = sorted((ROOT / "tests").rglob("*.py"))
    for pattern in patterns:
        assert any(fnmatchcase(str(path.relative_to(ROOT)), pattern) for path in names), pattern
    return [path for path in names if any(fnmatchcase(str(path.relative_to(ROOT)), p) for p in patterns)]


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.name)
def test_a_group_depends_on_what_is_there(group: Group) -> None:
    for path in (*group.depends, *group.but):
        assert any(ROOT.glob(path)), path


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.name)
def test_a_group_depends_on_the_helpers_of_its_tests(group: Group) -> None:
    for file in files(group):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                helper = f"tests/{name}.py"
                if (ROOT / helper).exists():
                    assert group.reason([helper]), f"{file} imports {helper}"


@pytest.mark.parametrize(("paths", "status"), [([], LEFT_OUT), (["tests/rows/results.py"], 0), (None, 0)])
def test_the_command_tells_a_script(
    paths: list[str] | None, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changed, "paths_since_base", lambda: paths)
    assert changed.main(["oldest-row"]) == status


def test_tests_are_left_out_with_their_group() -> None:
    assert NAMES["engines"].has("tests/multihost/test_ssh.py::test_it[a]")
    assert NAMES["engines"].has("tests/multiprocess/test_launchers.py::test_signals_reach_all[ray-2]")
    assert not NAMES["engines"].has("tests/multiprocess/test_launchers.py::test_signals_reach_all[local-2]")
    assert not NAMES["pages"].has("tests/multidevice/test_guide.py::test_there_are_programs")


@pytest.mark.parametrize("words", [[], ["--numprocesses=1"]])
def test_pytest_runs_none_of_a_group_that_is_left_out(words: list[str]) -> None:
    file = "tests/multiprocess/test_tour.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words, file]
    command += ["--left-out=pages", "--deselect", f"{file}::test_it_is_kept_without_output"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, done.stdout
