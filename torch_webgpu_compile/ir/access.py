"""How a body walks through memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..symbolic.sizes import (
    ONE,
    ZERO,
    Expr,
    Symbol,
    evaluate,
    linearize,
    product,
    substitute,
    symbols_of,
)
from .graph import Buffer
from .scalar import Index, Scalar, loads_of, scalar_symbols

# What a symbolic size counts as when buffers are compared.
_TYPICAL = 64


def neighbours_in_rows(
    bodies: Sequence[Scalar],
    buffers: Mapping[str, Buffer],
    rows: Sequence[Symbol],
    elements: Sequence[Symbol],
) -> bool:
    """Whether the memory that is read has neighbouring elements of a row side by side.

    False when neighbouring rows are: a reduction over columns. Loads that reach more elements
    decide: one row of a large table is few. Of windows that slide by one, both are, and
    neighbouring rows share most of what they read.
    """
    votes = 0
    slides = False
    for body in bodies:
        for load in loads_of(body):
            if load.buffer not in buffers:
                continue
            buffer = buffers[load.buffer]
            exprs = [i.expr if isinstance(i, Index) else ZERO for i in load.index]
            address = linearize(exprs, buffer.strides)
            extents = [s.extent for s in scalar_symbols(load) if s.extent is not None]
            weight = min(typical_numel(buffer.numel), typical_numel(product(extents)))
            along, across = _steps_by_one(address, elements), _steps_by_one(address, rows)
            votes += weight * (along - across)
            slides = slides or (along and across)
    return votes > 0 or (votes == 0 and not slides)


def typical_numel(numel: Expr) -> int:
    """A number for a size: itself, or with every symbol at a typical value."""
    return evaluate(numel, {s.name: _TYPICAL for s in symbols_of(numel)})


def step_of(address: Expr, symbol: Symbol) -> int:
    """How far the first step of a symbol moves an address; symbolic strides at a typical size."""
    start, end = substitute(address, {symbol: ZERO}), substitute(address, {symbol: ONE})
    difference = end - start
    names = {s.name: _TYPICAL if s.extent is None else 0 for s in symbols_of(difference)}
    return abs(evaluate(difference, names))


def _steps_by_one(address: Expr, symbols: Sequence[Symbol]) -> bool:
    return any(
        symbol.extent is not ONE
        and substitute(address, {symbol: ONE}) - substitute(address, {symbol: ZERO}) is ONE
        for symbol in symbols
    )
