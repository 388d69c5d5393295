"""What a program's own environment, launcher, transport, storage, hook, rule or strategy is made from.

Each is loaded on first use, so that a launcher imports no TensorFlow. The page "Extending dtrain" of
the guide has an example of each seam. Seams may change between versions; the changelog says so.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# name -> where it is defined: the module and the name there
_SEAMS = {
    # environments
    "Environment": "dtrain.environments.environment.Environment",
    "Topology": "dtrain.environments.topology.Topology",
    "current_job": "dtrain.environments.detected_job.current",
    "describe_environment": "dtrain.environments.detected_job.describe",
    "register_environment": "dtrain.environments.detected_job.register",
    # launchers
    "LAUNCHERS": "dtrain.launch.launchers.LAUNCHERS",
    "Launcher": "dtrain.launch.job.launcher.Launcher",
    "LocalLauncher": "dtrain.launch.local_processes.local_launcher.LocalLauncher",
    "MARK_VARIABLE": "dtrain.launch.local_processes.guard.MARK_VARIABLE",
    "launch_local": "dtrain.launch.local.launch_local",
    # transports
    "Calls": "dtrain.collectives.calls.Calls",
    "Transport": "dtrain.collectives.transport.Transport",
    "check_peers": "dtrain.process_group.peers.check",
    "exchange": "dtrain.process_group.value_exchange.exchange",
    "register_transport": "dtrain.collectives.transports.register",
    # storages
    "CheckpointIO": "dtrain.checkpoint.checkpoint_io.CheckpointIO",
    "register_storage": "dtrain.checkpoint.storages.register",
    # gradients
    "HOOKS": "dtrain.gradient_hooks.hooks.HOOKS",
    "GradientHook": "dtrain.interfaces.gradient_hook.GradientHook",
    "LocalSGD": "dtrain.gradient_hooks.local_sgd.LocalSGD",
    # rules of the partitioner
    "Partitioned": "dtrain.partition.partition.Partitioned",
    "Replicas": "dtrain.partition.replicas.Replicas",
    "Sharded": "dtrain.partition.layouts.Sharded",
    "by_batch": "dtrain.partition.partition.by_batch",
    "rule": "dtrain.partition.partitioner.rule",
    # strategies
    "ManagedStrategy": "dtrain.interfaces.managed_strategy.ManagedStrategy",
    "ReplicaLayout": "dtrain.interfaces.replica_layout.ReplicaLayout",
    "STRATEGIES": "dtrain.strategies.registry.STRATEGIES",
    "StrategyEntry": "dtrain.strategies.registry.StrategyEntry",
}

__all__ = [
    "HOOKS",
    "LAUNCHERS",
    "MARK_VARIABLE",
    "STRATEGIES",
    "Calls",
    "CheckpointIO",
    "Environment",
    "GradientHook",
    "Launcher",
    "LocalLauncher",
    "LocalSGD",
    "ManagedStrategy",
    "Partitioned",
    "ReplicaLayout",
    "Replicas",
    "Sharded",
    "StrategyEntry",
    "Topology",
    "Transport",
    "by_batch",
    "check_peers",
    "current_job",
    "describe_environment",
    "exchange",
    "launch_local",
    "register_environment",
    "register_storage",
    "register_transport",
    "rule",
]

if TYPE_CHECKING:
    from dtrain.checkpoint.checkpoint_io import CheckpointIO
    from dtrain.checkpoint.storages import register as register_storage
    from dtrain.collectives.calls import Calls
    from dtrain.collectives.transport import Transport
    from dtrain.collectives.transports import register as register_transport
    from dtrain.environments.detected_job import current as current_job
    from dtrain.environments.detected_job import describe as describe_environment
    from dtrain.environments.detected_job import register as register_environment
    from dtrain.environments.environment import Environment
    from dtrain.environments.topology import Topology
    from dtrain.gradient_hooks.hooks import HOOKS
    from dtrain.gradient_hooks.local_sgd import LocalSGD
    from dtrain.interfaces.gradient_hook import GradientHook
    from dtrain.interfaces.managed_strategy import ManagedStrategy
    from dtrain.interfaces.replica_layout import ReplicaLayout
    from dtrain.launch.job.launcher import Launcher
    from dtrain.launch.launchers import LAUNCHERS
    from dtrain.launch.local import launch_local
    from dtrain.launch.local_processes.guard import MARK_VARIABLE
    from dtrain.launch.local_processes.local_launcher import LocalLauncher
    from dtrain.partition.layouts import Sharded
    from dtrain.partition.partition import Partitioned, by_batch
    from dtrain.partition.partitioner import rule
    from dtrain.partition.replicas import Replicas
    from dtrain.process_group.peers import check as check_peers
    from dtrain.process_group.value_exchange import exchange
    from dtrain.strategies.registry import STRATEGIES, StrategyEntry

if not TYPE_CHECKING:  # with __getattr__, a type checker would accept any name

    def __getattr__(name: str) -> Any:
        if name not in _SEAMS:
            raise AttributeError(
                f"module 'dtrain.seams' has no attribute {name!r}; it has {', '.join(_SEAMS)}"
            )
        module, _, attribute = _SEAMS[name].rpartition(".")
        return getattr(importlib.import_module(module), attribute)
