"""A Keras step, traced as one program and partitioned, or run whole or in each replica; when XLA runs it."""
