"""`dtrain launch`: runs the user's script or module, unchanged, in every process of a job.

This module only parses the arguments; `dtrain.launch` runs the job.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtrain.base.option_fields import (
    count,
    declare,
    flag,
    given_options,
    option,
    own_fields,
    positive_integer,
    seconds,
)
from dtrain.base.paths import check_script
from dtrain.cli import worker_counts
from dtrain.cli.config_file import add_config_argument
from dtrain.cli.dashboard import dashboard
from dtrain.cli.ray_options import add_ray_arguments, ray_cluster
from dtrain.cli.report import port
from dtrain.cli.slurm_nodes import from_slurm
from dtrain.cli.worker_counts import DEFAULT_WORKERS, Workers
from dtrain.environments.gpu_shares import gpu_shares
from dtrain.errors import ConfigurationError

HELP = "run a script in several processes, on this machine or on several"


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """The options of `launch_local` that `dtrain launch` and `dtrain train` share, except the workers."""

    ps: int | None = option(
        None,
        "number of parameter servers; a job with parameter servers also has a chief (default: 0; 1 with the "
        "strategy parameter_server)",
        metavar="M",
        type=positive_integer,
    )
    max_restarts: int | None = option(
        None,
        "maximum number of restarts within any hour; with parameter servers, a restart of a single "
        "task counts too (default: 3)",
        metavar="R",
        type=count,
    )
    spares: int | None = option(
        None,
        "number of spare processes, which have imported TensorFlow and make a restart fast: a number, none, "
        "or auto, which is one for each worker (default: auto)",
        metavar="K",
        type=worker_counts.spares,
    )
    hang_timeout: float | None = option(
        None,
        "seconds without progress after which a worker counts as failed (default: auto, which is "
        "10 times the usual duration of a step, but at least 30 seconds)",
        metavar="S",
        type=worker_counts.auto_seconds,
    )
    start_timeout: float | None = option(
        None,
        "seconds to wait for a process that does not make its strategy, before all processes are restarted "
        "(default: 600)",
        metavar="S",
        type=seconds,
    )
    grace: float | None = option(
        None,
        "seconds between asking processes to end and killing them (default: 5, or 30 if they save "
        "checkpoints)",
        metavar="S",
        type=seconds,
    )
    mpi: bool = option(
        False,
        "start the workers with MPI's own starter, such as mpirun, so that they can communicate "
        "over MPI (pip install 'dtrain[mpi]')",
    )
    mpi_starter: str | None = option(
        None,
        "the MPI starter for --mpi: a path, srun, or a command with options (default: the mpirun beside this "
        "Python, or the one in PATH)",
        metavar="PATH",
    )
    log_dir: str | None = option(
        None,
        "folder for log files: one for each task and attempt, with a copy of the task's output",
        metavar="DIR",
    )


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """The options of a job that is started once on each of several machines."""

    nnodes: tuple[int, int] | None = option(
        None,
        "number of machines (nodes). With MIN:MAX, the job uses at most MAX nodes, and continues with at "
        "least MIN; further nodes wait to replace a lost one",
        metavar="N|MIN:MAX",
        type=worker_counts.workers,
    )
    node_rank: int | None = option(
        None,
        "the number of this machine, from 0; node 0 coordinates the job and shows the output of all nodes",
        type=count,
    )
    rendezvous: str | None = option(
        None, "the name or address of node 0 and a free port on it; the same on all nodes",
        metavar="HOST:PORT",
    )  # fmt: skip
    nproc_per_node: int | None = option(
        None,
        "number of worker processes on each node, or auto: one for each GPU, 1 without GPUs (default: auto)",
        metavar="N",
        type=lambda text: None if text == "auto" else positive_integer(text),
    )
    secret_file: str | None = option(
        None,
        "file of mode 600 with the job's secret, which is the same on all nodes (default: the file that "
        "DTRAIN_SECRET_FILE names)",
        metavar="FILE",
    )
    join_timeout: float | None = option(
        None, "seconds to wait for the other nodes (default: 55)", metavar="S", type=seconds
    )
    interface: str | None = option(
        None,
        "the network interface over which other machines reach the tasks of this machine, or with --hosts "
        "the tasks of each machine (default: the interface that reaches the coordinator)",
        metavar="NAME",
    )


@dataclass(frozen=True, kw_only=True)
class HostOptions:
    """The options of a job that is started from one machine and reaches the others by SSH."""

    hosts: str | None = option(
        None, "the machines, each with its number of workers (default: 1)", metavar="HOST:N,..."
    )
    hostfile: str | None = option(
        None, "file that lists the machines, one per line: HOST slots=N", metavar="FILE"
    )  # fmt: skip


def add_job_arguments(parser: argparse.ArgumentParser, *, workers_default: str) -> None:
    """Declare `--config`, `--workers`, the fields of `JobOptions`, and what is shown or logged."""
    add_config_argument(parser)
    parser.add_argument(
        "-n",
        "--workers",
        type=worker_counts.workers,
        metavar="N|MIN:MAX",
        help=f"number of worker processes on this machine (default: {workers_default}). With MIN:MAX, the "
        "job starts MAX workers, and continues with at least MIN",
    )
    declare(parser, own_fields(JobOptions))
    parser.add_argument(
        "--log-device-placement",
        action="store_true",
        help="log the device of each TensorFlow operation, as soon as the strategy has been made",
    )
    parser.add_argument(
        "--traceback",
        action="store_true",
        help="show all frames of a program that fails (default: those of the user's own code)",
    )


def note_output(args: argparse.Namespace) -> None:
    """Set the variables of `--log-device-placement` and `--traceback` for this process and its tasks."""
    for asked, variable in (
        (args.log_device_placement, "DTRAIN_LOG_DEVICE_PLACEMENT"),
        (args.traceback, "DTRAIN_TRACEBACK"),
    ):
        if asked:
            os.environ[variable] = "1"


def job_options(args: argparse.Namespace) -> dict[str, Any]:
    """The given fields of `JobOptions`, by name; a field that was given as `auto` is left out."""
    given = given_options(args, own_fields(JobOptions))
    return {name: value for name, value in given.items() if value is not None}


def launch(command: list[str], processes: Workers, **options: Any) -> int:
    """Run a command as a job of `processes` workers; returns the exit status of `launch_local`.

    Args:
        command: the argument vector.
        processes: the number of workers.
        options: further options of `launch_local`; `mpi` stands for its launcher.
    """
    from dtrain.launch import launch_local

    if options.pop("mpi", False):
        options["launcher"] = "mpi"
    least = processes.fewest if processes.fewest < processes.most else None
    status = launch_local(command, workers=processes.most, min_workers=least, **options)
    if status == 128 + signal.SIGPIPE:
        # If nobody reads standard output, Python's flush at its exit would fail with status 120.
        with contextlib.suppress(OSError, ValueError), Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
    return status


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `dtrain launch`."""
    parser.usage = (
        "dtrain launch [-n N|MIN:MAX] [options] script.py [args ...]\n"
        "       dtrain launch [-n N|MIN:MAX] [options] -m module [args ...]"
    )
    add_job_arguments(
        parser,
        workers_default=f"one for each GPU, which no other worker sees; {DEFAULT_WORKERS} without GPUs",
    )
    parser.add_argument(
        "--quorum",
        type=positive_integer,
        metavar="K",
        help="with DiLoCo or local SGD: a round goes on with K of the N workers; one that is lost is started "
        "again by itself, and joins the others (default: all are needed)",
    )
    parser.add_argument(
        "--devices-per-worker",
        type=positive_integer,
        metavar="K",
        help="number of logical devices in each worker (default: the devices that TensorFlow finds)",
    )
    parser.add_argument(
        "--gpus-per-worker",
        type=worker_counts.gpus_per_worker,
        metavar="K|all",
        help="number of GPUs that each worker sees, or all: one worker on each machine sees all of its GPUs "
        "(default: 1)",
    )
    nodes = parser.add_argument_group(
        "several machines",
        "Run the same command on each machine, with the --node-rank of that machine. Only node 0 reads the "
        "job's other options.",
    )
    declare(nodes, own_fields(NodeOptions))
    hosts = parser.add_argument_group(
        "several machines, from one",
        "Run the command on one machine, which starts the workers of all machines over SSH.",
    )
    declare(hosts, own_fields(HostOptions))
    hosts.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME",
        help="name of an environment variable to copy from this machine to all workers; can be given several "
        "times",
    )
    add_ray_arguments(parser)
    parser.add_argument(
        "--dashboard",
        type=port,
        metavar="PORT",
        help="serve a page on this machine, at this port (0: any that is free), that shows what each task "
        "does and the newest run below runs/ while the job runs; its address is printed",
    )
    parser.add_argument(
        "-m", dest="is_module", action="store_true", help="the script is the name of a module"
    )
    parser.add_argument("script", help="the Python script to run, or with -m the module")
    rest = parser.add_argument("args", nargs=argparse.REMAINDER, help="arguments of the script")
    rest.required = False  # else the error for a missing script also names the script's arguments


