"""The update of the weights by Keras' own optimizers."""
