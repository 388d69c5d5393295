"""`dtrain strategies`: what it says of this machine and of others; docs/strategies.md has the same table."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dtrain.cli.strategies import as_text
from dtrain.strategies.feasibility import feasibilities
from dtrain.strategies.machine import Machine
from dtrain.strategies.registry import STRATEGIES, resolve_name

ROOT = Path(__file__).parents[2]


def here(**found: Any) -> dict[str, tuple[bool, int | None, str]]:
    return {
        name: tuple(each)
        for name, each in feasibilities(Machine(processor="", cores=(0, 1), **found)).items()
    }


def test_every_strategy_has_a_rule_and_is_found_by_its_class() -> None:
    assert list(STRATEGIES) == list(here())
    for each in list(STRATEGIES.values())[1:]:
        assert resolve_name(each.class_name) == each.name
    for each in STRATEGIES.values():
        assert all((each.purpose, each.updates, each.replicas, each.failure, each.ease, each.limits))


def table(heads: tuple[str, ...], *fields: str) -> str:
    """A table of `docs/strategies.md`, as Markdown: these fields of each strategy."""
    rows = [(f"`{each.name}`", *(getattr(each, field) for field in fields)) for each in STRATEGIES.values()]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, *rows)).replace(
        "\n", f"\n|{'---|' * len(heads)}\n", 1
    )


def test_the_guide_has_the_same_words() -> None:
    guide = (ROOT / "docs" / "strategies.md").read_text(encoding="utf-8")
    assert table(("name", "for", "limits"), "purpose", "limits") in guide
    assert table(("name", "updates", "when a process dies"), "updates", "failure") in guide
    for each in STRATEGIES.values():
        assert f"- `{each.name}`: `{each.made_by}`; replicas: {each.replicas}\n" in guide


def test_a_machine_without_anything() -> None:
    found = here()
    assert found["default"][:2] == found["one_device"][:2] == found["mirrored"][:2] == (True, 1)
    assert found["multi_worker"] == (True, None, "with --workers N, over ring or MPI")
    assert found["parameter_server"][0]
    assert found["tpu"] == (False, None, "the environment names no TPU (TPU_NAME)")


@pytest.mark.parametrize(
    ("found", "name", "replicas", "said"),
    [
        ({"gpus": ("GPU:0", "GPU:1", "GPU:2")}, "mirrored", 3, "3 GPUs"),
        ({"gpus": ("GPU:0",)}, "central_storage", 1, "the same as one device"),
        ({"logical_cpus": 4}, "mirrored", 4, "share the cores"),
        ({"gpus": ("GPU:0",)}, "multi_worker", None, "NCCL"),
        ({"mpi_problem": "no starter"}, "multi_worker", None, "over ring; no MPI: no starter"),
        ({"job_workers": 3, "gpus": ("GPU:0", "GPU:1")}, "multi_worker", 6, "this job has 3 workers"),
        ({"tpu": "local"}, "tpu", None, "names a TPU (local)"),
        ({"job_workers": 2, "job_servers": 1}, "parameter_server", 1, "1 parameter server"),
    ],
)
def test_what_can_run(found: dict[str, Any], name: str, replicas: int | None, said: str) -> None:
    can, count, why = here(**found)[name]
    assert can
    assert count == replicas
    assert said in why


@pytest.mark.parametrize(
    ("found", "name", "said"),
    [
        ({"servers_problem": "no ports"}, "multi_worker", "no ports"),
        ({"servers_problem": "no ports"}, "parameter_server", "no ports"),
        ({"job_workers": 2}, "parameter_server", "this job has no parameter servers"),
        ({"job_workers": 2, "job_servers": 1}, "multi_worker", "this job has parameter servers"),
    ],
)
def test_what_cannot(found: dict[str, Any], name: str, said: str) -> None:
    can, _, why = here(**found)[name]
    assert not can
    assert said in why


@pytest.mark.parametrize("width", [100, 140])
def test_the_text_fits_and_marks_the_choice_of_auto(width: int) -> None:
    machine = Machine(processor="x", cores=(0,), auto="mirrored", auto_reason="this machine has 2 GPUs")
    lines = as_text(feasibilities(machine), machine, width=width).splitlines()
    assert max(map(len, lines)) <= width
    assert any(line.startswith("mirrored *") for line in lines)
    assert "* auto chooses mirrored: this machine has 2 GPUs." in lines


def test_the_command_on_this_machine() -> None:
    """It looks in a process of its own: the command itself never imports TensorFlow."""
    program = (
        "import sys; from dtrain.cli import main; status = main(['strategies', '--json']);"
        "sys.exit(status or ('tensorflow' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    rows = {row["name"]: row for row in found["strategies"]}
    assert set(rows) == set(STRATEGIES)
    assert rows["default"]["here"] is True and rows["tpu"]["here"] is False
    assert [name for name, row in rows.items() if row["auto"]] == [found["auto"]["strategy"]]
    assert found["auto"]["reason"]
    assert found["machine"]["cores"] >= 1
    assert found["machine"]["tensorflow"].startswith("2.")


def test_a_wrong_environment_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from dtrain import cli

    monkeypatch.setenv("TF_CONFIG", "{")
    assert cli.main(["strategies"]) == 2
