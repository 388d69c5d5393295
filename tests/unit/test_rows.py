"""The rows of versions: their files, what is read from the logs of a run, and the page that shows it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.contract.harness import HELD_KINDS
from tests.programs.registry import listed
from tests.rows import __main__ as runner
from tests.rows import environments, results
from tests.rows.environments import Row, UnavailableError
from tests.rows.results import Cell, Result

from dtrain.upstream.tested_versions import read_record

ROWS = environments.rows()
EXACT = [row for row in ROWS.values() if not row.may_fail]


def test_the_rows_are_in_order_and_what_may_fail_comes_last() -> None:
    names = list(ROWS)
    assert names[0] == "tf218-k38"
    assert names[-2:] == ["newest", "nightly"]
    assert [ROWS[name].may_fail for name in names] == [False] * (len(names) - 2) + [True] * 2


@pytest.mark.parametrize("row", EXACT, ids=lambda row: row.name)
def test_a_row_of_exact_versions_is_on_record_as_its_name_says(row: Row) -> None:
    found = {"tensorflow": row.pins["tensorflow_cpu"], "keras": row.pins["keras"]}
    assert found in read_record()["rows"]
    tensorflow, keras = (each.split(".")[:2] for each in found.values())
    assert row.name in ("locked", f"tf{''.join(tensorflow)}-k{''.join(keras)}")


def test_the_page_has_the_table_of_the_results() -> None:
    text = results.PAGE.read_text(encoding="utf-8")
    assert results.page(text) == text, "run: python -m tests.rows --table"
    assert results.table(results.load()) in text


def test_results_are_of_the_versions_of_their_rows() -> None:
    for name, result in results.load().items():
        pins = ROWS[name].pins
        assert result.may_fail == ROWS[name].may_fail
        if not result.may_fail:
            assert (result.tensorflow, result.keras) == (pins["tensorflow_cpu"], pins["keras"])


def test_what_ci_runs_is_there() -> None:
    known = {entry.name for entry in listed(*HELD_KINDS)}
    for part, asked in runner.ESSENTIALS.items():
        if part in runner.STRATEGIES:
            assert set(asked) <= known
        else:
            assert (environments.ROOT / asked[0].partition("::")[0]).is_file()


@pytest.mark.parametrize(
    ("log", "cell"),
    [
        ("fit  1.0 s  ok\nmirrored: 53 of 53 programs hold, in 86 s\n", (53, 53)),
        ("mirrored: 211 of 213 programs hold, in 86 s\n", (211, 213)),
        ("..\n276 passed, 78 warnings in 51.63s\n", (276, 276)),
        ("..\n276 passed, 78 warnings in 67.12s (0:01:07)\n", (276, 276)),
        ("===== 274 passed, 1 skipped, 1 warning in 19.10s =====\n", (274, 274)),
        ("1 failed, 217 passed, 2 skipped, 3 deselected, 1 error in 20.90s\n", (217, 219)),
        ("Traceback\nImportError: no\n", (0, 0)),
    ],
)
def test_logs_are_read(log: str, cell: tuple[int, int]) -> None:
    found = results.read(log)
    assert (found.held, found.ran) == cell
    assert found.holds == (cell[0] == cell[1] > 0)


def test_a_table_shows_what_failed_and_what_did_not_run() -> None:
    parts = {"names": Cell(3, 4), "mirrored": Cell(0, 0), "checkpoints": Cell(2, 2)}
    found = {"nightly": Result("2.22.0.dev1", "3.16.0.dev1", "3.11.7", may_fail=True, parts=parts)}
    line = results.table(found).splitlines()[-1]
    cells = [each.strip() for each in line.strip("|").split("|")]
    assert cells[:4] == ["2.22.0.dev1, may fail", "3.16.0.dev1", "**3 of 4**", "2 of 2"]
    assert cells[6:8] == ["**did not end**", "not run"]


def test_a_table_says_why_versions_are_refused() -> None:
    found = {
        "nightly": Result("2.22", "3.16", "3.11.7", may_fail=True, refused="dtrain uses x, which is gone.")
    }
    assert "| refused | not run |" in results.table(found)
    assert results.table(found).endswith(
        "\nTensorFlow 2.22 with Keras 3.16: `dtrain uses x, which is gone.`\n"
    )
    assert not found["nightly"].holds


def test_a_run_replaces_its_own_cells_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FILE", "PAGE"):
        path = getattr(results, name)
        (tmp_path / path.name).write_text(path.read_text(encoding="utf-8"))
        monkeypatch.setattr(results, name, tmp_path / path.name)
    before = results.load()["tf218-k38"]
    new = Result(before.tensorflow, before.keras, before.python, parts={"names": Cell(1, 2)})
    results.write({"tf218-k38": new})
    assert results.load()["tf218-k38"].parts == before.parts | {"names": Cell(1, 2)}
    assert "**1 of 2**" in results.PAGE.read_text()
    results.write({"tf218-k38": Result("2.18.9", before.keras, before.python, parts={"names": Cell(2, 2)})})
    assert results.load()["tf218-k38"].parts == {"names": Cell(2, 2)}, "cells of other versions are gone"


@pytest.mark.parametrize(
    ("wanted", "error"),
    [("dtrain-has-no-such-wheel==1", UnavailableError), ("not a requirement!", RuntimeError)],
)
def test_an_environment_that_cannot_be_made(
    wanted: str, error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environments, "KEPT", tmp_path)
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    (tmp_path / "row.txt").write_text(wanted + "\n")
    with pytest.raises(error):
        Row("row", tmp_path / "row.txt").prepare()
    assert not (tmp_path / "row" / "made-of").exists()


def test_an_unknown_row_is_refused() -> None:
    command = [sys.executable, "-m", "tests.rows", "--row", "tf217-k38"]
    done = subprocess.run(command, cwd=environments.ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "--row tf217-k38: it is one of tf218-k38," in done.stderr
