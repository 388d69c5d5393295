"""Compares strategies: trains the same model, weights, data and batches under each, in separate processes.

`bench_plan.py` plans the rows, `runs.py` runs them, `measured.py` and `results.py` evaluate them; `table.py`
and `notes.py` show the results, and `output.py` writes them. It does not compare dtrain with other libraries;
`benchmarks/` does.
"""
