"""The stored numbers of same-bits: when they are compared with, and what is found where they are.

What the programs give is `tests/same_bits`' own to show.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.contract.harness import Report
from tests.programs.registry import listed
from tests.same_bits import store
from tests.same_bits.compare import Intended, difference
from tests.same_bits.differences import differences, record, stored_for
from tests.same_bits.plan import Comparison
from tests.same_bits.store import Case, Files, Stored, key_here

DIGESTS = {entry.name: entry.digest for entry in listed("recording")}
PLAN = Comparison(strategy="mirrored", programs=("each_steps_loss", "interrupted_arrays", "resumed_arrays"))
LEFT = Files({"backup/step-3/share.data": b"\x00\x01", "backup/COMMITTED.json": b"{}"})
BASE, NOW = Path("base"), Path("now")


def values(of: float = 1.0) -> dict[str, np.ndarray]:
    return {"loss": np.asarray(of), "weights": np.full((2, 3), of, "float32"), "steps": np.asarray(7)}


@pytest.fixture
def stored() -> Stored:
    """The numbers of all programs of PLAN, in a commit that is called "base"."""
    cases = {PLAN.case(program): Case(DIGESTS[program], values()) for program in PLAN.programs}
    return Stored("base", key_here(), cases, {PLAN.case("interrupted_arrays"): LEFT})


class Runs:
    """Runs no program: each gives the usual values, but for those that are told.

    Args:
        changed: the reports or values of programs, by tree and program.
    """

    def __init__(self, changed: dict[tuple[Path, str], Any] | None = None) -> None:
        self.changed = changed or {}
        self.made: list[tuple[tuple[str, ...], tuple[Path, ...], set[str]]] = []

    def __call__(
        self, plan: Comparison, trees: Sequence[Path], left: dict[str, Files]
    ) -> Iterator[tuple[str, list[Report]]]:
        self.made.append((plan.programs, tuple(trees), set(left)))
        for program in plan.programs:
            found = [self.changed.get((tree, program), values()) for tree in trees]
            yield program, [v if "status" in v else {"status": "ok", "values": v} for v in found]

    def differences(self, stored: Stored | None, *intended: Intended) -> dict[str, str]:
        return dict(differences([PLAN], NOW, lambda: BASE, stored, intended, self))


def test_with_stored_numbers_only_this_tree_runs_and_goes_on_with_the_stored_checkpoint(
    stored: Stored,
) -> None:
    runs = Runs()
    assert runs.differences(stored) == dict.fromkeys(map(PLAN.case, PLAN.programs), "")
    assert runs.made == [(PLAN.programs, (NOW,), {PLAN.case("interrupted_arrays")})]


def test_without_stored_numbers_both_trees_run() -> None:
    runs = Runs({(NOW, "resumed_arrays"): values(2.0)})
    found = runs.differences(None)
    assert found.pop(PLAN.case("resumed_arrays")) == "loss by 1.0e+00, weights by 1.0e+00"
    assert set(found.values()) == {""}
    assert runs.made == [(PLAN.programs, (BASE, NOW), set())]


def test_one_changed_bit_is_found_and_confirmed_beside_the_base(stored: Stored) -> None:
    changed = values()
    changed["weights"][1, 2] = np.nextafter(np.float32(1), np.float32(2))
    runs = Runs({(NOW, "each_steps_loss"): changed})
    found = runs.differences(stored)
    assert found.pop(PLAN.case("each_steps_loss")) == "weights by 1.2e-07"
    assert set(found.values()) == {""}
    assert [made[:2] for made in runs.made] == [(PLAN.programs, (NOW,)), (PLAN.programs, (BASE, NOW))]


@pytest.mark.parametrize(
    ("now", "text"),
    [
        ({"loss": np.asarray(1.0)}, "other values: steps, weights"),
        (values() | {"steps": np.asarray(7, "int32")}, "steps is int32(), not int64()"),
        ({"status": "error", "error": "ValueError: no"}, "fails in this tree: ValueError: no"),
    ],
)
def test_other_names_types_and_failures_are_found(now: Any, text: str, stored: Stored) -> None:
    found = Runs({(NOW, "each_steps_loss"): now}).differences(stored)
    assert found[PLAN.case("each_steps_loss")] == text


def test_numbers_that_the_base_has_here_too_are_the_same(
    stored: Stored, capsys: pytest.CaptureFixture[str]
) -> None:
    other = {(tree, "each_steps_loss"): values(1.5) for tree in (BASE, NOW)}
    assert not any(Runs(other).differences(stored).values())
    assert (
        "mirrored/each_steps_loss: here the base's are others, too: loss by 5.0e-01"
        in capsys.readouterr().out
    )


def test_an_intended_difference_needs_no_run_of_the_base(stored: Stored) -> None:
    runs = Runs({(NOW, "each_steps_loss"): values(1.5)})
    found = runs.differences(stored, Intended(("mirrored/each_*",), "rounded once less"))
    assert found[PLAN.case("each_steps_loss")] == "loss by 5.0e-01, weights by 5.0e-01"
    assert len(runs.made) == 1


def test_an_error_is_never_an_intended_difference(stored: Stored) -> None:
    entry = Intended(("mirrored/each_*",), "rounded once less")
    runs = Runs({(NOW, "each_steps_loss"): {"status": "error", "error": "ValueError: no"}})
    found = runs.differences(stored, entry)[PLAN.case("each_steps_loss")]
    assert len(runs.made) == 2
    assert not entry.covers(PLAN.case("each_steps_loss"), found)
    assert entry.covers(PLAN.case("each_steps_loss"), "loss by 5.0e-01")


def test_what_the_base_alone_cannot_run_may_be_intended() -> None:
    entry = Intended(("mirrored/each_*",), "a method is new")
    failed = {"status": "error", "error": "AttributeError: "}
    ran = {"status": "ok", "values": {}}
    found = [difference(failed, ran), difference(failed, failed), difference(ran, failed)]
    assert [entry.covers(PLAN.case("each_steps_loss"), each) for each in found] == [True, False, False]


def test_what_is_not_stored_runs_in_both_trees(stored: Stored) -> None:
    del stored.cases[PLAN.case("each_steps_loss")]
    runs = Runs({(NOW, "each_steps_loss"): values(1.5)})
    assert runs.differences(stored)[PLAN.case("each_steps_loss")] == "loss by 5.0e-01, weights by 5.0e-01"
    assert [made[:2] for made in runs.made] == [
        (PLAN.programs[1:], (NOW,)),
        (PLAN.programs[:1], (BASE, NOW)),
    ]


@pytest.mark.parametrize(
    ("edited", "again"),
    [
        ("each_steps_loss", ("each_steps_loss",)),
        (
            "interrupted_arrays",
            ("interrupted_arrays", "resumed_arrays"),
        ),  # with the checkpoint of the program now
    ],
)
def test_an_edited_program_runs_in_both_trees(edited: str, again: tuple[str, ...], stored: Stored) -> None:
    stored.cases[PLAN.case(edited)] = Case("the digest of another text", values())
    runs = Runs()
    assert not any(runs.differences(stored).values())
    assert runs.made[-1][:2] == (again, (BASE, NOW))


def test_stored_numbers_come_back_to_the_bit_and_as_the_same_bytes(stored: Stored, tmp_path: Path) -> None:
    odd = {
        "nan": np.asarray([np.nan, -0.0, np.inf]),
        "text": np.asarray(["a", "ß"]),
        "none": np.zeros((0, 3)),
    }
    stored.cases[PLAN.case("each_steps_loss")] = Case("digest", odd | {"bytes": np.asarray([b"ab", b"c"])})
    one, other = tmp_path / "one.zip", tmp_path / "other.zip"
    stored.write(one)
    again = Stored.read(one)
    again.write(other)
    assert one.read_bytes() == other.read_bytes()
    assert (again.commit, again.key, again.left) == (stored.commit, stored.key, stored.left)
    for name, case in stored.cases.items():
        for key, value in case.values.items():
            found = again.cases[name].values[key]
            assert (found.dtype, found.shape, found.tobytes()) == (value.dtype, value.shape, value.tobytes())


def test_what_is_stored_already_is_not_recorded_again(stored: Stored, tmp_path: Path) -> None:
    file = tmp_path / "stored.zip"
    stored.cases[PLAN.case("each_steps_loss")] = Case("the digest of another text", values(2.0))
    stored.cases["mirrored/gone"] = Case("digest", values())
    stored.write(file)
    runs = Runs()
    record([PLAN], "base", BASE, file, runs)
    assert [made[:2] for made in runs.made] == [(("each_steps_loss",), (BASE,))]
    again = Stored.read(file)
    assert set(again.cases) == {PLAN.case(program) for program in PLAN.programs}
    assert again.cases[PLAN.case("each_steps_loss")].program == DIGESTS["each_steps_loss"]
    assert again.cases[PLAN.case("each_steps_loss")].values["loss"] == 1.0
    assert again.left == stored.left


def test_a_program_that_fails_is_not_recorded(tmp_path: Path) -> None:
    plan = replace(PLAN, programs=("many_steps_a_call", "each_steps_loss"))
    runs = Runs({(BASE, "each_steps_loss"): {"status": "error", "error": "ValueError: no"}})
    with pytest.raises(SystemExit, match="mirrored/each_steps_loss fails in base: ValueError: no"):
        record([plan], "base", BASE, tmp_path / "stored.zip", runs)
    assert set(Stored.read(tmp_path / "stored.zip").cases) == {"mirrored/many_steps_a_call"}


def test_objects_are_not_stored(stored: Stored, tmp_path: Path) -> None:
    stored.cases["mirrored/x"] = Case("digest", {"x": np.asarray([None, {}], object)})
    with pytest.raises(TypeError, match="has no bits"):
        stored.write(tmp_path / "one.zip")


@pytest.mark.parametrize("part", sorted(key_here()))
def test_numbers_of_other_versions_or_processors_do_not_fit(
    part: str, stored: Stored, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "stored.zip"
    replace(stored, key=stored.key | {part: "another"}).write(file)
    assert stored_for("base", file) is None
    assert f"{part} is {key_here()[part]}, not another" in capsys.readouterr().out


def test_only_the_numbers_of_the_commit_fit(
    stored: Stored, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "stored.zip"
    assert stored_for("base", file) is None
    stored.write(file)
    assert stored_for("base", file) is not None
    assert stored_for("1234567", file) is None
    printed = capsys.readouterr().out.splitlines()
    assert [line.rpartition(": ")[2] for line in printed] == [
        "there is no stored.zip",
        "they are those of base, not of 1234567",
    ]


def test_a_damaged_file_is_an_error(stored: Stored, tmp_path: Path) -> None:
    whole = tmp_path / "whole.zip"
    stored.write(whole)
    content = whole.read_bytes()
    middle = len(content) // 3
    damaged = {
        "short": content[: len(content) // 2],
        "empty": b"",
        "flipped": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
    }
    for name, changed in damaged.items():
        (tmp_path / name).write_bytes(changed)
    replace(stored, left={}).write(tmp_path / "without a checkpoint")
    with zipfile.ZipFile(tmp_path / "without numbers", "w") as archive:
        archive.writestr("mirrored/interrupted_arrays/x", b"")
    for name in (*damaged, "without a checkpoint", "without numbers"):
        with pytest.raises(SystemExit, match=f"{name} is damaged"):
            Stored.read(tmp_path / name)


def test_the_processor_is_told_by_its_maker_and_the_units_that_compute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cpuinfo"
    monkeypatch.setattr(store, "_CPUINFO", file)
    assert (key_here()["maker"], key_here()["units"]) == ("", "")
    each = "vendor_id\t: GenuineIntel\nflags\t\t: fpu sse2 smep fma amx_bf16 avx512f avx2\n"
    file.write_text(f"processor\t: 0\n{each}\nprocessor\t: 1\n{each}")
    found = key_here()
    assert (found["maker"], found["units"]) == ("GenuineIntel", "amx_bf16 avx2 avx512f fma sse2")


def test_what_is_in_the_repository_is_of_the_base() -> None:
    base = (store.FILE.parent / "base").read_text().strip()
    assert Stored.read().commit == base, "run: make same-bits-record"
