"""Makes this process a worker of a job with a quorum: checks that it can be one, and connects it."""

from __future__ import annotations

import hashlib

import tensorflow as tf

from dtrain.engine.replica.seeds import note_drawn
from dtrain.environments import settings
from dtrain.environments.topology import Topology
from dtrain.errors import ConfigurationError
from dtrain.interfaces.gradient_hook import GradientHook
from dtrain.process_group.quorum_client import QuorumClient, connect
from dtrain.process_group.secret import job_secret
from dtrain.upstream import tf_tracing

_LAUNCH = "dtrain launch --workers N --quorum K train.py"


def quorum_of(
    topology: Topology | None, hook: GradientHook | None, strategy: str, *, by_program: bool
) -> QuorumClient | None:
    """This process' connection to the rounds of its job; None if the job has no quorum.

    Args:
        topology: the job.
        hook: the strategy's gradient hook.
        strategy: the class of the strategy.
        by_program: whether the program described the job by a cluster resolver.

    Raises:
        ConfigurationError: the strategy has no rounds, or not such as a quorum can have; or the hook asks for
            another quorum than the launcher, or for one without it.
        PeerMissingError: the launcher's server cannot be reached.
    """
    asked = 0 if hook is None else hook.quorum
    found = settings.quorum()
    if found is None:
        if asked:
            raise ConfigurationError(
                f"{type(hook).__name__} has quorum={asked}, but the job was not started with --quorum.",
                hint=f"start it by: {_LAUNCH}",
            )
        return None
    fewest, address = found
    if topology is None or by_program:
        raise ConfigurationError(
            "The job was started with --quorum, but the strategy got a cluster resolver.",
            hint="leave cluster_resolver out",
        )
    if asked not in (0, fewest):
        raise ConfigurationError(
            f"{type(hook).__name__} has quorum={asked}, but the job was started with --quorum {fewest}.",
            hint="leave one of them out",
        )
    if hook is None or not hook.average_every or strategy != "MultiWorkerMirroredStrategy":
        kind = "no gradient hook" if hook is None else f"the gradient hook {type(hook).__name__}"
        raise ConfigurationError(
            f"The job was started with --quorum, but its {strategy} has {kind}, and so no rounds in which "
            "workers could be missing.",
            hint='use MultiWorkerMirroredStrategy(gradient_hook="diloco"), or leave out --quorum',
        )
    if hook.fragments > 1 or hook.overlap:
        raise ConfigurationError(
            f"With a quorum, DiLoCo sends all weights at once, but fragments={hook.fragments} and "
            f"overlap={hook.overlap} were set.",
            hint="leave them out, or leave out --quorum",
        )
    secret = job_secret(topology)
    if secret is None:
        raise ConfigurationError(
            "The processes of this job share no secret, which the rounds of a quorum need.",
            hint=f"start the job by: {_LAUNCH}",
        )
    return connect(address, secret, topology.rank, topology.world_size)


def check_one_device(replicas: int) -> None:
    """Checks that a worker has one device.

    Raises:
        ConfigurationError: it has several.
    """
    if replicas > 1:
        raise ConfigurationError(
            f"This worker of a job with a quorum has {replicas} devices, and would have as many replicas.",
            hint="give each worker one device, and start more workers",
        )


def seed_alike() -> None:
    """Sets one random seed on all workers of a job that set none, also on those that join later.

    So datasets that shuffle have one order, of which each worker takes its part.
    """
    if tf_tracing.global_seed() is None:
        job = (settings.restarted_job() or "").encode()
        seed = int.from_bytes(hashlib.sha256(job).digest()[:4], "big") >> 1
        tf.random.set_seed(seed)
        note_drawn(seed)
