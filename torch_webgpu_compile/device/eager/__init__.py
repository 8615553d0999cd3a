"""Operators of PyTorch on the device: compiled when first called, written here, or on the host."""
