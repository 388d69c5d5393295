"""Jobs that are started from one machine: it is the coordinator, and starts an agent on each host by SSH.

It runs the user's own OpenSSH client, with the user's settings and known host keys. All that an agent has to
know is sent over the client's standard input, so no secret is on a command line.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from dtrain.environments import without_task
from dtrain.errors import ConfigurationError, DtrainError, PeerMissingError
from dtrain.launch.hosts.agent import HERE
from dtrain.launch.hosts.agent_messages import Invite
from dtrain.launch.hosts.agents_launcher import HostsLauncher
from dtrain.launch.job.job_session import Session
from dtrain.launch.job.spec import JobSpec
from dtrain.launch.local_processes.guard import MARK_VARIABLE
from dtrain.process_group import secret
from dtrain.task import channel

PASSED = ("DTRAIN_", "TF_", "XLA_", "KERAS_", "NCCL_", "OMP_", "PYTHON")
"""The prefixes of the variables that the tasks on other hosts get too."""

_OWN = (MARK_VARIABLE, secret.VARIABLE, channel.VARIABLE)  # each means something on this machine only
_AGENT = (sys.executable, "-m", "dtrain.launch.hosts.agent")
# The client must never ask the user, and must leave no shared connection open in the background.
_OPTIONS = ("BatchMode=yes", "ConnectTimeout=20", "ControlMaster=no")
_HINTS = {
    "REMOTE HOST IDENTIFICATION HAS CHANGED": "If {host} was installed again, remove its old key (ssh-keygen "
    "-R {host}), connect once by hand (ssh {host}) and check the new one. If it was not, another machine "
    "answers in its place: do not connect.",
    "Host key verification failed": "Connect once by hand (ssh {host}), and check the key that it shows.",
    "No module named": "Install the same version of dtrain on {host}, for the Python {python}.",
    "Permission denied (": "Let ssh log in there without a password: ssh-copy-id {host}, or load your key "
    "into the agent (ssh-add).",
    "Could not resolve hostname": "Check the name, or give it an address in ~/.ssh/config.",
}
_NOT_FOUND = (126, 127)  # the statuses of a shell that cannot run a command


class SSHLauncher(HostsLauncher):
    """The coordinator, on the user's machine. If that is also a host, its agent is started without SSH.

    Raises:
        ConfigurationError: `JobSpec.hosts` is missing, there is no SSH client, or a variable that tasks
            should get is not set.
    """

    _own_name = "this machine"
    _absent_hint = "Can you log in there by ssh, without a question, and is the machine fast enough?"

    def __init__(self, session: Session, spec: JobSpec | None = None) -> None:
        super().__init__(session, spec)
        if spec is None or spec.hosts is None:
            raise ConfigurationError(
                "The launcher is 'ssh', but JobSpec.hosts is not set.",
                hint="Use dtrain launch --hosts a:2,b:2.",
            )
        self._hosts = spec.hosts
        self._fewest = spec.hosts.fewest or len(spec.hosts.slots)
        self._unusable = 0  # hosts whose agents have ended before they were part of the job
        self._first: DtrainError | None = None
        self._env = passed_environment(os.environ, spec.hosts.env)
        self._gpus: list[str] | None = [] if spec.ps else None
        self._script = script_of(spec.command)
        if not shutil.which("ssh") and not all(map(_is_here, self._hosts.slots)):
            raise ConfigurationError(
                "There is no program ssh in PATH, which reaches the hosts.",
                hint="Install the OpenSSH client (openssh-client).",
            )

    @contextlib.contextmanager
    def _agents_started(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for node, (host, slots) in enumerate(self._hosts.slots.items()):
                command = (*_AGENT, HERE) if _is_here(host) else self._over_ssh(host)
                invite = Invite(
                    node,
                    host,
                    slots,
                    str(Path.cwd()),
                    self._env,
                    self._gpus,
                    self._script,
                    self._hosts.gpus_per_worker,
                    self._hosts.interface or "",
                )
                stack.enter_context(self._agent_over_pipes(command, invite))
            yield

    def _over_ssh(self, host: str) -> Sequence[str]:
        options = [word for option in _OPTIONS for word in ("-o", option)]
        return ["ssh", "-T", "-x", *options, "--", host, f"exec {shlex.join(_AGENT)}"]

    def _missing(self, waited: float) -> str | None:
        present = {agent.hello.node for agent in self._present()}
        absent = [host for node, host in enumerate(self._hosts.slots) if node not in present]
        if len(absent) > self._unusable and waited < self._hosts.join_timeout:
            return ""
        if len(present) >= self._fewest:
            return None
        return f"There was no answer in {waited:.0f} s from: {', '.join(absent)}."

    def _fail(self, error: DtrainError) -> None:
        """Handle an agent that cannot be part of the job; a `PeerMissingError` means that it has ended."""
        with self._changed:
            self._unusable += isinstance(error, PeerMissingError)
            self._first = self._first or error
            spared = len(self._hosts.slots) > self._fewest
            if spared and len(self._hosts.slots) - self._unusable >= self._fewest:
                self.session.say(f"{error} The job continues without that host.")
                return
        super()._fail(self._first)

    def _hint_for(self, host: str, status: int, output: str) -> str:
        if status in _NOT_FOUND:
            return (
                f"Install Python and dtrain on {host} at the same path as on this machine: {sys.executable}."
            )
        for words, hint in _HINTS.items():
            if words in output:
                return hint.format(host=host, python=sys.executable)
        return (
            f"Is {host} up, does its SSH server run, and does a firewall let you through? See ssh -v {host}."
        )


def passed_environment(env: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """The variables of `env` that the tasks on all hosts get: those of `PASSED`, and those with these names.

    Raises:
        ConfigurationError: one of the names is not set.
    """
    for name in names:
        if name not in env:
            raise ConfigurationError(
                f"The variable {name} is to be copied to all hosts, but it is not set here.",
                hint=f"Set it (export {name}=...), or leave out --env {name}.",
            )
    usual = without_task(env)
    return {
        name: value
        for name, value in usual.items()
        if name in names or (name.startswith(PASSED) and name not in _OWN)
    }


def _is_here(host: str) -> bool:
    own = socket.gethostname()
    return host in ("localhost", own, own.partition(".")[0])


def script_of(command: Sequence[str]) -> str:
    """The script that a command runs with this Python; "" if it runs something else."""
    if len(command) > 1 and command[0] == sys.executable and not command[1].startswith("-"):
        return command[1]
    return ""
