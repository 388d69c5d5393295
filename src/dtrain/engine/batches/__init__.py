"""Batches, their rows, their parts for the replicas, and the order of examples."""
