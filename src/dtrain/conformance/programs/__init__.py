"""The programs of the corpus, one file a theme. Each is ordinary Keras, and stands alone.

A program uses `run.strategy` as TensorFlow's guide shows, and no function of dtrain's. The initial weights
depend on the seed that the worker sets before each program. No program has layers that draw random numbers,
because each replica draws different ones.
"""
