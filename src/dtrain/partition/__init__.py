"""Partitions one traced function over replicas: each gets its rows, and collectives join the parts.

The package knows graphs of TensorFlow, and nothing of Keras.
"""
