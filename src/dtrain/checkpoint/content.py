"""The content of a checkpoint: variables, the workers' states and notes; and finding the newest complete one.

Writing files is the store's task.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from dtrain.base.counts import is_count
from dtrain.base.log import logger
from dtrain.checkpoint.group import Group
from dtrain.checkpoint.layout import HINT
from dtrain.checkpoint.stored import StoredCheckpoint, committed, read_share
from dtrain.checkpoint.tensor_file import StoredTensor
from dtrain.checkpoint.variables import AGGREGATIONS, Entry, TrainingVariables
from dtrain.data.unpickling import dump_arrays, load_arrays
from dtrain.environments import settings
from dtrain.errors import CheckpointError
from dtrain.interfaces.replica_layout import ReplicaLayout
from dtrain.process_group.value_exchange import exchange

_MOST = 10**6  # workers or replicas


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint of which all files were read once, and found to be whole.

    Attributes:
        path: the directory of the checkpoint.
        step: how many steps were done.
        serial: its number among the checkpoints of the run.
        workers: how many workers the job had.
        replicas: how many replicas the job had in all.
        sums: which transport all-reduced between the workers, as in `ReplicaLayout.sums`.
        job: the launcher's name of the job that wrote it, or None.
        program: the settings of the program that wrote it (see `program`); None if they were not recorded.
        boundary: whether it was taken between two epochs.
        finished: whether training was complete.
        table: the variables in the checkpoint.
        tensors: the tensors of all shares by name: the variables' values and the workers' states. Each is
            read when it is asked for.
    """

    path: str
    step: int
    serial: int
    workers: int
    replicas: int
    sums: str
    job: str | None
    program: dict[str, Any] | None
    boundary: bool
    finished: bool
    table: list[Entry]
    tensors: dict[str, StoredTensor]

    def worker(self, number: int) -> dict[str, Any]:
        """The state of a worker; that of another worker if the checkpoint has none of this worker.

        Raises:
            CheckpointError: there is none that can be read.
        """
        key = f"worker/{number}"
        others = sorted(name for name in self.tensors if name.startswith("worker/"))
        problem = "it is missing"
        try:
            stored = self.tensors[key if key in self.tensors or not others else others[0]]
            state = load_arrays(stored.read().numpy())
            if isinstance(state, dict):
                return state
            problem = f"it is a {type(state).__name__}"
        except Exception as error:  # unpickling raises anything for bytes that were changed
            problem = f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"{self.path} has no state of worker {number} that can be read: {problem}.", hint=HINT
        )


def content(
    variables: TrainingVariables,
    layout: ReplicaLayout,
    group: Group,
    worker: dict[str, Any],
    program: dict[str, Any],
    *,
    boundary: bool = False,
    finished: bool = False,
) -> tuple[dict[str, tf.Tensor], dict[str, Any]]:
    """Captures the tensors that this worker writes, and the notes of the whole checkpoint.

    Args:
        variables: the variables to save.
        layout: the strategy's layout.
        group: the workers that write to the same folder.
        worker: this worker's own state, as plain data; the states of Python's and NumPy's random generators
            are added.
        program: the program's settings (see `program`).
        boundary, finished: as in `LoadedCheckpoint`.

    Returns:
        The tensors by name, and the notes as values that JSON can hold.
    """
    noted = {**worker, "random": random.getstate(), "numpy": np.random.get_state()}
    tensors = variables.capture(group.mine, len(group.members))
    tensors[f"worker/{layout.worker}"] = tf.constant(dump_arrays(noted))
    notes = {
        "workers": layout.workers,
        "replicas": layout.replicas,
        "sums": layout.sums,
        "boundary": boundary,
        "finished": finished,
        "job": settings.restarted_job(),
        "program": program,
        "variables": [entry.as_list() for entry in variables.table()],
    }
    return tensors, notes


def findings_of(model: Any) -> dict[str, Any]:
    """What the engine has found out or decided about a model's steps; a restart might not find the same."""
    functions = {"train": model.train_function, "test": model.test_function}
    return {name: getattr(function, "findings", None) for name, function in functions.items()}


def restore_findings(model: Any, findings: dict[str, Any]) -> None:
    """Restores the findings in a model's train and test functions; creates the functions if necessary."""
    if findings["train"] is not None:
        model.make_train_function()
        model.train_function.findings = findings["train"]
    if findings["test"] is not None:
        model.make_test_function()
        model.test_function.findings = findings["test"]


def restore_generators(worker: dict[str, Any]) -> None:
    """Restores Python's and NumPy's random generators from a worker's state."""
    random.setstate(worker["random"])
    np.random.set_state(worker["numpy"])


