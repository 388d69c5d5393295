"""Submits a job to Slurm: it writes a batch script and gives it to `sbatch`.

The script starts a launcher as each task of a job step; `dtrain.environments.slurm_step` recognises them
there.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dtrain.base.option_fields import option, positive_integer
from dtrain.base.paths import check_script
from dtrain.base.plain_text import cleaned
from dtrain.environments.slurm_step import outside_job
from dtrain.errors import ConfigurationError, RunAgain, SchedulerError
from dtrain.submit.target import JobRequest

HELP = "submit to Slurm, by sbatch"

_PATIENCE = 300.0  # seconds for sbatch to answer; it tries for a while to reach the controller
_NOTICE = 120  # seconds before the time limit
_AFTER_SAVING = 20  # seconds of the notice that are left for the launchers' end and the requeueing
_LEAST_GRACE = 10
_WARNS = "USR1"  # the notice's signal; USR2 would print the stacks of all threads
_PLAIN = re.compile(r"[-\w=.,:/@%+*~^\[\]]+")  # needs no quotes
_NODE_COUNT = re.compile(r"[0-9]+[km]?([-:,][0-9]+[km]?)*")  # lists such as 1,4-8:2 too
_QUOTED = 2000  # characters of what sbatch says

_HOSTS_HAVE = "sinfo -o '%P %D %c %m %G' lists what the hosts have; ask for less."
# Hints by words in sbatch's message; the first match counts.
_HINTS = (
    ("partition", "sinfo --summarize lists the partitions; name one by --partition."),
    ("account", "sacctmgr show associations user=$USER lists your accounts; name one by --account."),
    ("qos", "sacctmgr show qos lists them; name one by --qos."),
    ("time limit", "sinfo -o '%P %l' lists the time limits of the partitions; give a shorter --time."),
    ("memory", "sinfo -o '%P %m' lists the memory of the hosts; give a smaller --mem."),
    ("gres", "sinfo -o '%P %G' lists the GPUs of the hosts; give a smaller --gpus-per-task."),
    ("node configuration", _HOSTS_HAVE),
    ("processors", _HOSTS_HAVE),
    ("node count", "sinfo --summarize lists the number of hosts; give fewer --nodes."),
    ("contact", "Is the controller up (scontrol ping), and is this a host of the cluster?"),
    ("array", "Write it as Slurm does, such as --array 0-3 or --array 1,5%2."),
    ("permission", "Ask the cluster's administrators for the right to submit jobs."),
)


def _node_count(text: str) -> str:
    """Parse a number of hosts as sbatch takes it; the `type` of an argument of `argparse`."""
    if not _NODE_COUNT.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number of hosts such as 4, or MIN-MAX")
    return text


@dataclass(frozen=True, kw_only=True)
class SlurmOptions:
    """The options of `dtrain submit --slurm`."""

    nodes: str | None = option(None, "number of hosts, or MIN-MAX", metavar="N", type=_node_count)
    tasks_per_node: int | None = option(
        None, "number of tasks on each host", metavar="N", type=positive_integer
    )
    cpus_per_task: int | None = option(None, "cores of each task", metavar="N", type=positive_integer)
    gpus_per_task: int | None = option(
        None, "GPUs of each task, which then runs one worker per GPU", metavar="N", type=positive_integer
    )
    mem: str | None = option(None, "memory on each host, such as 16G", metavar="SIZE")
    time: str | None = option(None, "time limit, such as 4:00:00 or 2-00:00:00", metavar="TIME")
    partition: str | None = option(None, "partition", metavar="NAME")
    account: str | None = option(None, "account", metavar="NAME")
    qos: str | None = option(None, "quality of service", metavar="NAME")
    array: str | None = option(
        None, "run the job once for each number, which the script finds in SLURM_ARRAY_TASK_ID", metavar="0-3"
    )
    sbatch_option: Sequence[str] | None = option(
        None,
        "a further option of sbatch, such as --sbatch-option=--constraint=a100; can be given several times",
        metavar="OPTION",
        many=True,
    )
    launch_option: Sequence[str] | None = option(
        None,
        "an option of dtrain launch, such as --launch-option=--ps=1; can be given several times",
        metavar="OPTION",
        many=True,
    )
    output_dir: str | None = option(None, "folder of the output (default: the current folder)", metavar="DIR")
    notice: int | None = option(
        None,
        f"seconds before the time limit at which the job saves and requeues itself (default: {_NOTICE})",
        metavar="S",
        type=positive_integer,
    )


Options = SlurmOptions


def submit(request: JobRequest, options: SlurmOptions) -> int:
    """Give the job to `sbatch`, or with `dry_run` print the batch script; returns 0.

    Raises:
        ConfigurationError: an option cannot be used, or there is no script or no `sbatch`.
        SchedulerError: Slurm has refused the job, or does not answer; the message quotes it.
    """
    text = batch_script(request, options)
    if request.dry_run:
        sys.stdout.write(text)
        return 0
    if request.command[0] != "-m":
        check_script(request.command[0])
    if shutil.which("sbatch") is None:
        raise ConfigurationError(
            "There is no sbatch in PATH, and it submits jobs to Slurm.",
            hint="Run this on a login host of the cluster; --dry-run prints the batch script.",
        )
    folder = Path(options.output_dir or ".").expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)  # without the folder, Slurm ends the job without a message
    except OSError as error:
        raise ConfigurationError(f"The folder {folder} cannot be made: {error.strerror}.") from error
    job = _given_to_sbatch(text)
    sys.stdout.write(
        f"Submitted as Slurm job {job}. Its output: {folder / _output_name(request, options, job)}\n"
        f"squeue --job {job} shows its state, scancel {job} ends it.\n"
    )
    return 0


def batch_script(request: JobRequest, options: SlurmOptions) -> str:
    """The text of the batch script.

    Raises:
        ConfigurationError: an option cannot be written into it, or the numbers contradict each other.
    """
    tasks = _tasks(request, options)
    notice = options.notice or _NOTICE
    folder = Path(options.output_dir or ".").expanduser()
    given = {
        "job-name": request.name,
        "nodes": options.nodes,
        "ntasks": tasks,
        "ntasks-per-node": options.tasks_per_node,
        "cpus-per-task": options.cpus_per_task,
        "gpus-per-task": options.gpus_per_task,
        "mem": options.mem,
        "time": options.time,
        "partition": options.partition,
        "account": options.account,
        "qos": options.qos,
        "array": options.array,
        "output": f"{folder}/".replace("%", "%%") + _output_name(request, options, None),
        "open-mode": "append",
        "signal": f"B:{_WARNS}@{notice}",
    }
    lines = [f"--{name}={value}" for name, value in given.items() if value is not None]
    lines += ["--requeue", *(options.sbatch_option or ())]
    own = f"--cpus-per-task={options.cpus_per_task} " if options.cpus_per_task else ""
    launch = shlex.join(_launch_command(request, options, tasks, notice))
    directives = "\n".join(_directives(lines))
    return f"""\
