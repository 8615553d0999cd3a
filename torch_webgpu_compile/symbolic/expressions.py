"""Exact integer expressions in a canonical form, with range-aware division.

An `Expr` is a polynomial with integer coefficients over atoms (symbols, floor divisions,
remainders), kept in a canonical form, so that equal expressions are the same object and differences
simplify:

    >>> i = atom_expr(Symbol("i0", 0, as_expr(24), None, None))
    >>> (i // 6) * 6 + i % 6
    i0

sympy could express the same; it is used at the border (PyTorch's symbolic shapes). Index arithmetic
needs range-aware simplification of divisions, and is built by the ten thousand per model.

`Symbol`s are integers ≥ ``lower``; a size symbol may have a largest value, ``most``, and an
iteration symbol has an exclusive upper bound, its ``extent``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from math import gcd
from typing import Any, Union

from .interning import InternTable, reduced

_table = InternTable()
_references = _table.references


class Interned(type):
    """Equal arguments give the same object, so equality and hashing are by identity."""

    def __call__(cls, *args: Any) -> Any:
        key = (cls, *args)
        reference = _references.get(key)
        found = None if reference is None else reference()
        return _table.add(key, super().__call__(*args)) if found is None else found


class SymbolicError(TypeError):
    """An expression with symbols was taken for a number."""


class Symbol(metaclass=Interned):
    """An unknown integer in [lower, extent), or in [lower, most] where ``extent`` is None.

    ``most`` is None for what has no known end. It tells what is worth while, not what is proven:
    `bound` leaves it out, as it says more of one size by another. ``usual`` is near what a size
    without such an end was when its graph was traced, None if that is unknown; it may be anything.
    """

    __slots__ = ("__weakref__", "extent", "key", "lower", "most", "name", "usual")
    key: str
    __reduce__ = reduced

    def __init__(
        self, name: str, lower: int, extent: Expr | None, most: int | None, usual: int | None
    ) -> None:
        self.name = name
        self.lower = lower
        self.extent = extent
        self.most = most
        self.usual = usual
        self.key = f"0{name}<{'' if extent is None else extent.key}"

    def __repr__(self) -> str:
        return self.name


class FloorDiv(metaclass=Interned):
    """⌊numerator / denominator⌋ with a positive denominator, not simplifiable further."""

    __slots__ = ("__weakref__", "denominator", "key", "numerator")
    key: str
    __reduce__ = reduced

    def __init__(self, numerator: Expr, denominator: Expr) -> None:
        self.numerator = numerator
        self.denominator = denominator
        self.key = f"1({numerator.key}//{denominator.key})"

    def __repr__(self) -> str:
        return f"{_operand(self.numerator)}//{_operand(self.denominator)}"


class Mod(metaclass=Interned):
    """numerator − denominator · ⌊numerator / denominator⌋, with a positive denominator."""

    __slots__ = ("__weakref__", "denominator", "key", "numerator")
    key: str
    __reduce__ = reduced

    def __init__(self, numerator: Expr, denominator: Expr) -> None:
        self.numerator = numerator
        self.denominator = denominator
        self.key = f"2({numerator.key}%{denominator.key})"

    def __repr__(self) -> str:
        return f"{_operand(self.numerator)}%{_operand(self.denominator)}"


Atom = Union[Symbol, FloorDiv, Mod]
Monomial = tuple[Atom, ...]


def factor_text(atom: Atom) -> str:
    """An atom as it is written in a product."""
    return atom.name if isinstance(atom, Symbol) else f"({atom!r})"


def _operand(expr: Expr) -> str:
    simple = expr.is_constant or (
        expr.constant == 0 and len(expr.terms) == 1 and expr.terms[0][1] == 1
    )
    return repr(expr) if simple and len(expr.terms[:1] and expr.terms[0][0]) <= 1 else f"({expr!r})"


IntLike = Union[int, "Expr"]

# What is remembered of calculations keeps expressions alive. A large model's graph makes some
# thousand additions, and a few hundred calls of the others.


class Expr(metaclass=Interned):
    """constant + Σ coefficient · monomial, in canonical order.

    Build with `as_expr` and operators.
    """

    __slots__ = ("__weakref__", "constant", "key", "terms")
    key: str
    __reduce__ = reduced

    def __init__(self, constant: int, terms: tuple[tuple[Monomial, int], ...]) -> None:
        self.constant = constant
        self.terms = terms
        self.key = "+".join(
            [str(constant)] + [f"{c}*{'*'.join(a.key for a in m)}" for m, c in terms]
        )

    @property
    def is_constant(self) -> bool:
        """Whether it has no symbols: ``constant`` is its value."""
        return not self.terms

    @property
    def divisor(self) -> int:
        """The largest integer that it is known to be a multiple of; 0 for 0."""
        return gcd(self.constant, *(coefficient for _, coefficient in self.terms))

    def __int__(self) -> int:
        if self.terms:
            raise SymbolicError(f"size {self} is symbolic, a constant is needed")
        return self.constant

    def __add__(self, other: IntLike) -> Expr:
        return _add(self, other if other.__class__ is Expr else as_expr(other), 1)

    __radd__ = __add__

    def __sub__(self, other: IntLike) -> Expr:
        return _add(self, other if other.__class__ is Expr else as_expr(other), -1)

    def __rsub__(self, other: IntLike) -> Expr:
        return _add(as_expr(other), self, -1)

    def __neg__(self) -> Expr:
        return _mul(self, as_expr(-1))

    def __mul__(self, other: IntLike) -> Expr:
        return _mul(self, other if other.__class__ is Expr else as_expr(other))

    __rmul__ = __mul__

    def __floordiv__(self, other: IntLike) -> Expr:
        return floordiv(self, as_expr(other))

    def __rfloordiv__(self, other: IntLike) -> Expr:
        return floordiv(as_expr(other), self)

    def __mod__(self, other: IntLike) -> Expr:
        return mod(self, as_expr(other))

    def __repr__(self) -> str:
        parts = []
        for monomial, coefficient in self.terms:
            text = "*".join(factor_text(a) for a in monomial)
            parts.append(text if coefficient == 1 else f"{coefficient}*{text}")
        if self.constant or not parts:
            parts.append(str(self.constant))
        return " + ".join(parts).replace("+ -", "- ")


@lru_cache(maxsize=1 << 14)
def _constant(value: int) -> Expr:
    return Expr(value, ())


def as_expr(value: IntLike) -> Expr:
    """An integer or expression as an `Expr`."""
    return value if isinstance(value, Expr) else _constant(int(value))


ZERO = as_expr(0)
ONE = as_expr(1)


@lru_cache(maxsize=1 << 13)
def atom_expr(atom: Atom) -> Expr:
    """The expression that is just ``atom``."""
    return Expr(0, (((atom,), 1),))


def _from_dict(constant: int, terms: dict[Monomial, int]) -> Expr:
    kept = [(m, c) for m, c in terms.items() if c]
    kept.sort(key=lambda mc: tuple(a.key for a in mc[0]))
    return Expr(constant, tuple(kept))


@lru_cache(maxsize=1 << 14)
def _add(a: Expr, b: Expr, sign: int) -> Expr:
    terms = dict(a.terms)
    for monomial, coefficient in b.terms:
        terms[monomial] = terms.get(monomial, 0) + sign * coefficient
    return _merge_remainders(_from_dict(a.constant + sign * b.constant, terms))


@lru_cache(maxsize=1 << 13)
def _mul(a: Expr, b: Expr) -> Expr:
    if a.is_constant and a.constant == 1:
        return b
    if b.is_constant and b.constant == 1:
        return a
    terms: dict[Monomial, int] = {}
    constant = a.constant * b.constant
    for ma, ca in (*a.terms, ((), a.constant)):
        for mb, cb in (*b.terms, ((), b.constant)):
            if (not ma and not mb) or not ca * cb:
                continue
            monomial = tuple(sorted(ma + mb, key=lambda atom: atom.key))
            terms[monomial] = terms.get(monomial, 0) + ca * cb
    return _merge_remainders(_from_dict(constant, terms))


def _merge_remainders(expr: Expr) -> Expr:
    """c·(y % b) + c·b·(y // b) is c·y, for an integer c or a product."""
    for monomial, coefficient in expr.terms:
        remainder = next((a for a in monomial if isinstance(a, Mod)), None)
        if remainder is None:
            continue
        y, b = remainder.numerator, remainder.denominator
        factor = as_expr(coefficient)
        if len(monomial) > 1:
            left = _remove_factor(monomial, (remainder,))
            assert left is not None
            factor = Expr(0, ((left, coefficient),))
        quotient = _mul(floordiv(y, b), _mul(b, factor))
        present = dict(expr.terms)
        if quotient.terms and all(present.get(m) == c for m, c in quotient.terms):
            terms = {m: c for m, c in expr.terms if m != monomial}
            for m, c in quotient.terms:
                terms[m] -= c
            rest = _from_dict(expr.constant - quotient.constant, terms)
            return _add(rest, _mul(y, factor), 1)
    return expr


def _divide_terms(a: Expr, b: Expr) -> tuple[Expr, Expr]:
    """(q, r) with a = q·b + r, where q takes the terms that b divides exactly."""
    if b.is_constant:
        d = b.constant
        q = Expr(a.constant // d, tuple((m, c // d) for m, c in a.terms if c % d == 0))
        r = Expr(a.constant % d, tuple((m, c) for m, c in a.terms if c % d))
        return q, r
    if len(b.terms) == 1 and b.constant == 0:
        factor, scale = b.terms[0]
        quotient: dict[Monomial, int] = {}
        rest: dict[Monomial, int] = {}
        constant = 0
        for monomial, coefficient in a.terms:
            left = _remove_factor(monomial, factor)
            if left is None or coefficient % scale:
                rest[monomial] = coefficient
            elif left:
                quotient[left] = coefficient // scale
            else:
                constant = coefficient // scale
        return _from_dict(constant, quotient), _from_dict(a.constant, rest)
    return (ONE, ZERO) if a is b else (ZERO, a)


def _remove_factor(monomial: Monomial, factor: Monomial) -> Monomial | None:
    left = list(monomial)
    for atom in factor:
        if atom not in left:
            return None
        left.remove(atom)
    return tuple(left)


@lru_cache(maxsize=1 << 13)
def floordiv(a: Expr, b: Expr) -> Expr:
    """⌊a / b⌋ for b > 0, simplified."""
    if b is ONE:
        return a
    if a.is_constant and b.is_constant:
        return as_expr(a.constant // b.constant)
    q, r = _divide_terms(a, b)
    if q is not ZERO:
        return q + floordiv(r, b)
    if is_nonnegative(a) and is_less(a, b):
        return ZERO
    if a.is_constant and a.constant < 0 and is_nonnegative(b + a):
        return as_expr(-1)
    parts = _split_factor(a, b)
    if parts is not None:
        return floordiv(parts[0], parts[1])
    if len(a.terms) == 1 and a.constant == 0 and a.terms[0][1] == 1 and len(a.terms[0][0]) == 1:
        atom = a.terms[0][0][0]
        if isinstance(atom, Mod):
            q, r = _divide_terms(atom.denominator, b)
            if r is ZERO:
                return mod(floordiv(atom.numerator, b), q)
    if len(a.terms) == 1 and a.terms[0][1] == 1 and len(a.terms[0][0]) == 1:
        atom = a.terms[0][0][0]
        if isinstance(atom, FloorDiv):  # ⌊(⌊x / y⌋ + c) / b⌋ = ⌊(x + c·y) / (y·b)⌋
            return floordiv(atom.numerator + atom.denominator * a.constant, atom.denominator * b)
    return atom_expr(FloorDiv(a, b))


def _split_factor(a: Expr, b: Expr) -> tuple[Expr, Expr, int] | None:
    """x, y and g of a = g·x + s and b = g·y with 0 ≤ s < g, for a factor g > 1 of ``b``.

    Then ⌊a / b⌋ = ⌊x / y⌋.
    """
    whole = b.divisor
    factors = {gcd(c, whole) for _, c in a.terms}
    for g in sorted({gcd(whole, *factors), *factors} - {1}, reverse=True):
        big = tuple((m, c // g) for m, c in a.terms if c % g == 0)
        small = Expr(a.constant % g, tuple((m, c) for m, c in a.terms if c % g))
        if small.is_constant or (is_nonnegative(small) and is_less(small, as_expr(g))):
            divided = Expr(b.constant // g, tuple((m, c // g) for m, c in b.terms))
            return Expr(a.constant // g, big), divided, g
    return None


@lru_cache(maxsize=1 << 13)
def mod(a: Expr, b: Expr) -> Expr:
    """a − b·⌊a / b⌋ for b > 0, simplified."""
    if b is ONE:
        return ZERO
    if a.is_constant and b.is_constant:
        return as_expr(a.constant % b.constant)
    q, r = _divide_terms(a, b)
    if q is not ZERO:
        return mod(r, b)
    if is_nonnegative(a) and is_less(a, b):
        return a
    if a.is_constant and a.constant < 0 and is_nonnegative(b + a):
        return b + a
    parts = _split_factor(a, b)
    if parts is not None:
        x, y, factor = parts
        return mod(x, y) * factor + (a - x * factor)
    if len(a.terms) == 1 and a.constant == 0 and a.terms[0][1] == 1 and len(a.terms[0][0]) == 1:
        atom = a.terms[0][0][0]
        if isinstance(atom, Mod) and _divide_terms(atom.denominator, b)[1] is ZERO:
            return mod(atom.numerator, b)
    return atom_expr(Mod(a, b))


@lru_cache(maxsize=1 << 13)
def bound(expr: Expr, upper: bool) -> Expr | None:
    """An expression without iteration symbols that is ≤ (``upper``: ≥) ``expr``, or None."""
    total = as_expr(expr.constant)
    for monomial, coefficient in expr.terms:
        product = as_expr(coefficient)
        want_upper = upper == (coefficient > 0)
        for atom in monomial:
            lowest = 0
            if isinstance(atom, Symbol):
                limit: Expr | None
                if atom.extent is None:
                    limit = atom_expr(atom)
                    lowest = atom.lower
                else:
                    limit = atom.extent - 1 if want_upper else as_expr(atom.lower)
            elif isinstance(atom, Mod):
                limit = as_expr(0)
                if want_upper:
                    limit = atom.denominator - 1
            else:
                lower = bound(atom.numerator, False)
                if lower is None or not _size_nonnegative(lower):
                    lowest = -1
                limit = bound(atom.numerator, want_upper)
                limit = None if limit is None else floordiv(limit, atom.denominator)
            if limit is None or (len(monomial) > 1 and lowest < 0):
                return None
            product = product * limit
        total = total + product
    return total


def _size_nonnegative(expr: Expr) -> bool:
    """Whether an expression over size symbols is ≥ 0, judged term by term."""
    total = expr.constant
    for monomial, coefficient in expr.terms:
        low = 1
        for atom in monomial:
            if isinstance(atom, Symbol):
                if atom.lower < 0 and len(monomial) > 1:
                    return False
                low *= atom.lower
            elif isinstance(atom, Mod) or is_nonnegative(atom.numerator):
                low = 0
            else:
                return False
        if coefficient < 0:
            return _absorbed(expr)
        total += coefficient * low
    return total >= 0


def _absorbed(expr: Expr) -> bool:
    """s·t − t ≥ 0 and the like: shift every size symbol to its lower bound and look again."""
    shifted = expr
    for atom in symbols_of(expr):
        if atom.extent is None and atom.lower:
            shifted = substitute(
                shifted,
                {atom: atom_expr(Symbol(atom.name + "'", 0, None, None, None)) + atom.lower},
            )
    return (
        shifted.constant >= 0
        and all(c >= 0 for _, c in shifted.terms)
        and all(isinstance(a, (Symbol, Mod)) for m, _ in shifted.terms for a in m)
    )


@lru_cache(maxsize=1 << 13)
def is_nonnegative(expr: Expr) -> bool:
    """Whether expr ≥ 0 is proven for all values of its symbols."""
    if expr.is_constant:
        return expr.constant >= 0
    low = bound(expr, False)
    return low is not None and _size_nonnegative(low)


def is_less(a: Expr, b: Expr) -> bool:
    """Whether a < b is proven for all values of their symbols."""
    high = bound(a, True)
    if high is None:
        return False
    return is_nonnegative(b - high - 1)


@lru_cache(maxsize=1 << 13)
def symbols_of(expr: Expr) -> frozenset[Symbol]:
    """All symbols in ``expr``, inside divisions too."""
    found: set[Symbol] = set()
    for monomial, _ in expr.terms:
        for atom in monomial:
            if isinstance(atom, Symbol):
                found.add(atom)
            else:
                found |= symbols_of(atom.numerator) | symbols_of(atom.denominator)
    return frozenset(found)


def substitute(expr: Expr, values: Mapping[Symbol, Expr]) -> Expr:
    """``expr`` with symbols replaced, simplified again."""
    symbols = symbols_of(expr)
    if symbols.isdisjoint(values):
        return expr
    return _substituted(expr, tuple([(s, values[s]) for s in symbols if s in values]))


@lru_cache(maxsize=1 << 13)
def _substituted(expr: Expr, pairs: tuple[tuple[Symbol, Expr], ...]) -> Expr:
    values = dict(pairs)
    total = as_expr(expr.constant)
    for monomial, coefficient in expr.terms:
        product = as_expr(coefficient)
        for atom in monomial:
            if isinstance(atom, Symbol):
                product = product * (values[atom] if atom in values else atom_expr(atom))
            else:
                numerator = substitute(atom.numerator, values)
                denominator = substitute(atom.denominator, values)
                divide: Callable[[Expr, Expr], Expr] = (
                    floordiv if isinstance(atom, FloorDiv) else mod
                )
                product = product * divide(numerator, denominator)
        total = total + product
    return total
