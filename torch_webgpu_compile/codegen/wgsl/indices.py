"""Index expressions as WGSL arithmetic, and their ranges.

Addresses are i32: the planner checks that buffers have fewer than 2³¹ elements. Values are int64 to
the user; they are computed in 32 bits where their range allows it (`is_narrow`), else in 64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

from ... import dtypes
from ...dtypes import DType
from ...errors import UnsupportedOp
from ...ir.access import VECTOR, is_multiple_of
from ...ir.folding import as_index
from ...ir.scalar import Const, Index, Op, Scalar, const, is_host_float
from ...plan.model import Parameter
from ...plan.numbers import HostNumber
from ...symbolic.sizes import (
    INT32,
    INT64,
    LARGEST_SIZE,
    ONE,
    ZERO,
    Atom,
    Expr,
    FloorDiv,
    Mod,
    Symbol,
    as_expr,
    atom_expr,
    bound,
    computed_parts,
    floordiv,
    is_less,
    is_nonnegative,
    is_within,
    mod,
    symbols_of,
)
from ..hardening.spelling import int64_of
from .literals import literal
from .op_table import COMPARISONS, OPERATORS, op_code

NameOf = Callable[[Atom | Parameter], str]
"""The WGSL name of an index symbol, or of what depends on sizes alone."""

_SMALL_SIZE = 1 << 28
_HALF, _WORD = 1 << 31, 1 << 32


def render_index(expr: Expr, name_of: NameOf) -> str:
    """``expr`` as a WGSL expression of type i32; what depends on sizes alone has a name.

    Exact for addresses and for what `is_narrow`; else modulo 2³². A division whose operands are
    proven non-negative is done unsigned: for a constant divisor that is a multiplication and a
    shift without sign correction.
    """
    parts: list[str] = []
    for monomial, coefficient in expr.terms:
        factors = [_render_atom(atom, name_of) for atom in monomial]
        coefficient = _wrapped(coefficient, _WORD)
        if coefficient != 1:
            factors.append(_magnitude(coefficient))
        text = " * ".join(factors)
        if coefficient == -1:
            text = " * ".join(factors[:-1])
        parts.append(f"- {text}" if coefficient < 0 else f"+ {text}")
    constant = _wrapped(expr.constant, _WORD)
    if constant or not parts:
        parts.append(f"{'+' if constant >= 0 else '-'} {_magnitude(constant)}")
    text = " ".join(parts)
    return text.removeprefix("+ ") if text.startswith("+") else "0 " + text


def _magnitude(value: int) -> str:
    """The absolute value of an i32 modulo 2³²: that of the lowest is the lowest."""
    return literal(const(-_HALF, dtypes.int32)) if abs(value) == _HALF else str(abs(value))


def _wrapped(value: int, count: int) -> int:
    """The integer nearest to 0 that is ``value`` modulo ``count``; a half is positive."""
    value %= count
    return value - count if value > count // 2 else value


def render_wide(expr: Expr, place: Callable[[Expr], Expr], name_of: NameOf, int64: DType) -> str:
    """``expr`` as a WGSL expression of an int64, modulo 2⁶⁴; see `Target.in_wgsl`.

    ``place`` gives the values of its iteration symbols in symbols that have names; they are i32.
    What depends on sizes alone comes from the host, in two words.
    """
    of_sizes = as_expr(expr.constant)
    parts: list[str] = []
    for monomial, coefficient in expr.terms:
        factor = as_expr(coefficient)
        for atom in monomial:
            factor = factor * atom_expr(atom) if _is_of_sizes(atom) else factor
        atoms = [atom for atom in monomial if not _is_of_sizes(atom)]
        moving = [_render_wide_atom(atom, place, name_of, int64) for atom in atoms]
        if not moving:
            of_sizes = of_sizes + factor
            continue
        scale = [] if factor is ONE else [_size_in_two_words(factor, name_of, int64)]
        parts.append(_joined("mul", [*scale, *moving], int64))
    if of_sizes is not ZERO or not parts:
        parts.append(_size_in_two_words(of_sizes, name_of, int64))
    return f"({_joined('add', parts, int64)})"


def _joined(name: str, codes: Sequence[str], int64: DType) -> str:
    """An operation on int64s, from the first to the last; the operator has no parentheses."""
    if int64 is dtypes.int64:
        return f" {OPERATORS[name]} ".join(codes)
    return reduce(lambda left, right: op_code(name, int64, (left, right)), codes)


def _render_wide_atom(
    atom: Atom, place: Callable[[Expr], Expr], name_of: NameOf, int64: DType
) -> str:
    expr = atom_expr(atom)
    if isinstance(atom, Symbol) or is_narrow(expr):
        return int64_of(render_index(place(expr), name_of), int64)
    numerator = render_wide(atom.numerator, place, name_of, int64)
    divisors = _divisors(atom.denominator)
    denominators = [render_wide(divisor, place, name_of, int64) for divisor in divisors]
    if isinstance(atom, Mod) and len(divisors) == 1:
        return op_code("remainder", int64, (numerator, denominators[0]))
    quotient = numerator
    for denominator in denominators:
        quotient = op_code("floor_divide", int64, (quotient, denominator))
    if isinstance(atom, FloorDiv):
        return quotient
    whole = [quotient, render_wide(atom.denominator, place, name_of, int64)]
    return f"({_joined('sub', [numerator, _joined('mul', whole, int64)], int64)})"


def _divisors(expr: Expr) -> list[Expr]:
    """Numbers of 64 bits to divide by one after the other in place of ``expr``.

    Raises:
        UnsupportedOp: there are none.
    """
    found: list[Expr] = []
    if is_within(expr, INT64):
        return [expr]
    if not expr.constant and len(expr.terms) == 1:
        ((monomial, coefficient),) = expr.terms
        factor = as_expr(coefficient)
        for atom in monomial:
            if not is_within(factor * atom_expr(atom), INT64):
                found.append(factor)
                factor = ONE
            factor = factor * atom_expr(atom)
        found.append(factor)
        # ⌊⌊a / b⌋ / c⌋ is ⌊a / (b·c)⌋ for c > 0.
        if all(is_within(d, INT64) for d in found) and all(map(is_nonnegative, found[1:])):
            return found
    raise UnsupportedOp(
        f"a division by {expr}",
        "it may not fit in 64 bits",
        "compute it outside of the compiled function, or compile with dynamic=False",
    )


def _size_in_two_words(expr: Expr, name_of: NameOf, int64: DType) -> str:
    if expr.is_constant:
        return literal(const(expr.constant, int64))
    # Parameters are signed words.
    low = low_word(expr, name_of)
    above = floordiv(expr + _HALF, as_expr(_WORD))
    high = name_of(above) if is_within(expr, INT64) else low_word(above, name_of)
    if int64 is dtypes.int64:
        return f"(i64({high}) * {_WORD}li + i64({low}))"
    upper = f"{int64.compute}(0u, u32({high}))"
    return op_code("add", int64, (upper, int64_of(low, int64)))


def low_word(expr: Expr, name_of: NameOf) -> str:
    """An expression of sizes modulo 2³², as an i32."""
    return name_of(mod(expr + _HALF, as_expr(_WORD)) - _HALF)


def is_of_sizes(expr: Expr) -> bool:
    """Whether an expression has no iteration symbols: it is the same at all points."""
    return all(s.extent is None for s in symbols_of(expr))


def host_number(node: Scalar) -> HostNumber | None:
    """The number that the host uploads for an `is_host_float`; None for anything else."""
    if not is_host_float(node) or not isinstance(node, Op):
        return None
    found = _host_operand(node.args[0])
    return HostNumber("float", (found,)) if isinstance(found, Expr) else found


def _host_operand(value: Scalar) -> HostNumber | Expr:
    match value:
        case Index(expr):
            return expr
        case Const(number):
            return HostNumber("float", (float(number),))
        case Op("cast", (inner,)):
            operand = _host_operand(inner)
            return HostNumber("float", (operand,)) if isinstance(operand, Expr) else operand
        case Op(name, args):
            return HostNumber(name, tuple(map(_host_operand, args)))
    raise AssertionError(value)


def _is_of_sizes(atom: Atom) -> bool:
    return is_of_sizes(atom_expr(atom))


def is_narrow(expr: Expr, largest: int = LARGEST_SIZE) -> bool:
    """Whether 32 bits hold the values of ``expr``, and what it divides, for sizes ≤ ``largest``."""
    return all(is_within(part, INT32, largest) for part in computed_parts(expr))


def wraps(expr: Expr) -> bool:
    """Whether `render_index` is exact modulo 2³²."""
    return all(is_within(part, INT32) for part in computed_parts(expr)[1:])


def narrow_bounds(expr: Expr) -> tuple[Expr, ...] | None:
    """Sizes that must fit 32 bits for `is_narrow` to hold; () when it is proven.

    None where `expr` is to be computed in 64 bits: it leaves 32 even if no size passes 2²⁸.
    """
    if is_narrow(expr):
        return ()
    if not is_narrow(expr, _SMALL_SIZE):
        return None
    bounds = [bound(part, upper) for part in computed_parts(expr) for upper in (True, False)]
    known = [b for b in bounds if b is not None]
    if len(known) < len(bounds):
        return None
    return tuple(b for b in known if not is_within(b, INT32))


def _render_atom(atom: Atom, name_of: NameOf) -> str:
    if isinstance(atom, Symbol) or _is_of_sizes(atom):
        return name_of(atom)
    numerator = render_index(atom.numerator, name_of)
    denominator = render_index(atom.denominator, name_of)
    sign = "/" if isinstance(atom, FloorDiv) else "%"
    if is_nonnegative(atom.numerator):
        unsigned = f"{denominator}u" if atom.denominator.is_constant else f"u32({denominator})"
        return f"i32(u32({numerator}) {sign} {unsigned})"
    function = "floor_div" if isinstance(atom, FloorDiv) else "floor_mod"
    return f"{function}_index({numerator}, {denominator})"


def is_clamped(node: Scalar, size: Expr) -> bool:
    """Whether a position is clamped to [0, size), of which it is known that it is not empty."""
    match node:
        case Op("minimum", (Op("maximum", (_, low)), high)):
            first, last = as_index(low), as_index(high)
            if first is None or last is None:
                return False
            return is_nonnegative(first) and is_nonnegative(last) and is_less(last, size)
    return False


def render_comparisons(
    name: str, lefts: Sequence[Expr], rights: Sequence[Expr], name_of: NameOf
) -> list[str]:
    """A comparison in each lane, or only the first when it decides for all."""
    sign = COMPARISONS[name]
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
