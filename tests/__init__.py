"""Tests, and programs that are run as ``python -m tests.…``."""

import os

# Neither reads what this user's programs have compiled, nor leaves something there.
os.environ.setdefault("TORCH_WEBGPU_CACHE", "0")
