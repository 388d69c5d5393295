"""Collective operations between workers, over MPI, sockets, or TensorFlow's own collectives (ring, NCCL).

The engine calls TensorFlow's strategies for an all-reduce or a gather; this package works below them.
"""
