"""Strategies side by side: the same model, weights, data and batches, trained each in its own processes.

`plan.py` says what runs, `runs.py` runs it, `results.py` what came of it; `table.py`, `notes.py` and
`picture.py` show it. How fast dtrain is beside other libraries is told by `benchmarks/`.
"""
