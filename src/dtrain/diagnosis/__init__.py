"""What `dtrain env`, `doctor` and `explain` find: the installation, problems of hosts or of a user's script.

`installation` gathers versions and devices, `checks` lists the checks of hosts, and `peer_probe` connects the
tasks for them. `script_job` runs a script as a small job, and `tpu_ready` examines it for a TPU.
"""
