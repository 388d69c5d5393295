"""The notebook of the tour runs from top to bottom in a fresh kernel, and is kept without output."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

TOUR = Path(__file__).resolve().parents[2] / "examples" / "tour.ipynb"


def test_it_is_kept_without_output() -> None:
    notebook = nbformat.read(TOUR, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(code) >= 10
    assert not [cell for cell in code if cell.outputs or cell.execution_count is not None]


@pytest.mark.usefixtures("as_installed")
@pytest.mark.long
@pytest.mark.timeout(600)
def test_it_runs(tmp_path: Path) -> None:
    notebook = nbformat.read(TOUR, as_version=4)
    client = NotebookClient(
        notebook, timeout=None, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()  # a cell that fails raises
    printed = "".join(
        output.get("text", "")
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if output.output_type == "stream"
    )
    assert "finished" in printed
    assert (tmp_path / "runs" / "tour" / "curves.png").is_file()
