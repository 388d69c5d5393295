"""Predicts what a job would take on a cluster, before it is started; no TensorFlow, and nothing is measured.

`model_profile`, `cluster` and `calibration` hold what is known, each figure with its source, and
`measured_calibration` makes a calibration of what `dtrain bench` has measured.
`collective_costs` computes the time of one collective, `simulator` steps of many workers, `device_memory`
what a device holds, and `job_failures` the share of time that failures leave. `predictions` compares
strategies, and `plan_output` shows them.
"""
