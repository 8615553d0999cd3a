"""Rules that replace ATen operators by others while a graph is traced."""
