"""The launcher of MPI ranks on several hosts: agents start the MPI starter, its daemons, and the tasks.

As on one machine, the starter starts placeholders only (see `mpi_launcher`). It reaches the other hosts
through this launcher's agents, which were started by the user's own `ssh`, and opens no SSH connection.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import json
import os
import queue
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from dtrain.base.clock import Clock
from dtrain.environments import without_task
from dtrain.environments.topology import Task
from dtrain.errors import MPIError
from dtrain.launch.hosts.agent_messages import OutputLine, Started
from dtrain.launch.hosts.remote_agent import RemoteAgent, RemoteTask
from dtrain.launch.hosts.ssh_launcher import SSHLauncher
from dtrain.launch.job.job_session import Session
from dtrain.launch.job.launcher import Assignment
from dtrain.launch.job.spec import JobSpec
from dtrain.launch.job.task_handle import TaskCommand
from dtrain.launch.mpi.mpi_launcher import PATIENCE, read_rank, starter_failed
from dtrain.launch.mpi.mpi_starter import Starter, find_starter
from dtrain.launch.mpi.rank_host import PLACEHOLDER
from dtrain.launch.supervision.reports import describe_exit
from dtrain.task.task_hooks import changes

_OF_USERS = ("OMPI_MCA_", "PMIX_MCA_", "PRTE_MCA_", "UCX_", "FI_", "MPICH_", "MPIR_", "I_MPI_", "MPI4PY_")
# The variables that select the network over which the hosts reach each other.
_NETWORK = ("PRTE_MCA_prte_if_include", "OMPI_MCA_btl_tcp_if_include")


class MPIHostsLauncher(SSHLauncher):
    """Starts the tasks through agents on hosts, as the ranks of one MPI start over all hosts.

    Raises:
        MPIError: mpi4py or the starter is missing on this machine.
    """

    silent_failures = True

    def __init__(self, session: Session, spec: JobSpec | None = None) -> None:
        super().__init__(session, spec)
        self._starter = find_starter(None if spec is None else spec.mpi_starter)
        usual = without_task(os.environ)
        self._env = {**{n: v for n, v in usual.items() if n.startswith(_OF_USERS)}, **self._env}

    @contextlib.contextmanager
    def assign(self, tasks: Sequence[Task], env: Mapping[str, str]) -> Iterator[Sequence[Assignment]]:
        """Choose the tasks' hosts, and make an MPI start with a rank for each task on its host.

        Raises:
            ConfigurationError: a host refuses so many ports.
            MPIError: the starter failed, took over 60 s, or made another start.
            PeerMissingError: too few hosts are left.
        """
        with super().assign(tasks, env) as assigned:
            agents = [self._places[assignment.topology.task] for assignment in assigned]
            addresses = {agent: self._address(agent) for agent in agents}
            start = _MPIStartOnHosts(self._starter, addresses, self._env, self.session.clock)
            try:
                ranks = start.ranks(agents)
                yield [
                    Assignment(assignment.topology, {**assignment.variables, **rank})
                    for assignment, rank in zip(assigned, ranks, strict=True)
                ]
                ended = start.ended()
                if ended:
                    self.session.say(f"The MPI starter ({self._starter}) {ended} before its ranks had ended.")
            finally:
                start.close()


class _MPIStartOnHosts:
    """One MPI start over several hosts.

    Args:
        starter: the MPI starter; it runs on the first host.
        addresses: where each agent's host is reached by the others.
        env: variables that the user has set for all hosts; they are not replaced.
    """

    def __init__(
        self,
        starter: Starter,
        addresses: Mapping[RemoteAgent, str],
        env: Mapping[str, str],
        clock: Clock,
    ) -> None:
        self._clock = clock
        self._starter = starter
        self._addresses = addresses
        self._set = env
        self._messages: queue.SimpleQueue[tuple[_RankHost, object]] = queue.SimpleQueue()
        self._started: list[_RankHost] = []
        self._usual = without_task(os.environ)
        self._common = {n: v for n, v in starter.for_ranks(of_one_host=False).items() if n not in env}

    def ranks(self, agents: Sequence[RemoteAgent]) -> list[dict[str, str]]:
        """The variables of each rank, in rank order; rank N is on the host of agent N."""
        hosts = Counter(self._addresses[agent] for agent in agents)
        first = {address: agent for agent, address in reversed([*self._addresses.items()])}
        self._run(agents[0], self._starter.start_on(hosts, PLACEHOLDER))
        ranks: dict[int, dict[str, str]] = {}
        deadline = self._clock.deadline(PATIENCE)
        while len(ranks) < len(agents):
            try:
                host, message = self._messages.get(timeout=deadline.left())
            except queue.Empty:
                problem = f"has started {len(ranks)} of {len(agents)} ranks in {PATIENCE:g} s"
                raise self._failed(problem) from None
            if message is None:
                prefix = "" if host is self._started[0] else "has a daemon that "
                raise self._failed(f"{prefix}{describe_exit(host.exit_code or 0)} on {host.agent}", host)
            if isinstance(message, list):
                name, *words = map(str, message)
                if name not in first:
                    raise self._failed(f"wants to reach {name}, which is no host of the job")
                self._run(first[name], ["sh", "-c", " ".join(words)])
                continue
            try:
                number, own = read_rank(dict(message), len(agents), self._usual)  # type: ignore[call-overload]
            except ValueError as error:
                raise self._failed(f"{error}", host) from None
            if self._addresses[agents[number]] != self._addresses[host.agent]:
                raise self._failed(f"has started rank {number} on {host.agent}, not on {agents[number]}")
            # The starter copies the first host's settings to all hosts, so each host's own replace them.
            ranks[number] = {**own, **self._common, **self._network(host.agent)}
        return [ranks[number] for number in sorted(ranks)]

    def ended(self) -> str:
        """How the starter has ended by itself; "" if it has not."""
        code = self._started[0].exit_code
        # The agents also kill the starter when they kill the tasks; that is no failure of the starter.
        if code is None or code == -signal.SIGKILL:
            return ""
        # Hydra fails when a rank ends without MPI_Finalize, which tasks do not call.
        return "" if code > 0 and self._starter.kind == "hydra" else describe_exit(code)

    def close(self) -> None:
        """End the start on all hosts."""
        for task in self._started:
            task.signal(signal.SIGKILL)

    def _run(self, agent: RemoteAgent, command: Sequence[str]) -> None:
        """Run a command of the MPI start on an agent's host."""
        env = {**self._starter.environment(self._usual), **self._common, **self._network(agent)}
        own = [sys.executable, "-m", "dtrain.launch.mpi.rank_host", *command]
        asked = TaskCommand(Task("mpi", len(self._started)), own, env)
        made = functools.partial(_RankHost, messages=self._messages, started=self._started)
        host = agent.start(asked, changes(self._usual, env), made)
        answer = agent.answer(host.id)
        if isinstance(answer, Started) and answer.reason:
            raise self._failed(f"could not be started on {agent}: {answer.reason}")

    def _network(self, agent: RemoteAgent) -> dict[str, str]:
        """Variables that make MPI use the interface over which the other hosts reach this one."""
        with contextlib.suppress(ValueError):
            address = ipaddress.IPv4Address(self._addresses[agent])
            if not address.is_loopback:
                # MPI libraries do not accept a network of a single address (/32).
                return {name: f"{address}/31" for name in _NETWORK if name not in self._set}
        return {}

    def _failed(self, what: str, host: _RankHost | None = None) -> MPIError:
        output = [*(host or self._started[0]).tail]
        return starter_failed(self._starter, what, output)


class _RankHost(RemoteTask):
    """The program `rank_host` on a host of an MPI start. What it writes is not shown.

    Attributes:
        agent: the agent of its host.
    """

    def __init__(
        self,
        agent: RemoteAgent,
        id: int,
        task: Task,
        session: Session,
        *,
        messages: queue.SimpleQueue[tuple[_RankHost, object]],
        started: list[_RankHost],
    ) -> None:
        super().__init__(agent, id, task, session)
        self.agent = agent
        self._messages = messages
        started.append(self)

    def show(self, line: OutputLine) -> None:
        """Handle a line of output: a message of the program, or output of the starter."""
        if line.to == "stderr":
            self.tail.append(line.line)
        else:
            with contextlib.suppress(ValueError):
                self._messages.put((self, json.loads(line.line)))

    def ended(self, code: int, seconds_ago: float) -> None:
        """The program has ended."""
        super().ended(code, seconds_ago)
        self._messages.put((self, None))
