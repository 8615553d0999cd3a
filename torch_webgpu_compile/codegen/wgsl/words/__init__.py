"""Kernels without 64-bit integers: WGSL with `i64` and `u64` to WGSL with pairs of u32.

Browsers, and Dawn everywhere, have no 64-bit integers. What generators and templates write for
adapters that have is translated as text, after a kernel is rendered: none of them knows of this.
"""

from .translate import without_int64

__all__ = ["without_int64"]
