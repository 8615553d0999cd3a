"""Tensors on the device: their memory, views of it, and copies to, from and within it."""
