"""What training on parameter servers must do: cases with their own assertions, run by the chief of a cluster.

Not tests themselves: `multiprocess/test_parameter_server.py` and `faults/` start the clusters and judge.
"""
