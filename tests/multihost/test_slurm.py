"""Jobs on a real Slurm, whose hosts are network namespaces: started by `srun` and `dtrain submit`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import guide
from engine_variables import SLURM_NO_STEP, SLURM_STEPS, assert_as_recorded
from hosts import HostsNotPermitted, hosts
from processes import wait_until
from slurm_cluster import SlurmCluster, slurm_cluster, slurm_missing

DTRAIN = [sys.executable, "-m", "dtrain"]
DIGITS = ["train", "digits", "--strategy", "multi_worker", "--epochs", "1", "--seed", "7"]
# Bits depend on the number of threads.
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "-1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "2",
}
SAYS = """
import json, os, sys
if "WITHOUT_MPI4PY" in os.environ:
    sys.modules["mpi4py"] = None
from dtrain import environments
kept = {name: value for name, value in os.environ.items() if name.startswith(("SLURM", "PMI"))}
folder = os.path.dirname(__file__)  # what two tasks print may get mixed
with open(f"{folder}/said-{os.environ.get('SLURM_PROCID', 0)}", "w") as file:
    json.dump([environments.describe(), kept], file)
"""
TRAINS = """
import os, signal, sys, time
import keras
import numpy as np
import dtrain

out, fault = sys.argv[1], sys.argv[2]
keras.utils.set_random_seed(3)
rng = np.random.default_rng(3)
x, y = rng.normal(size=(96, 6)).astype("float32"), rng.normal(size=(96, 1)).astype("float32")
with dtrain.strategy("multi_worker").scope():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(300, "tanh"), keras.layers.Dense(1)])
    model.compile("adam", "mse")
backup = dtrain.BackupAndRestore(out + "-backup", save_freq=3, delete_checkpoint=False)
steps = []

def disturb(batch, logs):
    steps.append(batch)
    first = os.environ.get("DTRAIN_ATTEMPT", "0") == "0" and "SLURM_RESTART_COUNT" not in os.environ
    if fault == "kill" and first and len(steps) == 17 and dtrain.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "slow" and first:
        # 36 times: longer than the time limit. # wall clock: Slurm has time limits in whole minutes
        time.sleep(4)

note = keras.callbacks.LambdaCallback(on_train_batch_end=disturb)
model.fit(x, y, batch_size=8, epochs=3, verbose=0, callbacks=[backup, note])
print("steps:", len(steps), flush=True)
np.savez(f"{out}-{dtrain.rank()}.npz", *model.get_weights(), *model.optimizer.variables)
"""

# Each worker counts steps until a signal asks it to save, as a training with checkpoints does. It saves once.
SAVES = """
import os, signal, sys, time
from dtrain.task import channel

received = []
for signum in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(signum, lambda signum, frame: received.append(signum))
channel.report_checkpoint(1, "nowhere")
step = 0
while not received:
    step += 1
    channel.report_progress(step, "step", train=True, done=step)
    print("step", step, flush=True)
    time.sleep(0.05)
print("asked", flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
print("saved", flush=True)
sys.exit(channel.RUN_AGAIN)
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Slurm on two hosts, for all tests of this file; a user's home of their own."""
    if reason := slurm_missing():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "home").mkdir()
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(hosts(folder / "hosts", 2))
        except HostsNotPermitted as error:
            pytest.skip(f"hosts cannot be made here: {error}")
        running = stack.enter_context(slurm_cluster(folder / "slurm", made))
        running.env |= ENVIRONMENT | {"HOME": str(folder / "home")}
        yield running


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A training of 36 steps; arguments: output, fault."""
    (tmp_path / "train.py").write_text(TRAINS)
    return tmp_path / "train.py"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of that training under the local launcher."""
    folder = tmp_path_factory.mktemp("local")
    (folder / "train.py").write_text(TRAINS)
    run_locally(["launch", "--workers", "2", "train.py", str(folder / "local"), "none"], folder)
    return folder / "local"


def run_locally(arguments: Sequence[str], folder: Path) -> None:
    env = os.environ | ENVIRONMENT
    subprocess.run([*DTRAIN, *arguments], check=True, env=env, cwd=folder)


def assert_same(one: Path, other: Path) -> None:
    for rank in (0, 1):
        with np.load(f"{one}-{rank}.npz") as arrays, np.load(f"{other}-{rank}.npz") as wanted:
            assert [*arrays] == [*wanted]
            for name in wanted:
                np.testing.assert_array_equal(arrays[name], wanted[name])


def described(slurm: SlurmCluster, tmp_path: Path, command: str, **env: str) -> list[Any]:
    """What each process says that such a command starts."""
    (tmp_path / "says.py").write_text(SAYS)
    program = f" {sys.executable} {tmp_path / 'says.py'}"
    words = f"{command.replace(' : ', f'{program} : ')}{program}".split()
    done = slurm.run(words, env=env)
    assert done.returncode == 0, done.stderr + slurm.logs()
    return said(tmp_path)


def said(folder: Path) -> list[Any]:
    files = sorted(folder.glob("said-*"))
    reports = [json.loads(file.read_text()) for file in files]
    for file in files:
        file.unlink()
    return reports


