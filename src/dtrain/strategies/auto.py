"""Chooses a strategy by the hardware and the environment of this process, and reports the reason in one line.

It creates no strategy; `registry` does.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, field
from typing import Any

from dtrain.base.log import logger
from dtrain.base.words import counted
from dtrain.environments import current, origin, settings
from dtrain.environments.tpu_name import tpu_name


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The chosen strategy.

    Attributes:
        name: the canonical name.
        reason: why it was chosen.
        options: arguments for the strategy's class.
    """

    name: str
    reason: str
    options: dict[str, Any] = field(default_factory=dict)

    def announce(self) -> None:
        """Reports the choice, on the chief only: to the log if the log is shown, else to standard error."""
        topology = current()
        if topology is not None and not topology.is_chief:
            return
        if logger.isEnabledFor(logging.INFO) and logger.hasHandlers():
            logger.info("strategy %s: %s", self.name, self.reason)
        else:
            sys.stderr.write(f"dtrain: strategy {self.name}: {self.reason}\n")


def choose() -> Choice:
    """Chooses the first that is found: a TPU, a cluster (`TF_CONFIG` or another environment), GPUs, the CPU.

    Raises:
        ClusterConfigError: `TF_CONFIG` is malformed.
        MPIError: the ranks of an MPI start cannot communicate.
    """
    topology = current()
    tpu = tpu_name()
    if tpu is not None:
        return Choice(name="tpu", reason=f"the environment names a TPU ({tpu})", options={"tpu": tpu})
    if topology is not None and topology.jobs.get("ps"):
        return Choice(
            name="parameter_server",
            reason=f"{origin()} has {counted(len(topology.jobs['ps']), 'parameter server')}",
        )
    if topology is not None and topology.is_training_task and topology.world_size > 1:
        return Choice(name="multi_worker", reason=f"{origin()} has {topology.world_size} workers")
    import tensorflow as tf

    from dtrain.strategies.devices import planned

    gpus = tf.config.list_physical_devices("GPU")
    if len(gpus) > 1:
        return Choice(name="mirrored", reason=f"this machine has {len(gpus)} GPUs")
    if gpus:
        return Choice(name="one_device", reason="this machine has one GPU", options={"device": "/gpu:0"})
    cpus = settings.devices_per_worker() or planned("CPU")
    if cpus > 1:
        return Choice(name="mirrored", reason=f"no GPU or TPU, but {cpus} logical CPUs were set up")
    why = "no TF_CONFIG" if topology is None else f"TF_CONFIG gives {topology.task} no peers to train with"
    return Choice(name="default", reason=f"no TPU, {why}, no GPU: the CPU")
