"""Custom loops: one replica of `strategy.run`, its state by thread, and how replicas combine values."""
