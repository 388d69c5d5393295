"""A report on runs: one self-contained page of HTML, which `dtrain report` writes.

`render` makes the page from runs that have been read, and `write_output` writes it to a file. This package
reads no run directory, and imports neither TensorFlow nor Keras.
"""

from __future__ import annotations

from dtrain.monitor.report.page import render
from dtrain.monitor.report.report_file import check_output, write_output

__all__ = ["check_output", "render", "write_output"]
