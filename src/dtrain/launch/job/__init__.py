"""What is to run: a job's specification, its tasks, what attempts share, and who starts and judges them."""
