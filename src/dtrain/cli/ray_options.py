"""The options of a job on a Ray cluster, for `dtrain launch`, and the job that they describe.

Nothing of Ray is imported here; `dtrain.launch.hosts.ray_launcher` uses it.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dtrain.base.option_fields import declare, flag, given_options, option, own_fields, positive_integer
from dtrain.errors import ConfigurationError

if TYPE_CHECKING:
    from dtrain.launch.job.ray_cluster import RayCluster


def address(text: str) -> str:
    """Parse the address of a Ray cluster; the `type` of an argument of `argparse`.

    Raises:
        argparse.ArgumentTypeError: the text does not have the form of an address.
    """
    from dtrain.launch.job.ray_cluster import is_address

    if not is_address(text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not an address such as HOST:PORT, ray://HOST:PORT or auto"
        )
    return text


def _gpus(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of GPUs")
    return number


@dataclass(frozen=True, kw_only=True)
class RayOptions:
    """The options of a job on Ray besides `--ray` itself."""

    ray_cpus: int | None = option(
        None, "number of CPUs that Ray gives each process, and of threads that the process uses (default: 1)",
        metavar="N", type=positive_integer,
    )  # fmt: skip
    ray_gpus: float | None = option(
        None, "number of GPUs that Ray gives each worker; may be a fraction (default: 0)", metavar="N",
        type=_gpus,
    )  # fmt: skip
    ray_placement: str | None = option(
        None,
        "how Ray chooses the machines: pack, spread, strict_pack or strict_spread (default: pack)",
        metavar="WORD",
    )


def add_ray_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `--ray` and the fields of `RayOptions`."""
    group = parser.add_argument_group(
        "a Ray cluster", "Run the command on a node of the cluster; Ray places the processes on all nodes."
    )
    group.add_argument(
        "--ray",
        nargs="?",
        const="auto",
        default=argparse.SUPPRESS,
        type=address,
        metavar="ADDRESS",
        help="let Ray place the processes (pip install 'dtrain[ray]'). ADDRESS is HOST:PORT of the cluster's "
        "head, or auto: the value of RAY_ADDRESS, or without it the cluster of this machine (default: auto)",
    )
    declare(group, own_fields(RayOptions))


def ray_cluster(args: argparse.Namespace, elsewhere: Mapping[str, Any]) -> RayCluster | None:
    """The cluster that the arguments describe; None if the job is not for Ray.

    Args:
        args: the parsed arguments.
        elsewhere: the given options of jobs on several machines, by name; of these, only `join_timeout` is
            for Ray too.

    Raises:
        ConfigurationError: an option needs `--ray`, or excludes it; or a value cannot be used.
    """
    from dtrain.launch.job.ray_cluster import RayCluster

    given = given_options(args, own_fields(RayOptions))
    if not hasattr(args, "ray"):
        for name in given:
            raise ConfigurationError(
                f"{flag(name)} is only for a job on Ray.", hint="Leave it out, or give --ray [ADDRESS] too."
            )
        return None
    others = [name for name in elsewhere if name != "join_timeout"]
    others += ["mpi"] if hasattr(args, "mpi") else []
    if others:
        raise ConfigurationError(
            f"--ray and {', '.join(map(flag, others))} exclude each other.",
            hint="With --ray, Ray chooses the machines, and --workers sets the number of workers.",
        )
    options: dict[str, Any] = {name.removeprefix("ray_"): value for name, value in given.items()}
    options |= {name: value for name, value in elsewhere.items() if value is not None}
    return RayCluster(address=args.ray, env=args.env, **options)
