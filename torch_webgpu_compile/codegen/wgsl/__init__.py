"""Expressions, values and buffer accesses as WGSL text."""
