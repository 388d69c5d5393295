"""The data feed of `fit`, `evaluate` and `predict`: a source, a position in its data, and the epochs over it.

`batch_sources.py` defines the interface of a source, `position.py` defines a position, and `data_feed.py`
passes batches to Keras. How a step uses a batch is not decided here.
"""
