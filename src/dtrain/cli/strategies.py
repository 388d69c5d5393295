"""`dtrain strategies`: compares all strategies, and shows which of them this machine can run.

It prints the entries of `strategies/registry.py` and the results of `strategies/feasibility.py`, as text or
as JSON. It decides nothing itself.
"""

from __future__ import annotations

import argparse
import json
import shutil
from typing import TYPE_CHECKING, Any

from dtrain.base.text_table import lines_of
from dtrain.strategies.registry import STRATEGIES, StrategyEntry

if TYPE_CHECKING:
    from dtrain.strategies.feasibility import Feasibility
    from dtrain.strategies.machine import Machine

HELP = "compare the strategies, and show which of them this machine can run"

# The fields of an entry that the JSON shows as they are.
_SHOWN = ("name", "made_by", "purpose", "updates", "replicas", "failure", "ease", "limits")
_NARROWEST, _WIDEST = 100, 160  # characters a line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `dtrain strategies`."""
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def run(args: argparse.Namespace) -> int:
    """Print the tables, or the JSON; return 0.

    Raises:
        ConfigurationError: the environment contradicts itself.
        UnsupportedVersionError: TensorFlow cannot be imported.
    """
    from dtrain.strategies.feasibility import feasibilities
    from dtrain.strategies.machine import examine_machine

    machine = examine_machine()
    here = feasibilities(machine)
    if args.json:
        print(json.dumps(as_data(here, machine), indent=2))
        return 0
    width = min(max(shutil.get_terminal_size((120, 24)).columns, _NARROWEST), _WIDEST)
    print(as_text(here, machine, width=width))
    return 0


def as_data(here: dict[str, Feasibility], machine: Machine) -> dict[str, Any]:
    """The contents of the tables, and the machine, as data for JSON."""
    return {
        "strategies": [
            {
                **{name: getattr(strategy, name) for name in _SHOWN},
                "class": strategy.class_name,
                "replicas_now": here[strategy.name].replicas,
                "here": here[strategy.name].can,
                "why": here[strategy.name].why,
                "auto": strategy.name == machine.auto,
            }
            for strategy in STRATEGIES.values()
        ],
        "auto": {"strategy": machine.auto, "reason": machine.auto_reason},
        "machine": {
            "processor": machine.processor,
            "cores": len(machine.cores),
            "gpus": list(machine.gpus),
            "tensorflow": machine.tensorflow,
            "keras": machine.keras,
        },
    }


def as_text(here: dict[str, Feasibility], machine: Machine, *, width: int) -> str:
    """Two tables in lines of `width` characters: what this machine can run, and what each strategy is for."""
    gpus = {0: "no GPU", 1: "one GPU"}.get(len(machine.gpus), f"{len(machine.gpus)} GPUs")
    on_this = [
        _on_this_machine(strategy, here[strategy.name], strategy.name == machine.auto)
        for strategy in STRATEGIES.values()
    ]
    about = [
        [
            strategy.name,
            strategy.purpose,
            strategy.updates,
            *(_plain(text) for text in (strategy.failure, strategy.ease)),
        ]
        for strategy in STRATEGIES.values()
    ]
    return "\n".join(
        [
            f"On this machine ({len(machine.cores)} cores, {gpus}; {machine.processor}; "
            f"TensorFlow {machine.tensorflow}, Keras {machine.keras}):",
            "",
            *lines_of(("", "class", "replicas", "here"), on_this, width=width, right=[2], wrapped=[3]),
            "",
            f"* auto chooses {machine.auto}: {machine.auto_reason}.",
            "",
            "What each strategy is for:",
            "",
            *lines_of(
                ("", "for", "updates", "when a process dies", "how to start it"),
                about,
                width=width,
                wrapped=[1, 2, 3, 4],
                apart=True,
            ),
        ]
    ).rstrip()


def _on_this_machine(entry: StrategyEntry, here: Feasibility, chosen: bool) -> list[str]:
    replicas = ("as asked for" if here.can else "-") if here.replicas is None else f"{here.replicas}"
    verdict = f"{'yes' if here.can else 'no'}: {here.why}"
    return [f"{entry.name}{' *' if chosen else ''}", entry.class_name, replicas, verdict]


def _plain(text: str) -> str:
    """The text without Markdown's backquotes."""
    return text.replace("`", "")
