"""When replicas are made equal: at each update, after several micro-batches, or after several steps."""
