"""What one tree compiles and another one does not: see `tests.replay.__main__`."""
