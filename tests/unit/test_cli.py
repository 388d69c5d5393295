"""The `dtrain` command itself: fast, without TensorFlow, and one clear message for every mistake."""

from __future__ import annotations

import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from dtrain import cli
from dtrain.errors import ConfigurationError

IN_FRESH_PYTHON = """
import sys
from dtrain.cli import main
status = main(sys.argv[1:])
heavy = sorted({"tensorflow", "keras", "numpy", "sklearn", "matplotlib"} & set(sys.modules))
sys.stderr.write(f"imported: {heavy}")
sys.exit(status)
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["launch", "--help"], ["train", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    done = run("-c", IN_FRESH_PYTHON, *arguments)
    assert done.returncode == 0
    assert done.stdout
    assert done.stderr == "imported: []"


def test_launching_and_meeting_import_no_tensorflow() -> None:
    modules = "dtrain.channel, dtrain.cluster.serving, dtrain.launch, dtrain.launch.spawn, dtrain.topology"
    done = run("-c", f"import sys, {modules}; print({{'tensorflow', 'keras'}} & set(sys.modules))")
    assert done.stdout == "set()\n", done.stderr


def test_help_takes_less_than_half_a_second() -> None:
    times = []
    for _ in range(3):  # the best of three: the machine may be busy with other things
        start = time.perf_counter()
        done = run("-m", "dtrain", "--help")
        times.append(time.perf_counter() - start)
        assert done.returncode == 0
        assert "launch" in done.stdout and "train" in done.stdout
    assert min(times) < 0.5


def test_version() -> None:
    assert run("-m", "dtrain", "--version").stdout.startswith("dtrain ")


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "commands:" in capsys.readouterr().err


def test_unknown_command_suggests_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["lauch"]) == 2
    assert "Did you mean 'launch'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["launch", "a.py"], "--workers"),
        (["launch", "--workers", "0", "a.py"], "'0' is not an integer of at least 1"),
        (["launch", "--workers", "two", "a.py"], "'two' is not an integer"),
        (["launch", "--workers", "2"], "script"),
        (["launch", "--workers", "2", "--devices-per-worker", "-1", "a.py"], "--devices-per-worker"),
        (["launch", "--worker", "2", "a.py"], "--worker"),
        (["launch", "--workers", "2", "/no/such/script.py"], "There is no script '/no/such/script.py'"),
        (["launch", "--workers", "1", "--ps", "0", "a.py"], "'0' is not an integer of at least 1"),
        (["launch", "--workers", "1", "--ps", "-1", "a.py"], "--ps"),
        (["launch", "--workers", "1", "--ps", "1", "--max-restarts", "x", "a.py"], "'x' is not an integer"),
        (["launch", "--workers", "1", "--max-restarts", "1", __file__], "the job has no parameter servers"),
        (
            ["launch", "--workers", "1", "--ps", "1", "--devices-per-worker", "2", __file__],
            "a worker of parameter servers has one device",
        ),
        (["--no-such-option"], "--no-such-option"),
    ],
)
def test_bad_arguments_give_a_message_and_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    shown = capsys.readouterr().err
    assert said in shown
    assert "Traceback" not in shown


def fake_command(monkeypatch: pytest.MonkeyPatch, outcome: object) -> None:
    def run(args: object) -> int:
        if isinstance(outcome, BaseException):
            raise outcome
        return int(str(outcome))

    module = types.ModuleType("fake_command")
    module.__dict__.update(HELP="fake", add_arguments=lambda parser: None, run=run)
    monkeypatch.setitem(sys.modules, "fake_command", module)
    monkeypatch.setitem(cli.COMMANDS, "fake", "fake_command")


def test_a_dtrain_error_is_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_command(monkeypatch, ConfigurationError("what was found", hint="what to do"))
    assert cli.main(["fake"]) == 2
    assert capsys.readouterr().err == "dtrain: error: what was found\nHint: what to do\n"


def test_other_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_command(monkeypatch, ZeroDivisionError("a defect"))
    with pytest.raises(ZeroDivisionError):
        cli.main(["fake"])


def test_status_and_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_command(monkeypatch, 7)
    assert cli.main(["fake"]) == 7
    fake_command(monkeypatch, KeyboardInterrupt())
    assert cli.main(["fake"]) == 130


def test_arguments_of_the_script_are_its_own(tmp_path: Path) -> None:
    script = tmp_path / "show.py"
    script.write_text("import sys; print(sys.argv[1:])")
    done = run("-m", "dtrain", "launch", "--workers", "1", str(script), "--workers", "9", "--", "-m", "x")
    assert done.stdout == "[worker 0] ['--workers', '9', '--', '-m', 'x']\n"
    assert (done.returncode, done.stderr) == (0, "")
