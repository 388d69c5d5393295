"""Files that every worker saves at once."""
