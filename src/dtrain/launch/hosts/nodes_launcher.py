"""Jobs that are started once on each host, in any order: node 0 is the coordinator, the others join it.

They connect over the control plane, so nodes on several hosts must have the same secret file.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import socket
import sys
from collections.abc import Iterator, Sequence

from dtrain.base.clock import REAL, Clock, Deadline
from dtrain.base.log import logger
from dtrain.base.tcp import host_towards, split_address
from dtrain.base.words import counted
from dtrain.environments import settings
from dtrain.environments.network_interfaces import interface_address
from dtrain.environments.topology import Task, Topology
from dtrain.errors import AuthenticationError, ConfigurationError, PeerMismatchError, PeerMissingError
from dtrain.launch.hosts import control_plane
from dtrain.launch.hosts.agent import HERE, Agent, Inbox, hello
from dtrain.launch.hosts.agent_messages import Hello, HostMessage, Invite, Refused, Welcome
from dtrain.launch.hosts.agents_launcher import HostsLauncher
from dtrain.launch.hosts.control_plane import ControlClient, ControlServer
from dtrain.launch.hosts.remote_agent import RemoteAgent, RemoteTask
from dtrain.launch.job.job_session import Session
from dtrain.launch.job.spec import JobSpec, Nodes
from dtrain.launch.job.task_handle import TaskCommand
from dtrain.process_group import secret
from dtrain.process_group.secret import Secret

_GONE = 3.0  # seconds of refused connections after which the coordinator counts as ended
_ASK_INTERVAL = 0.5  # seconds between two tries to connect to it
_LEASE_WITHOUT_TASKS = 300.0  # seconds for which a node without tasks waits for a silent coordinator
_UNPROVED = 8  # failed authentications after which the two secrets are taken to differ


def nodes_secret(nodes: Nodes) -> Secret:
    """The secret by which the nodes of a job know each other.

    Raises:
        ConfigurationError: there is no secret, and the rendezvous is not on the loopback interface; or the
            secret's file cannot be used.
    """
    path = nodes.secret_file or settings.secret_file()
    if path is not None:
        return secret.read_secret(path)
    job_secret = secret.job_secret(_rendezvous(nodes))
    if job_secret is None:
        raise ConfigurationError(
            f"The rendezvous {nodes.rendezvous} can be reached from other hosts, and the job has no secret: "
            "anybody there could run programs here.",
            hint="Make one: (umask 077; head -c 32 /dev/urandom | base64 > ~/job-secret). Copy the file to "
            "all hosts (mode 600), and name it on each: --secret-file ~/job-secret, or DTRAIN_SECRET_FILE.",
        )
    return job_secret


def _rendezvous(nodes: Nodes) -> Topology:
    return Topology({"worker": (nodes.rendezvous,)}, "worker", 0)


class NodesLauncher(HostsLauncher):
    """The coordinator, on node 0: the other nodes connect to it, and its own agent runs this host's tasks.

    Raises:
        ConfigurationError: `JobSpec.nodes` is missing, there is no secret, or the interface does not exist.
    """

    def __init__(self, session: Session, spec: JobSpec | None = None) -> None:
        super().__init__(session, spec)
        if spec is None or spec.nodes is None:
            raise ConfigurationError(
                "The launcher is 'nodes', but JobSpec.nodes is not set.",
                hint="Use dtrain launch --nnodes N --node-rank R --rendezvous HOST:PORT.",
            )
        self._nodes = spec.nodes
        self._secret = nodes_secret(spec.nodes)
        _own_address(spec.nodes)  # checks the interface before anything is started
        self._command = list(spec.command[1:])
        self._connected: dict[bytes, RemoteAgent] = {}
        # By rank: the node that waits for a taken rank, and until when.
        self._waiting: dict[int, tuple[bytes, Hello, Deadline]] = {}
        self._server: ControlServer | None = None
        self._own_agents = contextlib.ExitStack()  # of this node, one after another

    @contextlib.contextmanager
    def _agents_started(self) -> Iterator[None]:
        nodes = self._nodes
        host, port = split_address(nodes.rendezvous)
        self._server = ControlServer(
            host,
            port,
            self._secret,
            self._on_message,
            self._on_lost,
            self._refuse_late,
            self.session.clock,
        )
        self._server.start()
        try:
            with self._own_agents:
                self._start_own_agent()
                yield
        finally:
            self._server.close()

    def _start_own_agent(self) -> None:
        own = [sys.executable, "-m", "dtrain.launch.hosts.agent", HERE]
        host, interface = socket.gethostname(), self._nodes.interface or ""
        invite = Invite(0, host, self._nodes.per_node, "", {}, self._nodes.gpus, interface=interface)
        self._own_agents.enter_context(self._agent_over_pipes(own, invite))

    def _renew_own_agent(self) -> None:
        """Start the agent of this node again if it was killed, and wait for it; nobody else can start it.

        Raises:
            PeerMissingError: it has ended at once, or has said nothing in the time that nodes have to join.
        """
        own = self._agents.get(0)
        if own is None or not own.lost:
            return
        self.session.say("The agent of node 0 is started again.")
        self._start_own_agent()
        with self._changed:
            limit = self._nodes.join_timeout
            self._changed.wait_for(lambda: not self._agents[0].lost or self._failure is not None, limit)
        if self._failure is not None:
            raise self._failure

    def slots(self) -> int:
        """The number of workers for which the present hosts have room."""
        self._renew_own_agent()
        return super().slots()

    def start(self, commands: Sequence[TaskCommand]) -> list[RemoteTask]:
        """As `HostsLauncher.start`."""
        self._renew_own_agent()
        return super().start(commands)

    def _place(self, tasks: Sequence[Task]) -> list[RemoteAgent]:
        self._renew_own_agent()
        return super()._place(tasks)

    def _missing(self, waited: float) -> str | None:
        nodes, present = self._nodes, {agent.hello.node for agent in self._present()}
        fewest = nodes.fewest if waited >= nodes.join_timeout else nodes.most
        if 0 in present and len(present) >= fewest:
            return None
        if waited < nodes.join_timeout:
            return ""
        absent = ", ".join(str(node) for node in range(nodes.most) if node not in present)
        unauthenticated = 0 if self._server is None else self._server.unauthenticated
        needed = f"at least {nodes.fewest}" if nodes.fewest < nodes.most else nodes.most
        other = f" {unauthenticated} connections did not know the job's secret." if unauthenticated else ""
        return (
            f"{len(present)} of {needed} nodes have joined at {nodes.rendezvous} in {waited:.0f} s; "
            f"missing: node {absent}.{other}"
        )

    def _problem(self, hello: Hello) -> Refused | None:
        nodes = self._nodes
        name = f"Node {hello.node} ({hello.host})"
        if hello.node < 0:
            return Refused(f"{name} wants to join, but nodes are numbered from 0.", "Correct --node-rank.")
        if hello.slots != nodes.per_node:
            return Refused(
                f"{name} starts {counted(hello.slots, 'worker')}, but node 0 starts {nodes.per_node}.",
                "Give all nodes the same --nproc-per-node.",
            )
        if hello.command and list(hello.command) != self._command:
            pairs = itertools.zip_longest(hello.command, self._command)
            different = next(number for number, (one, other) in enumerate(pairs, 1) if one != other)
            return Refused(  # it does not show the words, because they may be passwords
                f"{name} runs another command than node 0: word {different} differs, where word 1 is the "
                "script, or -m.",
                "Give all nodes the same script and arguments; or is this another job's port?",
            )
        if hello.node and not hello.address and not secret.on_loopback(_rendezvous(nodes)):
            return Refused(
                f"{name} cannot determine at which address the other nodes reach it.",
                f"Can it resolve the name in {nodes.rendezvous}? Else give an address there, on all nodes.",
            )
        return super()._problem(hello)

    def _on_message(self, peer: bytes, message: HostMessage) -> None:
        agent = self._connected.get(peer)
        if agent is not None:
            self._receive(agent, message)
        elif isinstance(message, Hello) and self._server is not None:
            self._join(self._server, peer, message)

    def _join(self, server: ControlServer, peer: bytes, hello: Hello) -> None:
        """Accept or refuse a node. If its rank is taken, it waits, because the other node may be lost."""
        with self._changed:
            other = self._agents.get(hello.node)
            if other is not None and not other.lost and hello.node not in self._waiting:
                until = self.session.clock.deadline(control_plane.LOST + 1.0)
                self._waiting[hello.node] = peer, hello, until
                self.session.say(f"Node {hello.node} ({hello.host}) waits until {other} counts as lost.")
                return
            agent = self._register(functools.partial(server.send, peer), hello)
            if agent is not None:
                self._connected[peer] = agent
                waits = ", and waits as a spare" if len(self._present()) > self._nodes.most else ""
                self.session.say(f"{agent} has joined, from {hello.address or 'this host'}{waits}.")
                self.session.events.put(0)  # an elastic job may grow

    def _refuse_late(self) -> None:
        """Refuse the nodes that have waited for a rank whose holder was not lost meanwhile."""
        with self._changed:
            for node, (peer, hello, until) in list(self._waiting.items()):
                if until.passed() and not self._over and self._server is not None:
                    self._join(self._server, peer, hello)  # refuses it, because it is still in `_waiting`
                    del self._waiting[node]

    def _on_lost(self, peer: bytes) -> None:
        with self._changed:  # the engine must not see the rank empty before the waiting node has taken it
            self._waiting = {node: entry for node, entry in self._waiting.items() if entry[0] != peer}
            agent = self._connected.pop(peer, None)
            if agent is None:
                return
            self._lose(agent, f"nothing was heard of it for {control_plane.LOST:g} s")
            waiting = self._waiting.pop(agent.hello.node, None)
            if waiting is not None and self._server is not None:
                self._join(self._server, *waiting[:2])


def join_nodes(nodes: Nodes, command: Sequence[str], clock: Clock = REAL) -> int:
    """Run as a node other than the first: follow the coordinator until the job ends.

    Args:
        nodes: the job's nodes, and which of them this is.
        command: the argument vector of the job's program, which node 0 has too.
        clock: the clock of all time limits.

    Returns:
        The exit status of the job; 128 + the signal if this process received a signal that the coordinator
        did not answer, or two signals.

    Raises:
        PeerMissingError: no coordinator answers, or it has ended, or this node was cut off from it.
        AuthenticationError: the coordinator has a different secret.
        PeerMismatchError: the coordinator refuses this node, and says why.
        ConfigurationError: there is no secret, or the interface does not exist.
    """
    known = nodes_secret(nodes)
    _own_address(nodes)
    host, port = split_address(nodes.rendezvous)
    inbox = Inbox()
    client = ControlClient(host, port, known, inbox.put, clock)
    client.start()
    try:
        welcome = _welcomed(nodes, client, inbox, command, clock)
        watch = _CoordinatorWatch(host, port, client, clock)
        agent = Agent(client.send, inbox, welcome, nodes.gpus, nodes.interface or "", clock)
        end = agent.run(lambda: watch.cut_off(busy=agent.busy))
    finally:
        client.close()
    if end is not None:
        if end.line:
            logger.warning("%s", end.line)
        return end.status
    if agent.signals:
        return 128 + agent.signals[-1]
    reason = "has ended without a message" if watch.gone else f"was silent for {control_plane.LEASE:g} s"
    raise PeerMissingError(
        f"The coordinator of the job at {nodes.rendezvous} (node 0) {reason}; the tasks of node {nodes.rank} "
        "were ended.",
        hint="See the output of node 0, and start the job again on all nodes.",
    )


def _welcomed(
    nodes: Nodes, client: ControlClient, inbox: Inbox, command: Sequence[str], clock: Clock
) -> Welcome:
    """Introduce this node, and wait until it is part of the job."""
    host, port = split_address(nodes.rendezvous)
    deadline = clock.deadline(nodes.join_timeout)
    introduced = False
    while True:
        if client.proved and not introduced:
            introduced = True  # not earlier: only a connected host knows its own address towards node 0
            own, reached = _ends(host, port)
            own = _own_address(nodes) or own
            client.send(hello(nodes.rank, "", nodes.per_node, own, reached, command[1:]))
        message = inbox.get(timeout=0.2)
        if isinstance(message, Welcome):
            return message
        if isinstance(message, Refused):
            raise PeerMismatchError(f"Node 0 refused this node: {message.reason}", hint=message.hint)
        if not client.proved and client.unproved >= _UNPROVED:
            raise AuthenticationError(
                f"What answers at {nodes.rendezvous} does not know the secret of node {nodes.rank}.",
                hint="Give all nodes the same --secret-file; or another job or program has this port.",
            )
        if deadline.passed():
            raise PeerMissingError(
                f"Node {nodes.rank} has waited {nodes.join_timeout:g} s for the coordinator at "
                f"{nodes.rendezvous}: {_what_answers(host, port)}.",
                hint="Start node 0 there, with the same --rendezvous, and let a firewall open its port.",
            )


def _own_address(nodes: Nodes) -> str:
    """The address of the interface that was asked for; "" if none was."""
    if nodes.interface is None:
        return ""
    return interface_address(nodes.interface, six=":" in split_address(nodes.rendezvous)[0])


def _ends(host: str, port: int) -> tuple[str, str]:
    """The addresses, without a port, of this host towards another one, and of the other; "" if unknown."""
    with contextlib.suppress(OSError):
        *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        return host_towards([f"[{address[0]}]:{port}"]).strip("[]"), str(address[0])
    return "", ""


def _what_answers(host: str, port: int) -> str:
    try:
        socket.create_connection((host, port), 3.0).close()
    except TimeoutError:
        return "nothing answers (a firewall that drops, or a host that is down)"
    except OSError as error:
        return f"{error.strerror or error}"
    return "something answers, but not as a coordinator"


class _CoordinatorWatch:
    """Tells whether the coordinator has ended, or may have taken this node for lost.

    Attributes:
        gone: whether the coordinator's port has refused connections for `_GONE` seconds, so it has ended.
    """

    def __init__(self, host: str, port: int, client: ControlClient, clock: Clock = REAL) -> None:
        # Resolved now: without its network, a node would wait for a name server longer than its lease.
        self._places = _resolved(host, port)
        self._client = client
        self._clock = clock
        self._gone_at: Deadline | None = None  # if the connections are refused until then
        self._ask_at = clock.deadline(0.0)
        self.gone = False

    def cut_off(self, *, busy: bool = True) -> bool:
        """Whether this node must end: the coordinator has ended, or the lease is used up.

        Args:
            busy: whether tasks run here, which the coordinator may start elsewhere after the lease. Without
                any, the node waits longer for a coordinator that is stopped: perhaps the job has ended well.
        """
        lease = control_plane.LEASE if busy else _LEASE_WITHOUT_TASKS
        if self._client.lease_left(lease) <= 0:
            return True
        if not self._client.connected:
            self._ask()
        else:
            self._gone_at = None
        return self.gone or self._client.lease_left(lease) <= 0

    def _ask(self) -> None:
        if not self._ask_at.passed():
            return
        self._ask_at = self._clock.deadline(_ASK_INTERVAL)
        if all(map(_refuses, self._places)):
            self._gone_at = self._gone_at or self._clock.deadline(_GONE)
            self.gone = self._gone_at.passed()
        else:
            self._gone_at = None


def _resolved(host: str, port: int) -> list[tuple[str, int]]:
    """The addresses of a name; the name itself if it cannot be resolved now."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return [(host, port)]
    return [(str(address[0]), int(address[1])) for *_, address in addresses]


def _refuses(place: tuple[str, int]) -> bool:
    try:
        socket.create_connection(place, 0.5).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False
