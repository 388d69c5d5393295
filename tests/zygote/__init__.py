"""A zygote: a process that has imported TensorFlow and Keras, from which tests fork their Python programs.

A program that would not behave as after `exec` is started by `exec`. The package knows nothing of a zygote.
"""
