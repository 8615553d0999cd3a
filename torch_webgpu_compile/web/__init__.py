"""Bundles: compiled entry points with their weights, for a browser, or for Python without torch."""
