"""The training programs, one file a theme. Importing this package starts nothing; ``load`` does."""

from __future__ import annotations

import importlib
import pkgutil


def load() -> None:
    """Import every file of programs, which registers them."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
