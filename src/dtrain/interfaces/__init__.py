"""What the engine asks of a strategy, a dataset, a callback and a gradient hook."""
