"""dtrain inside Ray Train: a trainer whose workers train Keras 3, and a callback that reports to Ray.

Ray starts the workers, and starts them again after a failure; `dtrain launch --ray` lets dtrain do that.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dtrain.ray.report_callback import ReportCallback
    from dtrain.ray.trainer import DtrainConfig, TensorflowTrainer

_PUBLIC = {
    "DtrainConfig": "dtrain.ray.trainer",
    "ReportCallback": "dtrain.ray.report_callback",
    "TensorflowTrainer": "dtrain.ray.trainer",
}

__all__ = ["DtrainConfig", "ReportCallback", "TensorflowTrainer"]

if not TYPE_CHECKING:  # a callback is Keras', and the program that starts a run needs no Keras

    def __getattr__(name: str) -> Any:
        if name not in _PUBLIC:
            raise AttributeError(
                f"module 'dtrain.ray' has no attribute {name!r}; it has {', '.join(__all__)}"
            )
        return getattr(importlib.import_module(_PUBLIC[name]), name)
