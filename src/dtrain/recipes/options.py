"""The options that all recipes share, from the command line or from Python, checked at construction.

It imports no TensorFlow. The further options of single recipes are in `catalogue.py`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from dtrain.base.batch_sizes import BatchSizes, check_batches, plan_batches
from dtrain.base.option_fields import check, declare, given_options, option, own_fields, to_arguments
from dtrain.base.words import PRECISIONS, SCALINGS, SHORT_PRECISIONS
from dtrain.errors import ConfigurationError
from dtrain.monitor.run_directory import check_run_directory
from dtrain.strategies.registry import names

_LARGEST_SEED = 2**32 - 1


@dataclass(frozen=True, kw_only=True)
class RecipeOptions:
    """The options of one training run. An option that is None gets the recipe's default, or is derived.

    Any two of `global_batch`, `per_replica_batch` and `accumulation` determine the third.

    Args:
        strategy: a name that `dtrain.strategy` accepts.
        epochs: the number of passes over the training data, at least 1.
        global_batch: the examples of one weight update over all replicas, at least one per replica.
        per_replica_batch: the examples that one replica processes at once.
        accumulation: the number of micro-batches whose gradients make one weight update.
        learning_rate: the highest learning rate of the run, before scaling.
        scaling: how the learning rate grows with the ratio of the global batch to `base_batch`: "none",
            "linear" or "sqrt".
        base_batch: the global batch for which the learning rate is meant. Only with a scaling.
        warmup: the epochs in which the learning rate rises to its highest value; may be a fraction.
        precision: "float32", "mixed_float16" or "mixed_bfloat16".
        gradient_hook: what replicas send in place of each step's gradients; a name, also with arguments. None
            sends the gradients as they are.
        seed: the seed of the initial weights and of the order of the examples, from 0 to 4294967295.
        run_dir: the directory of the run's files; None means a new directory under `runs/`.

    Raises:
        ConfigurationError: a value is out of range or unknown, or two options contradict each other.
    """

    usual_batch: ClassVar[int] = 64
    usual_rate: ClassVar[float] = 3e-3
    usual_warmup: ClassVar[float] = 0.0

    strategy: str = option(
        "auto", f"how to distribute: {', '.join(names())}; dtrain strategies compares them", metavar="S"
    )
    epochs: int = option(10, "passes over the training data", metavar="E", least=1, noun="number of epochs")
    global_batch: int | None = option(
        None, "examples in one weight update, over all replicas", metavar="B", least=1
    )
    per_replica_batch: int | None = option(
        None,
        "examples that one replica processes at once; any two of --global-batch, this and --accumulation "
        "determine the third",
        metavar="B",
        least=1,
    )
    accumulation: int | None = option(
        None, "micro-batches per weight update; must divide the global batch", metavar="K", least=1
    )
    learning_rate: float | None = option(
        None, "the highest learning rate of the run, before scaling", metavar="R"
    )
    scaling: str = option(
        "none",
        "how the learning rate grows with the global batch: none, linear or sqrt",
        metavar="WORD",
        words=SCALINGS,
    )
    base_batch: int | None = option(
        None, "with --scaling, the global batch for which the learning rate is meant", metavar="B", least=1
    )
    warmup: float | None = option(
        None, "epochs in which the learning rate rises to its highest value; may be a fraction", metavar="E"
    )
    precision: str = option(
        "float32",
        "precision of the computation: float32, mixed_float16 or mixed_bfloat16",
        metavar="WORD",
        words=PRECISIONS,
        near=SHORT_PRECISIONS,
    )
    gradient_hook: str | None = option(
        None,
        "how replicas exchange gradients: float16, bfloat16, int8, power_sgd, top_k, local_sgd or diloco, "
        "also with arguments, as in diloco:every=20,compress=int8",
        metavar="H",
    )
    seed: int = option(1, "seed of the weights and of the data order", metavar="N")
    run_dir: str | None = option(
        None, "directory for the files (default: a new directory under runs/)", metavar="DIR"
    )

    def __post_init__(self) -> None:
        check(self)
        check_batches(self.global_batch, self.per_replica_batch, self.accumulation)
        if not 0 <= self.seed <= _LARGEST_SEED:
            raise ConfigurationError(
                f"The seed is {self.seed}.", hint=f"Set it to an integer from 0 to {_LARGEST_SEED}."
            )
        if self.learning_rate is not None and not 0 < self.learning_rate < math.inf:
            raise ConfigurationError(
                f"The learning rate is {self.learning_rate}.", hint="Set it to a number above 0."
            )
        if self.base_batch is not None and self.scaling == "none":
            raise ConfigurationError(
                f"The base batch is {self.base_batch}, but the scaling is 'none', which does not use it.",
                hint="Use --scaling linear or sqrt, or leave --base-batch out.",
            )
        if self.warmup is not None and not 0 <= self.warmup < self.epochs:
            raise ConfigurationError(
                f"The warm-up is {self.warmup:g} epochs, and the whole training {self.epochs}.",
                hint="Set it to 0 or more, and below the number of epochs.",
            )

    def batches(self, replicas: int) -> BatchSizes:
        """The batch sizes on this number of replicas.

        Raises:
            ConfigurationError: the sizes do not fit the number of replicas.
        """
        usual = self.usual_batch if self.per_replica_batch is None else None
        return plan_batches(
            replicas=replicas,
            global_batch=self.global_batch or usual,
            per_replica=self.per_replica_batch,
            accumulation=self.accumulation,
            uneven=True,
        )

    def rate(self) -> float:
        """The highest learning rate of the run, before scaling."""
        return self.usual_rate if self.learning_rate is None else self.learning_rate

    def warmup_epochs(self) -> float:
        """The length of the warm-up in epochs; a recipe's default is limited to a tenth of all epochs."""
        return min(self.usual_warmup, self.epochs / 10) if self.warmup is None else self.warmup

    def settings(self) -> dict[str, Any]:
        """These options as the run's record shows them, with defaults filled in and without `run_dir`."""
        fields = {f.name: getattr(self, f.name) for f in own_fields(type(self)) if f.name != "run_dir"}
        return {
            "strategy_asked": fields.pop("strategy"),
            **fields,
            "learning_rate": self.rate(),
            "warmup": self.warmup_epochs(),
        }

    def check_run_dir(self) -> None:
        """Check that the run directory can be used for a run; creates nothing.

        Raises:
            ConfigurationError: it cannot be used.
        """
        check_run_directory(self.run_dir, again=True)

    def check_data(self) -> None:
        """Check that the recipe's data exists and can be trained on; recipes with data files override this.

        Raises:
            DataError: the data is missing or invalid.
        """

    def to_arguments(self) -> list[str]:
        """The command-line arguments from which `parse` makes equal options."""
        return to_arguments(self)

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> Self:
        """The options in the result of a parser that declares these fields.

        Raises:
            ConfigurationError: as for the class.
        """
        return cls(**given_options(arguments, own_fields(cls)))

    @classmethod
    def parse(cls, argv: Sequence[str] | None = None) -> Self:
        """The options on a command line; None means this process's own arguments.

        Raises:
            ConfigurationError: as for the class.
            SystemExit: an argument is unknown or malformed.
        """
        parser = argparse.ArgumentParser(allow_abbrev=False)
        declare(parser, own_fields(cls))
        return cls.from_arguments(parser.parse_args(argv))
