"""What is between PyTorch and this package: dtypes, and the operators added to ``torch.ops``."""
