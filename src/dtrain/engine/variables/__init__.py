"""The kinds of variables that need care: split over servers, local to a worker, written by the host."""
