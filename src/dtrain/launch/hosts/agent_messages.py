"""The messages between the coordinator of a job and the agents on its hosts: one JSON schema with a version.

The dataclasses are the schema. Whatever does not fit them exactly is refused; nothing is ever unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dtrain.base.json_messages import Malformed, from_json, load, to_json
from dtrain.errors import ConfigurationError, PeerMismatchError
from dtrain.task.task_messages import Message

VERSION = 6
"""The version of the schema. It changes with every change of a message."""

LONGEST = 1 << 22
"""The largest number of bytes of a message: enough for the arguments and the environment of a task."""


@dataclass(frozen=True)
class Hello:
    """An agent introduces itself; its first message.

    Attributes:
        node: the rank of its host in the job.
        host: the host's name.
        slots: the number of workers that the host may run.
        address: the address at which the other hosts reach this one: that of the requested network interface,
            else the one from which it reaches the coordinator; "" if unknown.
        reached: the coordinator's address as this host sees it; "" if unknown.
        dtrain: the agent's version of dtrain.
        python: the agent's version of Python, such as "3.12".
        command: the job's command as this host's user gave it, without the Python; empty if only the
            coordinator has the command.
    """

    node: int
    host: str
    slots: int
    address: str
    reached: str
    dtrain: str
    python: str
    command: Sequence[str] = ()


@dataclass(frozen=True)
class Reserved:
    """The ports that an agent has reserved; none, and the reason, if the system refuses."""

    request: int
    ports: Sequence[int]
    reason: str = ""


@dataclass(frozen=True)
class Started:
    """A task was started; or it could not be, for a reason, and `pid` is 0."""

    id: int
    pid: int
    reason: str = ""


@dataclass(frozen=True)
class Exited:
    """A task ended `seconds_ago`; all of its messages were sent before this one."""

    id: int
    code: int
    seconds_ago: float


@dataclass(frozen=True)
class OutputLine:
    """A line that a task wrote to `stdout` or `stderr`."""

    id: int
    to: str
    line: str


@dataclass(frozen=True)
class Answer:
    """The answer to `Ask`."""

    request: int
    value: bool


@dataclass(frozen=True)
class Signalled:
    """The agent's process has received a signal, which ends the job."""

    signum: int


@dataclass(frozen=True)
class Invite:
    """The first message to an agent that was started over pipes: which host it is, and where tasks start.

    Attributes:
        node, host, slots: as in `Hello`.
        folder: the working directory of tasks; "" for the agent's own.
        env: variables that tasks get in addition to the agent's environment.
        gpus: one value of CUDA_VISIBLE_DEVICES for each worker of the host; empty sets no such variable; None
            lets the agent divide the GPUs that it finds.
        script: a file that must exist on the host; "" for none.
        gpus_per_worker: how the agent divides the GPUs that it finds, as for `gpu_shares`.
        interface: the network interface at whose address its tasks are reached; "" for the one that leads to
            the coordinator.
    """

    node: int
    host: str
    slots: int
    folder: str
    env: Mapping[str, str]
    gpus: Sequence[str] | None
    script: str = ""
    gpus_per_worker: int | None = None
    interface: str = ""


@dataclass(frozen=True)
class Welcome:
    """An agent is part of the job.

    Attributes:
        secret: the secret that the tasks of this job share.
        python: the path of the coordinator's Python, which an agent replaces by that of its own in a command.
    """

    secret: str
    python: str


@dataclass(frozen=True)
class Refused:
    """An agent is not part of the job, and why."""

    reason: str
    hint: str = ""


@dataclass(frozen=True)
class Reserve:
    """Reserve ports, and release those of earlier requests."""

    request: int
    count: int


@dataclass(frozen=True)
class Start:
    """Start a task.

    Attributes:
        id: a number that no other start of this job has.
        job, index: the task.
        command: its argument vector.
        env: variables that the task gets in addition to the agent's; None deletes a variable.
    """

    id: int
    job: str
    index: int
    command: Sequence[str]
    env: Mapping[str, str | None]


@dataclass(frozen=True)
class SendSignal:
    """Send a signal to a task's process group; `Ask` sends one to a single process."""

    id: int
    signum: int


@dataclass(frozen=True)
class Ask:
    """A question about a task.

    Attributes:
        request: the number that the answer repeats.
        id: the task's start.
        what: "stopped" (is it stopped?), "uses" (has it loaded `library`?), "listens" (does it listen on one
            of `ports`?), "signal" (send `signum` to its process `pid`: was it sent?), "taken" (does no signal
            `signum` wait for its process `pid`?), or "output" (wait until its output is forwarded).
    """

    request: int
    id: int
    what: str
    pid: int | None = None
    library: str = ""
    ports: Sequence[int] = ()
    signum: int = 0
    patience: float = 0.0


@dataclass(frozen=True)
class KillRest:
    """Kill processes that ended tasks have left behind."""


@dataclass(frozen=True)
class End:
    """The job is over; the agent ends with this status, and shows the line if there is one."""

    status: int
    line: str = ""


HostMessage = (
    Hello | Reserved | Started | Exited | OutputLine | Answer | Signalled
    | Invite | Welcome | Refused | Reserve | Start | SendSignal | Ask | KillRest | End
    | Message
)  # fmt: skip
"""A message between hosts; an agent passes on the messages of its tasks to their launcher as they are."""


def encode(message: HostMessage) -> bytes:
    """The bytes of a message.

    Raises:
        ConfigurationError: the message is longer than `LONGEST`.
    """
    text = json.dumps({"version": VERSION, **to_json(message)}).encode("ascii")  # lone surrogates are escaped
    if len(text) > LONGEST:
        raise ConfigurationError(
            f"A message between hosts ({type(message).__name__}) has {len(text)} bytes, and the longest may "
            f"have {LONGEST}.",
            hint="Shorten the arguments and the environment variables of the job.",
        )
    return text


def parse(text: bytes) -> HostMessage:
    """The message in these bytes.

    Raises:
        Malformed: they are no message of the schema.
        PeerMismatchError: they are a message of another version of the schema.
    """
    if len(text) > LONGEST:
        raise Malformed(f"{len(text)} bytes")
    content = load(text)
    version = content.pop("version", None)
    if type(version) is not int:
        raise Malformed("no version")
    if version != VERSION:
        raise PeerMismatchError(
            f"The other side speaks version {version} of dtrain's messages between hosts, this one version "
            f"{VERSION}.",
            hint="Install the same version of dtrain on all hosts.",
        )
    return from_json(content, HostMessage)
