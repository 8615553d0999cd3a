"""The interface to PyTorch: dtypes, and the operators added to ``torch.ops``."""
