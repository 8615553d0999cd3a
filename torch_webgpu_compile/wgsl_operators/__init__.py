"""`wgsl_op`: operators of PyTorch that users write in WGSL."""
