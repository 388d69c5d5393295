"""A Keras step, traced as one device's program and partitioned; and what runs whole or in each replica."""
