"""What failures leave of a job's time, with checkpoints at Daly's interval, as far as figures are known."""

from __future__ import annotations

from dataclasses import dataclass

from dtrain.planning.cluster import Cluster, WorkerPlacement
from dtrain.planning.compared_strategies import FULLY_SHARDED, SERVERS
from dtrain.planning.failures import daly_interval, goodput, young_interval
from dtrain.planning.model_profile import ModelProfile


@dataclass(frozen=True, kw_only=True)
class Failures:
    """What failures leave of the time.

    Attributes:
        mean_time: the mean time between failures of the job, in seconds.
        checkpoint: the seconds that a checkpoint stops the work.
        young, daly: seconds of work between checkpoints, by Young and by Daly; the second is taken.
        goodput: the part of the time that is work which no failure undoes.
    """

    mean_time: float
    checkpoint: float
    young: float
    daly: float
    goodput: float


def job_failures(
    profile: ModelProfile,
    cluster: Cluster,
    strategy: str,
    place: WorkerPlacement,
    hosts: int,
    checkpoint: float | None,
) -> tuple[Failures | None, list[str]]:
    """Goodput under failures, or what is not known for it, in words.

    Args:
        profile, cluster: the model and the machines.
        strategy: one of `STRATEGIES`.
        place: where the workers are.
        hosts: the hosts whose failure stops the job.
        checkpoint: the seconds that a checkpoint stops the work; None to compute them by the cluster's rate.
    """
    size, rate = profile.checkpoint_bytes, cluster.checkpoint_bytes_per_second
    if checkpoint is None and rate is not None and size is not None:
        writers = {FULLY_SHARDED: place.hosts, SERVERS: hosts}.get(strategy, 1)
        checkpoint = size / rate / writers
    missing = [
        words
        for absent, words in (
            (
                cluster.host_hours_to_failure is None,
                "how often hosts fail (host_hours_to_failure): no goodput",
            ),
            (checkpoint is None, "how long a checkpoint takes (checkpoint_bytes_per_second): no goodput"),
            (cluster.recovery_seconds is None, "how long a recovery takes (recovery_seconds): no goodput"),
        )
        if absent
    ]
    if cluster.host_hours_to_failure is None or checkpoint is None or cluster.recovery_seconds is None:
        return None, missing
    mean_time = cluster.host_hours_to_failure * 3600 / hosts
    daly = max(daly_interval(checkpoint, mean_time), 1e-3)
    return Failures(
        mean_time=mean_time,
        checkpoint=checkpoint,
        young=young_interval(checkpoint, mean_time),
        daly=daly,
        goodput=goodput(daly, checkpoint, cluster.recovery_seconds, mean_time),
    ), missing
