"""Expressing one node's iteration space in another's.

A consumer reads its producer's element ``index(s)`` at its own point ``s``. To compute both in one
kernel, the consumer's symbols ``s`` must be functions of the producer's: the inverse of that index.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..ir.access import load_index
from ..ir.scalar import Scalar, loads_of, substitute_symbols
from ..symbolic.sizes import (
    ONE,
    ZERO,
    Expr,
    FloorDiv,
    Mod,
    Symbol,
    as_symbol,
    atom_expr,
    contiguous_strides,
    delinearize,
    is_less,
    linearize,
    product,
    symbols_of,
)

Mapping_ = dict[Symbol, Expr]


def extent_of(symbol: Symbol) -> Expr:
    """The exclusive upper bound of an iteration symbol."""
    assert symbol.extent is not None, symbol
    return symbol.extent


def point_of(symbols: Sequence[Symbol]) -> tuple[Expr, ...]:
    """The index expressions that are just these symbols; 0 for a symbol of extent 1."""
    return tuple(ZERO if s.extent is ONE else atom_expr(s) for s in symbols)


@dataclass
class _Inverse:
    """The values of symbols that an index determines.

    Attributes:
        values: the symbols, as functions of the targets.
        remainders: of symbols that are determined only down to a multiple, what it is a multiple
            of: their value plus anything less reads the same element.
    """

    values: Mapping_
    remainders: dict[Symbol, Expr]


def invert_partially(index: Sequence[Expr], targets: Sequence[Expr]) -> _Inverse | None:
    """Symbols s such that index(s) = targets, as far as the index determines them.

    Understands symbols, mixed-radix sums of symbols and quotients or remainders of one symbol by
    constants: what views and permutations of contiguous tensors give. None for anything else, and
    where the upper digits of a symbol are not determined.
    """
    found: Mapping_ = {}
    digits: dict[Symbol, list[tuple[Expr, Expr | None]]] = {}
    for expr, target in zip(index, targets, strict=True):
        pieces = _pieces(expr)
        if pieces is None:
            return None
        for symbol, quotient, modulus, weight in pieces:
            part = target // quotient
            if modulus is not None:
                part = part % modulus
            found[symbol] = found.get(symbol, ZERO) + part * weight
            digits.setdefault(symbol, []).append((weight, _modulus(expr)))
    remainders: dict[Symbol, Expr] = {}
    for symbol, known in digits.items():
        lowest = _lowest_digit(symbol, known)
        if lowest is None:
            return None
        if lowest is not ONE:
            remainders[symbol] = lowest
    return _Inverse(found, remainders)


def _modulus(expr: Expr) -> Expr | None:
    """m of ``… % m``; None of anything else."""
    if len(expr.terms) != 1 or len(expr.terms[0][0]) != 1:
        return None
    atom = expr.terms[0][0][0]
    return atom.denominator if isinstance(atom, Mod) else None


def _lowest_digit(symbol: Symbol, digits: list[tuple[Expr, Expr | None]]) -> Expr | None:
    """The weight of the lowest of a symbol's (weight, modulus) digits; None if others lack."""
    by_weight = dict(digits)
    if len(by_weight) < len(digits) or any(not weight.is_constant for weight in by_weight):
        return ONE if all(weight is ONE for weight in by_weight) else None
    lowest = min(by_weight, key=lambda weight: weight.constant)
    expected = lowest
    while by_weight:
        if expected not in by_weight:
            return None
        modulus = by_weight.pop(expected)
        if modulus is None:
            return None if by_weight else lowest
        expected = expected * modulus
    return lowest if expected is extent_of(symbol) else None


def _pieces(expr: Expr) -> list[tuple[Symbol, Expr, Expr | None, Expr]] | None:
    """(symbol, q, m, w): the symbol receives ((target // q) % m) · w."""
    if expr.is_constant:
        return []
    if expr.constant:
        return None
    if len(expr.terms) == 1 and expr.terms[0][1] == 1 and len(expr.terms[0][0]) == 1:
        single = _digit(expr)
        return None if single is None else [(single[0], ONE, None, single[1])]
    digits = _weighted_symbols(expr)
    if digits is None:
        return None
    result: list[tuple[Symbol, Expr, Expr | None, Expr]] = []
    weight = ONE
    while digits:
        symbol = digits.pop(weight, None)
        if symbol is None:
            return None
        extent = extent_of(symbol)
        result.append((symbol, weight, extent if digits else None, ONE))
        weight = weight * extent
    return result


def _weighted_symbols(expr: Expr) -> dict[Expr, Symbol] | None:
    """The iteration symbol of each weight in Σ weight · symbol; weights may hold size symbols."""
    found: dict[Expr, Symbol] = {}
    for monomial, coefficient in expr.terms:
        digits = [a for a in monomial if not isinstance(a, Symbol) or a.extent is not None]
        if len(digits) != 1 or not isinstance(digits[0], Symbol):
            return None
        weight = product(atom_expr(a) for a in monomial if a is not digits[0]) * coefficient
        if weight in found:
            return None
        found[weight] = digits[0]
    return found


