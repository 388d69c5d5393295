"""Compares this tree's numbers with those of another commit, to the last bit.

`python -m tests.same_bits --base COMMIT` runs it; `make same-bits BASE=COMMIT` is the same command.
"""
