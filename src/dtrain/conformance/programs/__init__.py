"""The programs of the corpus, one file a theme. Each is ordinary Keras, and stands alone.

A program uses `run.strategy` as TensorFlow's guide tells, and nothing of dtrain's. Weights depend on the seed
that the worker sets before each program. Layers that draw random numbers are left out: replicas draw others.
"""
