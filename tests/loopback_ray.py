"""For the contract tests of launchers: the launcher "ray", in the cluster that RAY_ADDRESS names.

A process that launches such a job imports this module.
"""

from __future__ import annotations

import dataclasses
import os

from dtrain.launch.hosts.ray import RayLauncher
from dtrain.launch.launchers import LAUNCHERS
from dtrain.launch.ray_cluster import RayCluster
from dtrain.launch.session import Session
from dtrain.launch.spec import JobSpec


class LoopbackRay(RayLauncher):
    def __init__(self, session: Session, spec: JobSpec) -> None:
        super().__init__(session, dataclasses.replace(spec, ray=RayCluster(env=sorted(os.environ))))


LAUNCHERS["ray"] = LoopbackRay
