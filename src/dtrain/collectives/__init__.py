"""How do workers reduce? The transports: MPI, sockets, and TensorFlow's own collectives (ring, NCCL).

The engine asks TensorFlow's strategies for sums and gatherings; what is in here sits below them.
"""
