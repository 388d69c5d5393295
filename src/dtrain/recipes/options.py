"""What every recipe can be told, from the command line or from Python, checked before anything starts.

It parses and checks; it imports no TensorFlow and knows no recipe.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from dtrain.errors import ConfigurationError
from dtrain.monitor.run_directory import check_run_directory

_LARGEST_SEED = 2**32 - 1


@dataclass(frozen=True, kw_only=True)
class RecipeOptions:
    """The settings of one training run.

    Args:
        strategy: a name that `dtrain.strategy` knows.
        epochs: how often the training data is gone through; at least 1.
        global_batch: examples in a step, over all replicas; at least one for each.
        seed: of the initial weights and of the order of the examples; 0 to 4294967295.
        run_dir: where the run's files go; None for a new directory under `runs/`.

    Raises:
        ConfigurationError: a value is out of range, or `run_dir` cannot take a run.
    """

    strategy: str = "auto"
    epochs: int = 10
    global_batch: int = 64
    seed: int = 1
    run_dir: str | None = None

    def __post_init__(self) -> None:
        _at_least_one("epochs", self.epochs, "One epoch is one pass over the training data.")
        _at_least_one("global batch", self.global_batch, "Every replica needs at least one example a step.")
        if not 0 <= self.seed <= _LARGEST_SEED:
            raise ConfigurationError(
                f"The seed is {self.seed}.", hint=f"Set it to an integer from 0 to {_LARGEST_SEED}."
            )

    def settings(self) -> dict[str, Any]:
        """What a run's record tells of these options."""
        return {
            "strategy_asked": self.strategy,
            "epochs": self.epochs,
            "global_batch": self.global_batch,
            "seed": self.seed,
        }

    def check_run_dir(self) -> None:
        """See that the run directory can take a run; ConfigurationError if not. It makes nothing."""
        check_run_directory(self.run_dir)

    def check_replicas(self, replicas: int) -> None:
        """See that a global batch has an example for each of `replicas`; ConfigurationError if not."""
        if self.global_batch < replicas:
            raise ConfigurationError(
                f"The global batch is {self.global_batch}, but there are {replicas} replicas.",
                hint=f"Set the global batch to {replicas} or more, or train on fewer devices.",
            )

    def to_arguments(self) -> list[str]:
        """The command-line arguments that `parse` turns into these options again."""
        arguments = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                arguments += [f"--{field.name.replace('_', '-')}", str(value)]
        return arguments

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Add one option a field to `parser`."""
        parser.add_argument(
            "--strategy", default=cls.strategy, metavar="S", help="how to distribute (default: %(default)s)"
        )
        parser.add_argument(
            "--epochs",
            type=int,
            default=cls.epochs,
            metavar="E",
            help="passes over the data (default: %(default)s)",
        )
        parser.add_argument(
            "--global-batch",
            type=int,
            default=cls.global_batch,
            metavar="B",
            help="examples in a step, over all replicas (default: %(default)s)",
        )
        parser.add_argument(
            "--seed",
            type=int,
            default=cls.seed,
            metavar="N",
            help="of weights and data order (default: %(default)s)",
        )
        parser.add_argument(
            "--run-dir", metavar="DIR", help="where the files go (default: a new directory under runs/)"
        )

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> RecipeOptions:
        """The options in what a parser with `add_arguments` has parsed; ConfigurationError as above."""
        return cls(**{field.name: getattr(arguments, field.name) for field in fields(cls)})

    @classmethod
    def parse(cls, argv: Sequence[str] | None = None) -> RecipeOptions:
        """The options on a command line of their own; None means this process' own."""
        parser = argparse.ArgumentParser()
        cls.add_arguments(parser)
        return cls.from_arguments(parser.parse_args(argv))


def _at_least_one(name: str, value: int, hint: str) -> None:
    if value < 1:
        raise ConfigurationError(f"The {name} is {value}, which is below 1.", hint=hint)
