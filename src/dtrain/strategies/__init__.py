"""The strategies, one file each. A strategy decides on which devices replicas and variables are.

How Keras trains under a strategy is decided in `engine/`; which strategy to use, in `auto` and
`registry`.
"""
