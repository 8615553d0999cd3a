"""Measurements: tilings by autotuning, and the rates of adapters."""
