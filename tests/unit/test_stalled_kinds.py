"""Which tests the passes that freeze and limit processes choose, by the sources of the tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.stalled import kinds
from tests.stalled.kinds import TESTS, kinds_of, named_kinds, one_for_each_kind

HELPER = '''
"""It may say subprocess.run( without calling it."""
import subprocess

def start(): return subprocess.run(["true"])

class Job:
    def __init__(self): start()

def quiet():
    """It does not call subprocess.run(."""
'''
TEST = """
import helper
from helper import Job as Started
from tests.package import inner
from tests.package.inner import by_launcher as run

COMMAND = ["mpirun", "true"]

def by_attribute(): helper.start()
def by_class(): Started()
def by_function(): return run(COMMAND)
def by_module(): inner.of_other_hosts()
def by_nothing(): helper.quiet()
def mentions(): assert COMMAND and "--ps"
"""
INNER = """
from . import servers
from .servers import more

def by_launcher(command): launch_local(command, options=servers.OPTIONS)
def of_other_hosts(): more()
"""
SERVERS = """
OPTIONS = ["--ps", "1"]

def more():
    if True:
        os.fork()
    more()
"""


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of tests, with helpers and a package."""
    monkeypatch.setattr(kinds, "TESTS", tmp_path)
    (tmp_path / "package").mkdir()
    files = {
        "helper.py": HELPER,
        "unit/test_it.py": TEST,
        "package/__init__.py": "",
        "package/inner.py": INNER,
        "package/servers.py": SERVERS,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path / "unit" / "test_it.py"


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("by_attribute", {"process"}),
        ("by_class", {"process"}),
        ("by_function", {"launch", "mpi", "parameter server"}),
        ("by_module", {"process"}),
        ("by_nothing", set()),
        ("mentions", set()),
    ],
)
def test_a_start_is_found_wherever_the_test_reaches_it(made: Path, name: str, found: set[str]) -> None:
    assert kinds_of(frozenset({(made, name)})) == found


def test_what_a_fixture_starts_is_the_tests(made: Path) -> None:
    assert kinds_of(frozenset({(made, "by_nothing"), (made.parents[1] / "helper.py", "start")})) == {
        "process"
    }


def test_one_test_for_each_kind() -> None:
    tests = [{"process"}, set(), {"process"}, {"process", "launch"}, {"launch"}, set(), {"mpi", "launch"}]
    assert one_for_each_kind([frozenset(each) for each in tests]) == [0, 1, 3, 6]


def test_parameters_name_kinds() -> None:
    assert named_kinds({"launcher": "ssh", "count": 2, "text": "of ray"}, ["ssh", "ray"]) == {"ssh"}


def test_every_file_that_calls_subprocess_itself_has_a_kind() -> None:
    """By another, cruder way: the function in which the call is, whoever uses it."""
    for file in sorted(TESTS.glob("*/test_*.py")):
        text = file.read_text(encoding="utf-8")
        names = re.findall(r"^def (\w+)\(", text, re.M)
        if re.search(r"^ .*\bsubprocess\.(run|Popen)\(", text, re.M):
            assert any(kinds_of(frozenset({(file, name)})) for name in names), file