#!/bin/bash
{directives}

# Slurm sends {_WARNS} to this shell {notice} seconds before the time limit. srun passes it on to the
# launchers, which save a checkpoint and end with status {RunAgain.STATUS}; then the job is queued again.
warned=
trap 'warned=1; kill -{_WARNS} "$step" 2>/dev/null' {_WARNS}
srun {own}--kill-on-bad-exit=0 {launch} &
step=$!
wait "$step"
while kill -0 "$step" 2>/dev/null; do wait "$step"; done # a signal interrupts a wait
wait "$step"
status=$?
if [ -n "$warned" ] && [ "$status" -eq {RunAgain.STATUS} ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""


def _tasks(request: JobRequest, options: SlurmOptions) -> int:
    """The number of tasks, each of which is a launcher."""
    nodes = options.nodes or ""
    product = int(nodes or 1) * (options.tasks_per_node or 1) if nodes.isdigit() or not nodes else None
    tasks = request.workers or product
    if tasks is None:
        raise ConfigurationError(
            f"--nodes is {nodes!r}, and the number of workers is not known.", hint="Give --workers too."
        )
    full = product is not None and nodes and options.tasks_per_node
    if full and tasks != product:
        raise ConfigurationError(
            f"--workers is {tasks}, but --nodes {nodes} with --tasks-per-node {options.tasks_per_node} makes "
            f"{product}.",
            hint="Leave one of them out.",
        )
    return tasks


def _launch_command(request: JobRequest, options: SlurmOptions, tasks: int, notice: int) -> list[str]:
    per_task = options.gpus_per_task or 1
    count = ["--workers" if tasks == 1 else "--nproc-per-node", f"{per_task}"]
    # The launchers kill what has not saved by then.
    grace = ["--grace", f"{max(_LEAST_GRACE, notice - _AFTER_SAVING)}"]
    own = [word for words in options.launch_option or () for word in shlex.split(words)]
    return [sys.executable, "-m", "dtrain", "launch", *count, *grace, *own, *request.command]


def _directives(lines: Sequence[str]) -> Iterator[str]:
    for line in lines:
        if not line.startswith("-") or not line.isprintable():
            raise ConfigurationError(
                f"{line!r} cannot be an option of sbatch.", hint="Write it as in --sbatch-option=--exclusive."
            )
        # sbatch reads quotes as a shell does, and takes an unquoted # for the beginning of a comment.
        yield f"#SBATCH {line if _PLAIN.fullmatch(line) else shlex.quote(line)}"


def _output_name(request: JobRequest, options: SlurmOptions, job: str | None) -> str:
    """The name of the file of the output; with `job` None as a pattern of Slurm's."""
    name = re.sub(r"[^\w.-]", "_", request.name or "job")
    if job is not None:
        return f"{name}-{job}_*.out" if options.array else f"{name}-{job}.out"
    return f"{name}-%A_%a.out" if options.array else f"{name}-%j.out"


def _given_to_sbatch(text: str) -> str:
    """The number of the job that `sbatch` has made of a script."""
    try:
        done = subprocess.run(
            ["sbatch", "--parsable"],
            input=text,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PATIENCE,
            env=outside_job(os.environ),
        )
    except subprocess.TimeoutExpired as error:
        raise SchedulerError(
            f"sbatch has not answered in {_PATIENCE:g} s.", hint="Is the controller up (scontrol ping)?"
        ) from error
    except OSError as error:
        raise SchedulerError(
            f"sbatch could not be started: {error.strerror}.", hint="Check the sbatch that PATH finds."
        ) from error
    job = done.stdout.strip().partition(";")[0]
    if done.returncode or not job.isdigit():
        output = cleaned("; ".join((done.stderr or done.stdout).strip().splitlines()), _QUOTED)
        raise SchedulerError(
            f"sbatch has refused the job (status {done.returncode}): {output or 'it said nothing'}",
            hint=_hint_for(output),
        )
    with contextlib.suppress(BrokenPipeError):
        sys.stderr.write(done.stderr)  # warnings
    return job


def _hint_for(output: str) -> str:
    lower = output.lower()
    hint = next((hint for word, hint in _HINTS if word in lower), "")
    return hint or "sbatch --help explains the options; --dry-run prints the batch script."
