"""Jobs on several hosts: an agent on each starts its tasks, and one coordinator decides for all of them.

`launcher` is the coordinator's side. No task talks to another host through it: workers connect to each other.
"""
