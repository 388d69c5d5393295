"""Complete training programs, each readable as an example; this folder's face is their list.

Finding one by name imports neither TensorFlow nor the program itself.
"""

from __future__ import annotations

from dtrain.recipes.catalogue import RECIPES, Recipe, check_recipe, load_recipe
from dtrain.recipes.options import RecipeOptions

__all__ = ["RECIPES", "Recipe", "RecipeOptions", "check_recipe", "load_recipe"]
