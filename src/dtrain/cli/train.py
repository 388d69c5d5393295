"""`dtrain train`: runs a built-in recipe, in this process or in a job of several processes.

This module parses the arguments and decides where the recipe runs; the recipe itself trains.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import Field
from typing import Any

from dtrain import environments
from dtrain.base.option_fields import declare, flag, help_of, own_fields, positive_integer
from dtrain.base.words import counted
from dtrain.cli.launch import add_job_arguments, job_options, launch, note_output
from dtrain.cli.worker_counts import Workers
from dtrain.environments import settings
from dtrain.environments.topology import Topology
from dtrain.errors import ConfigurationError
from dtrain.process_group import ranks
from dtrain.recipes import RECIPES, RecipeOptions, check_recipe, load_recipe
from dtrain.recipes.catalogue import options_of_single_recipes
from dtrain.strategies.registry import AUTO, resolve_name, spanning
from dtrain.upstream import noise

HELP = "train a built-in recipe"

_SEVERAL_PROCESSES = spanning("workers", "servers")
_WORKERS = " or ".join(spanning("workers"))
_SERVERS = spanning("servers")
_ONE_DEVICE = spanning("device")
_SEVERAL_DEVICES = spanning("devices")
_DEFAULT_WORKERS = 2
_DEFAULT_PS = 1
_DEFAULT_DEVICES = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `dtrain train`, including the options of every recipe."""
    recipes = "; ".join(f"{name}: {recipe.line}" for name, recipe in RECIPES.items())
    declared: dict[str, argparse.Action] = {}
    parser.add_argument("recipe", action=_ChooseRecipe, const=declared, help=f"what to train ({recipes})")
    group = parser.add_argument_group("how to train")
    declared |= declare(group, own_fields(RecipeOptions))
    add_job_arguments(
        parser,
        workers_default=f"{_DEFAULT_WORKERS} with {' and '.join(_SEVERAL_PROCESSES)}, else 1",
    )
    parser.add_argument(
        "--devices",
        type=positive_integer,
        metavar="K",
        help=f"number of logical CPUs in each worker (default: {_DEFAULT_DEVICES} with "
        f"{' and '.join(_SEVERAL_DEVICES)})",
    )
    group = parser.add_argument_group("options of some recipes; see dtrain train RECIPE --help")
    for name, by_recipe in options_of_single_recipes().items():
        declared |= declare(group, [next(iter(by_recipe.values()))])
        declared[name].help = f"of {', '.join(map(_with_words, by_recipe, by_recipe.values()))}"


def _with_words(recipe: str, field: Field[Any]) -> str:
    """A recipe's name and, if its option takes only certain words, those words."""
    words = field.metadata["words"]
    return f"{recipe} ({' or '.join(words)})" if words else recipe


