"""What `dtrain env`, `doctor`, `explain` and `plan` find: the installation, and what a script does and takes.

`installation` gathers versions and devices, `checks` lists the checks of hosts, and `peer_probe` connects the
tasks for them. `script_job` runs a script as a small job, `profile_job` measures a step of it, and
`tpu_ready` examines it for a TPU.
"""