def run(args: argparse.Namespace) -> int:
    """Launch the job and return its exit status; see `launch_local`.

    Raises:
        ConfigurationError: the script does not exist, or two arguments exclude each other.
        PortInUseError: the page of `--dashboard` cannot be served at that port.
    """
    note_output(args)
    if not args.is_module:
        check_script(args.script)
    options = job_options(args)
    if args.quorum is not None:
        options["quorum"] = args.quorum
    if args.dashboard is None:
        return _run_job(args, options)
    with dashboard(args.dashboard) as states:
        return _run_job(args, {**options, "states": states})


def _run_job(args: argparse.Namespace, options: dict[str, Any]) -> int:
    if "ps" in options and args.gpus_per_worker is not None:
        raise ConfigurationError(
            "--gpus-per-worker is for jobs without parameter servers, but --ps was given.",
            hint="Leave it out: each task of such a job sees all GPUs of its machine.",
        )
    command = [sys.executable, *(["-m"] if args.is_module else []), args.script, *args.args]
    cluster = ray_cluster(
        args, given_options(args, own_fields(HostOptions)) | given_options(args, own_fields(NodeOptions))
    )
    if cluster is not None:
        options |= {"launcher": "ray", "ray": cluster, "devices_per_worker": args.devices_per_worker}
        return launch(command, args.workers or Workers(DEFAULT_WORKERS, DEFAULT_WORKERS), **options)
    if given_options(args, own_fields(HostOptions)):
        return _launch_on_hosts(command, args, options)
    if args.env:
        raise ConfigurationError(
            "--env is for workers on other machines.", hint="Leave it out, or give --hosts HOST:N,... too."
        )
    for name, value in from_slurm(args).items():
        setattr(args, name, Workers(value, value) if name == "nnodes" else value)
    if given_options(args, own_fields(NodeOptions)):
        return _launch_node(command, args, options)
    processes, gpus = worker_counts.local_workers(args.workers, args.gpus_per_worker, servers="ps" in options)
    return launch(
        command,
        processes,
        devices_per_worker=args.devices_per_worker,
        gpus=gpus,
        **options,
    )


