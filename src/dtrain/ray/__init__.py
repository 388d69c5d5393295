"""dtrain inside Ray Train: a trainer whose workers train Keras 3 models, and a callback that reports to Ray.

Here Ray Train starts the workers, and restarts them after a failure. With `dtrain launch --ray`, dtrain does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dtrain.ray.report_callback import ReportCallback
    from dtrain.ray.tensorflow_trainer import DtrainConfig, TensorflowTrainer

_PUBLIC = {
    "DtrainConfig": "dtrain.ray.tensorflow_trainer",
    "ReportCallback": "dtrain.ray.report_callback",
    "TensorflowTrainer": "dtrain.ray.tensorflow_trainer",
}

__all__ = ["DtrainConfig", "ReportCallback", "TensorflowTrainer"]

if not TYPE_CHECKING:  # imported late: the callback needs Keras, which the program that starts a run does not

    def __getattr__(name: str) -> Any:
        if name not in _PUBLIC:
            raise AttributeError(
                f"module 'dtrain.ray' has no attribute {name!r}; it has {', '.join(__all__)}"
            )
        return getattr(importlib.import_module(_PUBLIC[name]), name)
