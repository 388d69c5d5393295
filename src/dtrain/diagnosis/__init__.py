"""What `dtrain env` and `dtrain doctor` find: the installation, and what can go wrong between hosts.

`installation` gathers versions and devices, `checks` lists the checks, and `meeting` connects the tasks.
"""
