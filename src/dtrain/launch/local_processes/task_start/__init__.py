"""The first folder on a task's PYTHONPATH; it holds only `sitecustomize.py`, which Python runs at its start.

No module of the package imports it.
"""