def places(found: Sequence[Any]) -> dict[str, str]:
    """The host of each task, by the task."""
    return {about["task"]: kept["SLURMD_NODENAME"] for about, kept in found}


@pytest.mark.parametrize(
    ("command", "wanted"),
    [
        ("srun -N2 -n3", ["host1", "host1", "host2"]),
        ("srun -N2 -n4 -m cyclic", ["host1", "host2", "host1", "host1"]),
        ("srun -N2 -n6 -m plane=2", ["host1", "host1", "host2", "host2", "host1", "host1"]),
        ("srun -w host2 -n1 : -w host1 -n2", ["host2", "host1", "host1"]),
        ("salloc -N2 -n4 -c2 srun", ["host1", "host1", "host2", "host2"]),
    ],
)
def test_the_tasks_of_a_step_are_a_job(
    slurm: SlurmCluster, tmp_path: Path, command: str, wanted: list[str]
) -> None:
    descriptions = described(slurm, tmp_path, command)
    assert [about["environment"] for about, _ in descriptions] == ["slurm"] * len(wanted)
    (jobs,) = {json.dumps(about["jobs"]) for about, _ in descriptions}
    addresses = json.loads(jobs)["worker"]
    assert [address.partition(":")[0] for address in addresses] == wanted
    assert places(descriptions) == {f"worker {rank}": host for rank, host in enumerate(wanted)}
    assert len({*addresses}) == len(wanted)
    assert_as_recorded(descriptions[-1][1], SLURM_STEPS[command], varying=["SLURM_JOB_ID"])


def test_a_cluster_that_starts_every_step_for_mpi(slurm: SlurmCluster, tmp_path: Path) -> None:
    """As `MpiDefault=pmi2` does: with mpi4py it is an MPI start, without it the step that it is too."""
    descriptions = described(slurm, tmp_path, "srun -N2 --mpi=pmi2", WITHOUT_MPI4PY="1")
    assert all("PMI_RANK" in kept for _, kept in descriptions), descriptions
    assert [(about["environment"], about["also_found"]) for about, _ in descriptions] == [("slurm", [])] * 2


