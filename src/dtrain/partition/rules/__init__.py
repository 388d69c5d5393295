"""The rules, a module for each kind of operation; importing this package fills the table."""

from dtrain.partition.rules import (
    control_flow,
    elementwise,
    lists,
    products,
    random_numbers,
    reductions,
    rows,
    shapes,
    sizes,
    slices,
    variable_rules,
)

__all__ = [
    "control_flow",
    "elementwise",
    "lists",
    "products",
    "random_numbers",
    "reductions",
    "rows",
    "shapes",
    "sizes",
    "slices",
    "variable_rules",
]
