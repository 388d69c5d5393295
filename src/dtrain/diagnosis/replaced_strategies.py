"""Makes a user's script train on one device: what it makes as a strategy is another object.

It decides neither which object that is nor what is observed; the programs that call it do.
"""

from __future__ import annotations

import importlib
from typing import Any

from dtrain.strategies import registry


def replace_strategies(by: Any) -> None:
    """Replaces the class of every strategy of dtrain, and `dtrain.strategy`.

    Args:
        by: called in their place, with the arguments that the script gives.
    """

    def strategy(name: str = registry.AUTO, **options: Any) -> Any:
        registry.resolve_name(name)
        return by()

    entries = [entry for entry in registry.STRATEGIES.values() if entry.class_name.isidentifier()]
    # All are imported before one is replaced: some are subclasses of others.
    for entry, module in [(entry, importlib.import_module(entry.module)) for entry in entries]:
        setattr(module, entry.class_name, by)
    registry.strategy = strategy
