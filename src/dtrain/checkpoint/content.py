"""What a checkpoint holds: variables, and beside them what each worker noted; and the newest that is whole.

How it gets to disk is the store's.
"""

from __future__ import annotations

import pickle
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from dtrain.checkpoint.group import Group
from dtrain.checkpoint.stored import StoredCheckpoint, committed, read_share
from dtrain.checkpoint.variables import Entry, TrainingVariables
from dtrain.cluster import settings
from dtrain.data.unpickling import load_arrays
from dtrain.errors import CheckpointError
from dtrain.keras_engine.protocol import ReplicaLayout
from dtrain.keras_engine.talk import exchange
from dtrain.log import logger


@dataclass(frozen=True)
class Found:
    """A checkpoint, read.

    Attributes:
        path: where it is.
        step: steps that were done.
        serial: its number among the checkpoints of the run.
        workers: how many wrote it.
        replicas: how many of them there were in all.
        sums: what added up over the workers, as `ReplicaLayout.sums`.
        job: the launcher's name of the job that wrote it, or None.
        program: the settings of the program that wrote it, see `program`; None where they were not noted.
        boundary: whether it was taken between two epochs.
        finished: whether its training was complete.
        table: the variables in it.
        tensors: their values, and the workers' states, of all shares.
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
    tensors: dict[str, Any]

    def worker(self, number: int) -> dict[str, Any]:
        """What a worker noted beside its variables; the first one's where it was not there then."""
        key = f"worker/{number}"
        raw = self.tensors[key if key in self.tensors else min(k for k in self.tensors if k[:7] == "worker/")]
        found: dict[str, Any] = load_arrays(raw.numpy() if hasattr(raw, "numpy") else raw.item())
        return found


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
    """The tensors that this worker writes, and the notes of the whole checkpoint.

    Args:
        variables: the state.
        layout: the strategy's.
        group: who writes to the same place.
        worker: plain data of this worker's; the states of Python's and NumPy's generators are added.
        program: its settings, see `program`.
        boundary, finished: as in `Found`.
    """
    noted = {**worker, "random": random.getstate(), "numpy": np.random.get_state()}
    tensors = variables.capture(group.mine, len(group.members))
    tensors[f"worker/{layout.worker}"] = tf.constant(pickle.dumps(noted))
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
    """What the engine has found out of a model's own losses; found again later, it might be another thing."""
    functions = {"train": model.train_function, "test": model.test_function}
    return {name: getattr(function, "findings", None) for name, function in functions.items()}


def restore_findings(model: Any, findings: dict[str, Any]) -> None:
    """Gives a model's functions what was found out before they were made."""
    if findings["train"] is not None:
        model.make_train_function()
        model.train_function.findings = findings["train"]
    if findings["test"] is not None:
        model.make_test_function()
        model.test_function.findings = findings["test"]


def restore_generators(worker: dict[str, Any]) -> None:
    """Gives Python's and NumPy's random generators the states that a worker noted."""
    random.setstate(worker["random"])
    np.random.set_state(worker["numpy"])


def find_newest(folder: str, layout: ReplicaLayout, group: Group) -> Found | None:
    """The newest checkpoint, the same for all workers; every worker must call it.

    Args:
        folder: this worker's.
        layout: the strategy's.
        group: who shares the folder.
    """
    # Of two attempts' checkpoints of one name the later one counts.
    problem = ""
    try:
        mine = {(each.step, each.serial): each for each in reversed(committed(folder))}
    except (CheckpointError, tf.errors.OpError, OSError) as error:
        mine, problem = {}, str(error)
    found_problem = next(filter(None, exchange(layout, problem)), "")
    if found_problem:
        raise CheckpointError(
            f"The checkpoints in {folder} cannot be listed: {found_problem}", hint="See to the folder first."
        )
    everyone = exchange(layout, sorted(mine))
    common = set(everyone[0]).intersection(*everyone[1:])
    if not common and any(everyone):
        logger.warning("No checkpoint in %s is there for all workers: training begins anew.", folder)
    for name in sorted(common, reverse=True):
        found, problem = _read(mine[name])
        problems = exchange(layout, problem)
        if not any(problems):
            if found is not None and layout.worker == 0:
                _warn_of_other_sums(found, layout)
            return found
        if group.leads:
            logger.warning(
                "%s The checkpoint before it is used.", next(problem for problem in problems if problem)
            )
    if common and group.leads:
        logger.warning("There is no other checkpoint in %s: training begins anew.", folder)
    return None


def _warn_of_other_sums(found: Found, layout: ReplicaLayout) -> None:
    if found.sums and layout.sums and found.sums != layout.sums and found.workers == layout.workers:
        logger.warning(
            "The workers that wrote %s added up over %s; now they add up over %s. The training is as good, "
            "but its last bits may differ from those of a run that was not interrupted.",
            found.path,
            found.sums,
            layout.sums,
        )


def _read(checkpoint: StoredCheckpoint) -> tuple[Found | None, str]:
    tensors: dict[str, Any] = {}
    try:
        for share in range(checkpoint.writers):
            tensors.update(read_share(checkpoint, share))
    except CheckpointError as error:
        return None, error.message
    notes = checkpoint.notes
    return Found(
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
        table=[Entry.from_list(each) for each in notes["variables"]],
        tensors=tensors,
    ), ""