def _digit(expr: Expr) -> tuple[Symbol, Expr] | None:
    """(symbol, weight) when ``expr`` is the symbol's digit of that weight in a mixed radix."""
    symbol = as_symbol(expr)
    if symbol is not None:
        return (symbol, ONE) if symbol.extent is not None else None
    atom = expr.terms[0][0][0]
    if isinstance(atom, Mod):
        inner = atom.numerator
        if inner.constant == 0 and len(inner.terms) == 1 and len(inner.terms[0][0]) == 1:
            return _digit(inner) if inner.terms[0][1] == 1 else None
        return None
    if isinstance(atom, FloorDiv):
        symbol = as_symbol(atom.numerator)
        return None if symbol is None else (symbol, atom.denominator)
    return None


def flat_mapping(symbols: Sequence[Symbol], space: Sequence[Symbol]) -> Mapping_ | None:
    """The mapping of one space to another of as many points, both in row-major order.

    None when the numbers of points differ.
    """
    values = _flat_values([extent_of(s) for s in symbols], space)
    return None if values is None else dict(zip(symbols, values, strict=True))


def _flat_values(sizes: Sequence[Expr], space: Sequence[Symbol]) -> Sequence[Expr] | None:
    """The point in a space of these sizes with the row-major position of one in ``space``."""
    extents = [extent_of(s) for s in space]
    if product(sizes) is not product(extents):
        return None
    if list(sizes) == extents:
        return point_of(space)
    return delinearize(linearize(point_of(space), contiguous_strides(extents)), list(sizes))


def mappings(
    body: Scalar,
    symbols: Sequence[Symbol],
    computed: Mapping[str, Sequence[Expr]],
    space: Sequence[Symbol],
    elements: Sequence[Symbol],
    read: Mapping[str, Sequence[Expr]],
) -> Iterator[Mapping_]:
    """Candidate mappings of ``symbols`` into ``space``, most specific first; none is verified.

    Args:
        body: what the consumer computes.
        computed: per buffer that the group computes, its index in the group's symbols.
        space: the group's symbols that the consumer must cover.
        elements: the trailing part of ``space`` that reductions run over.
        read: like ``computed``, of buffers that the group loads, a different element at each point.
    """
    for load in loads_of(body):
        index = load_index(load)
        if load.buffer in read and index is not None:
            inverse = invert_partially(index, read[load.buffer])
            if inverse is None or inverse.remainders:
                continue
            yield {s: ZERO for s in symbols if s.extent is ONE} | inverse.values
    for load in loads_of(body):
        index = load_index(load)
        if load.buffer not in computed or index is None:
            continue
        inverse = invert_partially(index, computed[load.buffer])
        if inverse is None:
            continue
        # What the read leaves open runs over the elements: whole symbols, or their remainders.
        opened = [
            (s, inverse.remainders.get(s, extent_of(s)))
            for s in symbols
            if s not in inverse.values or s in inverse.remainders
        ]
        full = {s: ZERO for s, _ in opened} | inverse.values
        opened = [(s, extent) for s, extent in opened if extent is not ONE]
        if opened:
            remaining = _flat_values([extent for _, extent in opened], elements)
            if remaining is None:
                continue
            for (symbol, _), value in zip(opened, remaining, strict=True):
                full[symbol] = full[symbol] + value
        elif _repeats(computed[load.buffer], space):
            continue  # as many points in all, but each of these several times
        yield full
    flat = flat_mapping(symbols, space)
    if flat is not None:
        yield flat


def _repeats(index: Sequence[Expr], space: Sequence[Symbol]) -> bool:
    """Whether an index is the same at several points of a space, as it lacks a symbol."""
    seen = frozenset().union(*map(symbols_of, index))
    return any(s not in seen for s in space if extent_of(s) is not ONE)


def stays_inside(mapping: Mapping[Symbol, Expr]) -> bool:
    """Whether every symbol is below its extent, as far as is known."""
    return all(is_less(value, extent_of(s)) for s, value in mapping.items())


def reads_agree(body: Scalar, computed: Mapping[str, Sequence[Expr]]) -> bool:
    """Whether every load of a computed buffer is at exactly the point that computes it."""
    return all(
        load_index(load) == tuple(computed[load.buffer])
        for load in loads_of(body)
        if load.buffer in computed
    )


def tells_apart(index: Sequence[Expr], space: Sequence[Symbol]) -> bool:
    """Whether an index differs at any two points of a space, as far as `invert_partially` sees."""
    inverse = invert_partially(index, index)
    return (
        inverse is not None
        and not inverse.remainders
        and all(s in inverse.values for s in space if extent_of(s) is not ONE)
    )


def map_into(
    body: Scalar,
    symbols: Sequence[Symbol],
    computed: Mapping[str, Sequence[Expr]],
    space: Sequence[Symbol],
    elements: Sequence[Symbol] = (),
    read: Mapping[str, Sequence[Expr]] | None = None,
) -> tuple[Mapping_, Scalar] | None:
    """The mapping that lets the group compute ``body`` at each of its points, and the mapped body.

    None when the sizes differ or when the body needs elements that other points compute. A mapping
    found through a read is one-to-one because the read composed with it is the identity; a flat one
    is by construction. As the spaces have as many points and none is mapped out of them, each point
    is met.
    """
    sizes = product(extent_of(s) for s in symbols)
    if sizes is not product(extent_of(s) for s in space):
        return None
    for mapping in mappings(body, symbols, computed, space, elements, read or {}):
        # Where only parts are read, of one or of both, as many points need not be the same ones.
        if any(s not in mapping for s in symbols) or not stays_inside(mapping):
            continue
        mapped = substitute_symbols(body, mapping)
        if reads_agree(mapped, computed):
            return mapping, mapped
    return None
