"""Who queues a job on a system that starts it later? One file a system; `target.py` defines what they share.

Nothing here starts a task, and nothing imports TensorFlow.
"""
