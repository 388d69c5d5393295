"""One call of `fit`, `evaluate` or `predict` around Keras' own."""
