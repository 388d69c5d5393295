"""`dtrain conformance` without processes: the list of programs, the comparison, and the table."""

from __future__ import annotations

import numpy as np
import pytest

from dtrain import cli
from dtrain.conformance.corpus import chosen, programs
from dtrain.conformance.program_runs import ProgramAnswer
from dtrain.conformance.verdict_table import as_page
from dtrain.conformance.verdicts import ERROR, SAME, WRONG, Conformance, ProgramVerdict, compare
from dtrain.conformance.worker import informative_line
from dtrain.errors import ConfigurationError

EXPECTED = ProgramAnswer(
    {"weight": np.array([1.0, -2.0], "float32"), "count": np.array(3), "name": np.array(["a"])}
)
(FIRST,) = chosen("arrays")


def test_every_program_has_a_name_of_its_own_and_says_what_it_does() -> None:
    names = [each.name for each in programs()]
    assert len(names) >= 45 and len(set(names)) == len(names)
    assert all(each.says.endswith(".") for each in programs())


def test_programs_are_chosen_by_name() -> None:
    assert [each.name for each in chosen("strings, arrays")] == ["strings", "arrays"]
    assert len(chosen(None, 3)) == 3
    with pytest.raises(ConfigurationError, match="no program 'array'") as caught:
        chosen("array")
    assert "Did you mean 'arrays'?" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("changed", "outcome", "reason"),
    [
        ({}, SAME, ""),
        ({"weight": np.array([1.0, -2.0001], "float32")}, SAME, ""),
        ({"weight": np.array([1.0, -2.01], "float32")}, WRONG, "weight differs by 0.005 of its value"),
        ({"weight": np.array([1.0, np.nan], "float32")}, WRONG, "weight differs by inf of its value"),
        ({"weight": np.array([1.0], "float32")}, WRONG, "weight has the shape (1,) instead of (2,)"),
        ({"count": np.array(4)}, WRONG, "count is 4 instead of 3"),
        ({"more": np.array(1)}, WRONG, "more is not on both sides"),
    ],
)
def test_numbers_are_compared(changed: dict[str, np.ndarray], outcome: str, reason: str) -> None:
    assert compare(FIRST, ProgramAnswer(EXPECTED.values | changed), EXPECTED) == (outcome, reason)


def test_an_error_is_an_outcome_with_its_reason() -> None:
    assert compare(FIRST, ProgramAnswer({}, "ValueError: x"), EXPECTED) == (ERROR, "ValueError: x")


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("the shapes differ\nmore", "the shapes differ"),
        ("Graph execution error:\n\nDetected at node x\n  (0) INVALID: y\n\t [[z]]", "(0) INVALID: y"),
        ('in user code:\n\n    File "a.py", line 1, in f *\n        g()\n\n    ValueError: bad\n', "bad"),
        ("a (defined @ /a/venv/site-packages/keras/core.py:4)", "a (defined @ keras/core.py:4)"),
    ],
)
def test_the_line_of_an_error_that_says_what_is_wrong(message: str, line: str) -> None:
    assert informative_line(message) == line


def a_run() -> Conformance:
    verdicts = {
        "stock": {"arrays": ProgramVerdict(SAME), "strings": ProgramVerdict(ERROR, "TypeError: `a` | b")},
        "dtrain": {"arrays": ProgramVerdict(SAME), "strings": ProgramVerdict(SAME)},
    }
    return Conformance(
        programs=chosen("arrays,strings,adam"),
        versions={"TensorFlow": "2.21.0"},
        processor="x",
        cores=2,
        command="dtrain conformance",
        verdicts={"mirrored": verdicts},
        absent={"adam": "ValueError: y"},
    )


def test_the_page() -> None:
    page = as_page(a_run())
    assert "| `strings` | error | yes |" in page
    assert "- `strings`: error, `TypeError: 'a' | b`" in page
    assert "- `adam`: `ValueError: y`" in page


def test_the_command_lists_programs_and_refuses_unknown_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["conformance", "--list", "--limit", "2"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert cli.main(["conformance", "--strategies", "tpu"]) == 2
    assert "does not compare the strategy 'tpu'" in capsys.readouterr().err
