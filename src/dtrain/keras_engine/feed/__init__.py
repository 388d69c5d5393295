"""The one data feed of `fit`, `evaluate` and `predict`: a source, the position in it, and the epochs over it.

`sources.py` says what a source does, `position.py` what a position is, `epochs.py` hands batches to Keras.
How a step uses a batch is not decided here.
"""
