"""The operators that this package adds to ``torch.ops``."""
