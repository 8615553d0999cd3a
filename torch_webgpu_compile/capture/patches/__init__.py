"""Changes to PyTorch while graphs are captured: rows of `patches.TABLE`."""
