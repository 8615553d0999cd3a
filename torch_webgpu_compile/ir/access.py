"""How a body walks through memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from ..dtypes import DType, Kind
from ..symbolic.sizes import (
    ONE,
    ZERO,
    Expr,
    Symbol,
    as_expr,
    atom_expr,
    delinearize,
    linearize,
    product,
    substitute,
    symbols_of,
    typical,
    value_range,
)
from .buffers import Buffer
from .scalar import Index, Load, Scalar, loads_of, scalar_symbols
from .spaces import numbered

VECTOR = 4
"""Elements that one access moves at most, if they are neighbours."""

ACCESS_NBYTES = 16
"""Bytes that one access moves at most."""

Lanes = list[dict[Symbol, Expr]]
"""The points that an invocation computes at once, as values of iteration symbols."""


def load_index(load: Load) -> tuple[Expr, ...] | None:
    """The index expressions of a load, or None when it gathers."""
    exprs = tuple(i.expr for i in load.index if isinstance(i, Index))
    return exprs if len(exprs) == len(load.index) else None


def is_injective(index: Sequence[Scalar], symbols: Sequence[Symbol]) -> bool:
    """Whether different values of iteration symbols certainly give different indices.

    So it is where each symbol that takes several values has an entry that is a multiple of it, but
    for a constant.
    """
    exprs = [entry.expr for entry in index if isinstance(entry, Index)]
    return all(
        symbol.extent is ONE or any(_is_multiple_of_symbol(expr, symbol) for expr in exprs)
        for symbol in symbols
    )


def _is_multiple_of_symbol(expr: Expr, symbol: Symbol) -> bool:
    first = substitute(expr, {symbol: ZERO})
    step = substitute(expr, {symbol: ONE}) - first
    is_linear = step.is_constant and expr - first is step * atom_expr(symbol)
    return is_linear and step is not ZERO and all(s.extent is None for s in symbols_of(first))


def address_of(load: Load, strides: Sequence[Expr]) -> Expr:
    """The address that a load reads, in elements; entries computed from data count as 0."""
    exprs = [i.expr if isinstance(i, Index) else ZERO for i in load.index]
    return linearize(exprs, strides)


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
    for load, buffer, address in _addressed(bodies, buffers):
        along, across = _steps_by_one(address, elements), _steps_by_one(address, rows)
        votes += _reached(load, buffer, address) * (along - across)
        slides = slides or (along and across)
    return votes > 0 or (votes == 0 and not slides)


def elements_per_access(
    bodies: Sequence[Scalar],
    buffers: Mapping[str, Buffer],
    elements: Sequence[Symbol],
    least: int,
) -> int:
    """Elements of a row that one access of `ACCESS_NBYTES` serves, of the buffer most of is read.

    8 of two bytes each, 16 of one, 32 of four bits, of which one number holds several. 1 where it
    is less than ``least`` or than 8.
    """
    most, found = 0, 1
    extents = [ONE if s.extent is None else s.extent for s in elements]
    for load, buffer, address in _addressed(bodies, buffers):
        nbytes = _reached(load, buffer, address) * buffer.dtype.itemsize
        if buffer.dtype.itemsize > 4 or nbytes <= most:
            continue
        most, found = nbytes, 1
        for wanted in (n for n in (32, 16, 8) if n >= least):
            last = dict(zip(elements, delinearize(as_expr(wanted - 1), extents), strict=True))
            span = substitute(address, last) - substitute(address, dict.fromkeys(elements, ZERO))
            if span is as_expr(ACCESS_NBYTES // buffer.dtype.itemsize - 1):
                found = wanted
    return found


def _addressed(
    bodies: Sequence[Scalar], buffers: Mapping[str, Buffer]
) -> Iterator[tuple[Load, Buffer, Expr]]:
    """The loads of these buffers in each body, with the addresses that they read."""
    for load in chain.from_iterable(map(loads_of, bodies)):
        if load.buffer in buffers:
            buffer = buffers[load.buffer]
            yield load, buffer, address_of(load, buffer.strides)


def _reached(load: Load, buffer: Buffer, address: Expr) -> int:
    """The most elements that a load reads, in all of its iterations."""
    extents = [s.extent for s in scalar_symbols(load) if s.extent is not None]
    most = min(typical(buffer.numel), typical(product(extents)))
    if load_index(load) is None:
        return most
    within = value_range(address)  # it may read a part of the buffer
    return min(most, within[-1] - within[0] + 1)


def step_of(address: Expr, symbol: Symbol) -> int:
    """How far the first step of a symbol moves an address; symbolic strides at a typical size."""
    start, end = substitute(address, {symbol: ZERO}), substitute(address, {symbol: ONE})
    difference = end - start
    first = {s: ZERO for s in symbols_of(difference) if s.extent is not None}
    return abs(typical(substitute(difference, first)))


def reads_across(
    bodies: Sequence[Scalar],
    buffers: Mapping[str, Buffer],
    rows: Sequence[Symbol],
    elements: Sequence[Symbol],
) -> bool:
    """Whether a load that depends on the element has neighbouring rows side by side in memory."""
    return any(
        _steps_by_one(address, rows) and not _steps_by_one(address, elements)
        for load, _, address in _addressed(bodies, buffers)
        if not scalar_symbols(load).isdisjoint(elements)
    )


_SHARING = (1, 2, 8)


def _steps_by_one(address: Expr, symbols: Sequence[Symbol]) -> bool:
    """Whether neighbours are neighbours in memory, or two or eight of them share an element."""
    return any(
        symbol.extent is not ONE
        and any(
            substitute(address, {symbol: as_expr(n)}) - substitute(address, {symbol: ZERO}) is ONE
            for n in _SHARING
        )
        for symbol in symbols
    )


def is_multiple_of(expr: Expr, factor: int) -> bool:
    """Whether ``factor`` divides ``expr`` for all values of its symbols."""
    return expr.divisor % factor == 0


def are_aligned_neighbours(addresses: Sequence[Expr]) -> bool:
    """Whether addresses are a, a + 1, … from a multiple of their number: one vector access."""
    first = addresses[0]
    return is_multiple_of(first, len(addresses)) and all(
        address - first is as_expr(k) for k, address in enumerate(addresses)
    )


def lane_addresses(
    buffer: Buffer, index: Sequence[Expr], lanes: Sequence[Mapping[Symbol, Expr]]
) -> list[Expr]:
    """The address of each lane in a buffer, in elements from the start of its memory."""
    address = linearize(index, buffer.strides) + buffer.offset
    return [substitute(address, env) for env in lanes]


def flat_environment(
    symbols: Sequence[Symbol], flat: Expr, order: Sequence[int] | None = None
) -> dict[Symbol, Expr]:
    """The value of iteration symbols at element number ``flat``, the last of ``order`` fastest."""
    order = range(len(symbols)) if order is None else order
    sizes = []
    for k in order:
        extent = symbols[k].extent
        assert extent is not None
        sizes.append(extent)
    index = delinearize(flat, sizes)
    return {symbols[k]: value for k, value in zip(order, index, strict=True)}


def flat_values(prefix: str, sizes: Sequence[Expr], flat: Expr) -> dict[Symbol, Expr]:
    """The values of ``prefix0, prefix1, …`` at flat position ``flat``."""
    return flat_environment(numbered(prefix, sizes), flat)


def workgroup_type(dtype: DType) -> tuple[str, int]:
    """(WGSL type, bytes) of an element in workgroup memory."""
    if dtype.kind is Kind.BOOL:
        return "u32", 4  # NVIDIA's driver loses booleans there
    return dtype.compute, max(dtype.itemsize, 4)
