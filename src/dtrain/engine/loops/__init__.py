"""A running `fit`, `evaluate` or `predict`: what it needs, and the times of its workers."""
