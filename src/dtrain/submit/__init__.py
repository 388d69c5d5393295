"""Submits a job to a system that starts it: Slurm or Kubernetes; for a TPU VM it prints the command.

Each system has a file, and `target.py` defines their interface. Nothing here starts a task, or imports
TensorFlow.
"""
