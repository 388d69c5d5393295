"""What moves the weights beyond Keras' own: optimizers, rates and schedules, losses, precision."""

from dtrain.optim.lazy import LazyAdam
from dtrain.optim.precision import float32_outputs, precision, precision_policy
from dtrain.optim.rates import scaled_rate
from dtrain.optim.rematerialize import rematerialize
from dtrain.optim.schedules import WarmUp, cosine_restarts
from dtrain.optim.sharded_state import shard_state
from dtrain.optim.smoothing import SparseLabelSmoothing

__all__ = [
    "LazyAdam",
    "SparseLabelSmoothing",
    "WarmUp",
    "cosine_restarts",
    "float32_outputs",
    "precision",
    "precision_policy",
    "rematerialize",
    "scaled_rate",
    "shard_state",
]
