"""A real Slurm for tests: a controller and a daemon on each of the hosts that `hosts` makes.

    with slurm_cluster(tmp_path, made) as slurm:
        slurm.run(["srun", "--nodes=2", "hostname"])

Its settings, its key and its state are in a folder of the test. All of its processes end with the hosts.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hosts import Host, HostProcess
from processes import wait_until

_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "squeue", "scancel")
_PATHS = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
_SETTINGS = """\
ClusterName=test
SlurmctldHost={controller}({address})
AuthType=auth/munge
AuthInfo=socket=/run/munge.socket,cred_expire=10
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0
ReturnToService=2
MpiDefault=none
SwitchType=switch/none
KillWait=120
MinJobAge=600
InactiveLimit=0
EnforcePartLimits=ALL
SlurmdParameters=config_overrides
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
PartitionName=short Nodes=ALL MaxTime=1 State=UP
"""


class SlurmCluster:
    """A running Slurm. `slurm_cluster` makes it.

    Attributes:
        hosts: the first one has the controller; commands run there.
        folder: settings, logs and state.
        env: the variables that its commands need.
    """

    def __init__(self, folder: Path, made: Sequence[Host]) -> None:
        self.folder, self.hosts = folder, made
        self.env = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": _PATHS}

    def run(self, command: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any) -> Any:
        """Runs a command on the first host to its end; see `Host.run`."""
        return self.hosts[0].run(command, env=self.env | dict(env or {}), **options)

    def popen(
        self, command: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> HostProcess:
        """Starts a command on the first host."""
        return self.hosts[0].popen(command, env=self.env | dict(env or {}), **options)

    def state(self, job: str) -> str:
        """The state of a job, such as PENDING or COMPLETED; "" if it is not known."""
        said = self.run(["scontrol", "--oneliner", "show", "job", job]).stdout
        return dict(word.partition("=")[::2] for word in said.split()).get("JobState", "")

    def wait_for(self, job: str, *states: str) -> str:
        """Waits until a job is in one of these states, which it returns."""
        while (state := self.state(job)) not in states:
            time.sleep(0.09)  # each question starts processes
        return state

    def logs(self) -> str:
        """The last lines of all daemons, for the message of a failed test."""
        files = sorted(self.folder.glob("*.log"))
        return "\n".join(f"{file.name}:\n{file.read_text(errors='replace')[-2000:]}" for file in files)


def slurm_missing() -> str:
    """Why Slurm cannot be started here; "" if it can."""
    missing = [name for name in _PROGRAMS if shutil.which(name, path=_PATHS) is None]
    return f"these programs are missing: {', '.join(missing)}" if missing else ""


@contextlib.contextmanager
def slurm_cluster(
    folder: Path, made: Sequence[Host], *, cpus: Sequence[int] = (), settings: str = ""
) -> Iterator[SlurmCluster]:
    """Starts Slurm on hosts.

    Args:
        folder: an empty folder that all hosts see.
        made: the hosts.
        cpus: the number of CPUs that Slurm believes each to have; by default 4.
        settings: further lines of `slurm.conf`.
    """
    (folder / "state").mkdir(parents=True)
    for host in made:
        (folder / f"spool-{host.name}").mkdir()
    key = folder / "munge.key"
    key.touch(mode=0o400)
    key.chmod(0o600)
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    nodes = "\n".join(
        f"NodeName={host.name} NodeAddr={host.address} CPUs={number} RealMemory=1000 State=UNKNOWN"
        for host, number in zip(made, cpus or [4] * len(made), strict=True)
    )
    text = _SETTINGS.format(controller=made[0].name, address=made[0].address, folder=folder, nodes=nodes)
    (folder / "slurm.conf").write_text(text + settings)
    slurm = SlurmCluster(folder, made)
    with contextlib.ExitStack() as stack:
        for host in made:
            _start(
                stack,
                slurm,
                host,
                "munged",
                [
                    *("munged", "--foreground", "--force", f"--key-file={key}", "--socket=/run/munge.socket"),
                    "--pid-file=/run/munged.pid",
                    "--log-file=/run/munged.log",
                    "--seed-file=/run/munged.seed",
                ],
            )
        for host in made:
            wait_until(host.path("/run/munge.socket").exists)
        _start(stack, slurm, made[0], "slurmctld", ["slurmctld", "-D"])
        for host in made:
            _start(stack, slurm, host, f"slurmd-{host.name}", ["slurmd", "-D", "-N", host.name])
        try:
            wait_until(lambda: _idle(slurm) == len(made))
        except AssertionError:
            raise AssertionError(f"Slurm does not start:\n{slurm.logs()}") from None
        yield slurm


def _start(
    stack: contextlib.ExitStack, cluster: SlurmCluster, host: Host, name: str, command: list[str]
) -> None:
    with (cluster.folder / f"{host.name}-{name}-output.log").open("w") as log:
        process = host.popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=cluster.env, cwd=cluster.folder
        )

    def end() -> None:
        process.kill()
        process.wait()

    stack.callback(end)


def _idle(cluster: SlurmCluster) -> int:
    """How many hosts are ready."""
    time.sleep(0.09)  # each question starts processes
    said = cluster.run(["sinfo", "--noheader", "--partition=main", "--format=%T %D"]).stdout
    return sum(int(line.split()[1]) for line in said.splitlines() if line.split()[0] == "idle")
