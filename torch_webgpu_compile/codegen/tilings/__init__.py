"""How the work of a kernel is divided among invocations, as data."""
