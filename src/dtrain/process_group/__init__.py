"""The workers of a job as one group: they meet, stay connected, and exchange small values."""
