"""What a plan knows of machines: devices, memory, links, price and failures, each with its source.

Clusters come from files of JSON (`read_cluster`), or are machines that the package knows (`machines.json`).
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from dtrain.errors import ConfigurationError, known_are
from dtrain.planning.json_fields import JsonFields, read_fields

# The kinds of links that transports know latencies of.
LINKS = ("nvlink", "pcie", "memory", "network")

_MACHINES = Path(__file__).parent / "machines.json"


@dataclass(frozen=True, kw_only=True)
class ClusterLink:
    """A link, of one device inside a host, or of one host to the network.

    Attributes:
        kind: one of `LINKS`.
        bytes_per_second: what it carries in one direction, with all its lanes or adapters.
        efficiency: the part of that which is left for data after the headers of packets.
    """

    kind: str
    bytes_per_second: float
    efficiency: float

    @property
    def data_rate(self) -> float:
        """The bytes of data per second in one direction."""
        return self.bytes_per_second * self.efficiency


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Machines of one kind.

    Attributes:
        name, source: the name, and where the figures come from.
        device: the name of the device.
        devices_per_host: devices of a host; each is a worker.
        within: the link between the devices of a host.
        network: the link of a host to the others; None for a single host.
        device_memory: the bytes of a device; None if not known.
        memory_bytes_per_second: of a device's own memory; None if not known.
        cores_per_host: processor cores of a host, if the devices are processors; None for accelerators.
        speed_spread: standard deviation of the devices' speed, as a part of the speed; None if not known.
        step_jitter: standard deviation of a worker's steps, as a part of their mean; None if not known.
        price_per_host_hour: in `currency`; None if not known.
        currency: of the price.
        host_hours_to_failure: mean time to failure of a host; None if not known.
        checkpoint_bytes_per_second: at which a host writes a checkpoint; None if not known.
        recovery_seconds: from a failure until the job computes again; None if not known.
    """

    name: str
    source: str
    device: str
    devices_per_host: int
    within: ClusterLink
    network: ClusterLink | None
    device_memory: float | None = None
    memory_bytes_per_second: float | None = None
    cores_per_host: int | None = None
    speed_spread: float | None = None
    step_jitter: float | None = None
    price_per_host_hour: float | None = None
    currency: str = "USD"
    host_hours_to_failure: float | None = None
    checkpoint_bytes_per_second: float | None = None
    recovery_seconds: float | None = None

    def placed(self, workers: int) -> WorkerPlacement:
        """Where so many workers are: hosts are filled one after another.

        Raises:
            ConfigurationError: they need several hosts, and no network is known.
        """
        hosts = math.ceil(workers / self.devices_per_host)
        if hosts > 1 and self.network is None:
            raise ConfigurationError(
                f"{workers} workers need {hosts} hosts, and {self.name} has no network.",
                hint=f"Add a network to the cluster, or plan up to {self.devices_per_host} workers.",
            )
        return WorkerPlacement(
            workers=workers,
            per_host=min(workers, self.devices_per_host),
            hosts=hosts,
            within=self.within,
            network=self.network if hosts > 1 else None,
        )


@dataclass(frozen=True, kw_only=True)
class WorkerPlacement:
    """Workers of one collective on hosts.

    Attributes:
        workers: all workers.
        per_host: the most workers of a host, which share its link to the network.
        hosts: the hosts.
        within: the link between workers of a host.
        network: the link of a host; None for a single host.
    """

    workers: int
    per_host: int
    hosts: int
    within: ClusterLink
    network: ClusterLink | None

    @classmethod
    def on_one_host(cls, workers: int) -> WorkerPlacement:
        """Workers of one host; its link is of no account."""
        within = ClusterLink(kind="memory", bytes_per_second=math.inf, efficiency=1.0)
        return cls(workers=workers, per_host=workers, hosts=1, within=within, network=None)


def known_clusters() -> dict[str, Cluster]:
    """The known machines, by name."""
    fields = read_fields(_MACHINES)
    clusters = [_cluster(entry) for entry in fields.objects("machines")]
    fields.check_all_taken()
    return {cluster.name: cluster for cluster in clusters}


def this_machine(device: str, *, workers: int, accelerated: bool) -> Cluster:
    """This machine, or one with an accelerator for each worker, without a network.

    Args:
        device: the name of the device, as in the rates of a profile.
        workers: the workers, which share cores and memory if they compute on processors.
        accelerated: whether each has an accelerator.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Cluster(
        name="this machine",
        source="this machine; the rate between its processes is assumed, not measured",
        device=device,
        devices_per_host=workers,
        cores_per_host=None if accelerated else len(os.sched_getaffinity(0)),
        within=ClusterLink(kind="pcie" if accelerated else "memory", bytes_per_second=5e9, efficiency=1.0),
        network=None,
        device_memory=None if accelerated else memory / workers,
    )


def cluster_of(name: str) -> Cluster:
    """A known machine, or that of a file.

    Raises:
        ConfigurationError: there is neither, or the file is no cluster.
    """
    known = known_clusters()
    if name in known:
        return known[name]
    if not name.endswith(".json") and not Path(name).exists():
        raise ConfigurationError(
            f"There is no cluster {name!r}.",
            hint=f"Give a file, or a known machine. {known_are(known, name)}",
        )
    return read_cluster(Path(name))


def read_cluster(path: Path) -> Cluster:
    """Reads a cluster.

    Raises:
        ConfigurationError: the file cannot be read, or is no cluster.
    """
    return _cluster(read_fields(path))


def _cluster(fields: JsonFields) -> Cluster:
    cores = fields.number_or_none("cores_per_host", least=1, most=1e6)
    network = fields.object_or_none("network")
    cluster = Cluster(
        name=fields.text("name"),
        source=fields.text("source", ""),
        device=fields.text("device"),
        devices_per_host=fields.whole("devices_per_host", 1, least=1, most=10_000),
        within=_link(fields.object("within")),
        network=None if network is None else _link(network),
        device_memory=fields.number_or_none("device_memory", least=1),
        memory_bytes_per_second=fields.number_or_none("memory_bytes_per_second", least=1),
        cores_per_host=None if cores is None else int(cores),
        speed_spread=fields.number_or_none("speed_spread", most=0.3),
        step_jitter=fields.number_or_none("step_jitter", most=0.4),
        price_per_host_hour=fields.number_or_none("price_per_host_hour"),
        currency=fields.text("currency", "USD"),
        host_hours_to_failure=fields.number_or_none("host_hours_to_failure", least=1e-6),
        checkpoint_bytes_per_second=fields.number_or_none("checkpoint_bytes_per_second", least=1),
        recovery_seconds=fields.number_or_none("recovery_seconds"),
    )
    fields.check_all_taken()
    return cluster


def _link(fields: JsonFields) -> ClusterLink:
    link = ClusterLink(
        kind=fields.word("kind", LINKS),
        bytes_per_second=fields.number("bytes_per_second", least=1),
        efficiency=fields.number("efficiency", 1.0, least=0.01, most=1),
    )
    fields.text("source", "")
    fields.check_all_taken()
    return link
