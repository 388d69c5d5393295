"""Starts the tasks of a job as the ranks of an MPI start."""
