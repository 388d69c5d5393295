"""Describes in words what each strategy is for and what it guarantees; the README's table is made from it.

These facts hold on every machine. What a particular machine can run is decided in `feasibility`.
"""

from __future__ import annotations

from typing import NamedTuple


class StrategyFacts(NamedTuple):
    """The description of one strategy.

    Attributes:
        name: the canonical name.
        made_by: the class with its arguments, or the function.
        purpose: what it is used for.
        updates: how the replicas' gradients are combined, and whether replicas wait for each other.
        replicas: how many replicas there are.
        failure: what happens to the job when one of its processes dies.
        ease: what is needed to use it besides its name.
        limits: what it does not do.
    """

    name: str
    made_by: str
    purpose: str
    updates: str
    replicas: str
    failure: str
    ease: str
    limits: str

    @property
    def class_name(self) -> str:
        """The name of the class without arguments; for `default`, the qualified name of the function."""
        return self.made_by.partition("(")[0]


_GOES_ON = "started again, it goes on from its last checkpoint, to the bit"

FACTS = (
    StrategyFacts(
        name="default",
        made_by="dtrain.get_strategy()",
        purpose="one device; to begin with",
        updates="nothing to combine",
        replicas="1",
        failure=_GOES_ON,
        ease="the name is enough",
        limits="it distributes nothing",
    ),
    StrategyFacts(
        name="one_device",
        made_by="OneDeviceStrategy(device)",
        purpose="one device that you choose; to test a program that is to be distributed",
        updates="nothing to combine",
        replicas="1",
        failure=_GOES_ON,
        ease="the name is enough",
        limits="the device is yours to choose",
    ),
    StrategyFacts(
        name="mirrored",
        made_by="MirroredStrategy(devices, cross_device_ops)",
        purpose="several GPUs of one machine",
        updates="synchronous: an all-reduce every step",
        replicas="one a GPU, or one a logical CPU, of this machine",
        failure=_GOES_ON,
        ease="the name is enough",
        limits="on CPUs it is for tests: they share the cores",
    ),
    StrategyFacts(
        name="multi_worker",
        made_by='MultiWorkerMirroredStrategy(cluster_resolver, communication_options, communication="auto")',
        purpose="several machines, or several processes of one",
        updates="synchronous: an all-reduce every step, over MPI, sockets or NCCL",
        replicas="those of all workers",
        failure="all workers go on from the last checkpoint, to the bit; "
        "with `--workers MIN:MAX` also without those that do not come up",
        ease="one process a worker: `dtrain launch --workers N`, `TF_CONFIG` or an MPI start",
        limits="it does not train on without a worker: when one dies, all go on from the last checkpoint",
    ),
    StrategyFacts(
        name="central_storage",
        made_by="CentralStorageStrategy(compute_devices, parameter_device)",
        purpose="one copy of the weights, on the CPU, for several devices of one machine",
        updates="synchronous: gradients are added up where the weights are",
        replicas="one a device",
        failure=_GOES_ON,
        ease="the name is enough",
        limits="weights travel each step; several devices, one machine; no XLA, which reads weights on "
        "its own device only",
    ),
    StrategyFacts(
        name="tpu",
        made_by='TPUStrategy(tpu_cluster_resolver, ..., tpu="name")',
        purpose="the cores of a TPU",
        updates="synchronous: an all-reduce every step, between the cores",
        replicas="one a TPU core",
        failure="nothing is promised: not tried",
        ease="the name is enough on a TPU VM; elsewhere the TPU's name",
        limits="no TPU was at hand: only finding one and its errors are tested; Keras and TensorFlow train "
        "there as they are, without what follows below",
    ),
    StrategyFacts(
        name="parameter_server",
        made_by="ParameterServerStrategy(cluster_resolver, variable_partitioner, max_staleness=None, "
        "overlap=False)",
        purpose="huge embeddings; workers of unequal speed, or that come and go",
        updates="asynchronous: each worker updates the servers' weights with its own batch",
        replicas="1: each worker trains on whole batches by itself",
        failure="of a worker: the others go on, and its steps are done again; of a server or the chief: all "
        "go on from the last checkpoint",
        ease="a chief, workers and servers: `dtrain launch --workers N --ps M`",
        limits="with several workers the numbers are not one device's; see [below](#asynchronous-training)",
    ),
)
"""All strategies, in the order of the README's table."""

BY_NAME = {facts.name: facts for facts in FACTS}
