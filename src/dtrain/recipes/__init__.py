"""The recipes: complete training programs, each readable as an example; this module exports their list.

Looking a recipe up by its name imports neither TensorFlow nor the recipe.
"""

from __future__ import annotations

from dtrain.recipes.catalogue import RECIPES, Recipe, check_recipe, load_recipe
from dtrain.recipes.options import RecipeOptions

__all__ = ["RECIPES", "Recipe", "RecipeOptions", "check_recipe", "load_recipe"]
