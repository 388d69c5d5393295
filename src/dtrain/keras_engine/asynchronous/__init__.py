"""Training on parameter servers: the chief hands out blocks of steps, workers compute them, servers update.

A block is one TensorFlow function that a worker runs: for every step it computes on copies of the weights,
sends what is to change to the servers in one message each, and gets the new weights back in one.
"""
