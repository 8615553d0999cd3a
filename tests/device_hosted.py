"""ATen operators that may run on the host: those without a kernel. Anything else is a failure."""

from __future__ import annotations

HOSTED: frozenset[str] = frozenset()
