"""Test suites that others wrote, on the device and on the CPU: `python -m tests.judges`."""
