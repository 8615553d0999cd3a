"""Operators that exist only for devices outside of PyTorch, or have no decomposition there.

Each is written with other operators and takes the arguments of its ATen schema. One that changes
its arguments does so with in-place operators: the trace makes them functional.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._ops import OpOverload

REWRITES: dict[OpOverload, Callable[..., Any]] = {}
