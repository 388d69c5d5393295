"""The functions that Keras' loops call; each runs many steps."""
