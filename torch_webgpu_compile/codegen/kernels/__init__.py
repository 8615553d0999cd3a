"""The kernels: one module for each kind, and what they are built with."""
