"""Compares the programs' results with those of one device, and holds the verdicts of a run as data.

It starts no process and formats no table.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dtrain.conformance.corpus import CorpusProgram
from dtrain.conformance.program_runs import ProgramAnswer

SAME, WRONG, ERROR = "same", "wrong", "error"
"""The outcomes: one device's numbers; other numbers without an error; an error, a crash or a hang."""


class ProgramVerdict(NamedTuple):
    """The outcome of one program under one strategy on one side.

    Attributes:
        outcome: SAME, WRONG or ERROR.
        reason: what differs, or the error; "" if the numbers are the same.
    """

    outcome: str
    reason: str = ""


@dataclass(kw_only=True)
class Conformance:
    """A whole run.

    Attributes:
        programs: those that were run.
        versions: of Python, TensorFlow, Keras and dtrain, by name.
        processor: the processor's model.
        cores: the number of cores.
        command: the command line.
        verdicts: by strategy, side and program.
        absent: the programs that fail on one device, with the error; they are compared with nothing.
        seconds: how long it took.
    """

    programs: list[CorpusProgram]
    versions: dict[str, str]
    processor: str
    cores: int
    command: str
    verdicts: dict[str, dict[str, dict[str, ProgramVerdict]]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def counted(self) -> list[CorpusProgram]:
        """The programs that run on one device."""
        return [program for program in self.programs if program.name not in self.absent]

    def count(self, strategy: str, side: str, outcome: str) -> int | None:
        """The number of programs with an outcome; None if the side was not run."""
        verdicts = self.verdicts.get(strategy, {}).get(side)
        return None if verdicts is None else sum(verdict.outcome == outcome for verdict in verdicts.values())

    def as_data(self) -> dict[str, Any]:
        """The run as data for JSON."""
        return {
            "versions": self.versions,
            "processor": self.processor,
            "cores": self.cores,
            "command": self.command,
            "seconds": round(self.seconds),
            "programs": [program._asdict() for program in self.programs],
            "absent": self.absent,
            "verdicts": {
                strategy: {
                    side: {name: list(verdict) for name, verdict in verdicts.items()}
                    for side, verdicts in sides.items()
                }
                for strategy, sides in self.verdicts.items()
            },
        }


def compare(program: CorpusProgram, found: ProgramAnswer, expected: ProgramAnswer) -> ProgramVerdict:
    """Compare an answer with one device's: whole numbers and text exactly, others within the tolerance."""
    import numpy as np

    if found.error:
        return ProgramVerdict(ERROR, found.error)
    if set(found.values) != set(expected.values):
        apart = sorted(set(found.values) ^ set(expected.values))
        return ProgramVerdict(WRONG, f"{', '.join(apart)[:80]} is not on both sides")
    worst, where = 0.0, ""
    for name, wanted in expected.values.items():
        value = found.values[name]
        if value.shape != wanted.shape:
            return ProgramVerdict(WRONG, f"{name} has the shape {value.shape} instead of {wanted.shape}")
        if not np.issubdtype(wanted.dtype, np.floating):
            if not np.array_equal(value, wanted):
                return ProgramVerdict(WRONG, f"{name} is {str(value)[:40]} instead of {str(wanted)[:40]}")
            continue
        far = _distance(
            value.astype(np.float64), wanted.astype(np.float64), floor=program.atol / program.rtol
        )
        if far > worst:
            worst, where = far, name
    if worst > program.rtol:
        return ProgramVerdict(WRONG, f"{where} differs by {worst:.2g} of its value")
    return ProgramVerdict(SAME)


def _distance(found: Any, wanted: Any, *, floor: float) -> float:
    """The largest relative difference; the same infinity or NaN on both sides is no difference."""
    import numpy as np

    same = (found == wanted) | (np.isnan(found) & np.isnan(wanted))
    with np.errstate(invalid="ignore"):
        far = np.where(same, 0.0, np.abs(found - wanted) / (np.abs(wanted) + floor))
    return float(np.max(np.where(np.isnan(far), np.inf, far), initial=0.0))
