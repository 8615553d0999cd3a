"""Cumulative operators as reductions over blocks. Source: ATen ``cumsum``, ``logcumsumexp``, ….

A dimension of n elements is cut into blocks; a prefix inside one is a masked reduction of at most
`BLOCK` elements, and the totals of the blocks are scanned in the same way: n · BLOCK additions in
log(n) / log(BLOCK) rounds. With sorted keys, only elements of the same key are combined.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from .. import dtypes
from ..ir.scalar import Index, Scalar, apply, cast, neutral, where
from ..symbolic.sizes import ONE, Expr, as_expr, ceildiv, magnitude, upper_bound
from .builder import Builder, masked
from .pointwise import larger, plus, smaller, times
from .promotion import compute_dtype
from .reductions import converted
from .registry import lowers
from .value import Value, all_of, in_range, positions, zeros

aten = torch.ops.aten

BLOCK = 64  # a power of two, so that divisions of the index are shifts
# Up to this many additions, one kernel that adds each prefix anew takes less time than three.
DIRECT_ADDITIONS, DIRECT_SIZE = 1 << 20, 1024
# A size that is not known when compiling: after two rounds of blocks of 64, a million elements have
# become 244, which are scanned at once.
SYMBOLIC_ROUNDS = 2


def _log_add_exp(a: Scalar, b: Scalar) -> Scalar:
    """log(exp a + exp b); equal infinities stay, and NaN is unequal to all."""
    smaller_part = apply("exp", -abs(a - b))
    total = larger(a, b) + apply("log1p", smaller_part)
    doubled = a + math.log(2)
    return where(apply("eq", a, b), doubled, total)


_COMBINE = {
    "sum": plus,
    "prod": times,
    "maximum": larger,
    "minimum": smaller,
    "logsumexp": _log_add_exp,
}


def _reduced(
    builder: Builder,
    kind: str,
    inside: Scalar,
    body: Scalar,
    sizes: Sequence[Expr],
    block: Expr,
    name: str,
) -> Value:
    """The reduction over r < ``block`` of ``body``, as far as it is ``inside``."""
    if kind != "logsumexp":
        body = masked(inside, body, neutral(kind, body.dtype))
        return builder.reduce(kind, body, sizes, (block,), name=name)
    largest = _reduced(builder, "maximum", inside, body, sizes, block, "largest").body
    shift = where(apply("isinf", largest), 0, largest)
    grown = apply("exp", body - shift)
    total = _reduced(builder, "sum", inside, grown, sizes, block, name).body
    return builder.pointwise(shift + apply("log", total), sizes, name=name)


def inclusive_scan(
    builder: Builder, kind: str, value: Value, dim: int, rounds: int = 0, keys: Value | None = None
) -> Value:
    """Along ``dim``, element k of the result reduces elements 0…k.

    Args:
        kind: of reduction, or ``logsumexp`` for floats.
        rounds: of blocks that were done before.
        keys: as many as there are values, sorted along ``dim``: only elements with the key of
            element k are reduced.
    """
    dim %= value.rank
    size = value.sizes[dim]
    if value.is_empty or size is ONE:
        return value
    if _is_short(value, size, rounds):
        return _prefix(builder, kind, value, dim, value.sizes, size, keys)
    blocks = ceildiv(size, BLOCK)
    last, last_keys = _blocked_totals(builder, kind, value, dim, blocks, keys)
    before = inclusive_scan(builder, kind, last, dim, rounds + 1, last_keys)
    within = _prefix(builder, kind, value, dim, value.sizes, as_expr(BLOCK), keys)
    index = list(positions(value.sizes))
    block = index[dim] // BLOCK
    previous = [*index[:dim], block - 1, *index[dim + 1 :]]
    is_first = Index(block - 1) >= 0
    carried = before.at(previous)
    if keys is not None and last_keys is not None:
        same = apply("eq", keys.body, last_keys.at(previous))
        carried = where(same, carried, neutral(kind, value.dtype))
    carried = masked(is_first, carried, neutral(kind, value.dtype))
    return builder.pointwise(_COMBINE[kind](carried, within.body), value.sizes, name="scan")


def _is_short(value: Value, size: Expr, rounds: int) -> bool:
    """Whether one reduction per element is all that is needed."""
    most, additions = upper_bound(size), magnitude(value.numel * size)
    if most is None:
        return rounds == SYMBOLIC_ROUNDS
    few = additions is not None and additions <= DIRECT_ADDITIONS
    return most <= BLOCK or (few and most <= DIRECT_SIZE)


def _prefix(
    builder: Builder,
    kind: str,
    value: Value,
    dim: int,
    sizes: Sequence[Expr],
    block: Expr,
    keys: Value | None,
) -> Value:
    """Each element's prefix inside of its block."""
    index = list(positions(sizes))
    (r,) = positions((block,), "r")
    at = index[dim]
    whole = sizes[dim] is block
    start = as_expr(0) if whole else (at // block) * block
    index[dim] = start + r
    inside = Index(r) <= Index(at - start)
    body = value.at(index)
    if keys is not None:
        same = apply("eq", keys.at(index), keys.body)
        body = where(same, body, neutral(kind, value.dtype))
    return _reduced(builder, kind, inside, body, sizes, block, "prefix")


def _blocked_totals(
    builder: Builder, kind: str, value: Value, dim: int, blocks: Expr, keys: Value | None
) -> tuple[Value, Value | None]:
    """The reduction of every block, or of the elements with its last key; and that key."""
    sizes = [*value.sizes[:dim], blocks, *value.sizes[dim + 1 :]]
    index = list(positions(sizes))
    (r,) = positions((as_expr(BLOCK),), "r")
    index[dim] = index[dim] * BLOCK + r
    body, last_keys = value.at(index), None
    if keys is not None:
        ends = list(positions(sizes))
        end = Index(ends[dim] * BLOCK + (BLOCK - 1))
        last = apply("minimum", end, Index(value.sizes[dim] - 1))
        own = keys.at([*ends[:dim], last, *ends[dim + 1 :]])
        last_keys = builder.pointwise(own, sizes, name="last_keys")
        same = apply("eq", keys.at(index), last_keys.body)
        body = where(same, body, neutral(kind, value.dtype))
    inside = all_of(in_range(index[dim], value.sizes[dim]))
    block = as_expr(BLOCK)
    return _reduced(builder, kind, inside, body, sizes, block, "blocks"), last_keys


def _lower_scan(builder: Builder, kind: str, value: Value, dim: int) -> Value:
    out = builder.out
    if not value.rank:
        return converted(builder, value)
    is_bool = out.dtype is dtypes.bool_
    wide = value.cast(dtypes.int32 if is_bool else compute_dtype(out.dtype))
    return converted(builder, inclusive_scan(builder, kind, wide, dim))


def _register_scan(name: str, kind: str) -> None:
    @lowers(getattr(aten, name).default)
    def lower(builder: Builder, self: Value, dim: int, *, dtype: Any = None) -> Value:
        """Σ, the product or log Σ exp of each prefix along ``dim``.

        Computed in float32 for 16-bit floats; integers wrap. Of log Σ exp the maximum of each block
        is taken out of its sum.
        """
        return _lower_scan(builder, kind, self, dim)


_register_scan("cumsum", "sum")
_register_scan("cumprod", "prod")
_register_scan("logcumsumexp", "logsumexp")


def _register_extreme(name: str, kind: str) -> None:
    @lowers(getattr(aten, name).default)
    def lower(builder: Builder, self: Value, dim: int) -> tuple[Value, Value | None]:
        """(the extreme of each prefix along ``dim``, its int64 position), NaN once there was one.

        Of equal elements, or several NaN, the position is the last one's. It is made only if it is
        read.
        """
        if not self.rank:
            return self, zeros((), dtypes.int64)
        values = converted(builder, _lower_scan(builder, kind, self, dim))
        if not builder.is_used(1):
            return values, None
        # Where the running extreme was last seen: the largest such position up to here.
        position = Index(positions(self.sizes)[dim % self.rank])
        compute = compute_dtype(self.dtype)
        mine, best = cast(self.body, compute), cast(values.body, compute)
        seen = apply("eq", mine, best)
        if compute.is_float:
            both = apply("isnan", mine) & apply("isnan", best)
            seen |= both
        marked = builder.pointwise(where(seen, position, 0), self.sizes, name="seen")
        return values, inclusive_scan(builder, "maximum", marked, dim)


_register_extreme("cummax", "maximum")
_register_extreme("cummin", "minimum")
