"""Optimizers beyond Keras' own."""

from dtrain.optim.lazy import LazyAdam

__all__ = ["LazyAdam"]
