"""The table of cases, and what each is given. It starts no TensorFlow."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILES = ("counts", "numbers", "changes", "usage", "splits", "overlaps", "own_builds", "hooks")
WITH_ANY_WORKERS = ("overlaps", "own_builds")  # these run with one worker, too
# These take long for what they hold; they run with the long tests.
SLOW = (
    "callbacks_train_as_on_one_device",
    "splits_by_every_partitioner",
    "optimizers_of_every_kind_count_exactly",
    "splits_under_other_optimizers",
    "big_tables_stay_on_the_servers",
    "several_steps_in_a_turn_are_the_same_steps",
    "several_overlapped_steps_in_a_turn_are_applied_once",
    "rows_of_tables_and_split_weights_are_as_late",
    "overlapped_accumulation_goes_on_from_what_was_left",
    "scaled_losses_and_moving_statistics_overlap",
    "own_steps_overlap_or_say_why_not",
    "what_is_built_late_goes_on",
    "ragged_values_of_a_step_are_one_devices",
    "weights_are_loaded_before_what_is_built_late_trains",
)
# `make test-soak` alone runs these: the other cases of overlap hold each part of what the first trains with;
# `splits_by_every_partitioner` takes Adam for all optimizers of single elements.
REPEATED = (
    "overlapped_training_reaches_what_it_reaches_without",
    "splits_under_optimizers_of_single_elements",
)
LOSSES = ("losses",)  # their workers are killed; they run when they are asked for


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a case runs with.

    Attributes:
        strategy: the parameter-server strategy, with at least two workers.
        folder: for the case's files.
        runs: how often to repeat what may go well by chance.
    """

    strategy: Any
    folder: Path
    runs: int


Case = Callable[[Job], None]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    """Enters a function into the table, under its own name."""
    CASES[function.__name__] = function
    return function


def listed(files: tuple[str, ...] = FILES, *, slow: bool = False) -> list[str]:
    """The names of the cases in some files, read from the sources; the slow and repeated ones if asked."""
    found = []
    for file in files:
        tree = ast.parse((Path(__file__).parent / f"{file}.py").read_text())
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
        found += [f.name for f in functions if any(ast.unparse(d) == "case" for d in f.decorator_list)]
    return [name for name in found if slow or name not in (*SLOW, *REPEATED)]
