"""What the engine asks of a strategy, a dataset and a gradient hook."""
