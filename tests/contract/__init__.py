"""The contract: one set of training programs that every strategy must train to one device's numbers."""
