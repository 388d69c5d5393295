"""What is compared: which programs under which strategy and transport, in the short and in the long form."""

from __future__ import annotations

import zlib
from collections.abc import Collection
from dataclasses import dataclass, replace

from tests.contract.harness import HELD_KINDS
from tests.programs.registry import listed
from tests.programs.strategies import STRATEGIES

SHORT_SHARE = 48
"""The short form takes one program of the contract in so many, each strategy others."""

# A program of the second kind goes on with what the base's program of the first kind left.
BEFORE, AFTER = "interrupted_", "resumed_"

# With two replicas alone a sum has one order.
_OF_THREE = ("three_devices", "three_workers")
_PROGRAMS_OF_THREE = ("order_of_arrays", "each_steps_loss", "many_steps_accumulated", "loop_of_ones_own")

# What depends on how values travel.
_PROGRAMS_OF_TRANSPORTS = (
    "many_steps_a_call",
    "each_steps_loss",
    "many_steps_of_an_own_step",
    "many_steps_accumulated",
    "many_steps_in_float16",
    "interrupted_arrays",
    "resumed_arrays",
    "divided_state",
    "rows_of_tables",
    "loop_of_ones_own",
)

# What a recording layer notes stays in the process that computes, which is not the chief.
_NOT_UNDER_SERVERS = "order_of_"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The programs that both trees run under one strategy.

    Attributes:
        strategy: as in `tests.programs.strategies`.
        communication: what the workers' values travel by; None for the strategy's own choice.
        programs: names, in the order in which they run.
    """

    strategy: str
    communication: str | None = None
    programs: tuple[str, ...]

    @property
    def name(self) -> str:
        """The strategy, and the transport where one was asked for."""
        return self.strategy if self.communication is None else f"{self.strategy}-{self.communication}"

    def case(self, program: str) -> str:
        """The name of a case, "strategy/program"."""
        return f"{self.name}/{program}"

    def only(self, programs: Collection[str]) -> Comparison:
        """Some of its programs. One that goes on with another one's checkpoint brings that one along."""
        asked = {*programs, *(name.replace(AFTER, BEFORE, 1) for name in programs)}
        return replace(self, programs=tuple(name for name in self.programs if name in asked))


# TensorFlow's own, of which one device is compared as `one_device`.
_NOT_COMPARED = ("default",)


def comparisons(*, long: bool) -> list[Comparison]:
    """All that is to be compared; the long form runs every program of the contract."""
    own = tuple(entry.name for entry in listed("recording"))
    contract = listed(*HELD_KINDS)
    found = []
    for strategy in STRATEGIES:
        if strategy in _NOT_COMPARED:
            continue
        mine = (entry.name for entry in contract if entry.runs_under(strategy))
        mine = (name for name in mine if long or _is_dealt(strategy, name))
        here = tuple(n for n in own if not (STRATEGIES[strategy].served and n.startswith(_NOT_UNDER_SERVERS)))
        found.append(Comparison(strategy=strategy, programs=(*here, *mine)))
    travelling = own if long else _PROGRAMS_OF_TRANSPORTS
    # The ring is what `multi_worker` has chosen above: these processes have no GPU and are no ranks of MPI.
    found.append(Comparison(strategy="multi_worker", communication="mpi", programs=travelling))
    found += [Comparison(strategy=strategy, programs=_PROGRAMS_OF_THREE) for strategy in _OF_THREE]
    return found


def _is_dealt(strategy: str, program: str) -> bool:
    """Whether the short form runs a program under a strategy: by a hash, so a new program moves no other."""
    return zlib.crc32(f"{strategy}/{program}".encode()) % SHORT_SHARE == 0
