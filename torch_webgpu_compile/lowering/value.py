"""`Value`: a tensor during lowering, and its views.

A value has sizes and dtype but no layout. Its body computes one element from index symbols; a view
is a substitution of those symbols.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .. import dtypes
from ..dtypes import DType
from ..ir.gathering import substitute_scalars
from ..ir.scalar import Index, Scalar, cast, const
from ..ir.spaces import iteration_symbols, numbered
from ..symbolic.sizes import (
    ONE,
    ZERO,
    Expr,
    IntLike,
    Symbol,
    as_expr,
    contiguous_strides,
    delinearize,
    is_less,
    is_nonnegative,
    linearize,
    mod,
    product,
)

IndexLike = Expr | Scalar


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor: ``body`` computes the element at ``iteration_symbols("i", sizes)``.

    ``number`` marks a Python number (with sizes ()), which does not take part in dtype promotion as
    a tensor does.
    """

    dtype: DType
    sizes: tuple[Expr, ...]
    body: Scalar
    number: bool = False

    @property
    def rank(self) -> int:
        """The number of dimensions."""
        return len(self.sizes)

    @property
    def numel(self) -> Expr:
        """The number of elements."""
        return product(self.sizes)

    @property
    def is_empty(self) -> bool:
        """Whether a size is the constant 0; a symbolic size counts as at least 1."""
        return has_no_elements(self.sizes)

    def at(self, index: Sequence[IndexLike]) -> Scalar:
        """The element at ``index``, whose entries may be computed from data (a gather)."""
        assert len(index) == self.rank, (index, self.sizes)
        keys = numbered("i", self.sizes)
        exprs: dict[Symbol, Expr] = {}
        data: dict[Symbol, Scalar] = {}
        for key, entry in zip(keys, index, strict=True):
            if isinstance(entry, Expr):
                exprs[key] = entry
            elif isinstance(entry, Index):
                exprs[key] = entry.expr
            else:
                data[key] = cast(entry, dtypes.int64)
        return substitute_scalars(self.body, exprs, data)

    def cast(self, dtype: DType) -> Value:
        """The same value converted, without a node."""
        return Value(dtype, self.sizes, cast(self.body, dtype), self.number)


def positions(sizes: Sequence[Expr], prefix: str = "i") -> tuple[Expr, ...]:
    """The canonical index: a symbol per dimension, 0 where the size is 1."""
    symbols = iteration_symbols(prefix, sizes)
    return tuple(
        ZERO if size is ONE else symbol for size, symbol in zip(sizes, symbols, strict=True)
    )


def view(value: Value, sizes: Sequence[Expr], index: Sequence[IndexLike]) -> Value:
    """The value of ``sizes`` whose element at `positions` is ``value.at(index)``."""
    if any(size is ZERO for size in sizes):
        return zeros(sizes, value.dtype)
    return Value(value.dtype, tuple(sizes), value.at(index))


def permute(value: Value, dims: Sequence[int]) -> Value:
    """Dimension k of the result is dimension ``dims[k]``."""
    dims = [dim % value.rank for dim in dims]
    sizes = [value.sizes[dim] for dim in dims]
    new = positions(sizes)
    return view(value, sizes, [new[dims.index(k)] for k in range(value.rank)])


def expand(value: Value, sizes: Sequence[Expr]) -> Value:
    """Broadcast to ``sizes``, aligned at the last dimension."""
    if len(sizes) == value.rank and tuple(sizes) == value.sizes:
        return value
    new = positions(sizes)
    return view(value, sizes, broadcast_index(value, new))


def broadcast_index(value: Value, index: Sequence[IndexLike]) -> list[IndexLike]:
    """The index into ``value`` for an index of the shape that it is broadcast to."""
    skip = len(index) - value.rank
    return [ZERO if size is ONE else index[skip + k] for k, size in enumerate(value.sizes)]


def has_no_elements(sizes: Sequence[Expr]) -> bool:
    """Whether a size is the constant 0; a symbolic size counts as at least 1."""
    return any(size is ZERO for size in sizes)


def zeros(sizes: Sequence[Expr], dtype: DType) -> Value:
    """0 everywhere, without a node."""
    return Value(dtype, tuple(sizes), const(0, dtype))


