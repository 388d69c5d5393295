"""Gradient hooks that a strategy takes by name or as an object, a file for each algorithm."""
