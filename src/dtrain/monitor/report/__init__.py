"""A report on runs: one self-contained page of HTML, which `dtrain report` writes.

`render` makes the page from runs that have been read, and `write_output` writes it to a file. `page_blocks`
makes its blocks, which a live page renews one by one. This package reads no run directory, and imports
neither TensorFlow nor Keras.
"""

from __future__ import annotations

from dtrain.monitor.report.page import LIVE_POLICY, page_blocks, page_of, render
from dtrain.monitor.report.present import TaskRow, present_section
from dtrain.monitor.report.report_file import check_output, write_output

__all__ = [
    "LIVE_POLICY",
    "TaskRow",
    "check_output",
    "page_blocks",
    "page_of",
    "present_section",
    "render",
    "write_output",
]
