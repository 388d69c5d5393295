"""When and how long is saved, more fits than one, another number of workers, and parameter servers."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest

from fault_jobs import Training, assert_nothing_left, assert_recovered, assert_same, run, undisturbed

pytestmark = pytest.mark.timeout(1800)

MANY = ("--max-restarts", "30")
KILLED = 128 + signal.SIGKILL
TOLERANCE = 2e-4


def test_several_fits_of_one_program_and_kills_in_and_between_them(tmp_path: Path) -> None:
    """Saved by seconds, by epochs, stopped early, in one folder; nothing that was complete is made again."""
    stopped, longer = {"epochs": 5, "stop_after": 2}, {"epochs": 4}
    plain, early, long = undisturbed(tmp_path / "undisturbed", "one", {}, stopped, longer)
    shared = {"backup": "../backup"}
    keeping = {"backup": "../kept", "save": {"save_freq": 8, "delete_checkpoint": False}}

    def kill(step: int | str) -> dict[str, list[dict[str, object]]]:
        return {"faults": [{"kind": "SIGKILL", "step": step}]}

    options = {
        "seconds": {**shared, "save": {"save_freq": False, "save_seconds": 1e-3}, **kill(29)},
        "epochs": {**shared, "save": {"save_freq": "epoch"}, **kill(29)},
        "stopped": {**shared, **stopped, **kill("after")},
        "kept": {**keeping, **kill("after")},
        "more": {**keeping, **longer, **kill(70)},
    }
    trainings = {name: Training(tmp_path / name, settings) for name, settings in options.items()}
    # An attempt whose first fits are complete goes through them at once, and what it kept has more epochs
    # then than the fit that kept it: that one's result is looked at in a program of its own.
    job = run(
        [trainings["seconds"], trainings["epochs"], trainings["stopped"], trainings["kept"]], options=MANY
    )
    assert job.text.count("All are started again") == 4, job.text
    for name in ("seconds", "epochs", "kept"):
        assert_same(trainings[name], plain)
    assert_same(trainings["stopped"], early, epochs=2)
    assert_nothing_left(trainings["seconds"])
    for name, processes in (("seconds", 2), ("epochs", 2), ("stopped", 1), ("kept", 1)):
        assert len({pid for pid, _, _ in trainings[name].steps()}) == processes, f"{name} was trained again"
    assert trainings["epochs"].fault(0)["committed"] == 20
    assert 0 < trainings["seconds"].fault(0)["committed"] < 29  # wall clock: a step, not a time
    for name in ("seconds", "epochs"):
        assert_recovered(job, trainings[name], 0)

    # What was kept is gone on with by a later job that has more epochs.
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "log.csv").write_bytes((tmp_path / "kept" / "log.csv").read_bytes())
    job = run([trainings["more"]], options=MANY)
    assert_same(trainings["more"], long)
    assert_recovered(job, trainings["more"], 0)
    assert trainings["more"].steps()[0][1] == 61


@pytest.mark.soak("test_launch_faults.py goes on with fewer workers, test_elastic.py with more")
def test_another_number_of_workers_goes_on_at_the_same_step(tmp_path: Path) -> None:
    """From two to one and back: the same numbers but for the order of sums, and it is said."""
    options = {"strategy": "multi_worker", "policy": "float32", "dropout": 0.0, "normalize": False}
    (expected,) = undisturbed(tmp_path / "undisturbed", "multi_worker", options)
    faults = [{"kind": "SIGKILL", "step": step} for step in (25, 45)]
    training = Training(tmp_path / "job", {**options, "faults": faults})
    run([training], status=KILLED, workers=2, options=("--max-restarts", "0"))
    for workers, before, fault in ((1, 2, 0), (2, 1, 1)):
        made = len(training.steps())
        status = KILLED if workers == 1 else 0
        job = run([training], status=status, workers=workers, options=("--max-restarts", "0"))
        writers = "1 worker" if before == 1 else f"{before} workers"
        assert f"It was written by {writers}; now there are {workers}, with the same global" in job.text
        assert training.steps()[made][1] >= training.fault(fault)["committed"] + 1
    result = training.result()
    assert result["history"]["seen_once"] == expected["history"]["seen_once"]
    assert (result["epochs"], result["iterations"]) == (expected["epochs"], expected["iterations"])
    for name, values in expected["history"].items():
        np.testing.assert_allclose(
            result["history"][name], values, rtol=TOLERANCE, atol=TOLERANCE, err_msg=name
        )
    np.testing.assert_allclose(result["values"], expected["values"], rtol=TOLERANCE, atol=TOLERANCE)
    assert_nothing_left(training)


@pytest.mark.soak("test_parameter_server_restarts.py kills each task, in smaller jobs")
def test_parameter_servers_go_on_after_the_death_of_each(tmp_path: Path) -> None:
    """The chief's alone changes no bit with one worker; a worker's and a server's may change some."""
    chief = {"kind": "SIGKILL", "step": 30, "worker": "chief:0"}
    others = [
        {"kind": "SIGKILL", "step": 15, "worker": "chief:0", "target": "worker:0"},
        {"kind": "SIGKILL", "step": 45, "worker": "chief:0", "target": "ps:0"},
    ]
    options = {"strategy": "parameter_server"}
    alone = Training(tmp_path / "alone", {**options, "save": None})
    killed = Training(tmp_path / "killed", {**options, "faults": [chief]})
    run([alone], options=("--ps", "1"))
    job = run([killed], options=("--ps", "1"))
    assert "The whole job is started again" in job.text
    assert_same(killed, alone.result())
    assert_recovered(job, killed, 0)
    assert_nothing_left(killed)
    training = Training(tmp_path / "others", {**options, "faults": others})
    job = run([training], options=("--ps", "1"))
    assert "worker 0 was killed by signal 9 (SIGKILL); it is started again" in job.text
    assert "The whole job is started again" in job.text
    assert training.result()["epochs"] == [0, 1, 2]
    assert_recovered(job, training, 1)
    assert_nothing_left(training)
