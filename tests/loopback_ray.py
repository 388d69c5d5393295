"""For the contract tests of launchers: the launcher "ray", in the cluster that RAY_ADDRESS names.

A process that launches such a job imports this module.
"""

from __future__ import annotations

import dataclasses
import os

from dtrain.launch.hosts.ray_launcher import RayLauncher
from dtrain.launch.job.job_session import Session
from dtrain.launch.job.ray_cluster import RayCluster
from dtrain.launch.job.spec import JobSpec
from dtrain.launch.launchers import LAUNCHERS


class LoopbackRay(RayLauncher):
    def __init__(self, session: Session, spec: JobSpec) -> None:
        super().__init__(session, dataclasses.replace(spec, ray=RayCluster(env=sorted(os.environ))))


LAUNCHERS["ray"] = LoopbackRay
