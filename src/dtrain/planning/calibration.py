"""What a plan knows of transports: latencies, overheads, and which rules they follow.

The defaults are in `transports.json`, each with its source. A file of the same form, with what was measured
on the machines at hand, takes their place.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dtrain.collectives.reduction_rules import BUCKET
from dtrain.errors import ConfigurationError, known_are
from dtrain.planning.cluster import LINKS
from dtrain.planning.json_fields import JsonFields, read_fields

SHAPES = ("ring", "tree", "parts")
GROUPINGS = ("buckets", "tensors")

_TRANSPORTS = Path(__file__).parent / "transports.json"


@dataclass(frozen=True, kw_only=True)
class CollectiveAlgorithm:
    """One way in which a transport makes a collective.

    Attributes:
        shape: "ring": each worker sends to the next one. "tree": chains in hosts, and a binary tree between
            them. "parts": each worker sends each other one its part of the vector, as dtrain itself does.
        launch_seconds: of each call, before the first byte.
        latency: seconds of one message, by the kind of link.
        efficiency: the part of the links' data rate that the algorithm reaches.
        message_seconds: processor time of each message; of "parts" only.
        largest: the most bytes that go in this way; None without a limit.
    """

    shape: str
    launch_seconds: float
    latency: dict[str, float]
    efficiency: float = 1.0
    message_seconds: float = 0.0
    largest: float | None = None


@dataclass(frozen=True, kw_only=True)
class TransportCosts:
    """A transport.

    Attributes:
        name, source: the name, and where the figures come from.
        algorithms: the algorithms; the fastest for the size is taken.
        grouping: "buckets" for several large gradients in a call, as dtrain's own transports have them;
            "tensors" for each large gradient alone.
        bucket_bytes: the most bytes of a bucket.
        overlap: whether it sends during the backward pass; None leaves it to the rule of spare cores.
        cpu_seconds_per_byte: processor time of a worker for each byte of an all-reduce.
        shares_cores: whether that time is taken from the worker's computation where it overlaps.
        slowdown: how much longer computation takes while something is sent beside it, as a part of its time:
            a GPU's communication takes processors and memory bandwidth from it.
    """

    name: str
    source: str
    algorithms: tuple[CollectiveAlgorithm, ...]
    grouping: str = "buckets"
    bucket_bytes: int = BUCKET
    overlap: bool | None = None
    cpu_seconds_per_byte: float = 0.0
    shares_cores: bool = False
    slowdown: float = 0.0


def transport_costs(path: Path | None = None) -> dict[str, TransportCosts]:
    """The costs of the transports, by name.

    Args:
        path: a file whose transports take the place of those of the same name; None for the defaults.

    Raises:
        ConfigurationError: the file cannot be read, is no calibration, or has a transport that is not known.
    """
    by_name = _read(_TRANSPORTS)
    given = {} if path is None else _read(path)
    if unknown := [name for name in given if name not in by_name]:
        raise ConfigurationError(
            f"{path} has a transport {unknown[0]!r}, which no plan uses.", hint=known_are(by_name, unknown[0])
        )
    return by_name | given


def _read(path: Path) -> dict[str, TransportCosts]:
    fields = read_fields(path)
    by_name = {costs.name: costs for costs in map(_costs, fields.objects("transports"))}
    fields.check_all_taken()
    return by_name


def _costs(fields: JsonFields) -> TransportCosts:
    costs = TransportCosts(
        name=fields.text("name"),
        source=fields.text("source", ""),
        algorithms=tuple(_algorithm(entry) for entry in fields.objects("algorithms")),
        grouping=fields.word("grouping", GROUPINGS, "buckets"),
        bucket_bytes=fields.whole("bucket_bytes", BUCKET, least=1),
        overlap=fields.flag_or_none("overlap"),
        cpu_seconds_per_byte=fields.number("cpu_seconds_per_byte", 0.0, most=1),
        shares_cores=bool(fields.flag_or_none("shares_cores")),
        slowdown=fields.number("slowdown", 0.0, most=10),
    )
    fields.check_all_taken()
    if all(algorithm.largest is not None for algorithm in costs.algorithms):
        raise ConfigurationError(
            f"{fields.place}: no algorithm sends vectors of any size.",
            hint="Leave largest out of one of the algorithms.",
        )
    return costs


def _algorithm(fields: JsonFields) -> CollectiveAlgorithm:
    latency = fields.object("latency")
    algorithm = CollectiveAlgorithm(
        shape=fields.word("shape", SHAPES),
        launch_seconds=fields.number("launch_seconds", 0.0, most=1e6),
        latency={kind: latency.number(kind) for kind in LINKS},
        efficiency=fields.number("efficiency", 1.0, least=0.01, most=1),
        message_seconds=fields.number("message_seconds", 0.0, most=1e6),
        largest=fields.number_or_none("largest", least=1),
    )
    latency.check_all_taken()
    fields.check_all_taken()
    return algorithm
