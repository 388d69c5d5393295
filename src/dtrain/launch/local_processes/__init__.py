"""Starts the tasks of a job as processes of this machine."""
