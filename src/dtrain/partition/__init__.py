"""Partitions one traced function over replicas: each gets its rows, and collectives join the parts.

`traced` reads the graph, `partitioner` walks over it, `rules` say what each operation becomes, and `emission`
makes the operations. The package knows graphs of TensorFlow, and nothing of Keras.
"""
