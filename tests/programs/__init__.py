"""The training programs of all suites, one file a theme, and the strategies that they run under.

The contract compares most of them with one device, and `tests/same_bits` all of them with another commit.
Importing this package starts nothing; `registry.find` imports the file of one program.
"""
