"""Calls a function in several worker processes, from a notebook or from anywhere in a program.

Each worker is a new interpreter that never imports the caller's main module, so the program needs no
`if __name__` guard. Functions and results are pickled by cloudpickle into files. No worker is ever restarted.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO, TypeVar

import cloudpickle

from dtrain.base.words import check_seconds
from dtrain.environments.topology import Task
from dtrain.errors import ConfigurationError, TaskFailedError, TaskTimeoutError
from dtrain.launch import child
from dtrain.launch.job.job_session import Session
from dtrain.launch.job.limits import convert_limit_errors
from dtrain.launch.job.spec import check_integer
from dtrain.launch.job.task_environment import local_topologies, task_environment, worker_tasks
from dtrain.launch.job.task_handle import TaskCommand
from dtrain.launch.local_processes.local_launcher import LocalLauncher
from dtrain.launch.local_processes.ports import reserve_ports
from dtrain.launch.supervision.reports import describe_exit
from dtrain.launch.supervision.running_tasks import Job, JobOutcome

Result = TypeVar("Result")


@convert_limit_errors()
def spawn(
    fn: Callable[..., Result],
    workers: int = 2,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    devices_per_worker: int | None = None,
    timeout: float | None = None,
) -> list[Result]:
    """Call `fn(*args, **kwargs)` in every worker process of a new job on this machine.

    In each worker, TF_CONFIG says which worker it is, as under `dtrain launch`. This process shows the
    workers' output, each line prefixed with its worker. When one worker fails, or on Ctrl-C, all are ended.
    No process is left when this function returns or raises.

    Args:
        fn: a function, lambda or closure that cloudpickle can pickle. TensorFlow objects cannot be pickled:
            create them inside the function.
        workers: the number of processes, at least 1.
        args: positional arguments of `fn`.
        kwargs: keyword arguments of `fn`.
        devices_per_worker: the number of logical devices in each worker; None leaves the choice to the
            worker.
        timeout: the seconds that the whole call may take; None sets no limit.

    Returns:
        The workers' return values, in the order of the workers' indices.

    Raises:
        ConfigurationError: a number is out of range, `fn` or an argument cannot be pickled, or the system
            refuses ports, processes or files.
        TaskFailedError: a worker raised an exception (its traceback is in the message), was killed, ended the
            process, or returned an object that cannot be pickled or unpickled.
        TaskTimeoutError: a worker still ran after `timeout` seconds.
        KeyboardInterrupt: Ctrl-C was pressed.

    Example:
        ```python
        def power(base):
            return base ** (dtrain.rank() + 1)
        print(dtrain.spawn(power, workers=2, args=[3]))  # [3, 9]
        ```
    """
    if timeout is not None:
        check_seconds("timeout", timeout)
    check_integer("workers", workers, least=1)
    tasks = worker_tasks(workers)
    name = getattr(fn, "__qualname__", repr(fn))
    call = fn, tuple(args), dict(kwargs or {})
    problem = f"spawn cannot send {name!r} or its arguments"
    with reserve_ports(len(tasks)) as ports:
        environments = {
            topology.task: task_environment(topology, devices_per_worker, None)
            for topology in local_topologies(tasks, ports)
        }
        return make_calls(call, environments, problem=problem, timeout=timeout)


def make_calls(
    call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]],
    environments: Mapping[Task, Mapping[str, str]],
    *,
    problem: str,
    timeout: float | None,
    output: TextIO | None = None,
) -> list[Any]:
    """Make a function call in processes of this machine, and return what each returned.

    Args:
        call: the function, its positional and its keyword arguments.
        environments: the environment of each process.
        problem: the beginning of the error's message if the call cannot be pickled.
        timeout: the seconds that all calls may take; None sets no limit.
        output: where the processes' lines go; by default this process's own streams.

    Raises:
        ConfigurationError: the function or an argument cannot be pickled.
        TaskFailedError, TaskTimeoutError: as `spawn`; or this process received a signal that did not end it.
        KeyboardInterrupt: Ctrl-C was pressed.
    """
    try:
        pickled = cloudpickle.dumps(call)
    except Exception as error:  # picklers raise whatever the objects' own methods raise
        raise ConfigurationError(
            f"{problem} to another process: {error}",
            hint="Make models, datasets, strategies and open files inside the function.",
        ) from error
    session = Session(stdout=output, stderr=output)
    launcher = LocalLauncher(session)
    with session.opened(), launcher.opened():
        folder = session.scratch()  # the session's guard deletes it, if this process is killed
        child.call_file(folder).write_bytes(pickle.dumps((sys.path, pickled)))
        # Run by its path: dtrain may be importable only after the child has set its sys.path to this one.
        command = [sys.executable, "-P", child.__file__, str(folder)]
        commands = [TaskCommand(task, command, env) for task, env in environments.items()]
        outcome = Job(commands, launcher, timeout=timeout).run()
        if outcome.signal is None:
            _raise_for(outcome, folder, timeout)
            return [_result(task, folder) for task in environments]
    # The session has ended, so the signal may have its usual effect: KeyboardInterrupt for Ctrl-C.
    signal.raise_signal(outcome.signal)
    task, code = next(iter(outcome.exit_codes.items()))
    raise TaskFailedError(
        f"{signal.Signals(outcome.signal).name} was received: all processes of this call were ended.",
        task=str(task),
        exit_code=code,
    )


def _raise_for(outcome: JobOutcome, folder: Path, timeout: float | None) -> None:
    if outcome.timed_out:
        task = outcome.timed_out[0]
        raise TaskTimeoutError(
            f"After {timeout:g} s still running: {', '.join(map(str, outcome.timed_out))}. They were ended.",
            task=str(task),
            exit_code=outcome.exit_codes[task],
            hint="Give spawn a longer timeout, or see in the output where they wait.",
        )
    if outcome.first_failure is not None:
        task = outcome.first_failure
        code = outcome.exit_codes[task]
        report = child.failure_file(folder, task.index)
        if report.exists():
            message = f"{task} failed:\n{report.read_text(encoding='utf-8')}"
        else:
            message = "\n".join(
                [f"{task} {describe_exit(code)}. Its last lines:", *outcome.tails[task]]
                if outcome.tails[task]
                else [f"{task} {describe_exit(code)}."]
            )
        raise TaskFailedError(message, task=str(task), exit_code=code)


def _result(task: Task, folder: Path) -> Any:
    try:
        return pickle.loads(child.result_file(folder, task.index).read_bytes())
    except FileNotFoundError:
        raise TaskFailedError(
            f"{task} ended with exit status 0 but without returning from the function.",
            task=str(task),
            exit_code=os.EX_OK,
            hint="Return from the function instead of ending the process.",
        ) from None
    except Exception as error:  # unpickling runs code of the returned objects, which may raise anything
        raise TaskFailedError(
            f"What {task} returned cannot be read here: {type(error).__name__}: {error}",
            task=str(task),
            exit_code=os.EX_OK,
            hint="Return numbers, arrays, text, and containers of them.",
        ) from error
