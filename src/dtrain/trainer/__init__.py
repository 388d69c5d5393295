"""`Trainer`: one object over strategy, data, checkpoints and monitoring."""
