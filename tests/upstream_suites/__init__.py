"""Keras' own suites, as its wheel ships them, in the scope of a strategy (`make test-upstream`).

`expected.txt` names the tests that do not pass, each with its reason: lines of `file::class::test | reason`.
"""
