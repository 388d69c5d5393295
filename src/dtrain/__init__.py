"""dtrain: distributed training for Keras 3 on TensorFlow.

This module holds the public names and loads each on first use. Importing dtrain does not import TensorFlow,
and changes nothing for models outside of a dtrain strategy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# public name -> the module that defines it
_PUBLIC = {
    "BackupAndRestore": "dtrain.checkpoint.backup_and_restore",
    "CentralStorageStrategy": "dtrain.strategies.central_storage",
    "DiLoCo": "dtrain.gradient_hooks.diloco",
    "DtrainError": "dtrain.errors",
    "FullyShardedStrategy": "dtrain.strategies.fully_sharded",
    "Int8": "dtrain.gradient_hooks.int8",
    "LearningRates": "dtrain.trainer.rate_finder",
    "MirroredStrategy": "dtrain.strategies.mirrored",
    "MultiWorkerMirroredStrategy": "dtrain.strategies.multi_worker",
    "OneDeviceStrategy": "dtrain.strategies.one_device",
    "ParameterServerStrategy": "dtrain.strategies.parameter_server",
    "PowerSGD": "dtrain.gradient_hooks.power_sgd",
    "TPUStrategy": "dtrain.strategies.tpu",
    "TopK": "dtrain.gradient_hooks.top_k",
    "Trainer": "dtrain.trainer.trainer",
    "barrier": "dtrain.process_group.ranks",
    "broadcast": "dtrain.process_group.ranks",
    "compare_copies": "dtrain.engine.callbacks.copies",
    "find_learning_rate": "dtrain.trainer.rate_finder",
    "get_strategy": "dtrain.strategies.default",
    "is_chief": "dtrain.process_group.ranks",
    "local_rank": "dtrain.process_group.ranks",
    "rank": "dtrain.process_group.ranks",
    "spawn": "dtrain.launch.spawn",
    "strategy": "dtrain.strategies.registry",
    "world_size": "dtrain.process_group.ranks",
}

__all__ = [
    "BackupAndRestore",
    "CentralStorageStrategy",
    "DiLoCo",
    "DtrainError",
    "FullyShardedStrategy",
    "Int8",
    "LearningRates",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "PowerSGD",
    "TPUStrategy",
    "TopK",
    "Trainer",
    "barrier",
    "broadcast",
    "compare_copies",
    "find_learning_rate",
    "get_strategy",
    "is_chief",
    "local_rank",
    "rank",
    "spawn",
    "strategy",
    "world_size",
]

if TYPE_CHECKING:
    # Sorted by hand: ruff's isort rules would write a separate import statement for each of these names.
    # isort: off
    from tensorflow.distribute import (
        CrossDeviceOps as CrossDeviceOps,
        DistributedDataset as DistributedDataset,
        DistributedIterator as DistributedIterator,
        DistributedValues as DistributedValues,
        HierarchicalCopyAllReduce as HierarchicalCopyAllReduce,
        InputContext as InputContext,
        InputOptions as InputOptions,
        InputReplicationMode as InputReplicationMode,
        NcclAllReduce as NcclAllReduce,
        ReduceOp as ReduceOp,
        ReductionToOneDevice as ReductionToOneDevice,
        ReplicaContext as ReplicaContext,
        RunOptions as RunOptions,
        Server as Server,
        Strategy as Strategy,
        StrategyExtended as StrategyExtended,
        cluster_resolver as cluster_resolver,
        coordinator as coordinator,
        get_replica_context as get_replica_context,
        has_strategy as has_strategy,
        in_cross_replica_context as in_cross_replica_context,
    )
    from dtrain import (
        checkpoint as checkpoint,
        data as data,
        errors as errors,
        experimental as experimental,
        monitor as monitor,
        optim as optim,
        ray as ray,
    )

    # isort: on
    from dtrain.checkpoint.backup_and_restore import BackupAndRestore
    from dtrain.engine.callbacks.copies import compare_copies
    from dtrain.errors import DtrainError
    from dtrain.gradient_hooks.diloco import DiLoCo
    from dtrain.gradient_hooks.int8 import Int8
    from dtrain.gradient_hooks.power_sgd import PowerSGD
    from dtrain.gradient_hooks.top_k import TopK
    from dtrain.launch.spawn import spawn
    from dtrain.process_group.ranks import barrier, broadcast, is_chief, local_rank, rank, world_size
    from dtrain.strategies.central_storage import CentralStorageStrategy
    from dtrain.strategies.default import get_strategy
    from dtrain.strategies.fully_sharded import FullyShardedStrategy
    from dtrain.strategies.mirrored import MirroredStrategy
    from dtrain.strategies.multi_worker import MultiWorkerMirroredStrategy
    from dtrain.strategies.one_device import OneDeviceStrategy
    from dtrain.strategies.parameter_server import ParameterServerStrategy
    from dtrain.strategies.registry import strategy
    from dtrain.strategies.tpu import TPUStrategy
    from dtrain.trainer.rate_finder import LearningRates, find_learning_rate
    from dtrain.trainer.trainer import Trainer


# Names that are TensorFlow's own objects, so that a program can use `dtrain` in place of `tf.distribute`.
_FROM_TENSORFLOW = (
    "CrossDeviceOps",
    "DistributedDataset",
    "DistributedIterator",
    "DistributedValues",
    "HierarchicalCopyAllReduce",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "NcclAllReduce",
    "ReduceOp",
    "ReductionToOneDevice",
    "ReplicaContext",
    "RunOptions",
    "Server",
    "Strategy",
    "StrategyExtended",
    "cluster_resolver",
    "coordinator",
    "get_replica_context",
    "has_strategy",
    "in_cross_replica_context",
)


# Public modules that are imported on first use.
_MODULES = ("checkpoint", "data", "errors", "experimental", "monitor", "optim", "ray")


if not TYPE_CHECKING:  # with __getattr__, a type checker would accept any name

    def __getattr__(name: str) -> Any:
        if name not in _PUBLIC and name not in _FROM_TENSORFLOW and name not in _MODULES:
            known = ", ".join([*__all__, *_MODULES])
            raise AttributeError(f"module 'dtrain' has no attribute {name!r}; it has {known}")
        try:
            if name in _MODULES:
                return importlib.import_module(f"dtrain.{name}")
            if name in _FROM_TENSORFLOW:
                return getattr(importlib.import_module("tensorflow").distribute, name)
            return getattr(importlib.import_module(_PUBLIC[name]), name)
        except ImportError:
            from dtrain.upstream.versions import check_versions

            check_versions()  # the error says what to install, or that Keras has another backend
            raise


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES, *_FROM_TENSORFLOW, "__version__"])
