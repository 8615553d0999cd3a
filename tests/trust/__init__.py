"""Faults that are injected, and long runs: ``python -m tests.trust``."""
