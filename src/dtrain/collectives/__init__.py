"""How do workers add up? The transports that values travel by: TensorFlow's ring or NCCL, and MPI.

The engine asks TensorFlow's strategies for sums and gatherings; what is in here sits below them.
"""
