"""Every reach into private names of Keras and TensorFlow, and the check of their versions.

Nothing outside this folder imports `keras.src` or `tensorflow.python`; each reach states why it is
needed, the public thread about it and the signature that it was written against. This is not a
compatibility layer: where an upstream name changes, a test fails.
"""
