"""Workers that are ranks of an MPI start, by hand and by `dtrain launch --mpi`, with real processes."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from dtrain.errors import ConfigurationError, MPIError
from dtrain.launch import launch_local
from mpi_jobs import STARTER, by_hand, needs_mpi, script
from processes import traces
from refusals import refused
from restart_jobs import Ended, run

pytestmark = needs_mpi

# What a user's script does: it trains, and adds something up by itself.
TRAIN = """
import signal, sys
import keras
import numpy as np
import dtrain
from mpi4py import MPI

strategy = dtrain.strategy("auto")
keras.utils.set_random_seed(1)
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.random.default_rng(0).random((48, 4), np.float32)
losses = model.fit(x, x.sum(1), batch_size=16, epochs=2, verbose=0).history["loss"]
here = float(dtrain.rank() + 1)
by_mpi = MPI.COMM_WORLD.allreduce(here)
by_strategy = strategy.reduce("SUM", strategy.run(lambda: here), axis=None).numpy()
print(dtrain.rank(), dtrain.world_size(), by_mpi, float(by_strategy), *(f"{each:.6f}" for each in losses))
if "fail" in sys.argv:
    if dtrain.rank() == 1:
        raise ValueError("on purpose")
    signal.pause()
if "leave" in sys.argv:
    if dtrain.rank() == 1:
        sys.exit(3)
    model.fit(x, x.sum(1), batch_size=16, verbose=0)
"""

# Of programs without TensorFlow; `index`, `attempt`, `step` and `die` are the shared prelude's.
BEGIN = """
    from dtrain.environments import mpi_start
    everyone = mpi_start.world()
    print("rank", mpi_start.rank(), "of", mpi_start.size(), "sum", everyone.allreduce(index + 1), flush=True)
    assert (everyone.Get_rank(), everyone.Get_size()) == (index, workers)
"""


@pytest.fixture
def launch(tmp_path: Path) -> Callable[..., Ended]:
    return functools.partial(run, tmp_path, launcher="mpi")


def shown(output: str) -> list[str]:
    """What the two workers of `TRAIN` printed, without marks."""
    lines = [line.rpartition("] ")[2] for line in output.splitlines()]
    return sorted(line for line in lines if line[:4] in ("0 2 ", "1 2 "))


@pytest.mark.long
@pytest.mark.usefixtures("as_installed")
def test_by_hand_and_by_the_launcher_the_same_numbers(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(TRAIN)
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    start = functools.partial(subprocess.run, capture_output=True, text=True, env=env)
    # Whoever fails does not wait for the others, who wait for it.
    hand = start(by_hand(2, sys.executable, str(program), "fail"))
    assert hand.returncode == 1 and "ValueError: on purpose" in hand.stderr, hand.stderr
    command = [sys.executable, "-m", "dtrain", "launch", "--mpi", "--workers", "2", str(program)]
    done = start(command)
    assert done.returncode == 0, done.stderr
    for ended, where in ((hand, "an MPI start"), (done, "TF_CONFIG, which precedes an MPI start,")):
        assert f"strategy multi_worker: {where} has 2 workers" in ended.stderr
        lines = shown(ended.stdout)
        assert [line.split()[:4] for line in lines] == [["0", "2", "3.0", "3.0"], ["1", "2", "3.0", "3.0"]]
    assert {line.split(maxsplit=2)[2] for line in shown(hand.stdout)} == {
        line.split(maxsplit=2)[2] for line in shown(done.stdout)
    }
    assert "[worker 1] 1 2" in done.stdout


@pytest.mark.long
def test_a_rank_that_leaves_is_missed_by_the_others(tmp_path: Path) -> None:
    """MPI's own end would wait for the others, and they for it."""
    program = tmp_path / "train.py"
    program.write_text(TRAIN)
    command = by_hand(2, sys.executable, str(program), "leave")
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    ended = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert ended.returncode != 0
    pattern = r"worker 1 (\(it |has )?ended its program"  # from the ranks' connections, or over MPI
    assert re.search(pattern, ended.stderr), ended.stderr[-3000:]


def test_more_ranks_than_cores(launch: Callable[..., Ended]) -> None:
    ended = launch(BEGIN, workers=4)
    assert ended.status == 0, ended.err
    assert sorted(ended.out.splitlines()) == [f"[worker {i}] rank {i} of 4 sum 10" for i in range(4)]
    assert not traces()


def test_a_rank_that_dies_is_named_and_all_are_started_again(launch: Callable[..., Ended]) -> None:
    ended = launch(
        BEGIN
        + """
    step(3)
    if attempt == 0 and index == 1:
        die()
    everyone.barrier()  # where the other waits for it
    if attempt == 1 and index == 0:
        sys.exit(7)
    """,
        max_restarts=1,
    )
    assert "worker 1 was killed by signal 9 (SIGKILL) at step 3. All are started again" in ended.err
    assert ended.attempts() == [[0, 1], [0, 1]]
    assert ended.status == 7 and "worker 0 ended with exit status 7; the job was ended" in ended.err
    assert not traces()


