"""Additions to Keras' training: optimizers, rates and schedules, losses, precision, memory and batch size.

It does not compute the steps; the engine does.
"""

from dtrain.optim.batch_finder import largest_batch
from dtrain.optim.lazy import LazyAdam
from dtrain.optim.memory import Memory, predict_memory
from dtrain.optim.memory_measured import measure_memory
from dtrain.optim.precision import float32_outputs, precision, precision_policy
from dtrain.optim.rates import scaled_rate
from dtrain.optim.rematerialize import rematerialize
from dtrain.optim.schedules import WarmUp, cosine_restarts
from dtrain.optim.sharded_state import shard_state
from dtrain.optim.smoothing import SparseLabelSmoothing

__all__ = [
    "LazyAdam",
    "Memory",
    "SparseLabelSmoothing",
    "WarmUp",
    "cosine_restarts",
    "float32_outputs",
    "largest_batch",
    "measure_memory",
    "precision",
    "precision_policy",
    "predict_memory",
    "rematerialize",
    "scaled_rate",
    "shard_state",
]
