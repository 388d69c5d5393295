"""A running `fit`, `evaluate` or `predict`: what it needs, and what its workers tell each other."""