def broadcast_sizes(shapes: Sequence[Sequence[Expr]]) -> tuple[Expr, ...]:
    """The common sizes of shapes that broadcast."""
    rank = max((len(shape) for shape in shapes), default=0)
    sizes = [ONE] * rank
    for shape in shapes:
        for k, size in enumerate(shape, rank - len(shape)):
            if size is not ONE:
                sizes[k] = size
    return tuple(sizes)


def reshape(value: Value, sizes: Sequence[Expr]) -> Value:
    """The same elements in row-major order with other sizes."""
    if tuple(sizes) == value.sizes:
        return value
    new = positions(sizes)
    index: list[IndexLike] = [ZERO] * value.rank
    if has_no_elements(sizes):
        return view(value, sizes, index)
    for old_dims, new_dims in _dimension_groups(value.sizes, sizes):
        new_sizes = [sizes[k] for k in new_dims]
        old_sizes = [value.sizes[k] for k in old_dims]
        flat = linearize([new[k] for k in new_dims], contiguous_strides(new_sizes))
        for k, entry in zip(old_dims, delinearize(flat, old_sizes), strict=True):
            index[k] = entry
    return view(value, sizes, index)


def _dimension_groups(
    old: Sequence[Expr], new: Sequence[Expr]
) -> list[tuple[list[int], list[int]]]:
    """Splits both shapes into aligned runs of equal numel, so that index arithmetic stays local."""
    left = [k for k, size in enumerate(old) if size is not ONE]
    right = [k for k, size in enumerate(new) if size is not ONE]
    groups = []
    while left and right:
        a, b = [left.pop()], [right.pop()]
        while True:
            size_a, size_b = product(old[k] for k in a), product(new[k] for k in b)
            if size_a is size_b:
                break
            if left and (not right or _divides(size_a, size_b)):
                a.insert(0, left.pop())
            elif right and (not left or _divides(size_b, size_a)):
                b.insert(0, right.pop())
            else:
                a, b = left + a, right + b
                left, right = [], []
                break
        groups.append((a, b))
    if groups and (left or right):  # sizes whose equality is only known to a guard
        groups[-1] = (left + groups[-1][0], right + groups[-1][1])
    return groups


def _divides(small: Expr, large: Expr) -> bool:
    if small.is_constant and large.is_constant:
        return 0 < small.constant < large.constant
    return small is not ZERO and mod(large, small) is ZERO


def channelwise(vector: Value, like: Value) -> Value:
    """A vector with one entry for each index of dimension 1 of ``like``, to broadcast with it."""
    return reshape(vector, [vector.sizes[0] if k == 1 else ONE for k in range(like.rank)])


def slice_dim(value: Value, dim: int, start: IntLike, size: Expr, step: int = 1) -> Value:
    """``size`` elements of a dimension: start, start + step, …"""
    dim %= value.rank
    sizes = [*value.sizes[:dim], size, *value.sizes[dim + 1 :]]
    index = list(positions(sizes))
    index[dim] = index[dim] * step + as_expr(start)
    return view(value, sizes, index)


def select(value: Value, dim: int, index: IndexLike) -> Value:
    """One element of a dimension, which disappears."""
    dim %= value.rank
    sizes = [*value.sizes[:dim], *value.sizes[dim + 1 :]]
    new: list[IndexLike] = list(positions(sizes))
    return view(value, sizes, [*new[:dim], index, *new[dim:]])


def unsqueeze(value: Value, dim: int) -> Value:
    """A new dimension of size 1 before ``dim``."""
    dim %= value.rank + 1
    return reshape(value, [*value.sizes[:dim], ONE, *value.sizes[dim:]])


def in_range(position: Expr, size: Expr) -> list[Scalar]:
    """Conditions for 0 ≤ position < size that are not always true."""
    conditions = []
    if not is_nonnegative(position):
        conditions.append(Index(position) >= 0)
    if not is_less(position, size):
        conditions.append(Index(position) < Index(size))
    return conditions


def all_of(conditions: Sequence[Scalar]) -> Scalar:
    """The conjunction; True of none."""
    total: Scalar = const(True, dtypes.bool_)
    for k, condition in enumerate(conditions):
        total = condition if k == 0 else total & condition
    return total
