"""Tilings by measurement, and what was measured of adapters."""
