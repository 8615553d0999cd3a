"""What PyTorch does for a plan: operators without a kernel, between the plan's own steps.

The runtime gets these as functions, and knows nothing of PyTorch.
"""
