"""Optimizer state divided over the replicas."""