def find_newest(
    folder: str, layout: ReplicaLayout, group: Group, check: Callable[[dict[str, Any]], bool] | None = None
) -> LoadedCheckpoint | None:
    """Reads the newest checkpoint that all workers can read; every worker must call it.

    Args:
        folder: this worker's folder of checkpoints.
        layout: the strategy's layout.
        group: the workers that share the folder.
        check: whether this worker's state has the form of the caller's states; any if None.

    Returns:
        The checkpoint, the same for all workers; None if there is none.

    Raises:
        CheckpointError: on all workers, if any worker cannot list its folder.
    """
    # If two attempts wrote a checkpoint of the same step and serial, the later one is used.
    problem = ""
    try:
        mine = {(stored.step, stored.serial): stored for stored in reversed(committed(folder))}
    except (CheckpointError, tf.errors.OpError, OSError) as error:
        mine, problem = {}, str(error)
    found_problem = next(filter(None, exchange(layout, problem)), "")
    if found_problem:
        raise CheckpointError(
            f"The checkpoints in {folder} cannot be listed: {found_problem}",
            hint="Check that the folder exists and may be read.",
        )
    everyone = exchange(layout, sorted(mine))
    common = set(everyone[0]).intersection(*everyone[1:])
    if not common and any(everyone):
        logger.warning(
            "No checkpoint in %s is complete for all workers: training starts from the beginning.", folder
        )
    for name in sorted(common, reverse=True):
        checkpoint, problem = _read(mine[name], layout.worker, check)
        problems = exchange(layout, problem)
        if not any(problems):
            if checkpoint is not None and layout.worker == 0:
                _warn_of_other_sums(checkpoint, layout)
            return checkpoint
        if group.leads:
            logger.warning(
                "%s The previous checkpoint is used instead.",
                next(problem for problem in problems if problem),
            )
    if common and group.leads:
        logger.warning("There is no other checkpoint in %s: training starts from the beginning.", folder)
    return None


def _warn_of_other_sums(found: LoadedCheckpoint, layout: ReplicaLayout) -> None:
    if found.sums and layout.sums and found.sums != layout.sums and found.workers == layout.workers:
        logger.warning(
            "The workers that wrote %s all-reduced over %s; now they all-reduce over %s. Training is still "
            "correct, but its results may differ in the last bits from those of an uninterrupted run.",
            found.path,
            found.sums,
            layout.sums,
        )


def _read(
    checkpoint: StoredCheckpoint, worker: int, check: Callable[[dict[str, Any]], bool] | None
) -> tuple[LoadedCheckpoint | None, str]:
    """Reads a checkpoint; None and a sentence if it was damaged, or says what dtrain never writes."""
    tensors: dict[str, StoredTensor] = {}
    try:
        _check_notes(checkpoint)
        for share in range(checkpoint.writers):
            tensors.update(read_share(checkpoint, share))
        loaded = _loaded(checkpoint, tensors)
        state = loaded.worker(worker)
        if not (_has_tensors_of(loaded.table, tensors) and _has_generators(state)):
            raise _wrong(checkpoint, "its tensors are not those that it lists")
        if check is not None and not check(state):
            raise _wrong(checkpoint, "the state of a worker is not that of such a training")
    except CheckpointError as error:
        return None, error.message
    return loaded, ""


def _check_notes(checkpoint: StoredCheckpoint) -> None:
    """Raises `CheckpointError` for notes that `content` never gives: their checksum proves nothing."""
    notes, program = checkpoint.notes, checkpoint.notes.get("program")
    if not (
        all(is_count(notes.get(name)) and 0 < notes[name] <= _MOST for name in ("workers", "replicas"))
        and all(isinstance(notes.get(name), bool) for name in ("boundary", "finished"))
        and isinstance(notes.get("sums", ""), str)
        and isinstance(notes.get("job"), str | None)
        and (program is None or (isinstance(program, dict) and "seed" in program))
        and (program is None or isinstance(program.get("optimizer"), dict))
        and isinstance(notes.get("variables"), list)
        and all(map(_is_entry, notes["variables"]))
    ):
        raise _wrong(checkpoint, "its notes are not those of a checkpoint")


def _is_entry(entry: Any) -> bool:
    if not (isinstance(entry, list) and len(entry) == 4):
        return False
    name, shape, dtype, apart = entry
    texts = isinstance(name, str) and isinstance(dtype, str) and isinstance(apart, str)
    if not (texts and isinstance(shape, list) and all(map(is_count, shape))):
        return False
    return apart in ("", *AGGREGATIONS) or Entry.from_list(entry).divided_dim is not None


def _has_tensors_of(table: Sequence[Entry], tensors: dict[str, StoredTensor]) -> bool:
    """Whether each tensor is the state of a worker, or has the shape and dtype of a variable in the table."""
    for name, tensor in tensors.items():
        kind, _, number = name.partition("/")
        if kind == "worker":
            continue
        number = number.partition("/")[0]
        if not number.isdecimal() or len(number) > 9 or int(number) >= len(table):
            return False
        entry = table[int(number)]
        shape = list(tensor.entry["shape"])
        dim = entry.divided_dim
        if dim is not None and len(shape) == len(entry.shape) and shape[dim] <= entry.shape[dim]:
            shape[dim] = entry.shape[dim]
        if (tuple(shape), tensor.entry["dtype"]) != (entry.shape, entry.dtype):
            return False
    return True


def _has_generators(state: dict[str, Any]) -> bool:
    """Whether a worker's state has states of random generators: tried on generators that nobody uses."""
    try:
        random.Random().setstate(state["random"])
        np.random.RandomState().set_state(state["numpy"])
    except Exception:  # of values of any other form
        return False
    return True


def _wrong(checkpoint: StoredCheckpoint, what: str) -> CheckpointError:
    return CheckpointError(f"{checkpoint.path} cannot be used: {what}.", hint=HINT)


def _loaded(checkpoint: StoredCheckpoint, tensors: dict[str, StoredTensor]) -> LoadedCheckpoint:
    notes = checkpoint.notes
    return LoadedCheckpoint(
        path=checkpoint.path,
        step=checkpoint.step,
        serial=checkpoint.serial,
        workers=notes["workers"],
        replicas=notes["replicas"],
        sums=notes.get("sums", ""),
        job=notes["job"],
        program=notes.get("program"),
        boundary=notes["boundary"],
        finished=notes["finished"],
        table=[Entry.from_list(entry) for entry in notes["variables"]],
        tensors=tensors,
    )
