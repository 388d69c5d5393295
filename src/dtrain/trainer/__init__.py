"""`Trainer`, one object over strategy, data, checkpoints and monitoring; and a search for a learning rate."""
