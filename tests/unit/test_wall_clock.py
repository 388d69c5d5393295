"""What `make check` finds in tests that depend on the machine's speed, and what it leaves alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests import wall_clock
from tests.wall_clock import findings

PAUSE, BOUND, LIMIT = "sleep", "upper bound", "wait limit"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("time.sleep(0.1)", PAUSE),
        ("sleep(100)", PAUSE),
        ("time.sleep(pause)", PAUSE),
        ("async def it():\n    await asyncio.sleep(1)", PAUSE),
        ("PATIENCE = 2.0; time.sleep(PATIENCE)", PAUSE),
        ("subprocess.run([python, '-c', 'import time; time.sleep(30)'])", PAUSE),
        ("text = f'import time\\ntime.sleep({seconds})'", PAUSE),
        ("text = 'if {condition}:\\n    time.sleep(1)'.format(condition=1)", PAUSE),
        ("assert time.monotonic() - begun < 5", BOUND),
        ("assert 1 < time.time() - begun < 5", BOUND),
        ("assert 5 > time.perf_counter() - begun", BOUND),
        ("took = time.monotonic() - begun; assert a and max(took, 1) <= limit", BOUND),
        ("if time.monotonic() - begun < 5: pass", BOUND),
        ("def spent():\n    return time.monotonic() - begun\nassert spent() < 2 * other", BOUND),
        ("assert time.monotonic() < deadline", BOUND),
        ("assert result['seconds'] < 10", BOUND),
        ("assert all(each.step_seconds < 10 for each in found)", BOUND),
        ("assert 0.9 * wall < counted", BOUND),
        ("process.wait(5)", LIMIT),
        ("process.wait(timeout=59.9)", LIMIT),
        ("thread.join(10)", LIMIT),
        ("future.result(timeout=1)", LIMIT),
        ("SECONDS = 20.0; process.communicate(timeout=SECONDS)", LIMIT),
        ("queue.get(timeout=5)", LIMIT),
        ("subprocess.run(command, timeout=30)", LIMIT),
        ("wait_until(condition, 10)", LIMIT),
        ("wait_until(condition, limit=10)", LIMIT),
        ("def wait_until(condition, limit: float = 10.0): pass", LIMIT),
        ("def run(*, timeout=10): pass", LIMIT),
        ("deadline = time.monotonic() + 20", LIMIT),
        ("@pytest.mark.timeout(20)\ndef test_it(): pass", LIMIT),
    ],
)
def test_what_depends_on_speed_is_found(text: str, kind: str) -> None:
    (found,) = findings(text)
    assert found.text.startswith(kind)


@pytest.mark.parametrize(
    "text",
    [
        "time.sleep(0.05)",
        "clock.sleep(5)",
        "assert time.monotonic() - begun > 5",
        "assert 3 <= result['seconds']",
        "assert result['steps'] < 10",
        "assert sum(parts['seconds']) <= wall",
        "while time.monotonic() < deadline: pass",
        "process.wait()",
        "process.wait(60)",
        "process.wait(timeout=300.0)",
        "while not ended.wait(0.05): pass",
        "', '.join(names)",
        "strategy = Strategy(peer_timeout=3)",
        "class Job:\n    def wait(self, more): self.now += more\njob.wait(4.9)",
        "text = 'the test waits (time.sleep(5)) for it'",
        "deadline = time.monotonic() + 120",
    ],
)
def test_what_does_not_is_left_alone(text: str) -> None:
    assert findings(text) == []


@pytest.mark.parametrize(
    "text",
    [
        "time.sleep(2)  # wall clock: the kernel needs it",
        "# wall clock: the kernel needs it\ntime.sleep(2)",
        "process.wait(\n    timeout=5,  # wall clock: the kernel needs it\n)",
        'PROGRAM = """\nimport time\ntime.sleep(2)  # wall clock: the kernel needs it\n"""',
    ],
)
def test_a_reason_is_accepted_at_its_place_only(text: str) -> None:
    assert findings(text) == []
    assert len(findings(text.replace("the kernel needs it", ""))) == 1
    assert len(findings(f"{text}\n\ntime.sleep(3)")) == 1


def test_a_program_in_a_string_has_the_lines_of_its_file() -> None:
    text = 'import os\n\nPROGRAM = """\nimport time\n\ntime.sleep(2)\n"""\n\nos.times()\n'
    assert [each.line for each in findings(text)] == [6]


def test_the_command_names_the_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wall_clock, "ROOT", tmp_path)
    (tmp_path / "good.py").write_text("1\n")
    (tmp_path / "bad.py").write_text("\n\ntime.sleep(3)\n")
    assert wall_clock.main([str(tmp_path / "good.py")]) == 0
    assert wall_clock.main([str(tmp_path / "good.py"), str(tmp_path / "bad.py")]) == 1
    assert "bad.py:3: sleep of 3 s" in capsys.readouterr().out
