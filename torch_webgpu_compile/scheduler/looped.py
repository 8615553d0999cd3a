"""Scalar functions that loop, for drivers that bound the iterations of an invocation's loops.

Such a driver counts the iterations of all loops together (`Target.max_loop_iterations`). A function
that loops inside of the loop of a reduction or product could exceed the bound; in a map, where it
is evaluated once per element, it does not.
"""

from __future__ import annotations

from ..ir.scalar import FunctionCall, Op, Scalar, walk
from ..target import Target

# With 60 iterations or more; the thousands of an incomplete gamma function are its most.
_LOOPED = frozenset(
    {
        *("gcd", "igamma", "igammac", "hermite_h", "hermite_he", "laguerre", "legendre"),
        *(f"{kind}chebyshev_{letter}" for kind in ("", "shifted_") for letter in "tuvw"),
    }
)


def is_looped(body: Scalar, target: Target) -> bool:
    """Whether a body calls a function that loops, on a driver that bounds an invocation's loops.

    Such a body must not be computed in the loop of a reduction or a product: see the module's
    docstring. Always False for targets without ``max_loop_iterations``.
    """
    if not target.max_loop_iterations:
        return False
    return any(map(_loops, walk(body)))


def _loops(node: Scalar) -> bool:
    if isinstance(node, FunctionCall):
        return node.function.has_loops
    return isinstance(node, Op) and (
        node.name in _LOOPED or (node.name == "pow" and node.dtype.is_integer)
    )
