"""`dtrain plan`: predicts what a model would take on a cluster, under each strategy.

This module parses the arguments, and prints; `dtrain.planning` predicts. Nothing is measured, and nothing of
TensorFlow is imported.
"""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dtrain.base.option_fields import count, positive_integer
from dtrain.errors import ConfigurationError

if TYPE_CHECKING:
    from dtrain.planning.calibration import TransportCosts
    from dtrain.planning.cluster import Cluster
    from dtrain.planning.model_profile import ModelProfile
    from dtrain.planning.predictions import PlanSettings

HELP = "predict the speed, memory and cost of training a model on a cluster, under each strategy"

_MOST_WORKERS, _MOST_MICRO_BATCHES = 100_000, 1000
_LEAST, _MOST = 1e-6, 1e18  # of a figure, as in files
_PLOTTED = 10_000  # workers at the right end of the plot


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `dtrain plan`."""
    parser.add_argument(
        "--model",
        required=True,
        metavar="NAME|FILE",
        help="name of a known model, or a JSON file with a profile",
    )
    parser.add_argument(
        "--cluster",
        required=True,
        metavar="NAME|FILE",
        help="name of known machines, or a JSON file that describes machines",
    )
    parser.add_argument(
        "--workers",
        required=True,
        type=positive_integer,
        metavar="N",
        help="number of workers, each with one device",
    )
    parser.add_argument(
        "--per-replica-batch",
        type=positive_integer,
        action="append",
        metavar="B",
        help="examples in a worker's micro-batch; give the option several times to compare (default: the "
        "largest batch that was measured)",
    )
    parser.add_argument(
        "--accumulation",
        type=positive_integer,
        action="append",
        metavar="K",
        help="micro-batches per update; give the option several times to compare (default: 1)",
    )
    parser.add_argument(
        "--ps",
        type=positive_integer,
        metavar="N",
        help="number of parameter servers (default: one for each host)",
    )
    parser.add_argument(
        "--every",
        type=positive_integer,
        default=50,
        metavar="N",
        help="steps in a round of DiLoCo (default: 50)",
    )
    parser.add_argument(
        "--calibration",
        metavar="FILE",
        help="JSON file with measured costs of transports, which replace the defaults",
    )
    parser.add_argument(
        "--host-hours-to-failure", type=_figure, metavar="HOURS", help="mean hours until a host fails"
    )
    parser.add_argument(
        "--checkpoint-seconds",
        type=_figure,
        metavar="S",
        help="seconds for which saving a checkpoint stops training",
    )
    parser.add_argument(
        "--recovery-seconds",
        type=_figure,
        metavar="S",
        help="seconds from a failure until training continues",
    )
    parser.add_argument("--price", type=_figure, metavar="P", help="price of one host per hour")
    parser.add_argument(
        "--seed", type=count, default=0, metavar="N", help="seed of the random delays (default: 0)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.add_argument(
        "--plot", metavar="FILE.png", help=f"draw the efficiency of each strategy up to {_PLOTTED:,} workers"
    )


def run(args: argparse.Namespace) -> int:
    """Print the predictions, and draw the plot if one is asked for; return 0.

    Raises:
        ConfigurationError: a file or an argument cannot be used, or the plot cannot be written.
        UnsupportedVersionError: a plot is asked for, and matplotlib is not installed.
    """
    from dtrain.planning.calibration import transport_costs
    from dtrain.planning.cluster import cluster_of
    from dtrain.planning.model_profile import profile_of
    from dtrain.planning.plan_output import as_data, as_text
    from dtrain.planning.predictions import PlanSettings, predictions

    if args.workers > _MOST_WORKERS:
        raise ConfigurationError(
            f"--workers is {args.workers:,}, but a plan has at most {_MOST_WORKERS:,}.",
            hint="Plan fewer workers.",
        )
    if max(args.accumulation or [1]) > _MOST_MICRO_BATCHES:
        raise ConfigurationError(
            f"--accumulation is {max(args.accumulation):,}, but a plan has at most {_MOST_MICRO_BATCHES:,}.",
            hint="Plan fewer micro-batches: with more of them, an update hardly communicates.",
        )
    profile, cluster = profile_of(args.model), _given(cluster_of(args.cluster), args)
    costs = transport_costs(None if args.calibration is None else Path(args.calibration))
    measured = [rate.batch for rate in profile.rates if rate.device == cluster.device]
    settings = PlanSettings(
        workers=args.workers,
        batches=args.per_replica_batch or [max(measured, default=1)],
        accumulations=args.accumulation or [1],
        servers=args.ps,
        every=args.every,
        checkpoint_seconds=args.checkpoint_seconds,
        seed=args.seed,
    )
    made = predictions(profile, cluster, settings, costs)
    if args.plot is not None:
        _plot(Path(args.plot), profile, cluster, settings, costs)
    if args.json:
        print(json.dumps(as_data(profile, cluster, settings, costs, made), indent=2, allow_nan=False))
        return 0
    print(as_text(profile, cluster, made, width=shutil.get_terminal_size((120, 24)).columns))
    return 0


def _figure(text: str) -> float:
    """Parse a figure of the plan; the `type` of an argument.

    Raises:
        argparse.ArgumentTypeError: the text is no number, or one that is too small or too large.
    """
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not _LEAST <= number <= _MOST:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number from {_LEAST:g} to {_MOST:g}")
    return number


def _given(cluster: Cluster, args: argparse.Namespace) -> Cluster:
    """The cluster, with the figures that are on the command line."""
    given = {
        "host_hours_to_failure": args.host_hours_to_failure,
        "recovery_seconds": args.recovery_seconds,
        "price_per_host_hour": args.price,
    }
    return replace(cluster, **{name: value for name, value in given.items() if value is not None})


def _plot(
    path: Path,
    profile: ModelProfile,
    cluster: Cluster,
    settings: PlanSettings,
    costs: dict[str, TransportCosts],
) -> None:
    """Draw the efficiency of each strategy, over the first transport that fits."""
    from dtrain.planning.plan_output import plot
    from dtrain.planning.predictions import efficiencies, sensible, usable, worker_counts

    most = _PLOTTED if cluster.network is not None else cluster.devices_per_host
    counts = worker_counts(most)
    curves = {
        strategy: efficiencies(
            profile, cluster, settings, usable(cluster, costs, strategy)[0], strategy, counts
        )
        for strategy in sensible(cluster, most)
    }
    batch = settings.batches[0]
    try:
        plot(curves, counts, path, title=f"{profile.name} on {cluster.name}, batch {batch} per worker")
    except OSError as error:
        raise ConfigurationError(
            f"The plot {path} cannot be written: {error.strerror or error}.", hint="Choose another file."
        ) from error
