"""A PyTorch backend for every GPU that WebGPU reaches."""
