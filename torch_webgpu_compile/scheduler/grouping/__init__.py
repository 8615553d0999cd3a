"""Passes that decide what shares a kernel: loop graphs to schedules."""