def test_a_starter_that_is_killed_costs_an_attempt(launch: Callable[..., Ended]) -> None:
    ended = launch(
        BEGIN
        + """
    step(3)
    if attempt == 0:
        everyone.barrier()
        if index == 0:
            os.kill(int(os.environ["PMIX_NAMESPACE"].partition("@")[0].rpartition("-")[2]), signal.SIGKILL)
        while True:
            everyone.barrier()
    """,
        max_restarts=1,
    )
    assert ended.status == 0, ended.err
    assert "The MPI starter" in ended.err and "was killed by signal 9 (SIGKILL)" in ended.err
    assert len(ended.attempts()) == 2


def test_a_job_goes_on_with_fewer_ranks(launch: Callable[..., Ended]) -> None:
    ended = launch(
        "    if place == 1:\n        die()\n" + BEGIN + "    step(1)\n",
        min_workers=1,
    )
    assert ended.status == 0, ended.err
    assert "The job continues with 1 of 2 workers" in ended.err
    assert "[worker 0] rank 0 of 1 sum 1" in ended.out


def test_slurms_starter_is_called_as_it_wants(launch: Callable[..., Ended], tmp_path: Path) -> None:
    """In its place stands a script that has ranks started by the one that is here."""
    srun = script(
        tmp_path / "srun",
        textwrap.dedent(
            f"""\
            [ "$1" = --version ] && echo slurm 24.05.1 && exit
            echo "$@" > {tmp_path}/called
            while [ "${{1#--}}" != "$1" ]; do
                [ "${{1#--ntasks=}}" != "$1" ] && n=${{1#--ntasks=}}
                shift
            done
            exec {" ".join(by_hand(0))[:-1]} $n "$@"
            """
        ),
    )
    ended = launch(BEGIN, mpi_starter=f"{srun} --mpi=pmix_v4")
    assert ended.status == 0, ended.err
    assert "[worker 1] rank 1 of 2 sum 3" in ended.out
    called = (tmp_path / "called").read_text().split()
    assert called[0] == "--mpi=pmix_v4" and "--ntasks=2" in called and "--mpi=pmix" not in called


def test_a_starter_of_another_mpi(launch: Callable[..., Ended], tmp_path: Path) -> None:
    """It gives its ranks numbers, which mpi4py's library does not understand."""
    other = script(
        tmp_path / "mpiexec",
        textwrap.dedent(
            """\
            [ "$1" = --version ] && echo "HYDRA build details:" && exit
            while [ "$1" != -n ]; do shift; done
            size=$2; shift 2
            for rank in $(seq 0 $((size - 1))); do PMI_RANK=$rank PMI_SIZE=$size "$@" & done
            wait
            """
        ),
    )
    ended = launch(BEGIN, mpi_starter=other)
    assert ended.status == 1
    assert "of 2, but mpi4py's MPI library (Open MPI" in ended.err and "as rank 0 of 1" in ended.err
    assert "the starter belongs to another MPI" in ended.err and "--mpi-starter PATH" in ended.err
    assert len(ended.attempts()) == 1, "another attempt could not help"


def test_what_cannot_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = functools.partial(launch_local, [sys.executable, "-c", "pass"], workers=2, launcher="mpi")
    with refused(ConfigurationError, "1 parameter server"):
        start(ps=1)
    with refused(ConfigurationError, "mpi_starter is 'srun'"):
        start(launcher="local", mpi_starter="srun")
    with refused(MPIError, "'/no/mpirun'"):
        start(mpi_starter="/no/mpirun")
    with pytest.raises(MPIError, match="is not known: to --version it says 'true"):
        start(mpi_starter="true")
    # What Intel MPI 2021.15 says, whose starter cannot start tasks of a launcher.
    intel = script(tmp_path / "impiexec", "echo 'Intel(R) MPI Library for Linux* OS, Version 2021.15'")
    with refused(MPIError, "Intel MPI's", "open socket", "by hand"):
        start(mpi_starter=intel)
    with refused(MPIError, "exit status", "--no-such-option"):
        start(mpi_starter=f"{STARTER} --no-such-option")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(MPIError, match="There is no MPI starter here") as caught:
        start()
    assert "pip install 'dtrain[mpi]'" in caught.value.hint
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with refused(MPIError, "mpi4py"):
        start()
    assert not traces()


def test_a_rank_that_is_stopped_is_found(launch: Callable[..., Ended]) -> None:
    ended = launch(
        BEGIN
        + """
    for number in range(1, 4):
        step(number, done=number)
        everyone.barrier()
    if attempt == 0 and index == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    everyone.barrier()
    """,
        max_restarts=1,
        hang_timeout=5.0,
    )
    assert ended.status == 0, ended.err
    assert "worker 1 has made no progress for" in ended.err and "is stopped (SIGSTOP)" in ended.err
    assert "worker 1 was" in ended.err and len(ended.attempts()) == 2
