"""What any package may use: logger, clock, checks of words, numbers and paths, options, text, files."""
