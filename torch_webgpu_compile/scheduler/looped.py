"""Scalar functions that are loops, where a driver counts the iterations of all loops together.

In the loop of a reduction or of a product they could use up what the driver allows
(`Target.max_loop_iterations`); in a kernel of maps each element has few enough.
"""

from __future__ import annotations

from ..ir.scalar import Op, Scalar, walk
from ..target import Target

# With 60 iterations or more; the thousands of an incomplete gamma function are its most.
_LOOPED = frozenset(
    {
        *("gcd", "igamma", "igammac", "hermite_h", "hermite_he", "laguerre", "legendre"),
        *(f"{kind}chebyshev_{letter}" for kind in ("", "shifted_") for letter in "tuvw"),
    }
)


def is_looped(body: Scalar, target: Target) -> bool:
    """Whether a body should not be computed inside of another loop."""
    if not target.max_loop_iterations:
        return False
    return any(
        isinstance(node, Op)
        and (node.name in _LOOPED or (node.name == "pow" and node.dtype.is_integer))
        for node in walk(body)
    )
