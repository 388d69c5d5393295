"""How Keras trains under a strategy: the step, the losses, the metrics, the optimizer, the files.

It knows `tf.distribute.Strategy` and the small protocol in `interfaces/`; it does not know which
strategies exist.
"""
