"""Complete training programs on real data, each readable as an example; this file is their list.

Finding one by name imports neither TensorFlow nor the program itself.
"""

from __future__ import annotations

import difflib
import importlib
from types import ModuleType

from dtrain.errors import ConfigurationError
from dtrain.recipes.options import RecipeOptions

__all__ = ["RECIPES", "RecipeOptions", "check_recipe", "load_recipe"]

RECIPES = {
    "digits": "a small CNN on scikit-learn's 1797 handwritten digits",
}
"""Name and one line of every recipe; `dtrain.recipes.<name>` is its module."""


def check_recipe(name: str) -> None:
    """See that a recipe of this name exists.

    Raises:
        ConfigurationError: it does not; the message lists those that do, and the nearest.
    """
    if name in RECIPES:
        return
    nearest = difflib.get_close_matches(name.lower(), RECIPES, n=1, cutoff=0.5)
    suggestion = f"Did you mean {nearest[0]!r}? " if nearest else ""
    raise ConfigurationError(
        f"The recipe {name!r} is not known.", hint=f"{suggestion}Known recipes: {', '.join(sorted(RECIPES))}."
    )


def load_recipe(name: str) -> ModuleType:
    """Import the recipe's module, and with it TensorFlow.

    Returns:
        A module with `train(options: RecipeOptions) -> str`, which trains and returns a summary to print.

    Raises:
        ConfigurationError: no recipe has this name.
    """
    check_recipe(name)
    return importlib.import_module(f"dtrain.recipes.{name}")
