"""Jobs whose tasks are placed by Ray: this process is the coordinator, and Ray starts an agent for each task.

Ray decides where a task runs, and finds another place when it loses a node. The restart engine decides what a
failure means and what is started again, as for every launcher.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

from dtrain import errors
from dtrain.base.words import counted
from dtrain.environments import without_task
from dtrain.environments.topology import Task
from dtrain.errors import ConfigurationError, PeerMissingError, ProcessEnd, RayError
from dtrain.launch.hosts.agent_messages import Hello, HostMessage, Invite
from dtrain.launch.hosts.agents_launcher import HostsLauncher
from dtrain.launch.hosts.pipe_connection import PipeConnection
from dtrain.launch.hosts.ray_driver import Order, ordered
from dtrain.launch.hosts.remote_agent import RemoteAgent, RemoteTask
from dtrain.launch.hosts.ssh_launcher import passed_environment, script_of
from dtrain.launch.job.job_session import Session
from dtrain.launch.job.spec import JobSpec
from dtrain.launch.job.task_handle import TaskCommand
from dtrain.launch.local_processes.local_process import piped

OLDEST = (2, 51)
"""The oldest version of Ray that is supported: the first in which Ray Train V2 is the default."""

INSTALL = "Install it: pip install 'dtrain[ray]'."

_DRIVER = (sys.executable, "-m", "dtrain.launch.hosts.ray_driver")
_CHECK_INTERVAL = 0.2  # seconds between two checks for a signal
_END_SECONDS = 15.0  # seconds for Ray's driver to end the agents, and to leave the cluster
_GO_ON = "Start the job again. With checkpoints (dtrain.BackupAndRestore) it resumes from the last one."
_SILENT = 10.0  # seconds without a note about the cluster while tasks wait for their places
_ORDER = ("worker", "ps", "chief")


class RayLauncher(HostsLauncher):
    """The coordinator of a job on Ray. Each task has its own agent and its own place in the cluster.

    Raises:
        ConfigurationError: `JobSpec.ray` is missing, or a variable that tasks should get is not set.
        UnsupportedVersionError: Ray is missing, or too old.
    """

    _own_name = "this machine"
    _absent_hint = (
        "Ask for less (--workers, --ray-cpus, --ray-gpus, --ray-placement), wait until other jobs have "
        "ended, or add nodes; ray status shows what is free."
    )

    def __init__(self, session: Session, spec: JobSpec | None = None) -> None:
        super().__init__(session, spec)
        if spec is None or spec.ray is None:
            raise ConfigurationError(
                "The launcher is 'ray', but JobSpec.ray is not set.",
                hint="Use dtrain launch --ray.",
            )
        check_version()
        self._wanted = spec.ray
        self._jobs = {"worker": spec.workers, "ps": spec.ps, "chief": int(spec.ps > 0)}
        self._fewest = spec.min_workers or sum(self._jobs.values())
        self._env = threads(spec.ray.cpus) | passed_environment(os.environ, spec.ray.env)
        self._script = script_of(spec.command)
        self._addresses: dict[int, str] = {}  # by node: the address of its newest agent
        self._assigned: dict[int, str] = {}  # the same, at the time when the tasks' addresses were chosen
        self._links: list[tuple[socket.socket, PipeConnection]] = []
        self._cluster, self._heard_at = "", 0.0  # the cluster's resources in words, and when they were noted
        self._ended = threading.Event()

    @contextlib.contextmanager
    def _agents_started(self) -> Iterator[None]:
        path = self.session.scratch() / "ray.socket"
        with socket.socket(socket.AF_UNIX) as server, self._driver(path):
            server.bind(str(path))
            server.listen(128)
            threading.Thread(target=self._accept, args=(server,), daemon=True).start()
            try:
                yield
            finally:
                with self._changed:
                    links = list(self._links)
                for link, connection in links:
                    connection.close()
                    with contextlib.suppress(OSError):
                        link.shutdown(socket.SHUT_WR)
                    link.close()

    @contextlib.contextmanager
    def _driver(self, path: Path) -> Iterator[None]:
        """Run Ray's driver inside the context. At the end it has left the cluster, and no agent is left."""
        output: deque[str] = deque(maxlen=50)
        wanted, env = self._wanted, without_task(os.environ)
        order = Order(wanted.address, self._bundles(), self._fewest, wanted.placement.upper(), str(path))
        with piped(_DRIVER, env, lambda: _END_SECONDS if self._addresses else 0.0) as about:
            process, stdin, stdout, stderr = about
            listener = threading.Thread(target=self._listen, args=(stderr, output), daemon=True)
            listener.start()
            follower = process, stdout, listener, output
            threading.Thread(target=self._follow, args=follower, daemon=True).start()
            with contextlib.suppress(OSError):  # it has ended: `_follow` says why
                stdin.write(ordered(order))
                stdin.flush()
            try:
                yield
            finally:
                with contextlib.suppress(OSError):
                    stdin.close()

    def _bundles(self) -> list[dict[str, float]]:
        wanted = self._wanted
        gpus = {"GPU": wanted.gpus} if wanted.gpus else {}
        return [
            {"CPU": float(wanted.cpus), **(gpus if job == "worker" else {})}
            for job in _ORDER
            for _ in range(self._jobs[job])
        ]

    def _listen(self, pipe: IO[bytes], output: deque[str]) -> None:
        with pipe:
            for line in pipe:
                output.append(line.decode(errors="replace").rstrip())

    def _follow(
        self,
        process: subprocess.Popen[bytes],
        notes: IO[bytes],
        listener: threading.Thread,
        output: deque[str],
    ) -> None:
        """Read the notes of Ray's driver until it ends."""
        with notes:
            for line in notes:
                self._noted(**json.loads(line))
        listener.join(_CHECK_INTERVAL)
        last = next(filter(None, reversed(output)), "it said nothing")
        with self._changed:
            self._ended.set()
            self._fail(
                RayError(
                    f"The process that uses Ray has ended (status {process.wait()}): {last}",
                    hint=f"Is the cluster still up (ray status)? When it is: {_GO_ON}",
                )
            )

    def _noted(self, kind: str, **about: str) -> None:
        if kind == "failed":
            self._fail(getattr(errors, about["error"])(about["message"], hint=about["hint"]))
        elif kind == "message":
            self.session.say(about["line"])
        elif kind == "cluster":
            self._cluster, self._heard_at = about["text"], self.session.clock.now()

    def _accept(self, server: socket.socket) -> None:
        """Accept the agents' connections, which Ray's driver makes, until the socket is closed."""
        with contextlib.suppress(OSError):
            while True:
                link, _ = server.accept()
                header = b""
                while not header.endswith(b"\n") and (byte := link.recv(1)):
                    header += byte
                if header.endswith(b"\n"):
                    self._add_agent(link, **json.loads(header))

    def _add_agent(self, link: socket.socket, node: int, host: str, address: str, moves: bool) -> None:
        with self._changed:
            if self._over:
                link.close()
                return
            self._addresses[node] = address
            folder = "" if moves else str(Path.cwd())  # with `moves`, Ray has copied the working directory
            invite = Invite(node, host, 1, folder, self._env, [], self._script)
            connection = self._handshake(
                os.dup(link.fileno()),
                os.dup(link.fileno()),
                invite,
                [],
                lambda: RayError(
                    f"dtrain's agent on {host} ended before it was ready.",
                    hint=f"See its messages above, and the logs of Ray on {host}.",
                ),
            )
            self._links = [*(pair for pair in self._links if not pair[1].ended), (link, connection)]

    def _register(self, send: Callable[[HostMessage], None], hello: Hello) -> RemoteAgent | None:
        agent = super()._register(send, hello)
        self.session.events.put(0)  # an elastic job may grow
        return agent

    def _missing(self, waited: float) -> str | None:
        present, wanted = len(self._present()), sum(self._jobs.values())
        limit = self._wanted.join_timeout
        if present >= (wanted if waited < limit else self._fewest):
            return None
        return "" if waited < limit else self._unplaced(waited, present)

    def _unplaced(self, waited: float, present: int) -> str:
        tasks = counted(sum(self._jobs.values()), "task")
        resources = " and ".join(filter(None, [counted(self._wanted.cpus, "CPU"), self._gpus_in_words()]))
        if not self._cluster and not self._addresses:
            return f"Ray at {self._wanted.address} has not answered in {waited:.0f} s."
        silent = self.session.clock.now() - self._heard_at
        if self._cluster and silent > _SILENT:
            return f"Ray at {self._wanted.address} has not answered for {silent:.0f} s: has its head ended?"
        return (
            f"Ray has placed {present} of {tasks} with {resources} each ({self._wanted.placement}) in "
            f"{waited:.0f} s. {self._cluster}"
        )

    def _gpus_in_words(self) -> str:
        return f"{self._wanted.gpus:g} GPU for each worker" if self._wanted.gpus else ""

    def _machine(self, agent: RemoteAgent) -> object:
        return self._addresses[agent.hello.node]

    def _address(self, agent: RemoteAgent) -> str:
        address = self._assigned[agent.hello.node] = self._addresses[agent.hello.node]
        return f"[{address}]" if ":" in address else address

    def _place(self, tasks: Sequence[Task]) -> list[RemoteAgent]:
        """The agent of each task. Ray gets `join_timeout` seconds to replace the agents of a lost node.

        An elastic job has workers only; the last ones are left out while they have no place.
        """
        needed = min(len(tasks), self._fewest)
        waited = self._wait(lambda: len(self._present()) >= needed)
        present = self._present()
        if len(present) < needed:
            raise PeerMissingError(self._unplaced(waited, len(present)), hint=self._absent_hint)
        ordered = sorted(tasks, key=lambda task: (_ORDER.index(task.job), task.index))
        return [present[ordered.index(task)] for task in tasks[: len(present)]]

    def start(self, commands: Sequence[TaskCommand]) -> list[RemoteTask]:
        """Start tasks where they were assigned; with parameter servers, wait for an agent that Ray replaces.

        Raises:
            OSError: an agent could not start a task.
            PeerMissingError: Ray has no place for a task, or has moved it away from its assigned address.
        """
        if self._jobs["ps"]:
            nodes = {command.task: self._places[command.task].hello.node for command in commands}
            there = set(nodes.values())
            waited = self._wait(lambda: there <= {agent.hello.node for agent in self._present()})
            for task, node in nodes.items():
                before, now = self._assigned[node], self._addresses[node]
                if self._agents[node].lost:
                    why = self._unplaced(waited, len(self._present()))
                    raise PeerMissingError(why, hint=self._absent_hint)
                if now != before:
                    raise PeerMissingError(
                        f"Ray has lost the node of {task} ({before}) and placed it on {now}, and the other "
                        "tasks know only its old address.",
                        hint=_GO_ON,
                    )
        return super().start(commands)

    def _wait(self, condition: Callable[[], bool]) -> float:
        """Wait until a condition holds, at most `join_timeout` seconds; returns the seconds waited.

        Raises:
            RayError: Ray's driver has ended.
            ProcessEnd: this process has received a signal.
        """
        began = self.session.clock.now()
        with self._changed:
            while not condition() and self.session.clock.now() - began < self._wanted.join_timeout:
                if self._ended.is_set() and self._failure is not None:
                    raise self._failure
                if self.session.signalled:
                    self._status = 128 + self.session.signalled
                    raise ProcessEnd(self._status)
                self._changed.wait(_CHECK_INTERVAL)
        return self.session.clock.now() - began


def threads(cpus: int) -> dict[str, str]:
    """The variables that make each operation of a task use `cpus` threads."""
    return {"OMP_NUM_THREADS": f"{cpus}", "TF_NUM_INTRAOP_THREADS": f"{cpus}"}


def check_version() -> None:
    """Check the version of Ray that is installed, without importing it.

    Raises:
        UnsupportedVersionError: it is missing, or too old.
    """
    oldest = ".".join(map(str, OLDEST))
    try:
        version = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        raise errors.UnsupportedVersionError("Ray is not installed.", hint=INSTALL) from None
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST:
        raise errors.UnsupportedVersionError(
            f"Ray {version} is installed, and dtrain needs {oldest} or later.", hint=INSTALL
        )
