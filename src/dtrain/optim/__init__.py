"""Optimizers and rates beyond Keras' own."""
