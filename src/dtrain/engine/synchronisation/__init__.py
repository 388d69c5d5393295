"""When replicas are made equal: after several micro-batches, or after several steps."""
