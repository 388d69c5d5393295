"""Collective operations between workers, over MPI, sockets, or TensorFlow's own collectives (ring, NCCL).

A step that is partitioned calls them directly; in custom loops TensorFlow's strategies do.
"""
