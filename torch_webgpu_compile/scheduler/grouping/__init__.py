"""Passes that decide which nodes share a kernel: loop graphs to schedules."""
