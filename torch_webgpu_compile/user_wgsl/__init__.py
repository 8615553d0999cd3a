"""WGSL that users write: where it is in their files, its declarations, its names in kernels."""
