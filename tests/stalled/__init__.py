"""Runs the tests that start processes while it freezes or slows down these processes at random.

It shows that no test and no rule of the package depends on a machine that never stalls. It changes no test.
"""
