"""The strategies, one file each; a strategy decides where replicas and variables live.

How Keras trains on them is `keras_engine/`'s; which one to take is `auto.py`'s and `registry.py`'s.
"""
