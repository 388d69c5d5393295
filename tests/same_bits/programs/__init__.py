"""Programs whose numbers are compared between two commits, beside those of the contract.

They show what one device cannot be asked: the order of the examples, calls of many steps, XLA by rule, and
checkpoints that another commit wrote. Importing this package starts nothing; ``load`` does.
"""

from __future__ import annotations

import importlib
import pkgutil


def load() -> None:
    """Import every file of programs, which registers them."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
