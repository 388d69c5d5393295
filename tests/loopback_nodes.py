"""For the contract tests of launchers: the launcher "nodes" with two nodes on this machine.

A process that launches such a job imports this module. The second node is a separate process. It ends as any
node does: when the job has ended, or when the first node is gone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from dtrain.launch.hosts.nodes_launcher import NodesLauncher, join_nodes
from dtrain.launch.job.job_session import Session
from dtrain.launch.job.spec import JobSpec, Nodes
from dtrain.launch.launchers import LAUNCHERS
from dtrain.launch.local_processes.ports import reserve_ports


class LoopbackNodes(NodesLauncher):
    def __init__(self, session: Session, spec: JobSpec) -> None:
        self._held = contextlib.ExitStack()
        (port,) = self._held.enter_context(reserve_ports(1))
        nodes = Nodes(rendezvous=f"localhost:{port}", rank=0, fewest=2, most=2, per_node=2)
        super().__init__(session, dataclasses.replace(spec, nodes=nodes))

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        own = dataclasses.asdict(dataclasses.replace(self._nodes, rank=1))
        command = [sys.executable, "-m", "loopback_nodes", json.dumps(own)]
        other = subprocess.Popen(command, start_new_session=True)
        with self._held, super().opened():
            yield
        status = other.wait()
        if status != self._status:
            raise RuntimeError(f"node 1 ended with status {status}, and the job with {self._status}")


if __name__ == "__main__":
    options: dict[str, Any] = json.loads(sys.argv[1])
    sys.exit(join_nodes(Nodes(**options), []))

LAUNCHERS["nodes"] = LoopbackNodes
