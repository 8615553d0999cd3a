"""From a Python function, with all that it reaches, to a `CapturedGraph`, for bundles."""
