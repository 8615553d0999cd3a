"""Index expressions as WGSL ``i32`` arithmetic, and what is known of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .. import dtypes
from ..ir.scalar import Const, Index, Op, Scalar
from ..sizes import (
    Atom,
    Expr,
    FloorDiv,
    Symbol,
    as_expr,
    atom_expr,
    is_less,
    is_nonnegative,
    symbols_of,
)
from .buffer_access import VECTOR

NameOf = Callable[[Atom], str]
"""The WGSL name of an index symbol, a size symbol or a quotient or remainder of sizes."""


def render_index(expr: Expr, name_of: NameOf) -> str:
    """``expr`` as a WGSL expression of type i32; what depends on sizes alone has a name.

    Values stay below 2³¹ (the planner checks buffer sizes), so 32 bits are exact. A division whose
    operands are proven non-negative is done unsigned: for a constant divisor that is a
    multiplication and a shift without sign correction.
    """
    parts: list[str] = []
    for monomial, coefficient in expr.terms:
        factors = [_render_atom(atom, name_of) for atom in monomial]
        if coefficient != 1:
            factors.append(str(abs(coefficient)))
        text = " * ".join(factors)
        if coefficient == -1:
            text = " * ".join(factors[:-1])
        parts.append(f"- {text}" if coefficient < 0 else f"+ {text}")
    if expr.constant or not parts:
        parts.append(f"+ {expr.constant}" if expr.constant >= 0 else f"- {-expr.constant}")
    text = " ".join(parts)
    return text.removeprefix("+ ") if text.startswith("+") else "0 " + text


def _render_atom(atom: Atom, name_of: NameOf) -> str:
    if isinstance(atom, Symbol) or all(s.extent is None for s in symbols_of(atom_expr(atom))):
        return name_of(atom)
    numerator = render_index(atom.numerator, name_of)
    denominator = render_index(atom.denominator, name_of)
    sign = "/" if isinstance(atom, FloorDiv) else "%"
    if is_nonnegative(atom.numerator):
        unsigned = f"{denominator}u" if atom.denominator.is_constant else f"u32({denominator})"
        return f"i32(u32({numerator}) {sign} {unsigned})"
    function = "floor_div" if isinstance(atom, FloorDiv) else "floor_mod"
    return f"{function}_index({numerator}, {denominator})"


def is_multiple_of(expr: Expr, factor: int) -> bool:
    """Whether ``factor`` divides ``expr`` for all values of its symbols."""
    return expr.constant % factor == 0 and all(c % factor == 0 for _, c in expr.terms)


def are_aligned_neighbours(addresses: Sequence[Expr]) -> bool:
    """Whether addresses are a, a + 1, … from a multiple of their number: one vector access."""
    first = addresses[0]
    return is_multiple_of(first, len(addresses)) and all(
        address - first is as_expr(k) for k, address in enumerate(addresses)
    )


def as_index(node: Scalar) -> Expr | None:
    """A scalar that is plain index arithmetic, as an expression."""
    if isinstance(node, Index):
        return node.expr
    if isinstance(node, Const) and node.dtype is dtypes.int64 and abs(int(node.value)) < 1 << 31:
        return as_expr(int(node.value))
    return None


def is_clamped(node: Scalar, size: Expr) -> bool:
    """Whether a position is clamped to [0, size), of which it is known that it is not empty."""
    match node:
        case Op("minimum", (Op("maximum", (_, low)), high)):
            first, last = as_index(low), as_index(high)
            if first is None or last is None:
                return False
            return is_nonnegative(first) and is_nonnegative(last) and is_less(last, size)
    return False


def decide(name: str, left: Expr, right: Expr) -> bool | None:
    """The result of a comparison that holds, or fails, for all values of the symbols."""
    if name in ("ge", "le"):
        flipped = decide("lt", left, right) if name == "ge" else decide("lt", right, left)
        return None if flipped is None else not flipped
    if name == "gt":
        return decide("lt", right, left)
    if name == "lt":
        if is_less(left, right):
            return True
        return False if is_nonnegative(left - right) else None
    if left is right:
        return name == "eq"
    apart = is_less(left, right) or is_less(right, left)
    return (name == "ne") if apart else None


def render_comparisons(
    name: str, lefts: Sequence[Expr], rights: Sequence[Expr], name_of: NameOf
) -> list[str]:
    """A comparison in each lane, or only the first when it decides for all."""
    sign = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}[name]
    differences = [a - b for a, b in zip(lefts, rights, strict=True)]
    # a < b for multiples of four decides for a + 1, a + 2 and a + 3 as well.
    grouped = (
        name in ("lt", "ge")
        and is_multiple_of(differences[0], VECTOR)
        and all(d - differences[0] is as_expr(k) for k, d in enumerate(differences))
    )
    same = grouped or all(d is differences[0] for d in differences)
    return [
        f"{render_index(a, name_of)} {sign} {render_index(b, name_of)}"
        for a, b in zip(lefts[:1] if same else lefts, rights, strict=False)
    ]