def _launch_node(command: list[str], args: argparse.Namespace, options: dict[str, Any]) -> int:
    """Run this node's part of a job on several machines; returns the exit status of the whole job.

    Raises:
        ConfigurationError: an option of several machines is missing, or excludes another one.
    """
    from dtrain.environments.gpus import visible_gpus
    from dtrain.launch.job.spec import Nodes

    written = given_options(args, own_fields(NodeOptions))
    given = {name: value for name, value in written.items() if value is not None}
    for name in ("nnodes", "node_rank", "rendezvous"):
        if name not in given:
            raise ConfigurationError(
                f"{' and '.join(map(flag, written))} {'is' if len(written) == 1 else 'are'} for a job on "
                f"several machines, but {flag(name)} is missing.",
                hint="Give --nnodes N --node-rank R --rendezvous HOST:PORT on each machine.",
            )
    if args.workers or options.get("mpi"):
        raise ConfigurationError(
            f"{'--workers' if args.workers else '--mpi'} is for one machine, but --nnodes was given.",
            hint="Leave it out; --nproc-per-node sets the number of workers on each machine.",
        )
    gpus = [] if "ps" in options else visible_gpus()
    shares = gpu_shares(gpus, given.get("nproc_per_node"), args.gpus_per_worker, where="this node")
    count_per_node = given.get("nproc_per_node", len(shares) or 1)
    nodes = Nodes(
        rendezvous=given["rendezvous"],
        rank=given["node_rank"],
        fewest=given["nnodes"].fewest,
        most=given["nnodes"].most,
        per_node=count_per_node,
        secret_file=Path(given["secret_file"]).expanduser() if "secret_file" in given else None,
        join_timeout=given.get("join_timeout", Nodes.join_timeout),
        gpus=shares,
        interface=given.get("interface"),
    )
    if nodes.rank:
        if "states" in options:
            raise ConfigurationError(
                f"--dashboard is for node 0, which knows all tasks, but --node-rank is {nodes.rank}.",
                hint="Leave it out here.",
            )
        from dtrain.launch.hosts.nodes_launcher import join_nodes

        return join_nodes(nodes, command)
    return launch(
        command,
        Workers(nodes.most * nodes.per_node, nodes.fewest * nodes.per_node),
        devices_per_worker=args.devices_per_worker,
        launcher="nodes",
        nodes=nodes,
        **options,
    )


def _launch_on_hosts(command: list[str], args: argparse.Namespace, options: dict[str, Any]) -> int:
    """Run a job on several machines from this one; returns its exit status.

    Raises:
        ConfigurationError: the hosts are malformed, or an option excludes another one.
    """
    from dtrain.launch.hosts.host_list import parse_hosts, read_hostfile
    from dtrain.launch.job.spec import SSHHosts

    given = given_options(args, own_fields(HostOptions)) | given_options(args, own_fields(NodeOptions))
    name = "hosts" if "hosts" in given else "hostfile"
    shared = ("nnodes", "nproc_per_node", "join_timeout", "interface")
    others = [key for key in given if key not in (name, *shared)]
    others += ["workers"] if args.workers else []
    if others:
        raise ConfigurationError(
            f"{flag(name)} and {', '.join(map(flag, others))} exclude each other.",
            hint=f"With {flag(name)}, this machine starts the workers of all machines. Leave "
            f"{' and '.join(map(flag, others))} out.",
        )
    per_node = given.get("nproc_per_node") or 1
    slots = (
        parse_hosts(args.hosts, per_node) if name == "hosts" else read_hostfile(Path(args.hostfile), per_node)
    )
    hosts = SSHHosts(
        slots=slots,
        env=args.env,
        join_timeout=given.get("join_timeout", SSHHosts.join_timeout),
        most=given["nnodes"].most if "nnodes" in given else None,
        fewest=given["nnodes"].fewest if "nnodes" in given else None,
        gpus_per_worker=args.gpus_per_worker,
        interface=given.get("interface"),
    )
    return launch(
        command,
        Workers(hosts.workers, hosts.fewest_workers),
        devices_per_worker=args.devices_per_worker,
        launcher="ssh",
        hosts=hosts,
        **options,
    )
