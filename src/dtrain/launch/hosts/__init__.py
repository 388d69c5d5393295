"""Jobs on several hosts: an agent on each host starts its tasks, and one coordinator controls all agents.

`agents_launcher` is the coordinator's side. Training data does not pass through it: workers connect to each
other.
"""
