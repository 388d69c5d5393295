"""`Trainer`, one object over strategy, data, checkpoints and monitoring; and the search for a learning rate."""