def test_one_task_and_a_batch_script_are_no_job_and_tf_config_comes_first(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    job = {"cluster": {"worker": ["host1:2222", "host2:2222"]}, "task": {"type": "worker", "index": 0}}
    descriptions = described(slurm, tmp_path, "srun -N2", TF_CONFIG=json.dumps(job))
    assert [(description["environment"], description["also_found"]) for description, _ in descriptions] == [
        ("tf_config", ["slurm"])
    ] * 2
    assert described(slurm, tmp_path, "srun -N2", DTRAIN_SLURM="0")[0][0]["environment"] is None
    for command, recorded in SLURM_NO_STEP.items():
        if command.startswith("sbatch"):
            batch = [*command.split(), "--parsable", "--wait", f"--output={tmp_path}/batch"]
            slurm.run([*batch, f"--wrap={sys.executable} {tmp_path}/says.py"])
            answers = said(tmp_path)
        else:
            answers = described(slurm, tmp_path, command)
        ((about, kept),) = answers
        assert about["environment"] is None and "Slurm" in about["schedulers"]
        assert_as_recorded(kept, recorded, varying=["SLURM_JOB_ID"])


@pytest.mark.soak("launchers under srun, and a submitted job, are compared to the bit")
def test_a_recipe_under_srun_gives_the_bits_of_the_local_launcher(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    command = [*DTRAIN, *DIGITS, "--run-dir", str(tmp_path / "slurm")]
    done = slurm.run(["srun", "--nodes=2", "--cpus-per-task=2", *command])
    assert done.returncode == 0, done.stdout + done.stderr + slurm.logs()
    run_locally([*DIGITS, "--workers", "2", "--run-dir", str(tmp_path / "local")], tmp_path)
    ours, theirs = (json.loads((tmp_path / name / "run.json").read_text()) for name in ("slurm", "local"))
    assert ours["final_metrics"] == theirs["final_metrics"]
    assert (ours["workers"], ours["cores"], ours["threads"]) == (2, 2, 1)
    import keras

    one, other = (keras.models.load_model(tmp_path / name / "model.keras") for name in ("slurm", "local"))
    for weight, wanted in zip(one.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(weight, wanted)
    assert "without a secret" not in done.stderr


@pytest.mark.usefixtures("as_installed")
def test_a_killed_worker_of_launchers_under_srun_is_recovered_with_the_same_bits(
    slurm: SlurmCluster, tmp_path: Path, program: Path, undisturbed: Path
) -> None:
    command = [*DTRAIN, "launch", str(program), str(tmp_path / "killed"), "kill"]
    path = {"PYTHONPATH": os.environ["PYTHONPATH"]}  # that of `as_installed`
    done = slurm.run(["srun", "--nodes=2", "--ntasks-per-node=1", *command], timeout=280, env=path)
    assert done.returncode == 0, done.stdout + done.stderr + slurm.logs()
    assert "was killed by signal 9" in done.stderr and "All are started again" in done.stderr
    assert_same(tmp_path / "killed", undisturbed)


def test_at_the_time_limit_a_submitted_job_requeues_itself_and_ends_with_the_same_bits(
    slurm: SlurmCluster, tmp_path: Path, program: Path, undisturbed: Path
) -> None:
    options = ["--nodes", "2", "--tasks-per-node", "1", "--time", "2", "--notice", "50"]
    options += ["--output-dir", str(tmp_path / "output")]
    command = [*DTRAIN, "submit", "--slurm", *options, str(program), str(tmp_path / "requeued"), "slow"]
    done = slurm.run(command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    job = done.stdout.split()[4].rstrip(".")

    def output() -> str:
        return "".join(file.read_text() for file in (tmp_path / "output").glob("*"))

    try:
        assert slurm.wait_for(job, "COMPLETED", "FAILED", "TIMEOUT", "CANCELLED") == "COMPLETED", output()
    finally:
        slurm.run(["scancel", job])
    assert "USR1 was received: every task has saved a checkpoint" in output()
    assert_same(tmp_path / "requeued", undisturbed)


def test_a_cancelled_job_saves_on_all_hosts_and_is_not_requeued(slurm: SlurmCluster, tmp_path: Path) -> None:
    (tmp_path / "saves.py").write_text(SAVES)
    done = slurm.run(
        [*DTRAIN, "submit", "--slurm", "--nodes", "2", "saves.py", str(tmp_path / "go")], cwd=tmp_path
    )
    job = done.stdout.split()[4].rstrip(".")
    output = tmp_path / f"saves-{job}.out"

    def says(*words: str) -> bool:
        text = output.read_text() if output.exists() else ""
        return all(word in text for word in words)

    wait_until(lambda: says("[worker 0 on host1] step 5", "[worker 1 on host2] step 5"))
    slurm.run(["scancel", job])
    wait_until(lambda: says("[worker 0 on host1] asked", "[worker 1 on host2] asked"))
    (tmp_path / "go").touch()
    wait_until(lambda: not slurm.run(["squeue", "--noheader"]).stdout)
    assert says("[worker 0 on host1] saved", "[worker 1 on host2] saved"), output.read_text()
    assert slurm.state(job) == "CANCELLED"


def test_what_slurm_refuses_is_quoted_with_a_remedy(
    slurm: SlurmCluster, tmp_path: Path, program: Path
) -> None:
    for options, quoted, remedy in (
        (["--partition", "gpu"], "invalid partition specified: gpu", "sinfo --summarize"),
        (["--partition", "short", "--time", "10"], "time limit", "shorter --time"),
        (["--nodes", "3"], "Node count specification invalid", "fewer --nodes"),
        (["--cpus-per-task", "9"], "More processors requested than permitted", "ask for less"),
        (["--sbatch-option=--no-such-option"], "unrecognized option '--no-such-option'", "--dry-run"),
        (["--array", "3-1"], "Invalid job array", "Write it as Slurm does"),
    ):
        done = slurm.run([*DTRAIN, "submit", "--slurm", *options, str(program)], cwd=tmp_path)
        assert done.returncode == 2
        assert quoted.lower() in done.stderr.lower() and remedy in done.stderr, done.stderr
    assert slurm.run(["squeue", "--noheader"]).stdout == ""


def test_the_commands_of_the_guide_run(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Each line of a block that is marked so; a job that is submitted is awaited."""
    page = (guide.DOCS / "slurm.md").read_text(encoding="utf-8")
    blocks = re.findall(r"<!-- run -->\n```bash\n(.*?)```", page, re.DOTALL)
    (tmp_path / "train.py").write_text("from dtrain import environments\nprint(environments.current())\n")
    env = {"PATH": f"{Path(sys.executable).parent}:{slurm.env['PATH']}"}
    lines = [line for block in blocks for line in block.splitlines()]
    assert len(lines) == 9
    for line in lines:
        done = slurm.run(["bash", "-c", line], cwd=tmp_path, env=env)
        assert done.returncode == 0, (line, done.stderr)
    wait_until(lambda: not slurm.run(["squeue", "--noheader"]).stdout)
    outputs = sorted(tmp_path.glob("*.out")) + sorted((tmp_path / "output").glob("*_[01].out"))
    assert len(outputs) == 3
    for output in outputs:
        assert output.read_text().count("task_index=1") == 1, output.read_text()


@pytest.mark.soak("test_a_killed_worker_of_launchers_under_srun_is_recovered_with_the_same_bits: launchers")
def test_parameter_servers_through_slurm(slurm: SlurmCluster, tmp_path: Path) -> None:
    recipe = ["-m", "dtrain", "train", "digits", "--strategy", "parameter_server", "--epochs", "3"]
    command = [*DTRAIN, "launch", "--ps", "1", *recipe, "--run-dir", str(tmp_path / "run")]
    done = slurm.run(["srun", "--nodes=2", "--ntasks-per-node=1", *command])
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (record["workers"], record["parameter_servers"], record["status"]) == (2, 1, "finished")
