"""Runs the attempts of a job: what a failure means, who is stuck, and what starts again."""
