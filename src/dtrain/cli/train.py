"""`dtrain train`: run a built-in recipe, in this process or in as many workers as are asked for.

It only reads the arguments and decides where the recipe runs; the recipe itself trains.
"""

from __future__ import annotations

import argparse
import os
import sys

from dtrain import cluster, job
from dtrain.cli.launch import positive_integer
from dtrain.errors import ConfigurationError
from dtrain.recipes import RECIPES, RecipeOptions, check_recipe, load_recipe
from dtrain.strategies.registry import resolve_name

HELP = "train a built-in recipe on real data"

_MULTI_WORKER = "multi_worker"
_ONE_DEVICE = ("default", "one_device")
_SEVERAL_DEVICES = ("mirrored", "central_storage")
_DEFAULT_WORKERS = 2
_DEFAULT_DEVICES = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `dtrain train`."""
    recipes = "; ".join(f"{name}: {line}" for name, line in RECIPES.items())
    parser.add_argument("recipe", help=f"what to train ({recipes})")
    RecipeOptions.add_arguments(parser)
    parser.add_argument(
        "--workers",
        type=positive_integer,
        metavar="N",
        help=f"worker processes on this machine (default: {_DEFAULT_WORKERS} with multi_worker, else 1)",
    )
    parser.add_argument(
        "--devices",
        type=positive_integer,
        metavar="K",
        help=f"logical CPUs in a worker (default: {_DEFAULT_DEVICES} with mirrored and central_storage)",
    )


def run(args: argparse.Namespace) -> int:
    """Train, and return the exit status of the job.

    Raises:
        ConfigurationError: an argument cannot be used; nothing has been started or written then.
    """
    # TensorFlow's notes on how it starts would bury the progress; its warnings and errors stay.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    check_recipe(args.recipe)
    options = RecipeOptions.from_arguments(args)
    strategy = resolve_name(options.strategy)
    topology = cluster.current()
    if topology is None:
        options.check_run_dir()
        workers = _workers(strategy, args.workers)
        if workers is not None:
            return _launch(args.recipe, options, workers, args.devices)
    elif args.workers not in (None, topology.world_size):
        raise ConfigurationError(
            f"--workers is {args.workers}, but TF_CONFIG describes a job of {topology.world_size}.",
            hint="Leave --workers out where something else has started the processes, or unset TF_CONFIG.",
        )
    _set_devices(strategy, args.devices)
    return _train_here(args.recipe, options)


def _workers(strategy: str, asked: int | None) -> int | None:
    """How many processes to start; None to train in this one."""
    if strategy == _MULTI_WORKER:
        return asked or _DEFAULT_WORKERS
    if asked is None or asked == 1:
        return None
    if strategy == "auto":
        return asked
    raise ConfigurationError(
        f"--workers is {asked}, but the strategy {strategy!r} trains in one process.",
        hint=f"Use --strategy {_MULTI_WORKER} for several processes, or --devices for several devices.",
    )


def _set_devices(strategy: str, asked: int | None) -> None:
    """Say to the strategy, which is made later, how many logical devices to make of the CPU."""
    if asked is not None and asked > 1 and strategy in _ONE_DEVICE:
        raise ConfigurationError(
            f"--devices is {asked}, but the strategy {strategy!r} trains on one device.",
            hint=f"Use --strategy {' or '.join(_SEVERAL_DEVICES)}.",
        )
    if asked is None and cluster.settings.devices_per_worker() is None and strategy in _SEVERAL_DEVICES:
        asked = _DEFAULT_DEVICES
    if asked is not None:
        os.environ["DTRAIN_DEVICES_PER_WORKER"] = str(asked)


def _launch(recipe: str, options: RecipeOptions, workers: int, devices: int | None) -> int:
    from dtrain.launch import launch_local

    command = [sys.executable, "-m", "dtrain", "train", recipe, *options.to_arguments()]
    return launch_local(command, workers=workers, devices_per_worker=devices)


def _train_here(recipe: str, options: RecipeOptions) -> int:
    summary = load_recipe(recipe).train(options)
    if job.is_chief():
        print(summary)
    return 0
