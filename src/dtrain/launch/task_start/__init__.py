"""The folder that Python finds first when it starts a task: it holds `sitecustomize.py`, and nothing else.

It is no part of the package's own imports.
"""
