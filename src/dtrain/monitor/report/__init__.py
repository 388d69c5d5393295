"""A report on runs: one page of HTML that needs nothing but itself. `dtrain report` writes it.

`render` makes the page of runs that have been read, `write_output` puts it into a file. Nothing here imports
TensorFlow or Keras.
"""

from __future__ import annotations

from dtrain.monitor.report.output import check_output, write_output
from dtrain.monitor.report.page import render

__all__ = ["check_output", "render", "write_output"]