class _ChooseRecipe(argparse.Action):
    """Checks the recipe's name, and restricts a later `--help` to that recipe's options.

    `const` holds the actions of all recipes' options, by name.
    """

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, *_: object
    ) -> None:
        namespace.recipe = check_recipe(values)
        recipe = RECIPES[namespace.recipe]
        parser.description = f"{namespace.recipe}: {recipe.line}"
        own = {field.name: help_of(field) for field in own_fields(recipe.options)}
        for name, action in self.const.items():
            action.help = own.get(name, argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Train the recipe and return the exit status of the job.

    Raises:
        ConfigurationError: an argument cannot be used; nothing was started or written.
        DataError: the recipe's data is missing or invalid.
    """
    # Hide TensorFlow's info messages, which would bury the progress; keep its warnings and errors.
    os.environ.setdefault(noise.LEVEL, "1")
    note_output(args)
    options = _options(args.recipe, args)
    strategy = resolve_name(options.strategy)
    topology = environments.current()
    _check_servers(strategy, args)
    if topology is None:
        options.check_run_dir()
        processes = _workers(strategy, args.workers)
        if processes is not None:
            options.check_data()  # here, so that an error is shown once and not by every process
            return _launch(args.recipe, options, processes, strategy, args)
        _check_alone(strategy, args)
    else:
        _check_cluster(topology, args)
    _set_devices(strategy, args.devices)
    return _train_here(args.recipe, options)


def _options(recipe: str, args: argparse.Namespace) -> RecipeOptions:
    """The recipe's options.

    Raises:
        ConfigurationError: an option was given that only other recipes have, or a value is invalid.
    """
    for name, by_recipe in options_of_single_recipes().items():
        if recipe not in by_recipe and hasattr(args, name):
            raise ConfigurationError(
                f"{flag(name)} is {getattr(args, name)}, but the recipe {recipe!r} has no such option.",
                hint=f"{flag(name)} is an option of {', '.join(by_recipe)}. See dtrain train {recipe} "
                "--help.",
            )
    return RECIPES[recipe].options.from_arguments(args)


def _check_servers(strategy: str, args: argparse.Namespace) -> None:
    """Check that `--ps` is given only with parameter servers, and `--devices` only without them."""
    if strategy in _SERVERS:
        if args.devices is not None:
            raise ConfigurationError(
                f"--devices is {args.devices}, but a worker of parameter servers has one device.",
                hint="Use --workers to train on more devices.",
            )
        return
    if hasattr(args, "ps"):
        raise ConfigurationError(
            f"--ps is {args.ps}, but the strategy {strategy!r} has no parameter servers.",
            hint=f"Use --strategy {' or '.join(_SERVERS)}, or leave --ps out.",
        )


def _check_alone(strategy: str, args: argparse.Namespace) -> None:
    """Check that no option of a job is given if the recipe trains in this process."""
    for option, value in _given_job_options(args):
        raise ConfigurationError(
            f"{option} is {value}, but the recipe trains in one process, without a launcher.",
            hint=f"Use --strategy {_WORKERS}, or leave {option} out. The strategy is {strategy!r}.",
        )


def _given_job_options(args: argparse.Namespace) -> list[tuple[str, Any]]:
    """The given fields of `JobOptions` except `--ps`, as pairs of flag and value."""
    given = job_options(args)
    given.pop("ps", None)
    return [(flag(name), "set" if value is True else value) for name, value in given.items()]


def _check_cluster(topology: Topology, args: argparse.Namespace) -> None:
    """Check that the arguments fit the job that this process is already part of."""
    coordinated = topology.is_coordinated
    there = len(topology.jobs.get("worker", ())) if coordinated else topology.world_size
    origin, leave = environments.origin(), environments.how_to_disable()
    unset = f", or {leave}" if leave else ""
    if args.workers is not None and not args.workers.fewest <= there <= args.workers.most:
        raise ConfigurationError(
            f"--workers is {args.workers}, but {origin} describes a job of {counted(there, 'worker')}.",
            hint=f"Leave --workers out if another program starts the processes{unset}.",
        )
    servers = len(topology.jobs.get("ps", ()))
    if getattr(args, "ps", servers) != servers:
        raise ConfigurationError(
            f"--ps is {args.ps}, but {origin} describes a job with {counted(servers, 'parameter server')}.",
            hint=f"Leave --ps out if another program starts the processes{unset}.",
        )
    for option, value in _given_job_options(args):
        raise ConfigurationError(
            f"{option} is {value}, but another program has started the processes.",
            hint=f"Leave {option} out: the program that started the processes decides on restarts{unset}.",
        )


def _workers(strategy: str, asked: Workers | None) -> Workers | None:
    """The number of workers to start, or None to train in this process."""
    if strategy in _SEVERAL_PROCESSES:
        return asked or Workers(_DEFAULT_WORKERS, _DEFAULT_WORKERS)
    if asked is None or asked.most == 1:
        return None
    if strategy == AUTO:
        return asked
    raise ConfigurationError(
        f"--workers is {asked}, but the strategy {strategy!r} trains in one process.",
        hint=f"Use --strategy {_WORKERS} for several processes, or --devices for several devices.",
    )


def _set_devices(strategy: str, asked: int | None) -> None:
    """Set the number of logical devices for the strategy, which reads it from the environment later."""
    if asked is not None and asked > 1 and strategy in _ONE_DEVICE:
        raise ConfigurationError(
            f"--devices is {asked}, but the strategy {strategy!r} trains on one device.",
            hint=f"Use --strategy {' or '.join(_SEVERAL_DEVICES)}.",
        )
    if asked is None and settings.devices_per_worker() is None and strategy in _SEVERAL_DEVICES:
        asked = _DEFAULT_DEVICES
    if asked is not None:
        os.environ["DTRAIN_DEVICES_PER_WORKER"] = str(asked)


def _launch(
    recipe: str, options: RecipeOptions, processes: Workers, strategy: str, args: argparse.Namespace
) -> int:
    servers = {"ps": _DEFAULT_PS} if strategy in _SERVERS else {}
    command = [sys.executable, "-m", "dtrain", "train", recipe, *options.to_arguments()]
    return launch(command, processes, devices_per_worker=args.devices, **{**servers, **job_options(args)})


def _train_here(recipe: str, options: RecipeOptions) -> int:
    with noise.held_back():
        program = load_recipe(recipe)
    summary = program.train(options)
    if ranks.is_chief():
        print(summary)
    return 0
