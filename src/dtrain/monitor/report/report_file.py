"""Writes a report atomically, to a new file or over an earlier report, but over no other file.

It knows the mark by which a report is recognised, and nothing else of the page's content.
"""

from __future__ import annotations

from pathlib import Path

from dtrain.base import safe_files
from dtrain.errors import ConfigurationError

GENERATOR = "dtrain report"
"""The beginning of the meta element `generator` in a report's page; the version follows."""

_MARK = f'<meta name="generator" content="{GENERATOR}'
_HEAD = 4096
_HINT = "Choose another file with --output."


def check_output(output: Path) -> None:
    """Check that a report can be written to `output`, without writing anything.

    Raises:
        ConfigurationError: the report cannot be written, or would overwrite a file that is no report.
    """
    try:
        _check_place(output)
    except OSError as error:
        raise ConfigurationError(
            f"The report cannot be written to {output}: {error.strerror or error}.", hint=_HINT
        ) from None


def _check_place(output: Path) -> None:
    if output.is_dir():
        raise ConfigurationError(
            f"The report is to be written to {output}, which is a directory.", hint=_HINT
        )
    if not output.parent.is_dir():
        raise ConfigurationError(
            f"The report is to be written to {output}, but there is no directory {output.parent}.",
            hint="Make it, or choose another file with --output.",
        )
    if output.exists() and not is_report(output):
        raise ConfigurationError(f"{output} already exists and is not a report of dtrain.", hint=_HINT)


def is_report(path: Path) -> bool:
    """Whether a file is an earlier report."""
    try:
        with safe_files.open_to_read(path, links=True) as file:
            return _MARK.encode() in file.read(_HEAD)
    except OSError:
        return False


def write_output(output: Path, page: str) -> int:
    """Write a report atomically.

    Returns:
        The size of the report in bytes.

    Raises:
        ConfigurationError: the report cannot be written, or would overwrite a file that is no report.
    """
    check_output(output)
    content = page.encode("utf-8", "replace")
    try:
        with safe_files.replacing(output) as file:
            file.write(content)
    except OSError as error:
        raise ConfigurationError(
            f"The report cannot be written to {output}: {error.strerror or error}.", hint=_HINT
        ) from None
    return len(content)
