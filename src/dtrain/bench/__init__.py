"""Compares strategies: trains the same model, weights, data and batches under each, in separate processes.

`plan.py` plans the rows, `runs.py` runs them, `measured.py` and `results.py` evaluate them; `table.py`,
`notes.py` and `picture.py` show the results. It does not compare dtrain with other libraries; `benchmarks/`
does.
"""
