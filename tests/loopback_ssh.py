"""For the contract tests of launchers: the launcher "ssh" with two hosts, which are both this machine.

A process that launches such a job imports this module. A shell replaces the SSH client and its server;
`tests/multihost/test_ssh.py` uses the real ones.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence

from dtrain.launch.hosts.ssh_launcher import SSHLauncher
from dtrain.launch.job.job_session import Session
from dtrain.launch.job.spec import JobSpec, SSHHosts
from dtrain.launch.launchers import LAUNCHERS


class LoopbackSSH(SSHLauncher):
    def __init__(self, session: Session, spec: JobSpec) -> None:
        hosts = SSHHosts(slots={"localhost": 1, "other": 3}, env=sorted(os.environ))
        super().__init__(session, dataclasses.replace(spec, hosts=hosts))

    def _over_ssh(self, host: str) -> Sequence[str]:
        *_, host, line = super()._over_ssh(host)
        return ["sh", "-c", line]


LAUNCHERS["ssh"] = LoopbackSSH
