"""What a task reports to its launcher, and how."""
