"""The process through which a job uses Ray: it has Ray place the tasks, and connects the launcher and agents.

It is a process of its own, because Ray takes over the signals of the process that uses it, and ends that
process when it loses the cluster.

Usage: python -m dtrain.launch.hosts.ray_driver, with pipes. The first line of the input is an `Order`; at the
end of the input, the driver ends all agents and itself. Each line of the output is a note for `RayLauncher`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dtrain.base.clock import REAL, Clock
from dtrain.base.words import counted
from dtrain.errors import DtrainError, PeerMismatchError, RayError
from dtrain.launch.hosts.ray_actor import AgentActor

_NOTE_INTERVAL = 2.0  # seconds between two notes about the resources while tasks wait
_AGAIN = 1.0  # seconds until an agent that has ended is replaced
_END_SECONDS = 6.0  # seconds for agents to end
_CONNECT = 5.0  # seconds for the cluster's head to accept a connection
_MISSING = "No module named 'dtrain'"
_HIDDEN = (":", "_group", "memory")  # parts of the names of Ray's internal resources, which are not shown
_NO_NODE = (
    "start the job on a node of the cluster; or from elsewhere by ray job submit, or with ray://HOST:10001"
)


@dataclass(frozen=True)
class Order:
    """The launcher's request.

    Attributes:
        address: the cluster's address.
        bundles: the resources of each task, by Ray's names.
        together: the number of tasks, from the first on, that are placed together or not at all.
        strategy: Ray's placement strategy for these tasks.
        socket: the path of the Unix socket to which each agent is connected. Each connection begins with a
            line of JSON that describes the agent.
    """

    address: str
    bundles: Sequence[Mapping[str, float]]
    together: int
    strategy: str
    socket: str


class _Driver:
    def __init__(self, order: Order, note: Any) -> None:
        self._order = order
        self._note = note
        self._over = threading.Event()
        self._waiting = set(range(len(order.bundles)))

    def run(self, ended: threading.Event, clock: Clock = REAL) -> None:
        """Serve the launcher until `ended`, and end all agents within some seconds on a clock.

        Raises:
            RayError: Ray cannot be used.
            PeerMismatchError: the cluster has another version.
        """
        import ray

        _connect(self._order.address)
        self._moves = "working_dir" in (ray.get_runtime_context().runtime_env or {})
        groups = self._groups()
        threads = [
            threading.Thread(target=self._serve, args=(node, group, index), daemon=True)
            for node, (group, index) in enumerate(groups)
        ]
        for thread in threads:
            thread.start()
        while not ended.wait(_NOTE_INTERVAL):
            if self._waiting:
                self._note(kind="cluster", text=_resources())
        self._over.set()
        deadline = clock.deadline(_END_SECONDS)
        for node, thread in enumerate(threads):
            if node not in self._waiting:
                thread.join(deadline.left())
        ray.shutdown()

    def _groups(self) -> list[tuple[Any, int]]:
        """The placement group of each task, and its place in it."""
        from ray.util import placement_group

        order = self._order
        first = placement_group([dict(bundle) for bundle in order.bundles[: order.together]], order.strategy)
        alone = [placement_group([dict(bundle)]) for bundle in order.bundles[order.together :]]
        return [*((first, index) for index in range(order.together)), *((group, 0) for group in alone)]

    def _serve(self, node: int, group: Any, index: int) -> None:
        """Keep an agent running in a place, until the driver ends."""
        import ray

        while not self._over.is_set():
            actor = _actor(self._order.bundles[node], group, index)
            try:
                host, address = ray.get(actor.where.remote())
                self._waiting.discard(node)
                self._relay(node, actor, host, address)
            except ray.exceptions.RayError as error:
                self._lost(node, str(error))
            finally:
                self._waiting.add(node)
                ray.kill(actor)
            self._over.wait(_AGAIN)

    def _lost(self, node: int, reason: str) -> None:
        if self._over.is_set():
            return
        lines = [line.strip() for line in reason.splitlines() if line.strip()]
        if _MISSING in reason:
            error = RayError(
                f"A node of the Ray cluster has no dtrain: {lines[-1]}",
                hint="Install the same versions of dtrain, TensorFlow and Keras on all nodes: in their "
                "image, or by a runtime environment.",
            )
            self._note(kind="failed", error="RayError", message=error.message, hint=error.hint)
        else:
            self._note(kind="message", line=f"Ray has lost the place of node {node}: {lines[0]}")

    def _relay(self, node: int, actor: Any, host: str, address: str) -> None:
        """Connect the launcher and an agent, until one of them has ended."""
        import ray

        with socket.socket(socket.AF_UNIX) as link:
            link.connect(self._order.socket)
            about = {"node": node, "host": host, "address": address, "moves": self._moves}
            link.sendall(json.dumps(about).encode() + b"\n")
            threading.Thread(target=self._to_agent, args=(link, actor), daemon=True).start()
            try:
                while data := ray.get(actor.read.remote()):
                    link.sendall(data)
            except OSError:  # the launcher has closed the connection
                return
            finally:
                with contextlib.suppress(OSError):
                    link.shutdown(socket.SHUT_RDWR)  # ends the thread that reads from it
            if not self._over.is_set():
                for line in ray.get(actor.ended.remote())[1]:
                    self._note(kind="message", line=f"{host}: {line}")

    def _to_agent(self, link: socket.socket, actor: Any) -> None:
        import ray

        with contextlib.suppress(OSError, ray.exceptions.RayError):
            while data := link.recv(1 << 16):
                ray.get(actor.write.remote(data))  # wait for each call: an actor with threads keeps no order
            ray.get(actor.close.remote())


def _actor(bundle: Mapping[str, float], group: Any, index: int) -> Any:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    others = {name: value for name, value in bundle.items() if name not in ("CPU", "GPU")}
    options = {
        "num_cpus": bundle["CPU"],
        "num_gpus": bundle.get("GPU", 0),
        "resources": others or None,
        "max_concurrency": 4,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, index),
    }
    return ray.remote(**options)(AgentActor).remote()


def _connect(address: str) -> None:
    """Connect this process to a cluster.

    Raises:
        RayError: the connection is not possible.
        PeerMismatchError: the cluster has another version of Ray or Python.
    """
    import ray

    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon:
        try:
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT).close()
        except (OSError, OverflowError) as error:
            raise RayError(
                f"Ray does not answer at {address}: {getattr(error, 'strerror', None) or error}.",
                hint="Is the cluster up (ray status)? Is this the address that ray start --head has shown?",
            ) from error
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:
        text = " ".join(str(error).split())
        if "Version mismatch" in text:
            raise PeerMismatchError(
                f"The Ray cluster at {address} has other versions than this process: {text}",
                hint="Install the same versions of Ray and Python here as in the cluster.",
            ) from error
        raise RayError(
            f"Ray could not be used at {address}: {type(error).__name__}: {text}",
            hint=f"Start a cluster (ray start --head), and {_NO_NODE}. If the cluster asks for a token, set "
            "RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN where ~/.ray/auth_token does not have it.",
        ) from error


def _resources() -> str:
    """The cluster's resources, in words."""
    import ray

    with contextlib.suppress(Exception):
        nodes = sum(bool(node["Alive"]) for node in ray.nodes())
        free = _amounts(ray.available_resources())
        has = f"{counted(nodes, 'node')} with {_amounts(ray.cluster_resources())}"
        return f"The cluster has {has}; free are {free}."
    return ""


def _amounts(resources: Mapping[str, float]) -> str:
    shown = [name for name in sorted(resources) if not any(word in name for word in _HIDDEN)]
    return ", ".join(f"{resources[name]:g} {name}" for name in shown) or "nothing"


def main() -> int:
    """Serve the launcher that has started this process; returns the exit status."""
    output = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # send Ray's prints to standard error, because standard output carries the notes
    lock, ended = threading.Lock(), threading.Event()

    def note(**about: object) -> None:
        with lock, contextlib.suppress(OSError, ValueError):
            output.write(json.dumps(about) + "\n")

    line = sys.stdin.readline()
    if not line:
        return 1
    order = Order(**json.loads(line))

    def wait_for_end() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    try:
        _Driver(order, note).run(ended)
    except DtrainError as error:
        note(kind="failed", error=type(error).__name__, message=error.message, hint=error.hint)
        return 1
    return 0


def ordered(order: Order) -> bytes:
    """An order as the line that the driver reads."""
    return json.dumps(dataclasses.asdict(order)).encode() + b"\n"


if __name__ == "__main__":
    sys.exit(main())
