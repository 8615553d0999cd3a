"""Bundles: compiled entry points with their weights, for a browser, or for Python without torch.

Their format (`manifest`, `schema`, `verify`), their files, and `load`, which runs one on NumPy
arrays. The folder `exports` makes them.
"""
