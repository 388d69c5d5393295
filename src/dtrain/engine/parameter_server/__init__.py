"""Training on parameter servers: the chief schedules blocks of steps, workers compute, servers update.

A block is one TensorFlow function that runs several consecutive steps on one worker. In each step, the worker
computes on local copies of the weights, sends its changes in one message to each server, and receives the new
weights in one message from each.
"""
