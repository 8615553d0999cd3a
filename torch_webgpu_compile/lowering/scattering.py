"""`scatter`: updates of single elements, with atomics or as a reduction over the updates.

For ``torch.use_deterministic_algorithms`` (`ordered`): instead of atomics, whose order is a matter
of timing, each element takes the updates that name it, in their own order. Few are compared with
every element that they may change; many are sorted by the element that they name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from .. import dtypes
from ..ir.scalar import Const, Index, Scalar, apply, cast, const, neutral, scalar_symbols, where
from ..ir.spaces import symbol_keys
from ..symbolic.sizes import (
    ONE,
    ZERO,
    Expr,
    as_symbol,
    contiguous_strides,
    delinearize,
    linearize,
    magnitude,
    product,
    upper_bound,
)
from .builder import Builder, as_value, masked
from .index_checks import data_index
from .pointwise import plus
from .promotion import Operand, word_dtype
from .reductions import converted
from .registry import NotLowered
from .scans import inclusive_scan
from .sort_keys import extreme_key, of_extreme_key
from .sorting import binary_search, sort_last
from .value import IndexLike, Value, all_of, has_no_elements, in_range, positions, reshape, zeros

# A reduction compares every update with every element that it may change: 2^28 comparisons are
# 10 ms on a large GPU, and about what a host needs for copies both ways of that much data.
_MOST_COMPARISONS = 1 << 28
# n² comparisons a row: at 4096 that is 16 M, about the work of a 256³ matrix product.
_FEW = 4096
_ATOMIC = frozenset({dtypes.float32, dtypes.int32, dtypes.uint32, dtypes.int64})


def scatter(
    builder: Builder,
    initial: Value,
    ranges: Sequence[Expr],
    index: Sequence[IndexLike],
    body: Scalar,
    accumulate: bool,
) -> Value:
    """``initial`` with elements set, or increased by ``body``, at every point of ``ranges``.

    16-bit floats accumulate in float32 and are rounded once; a sum of bools is their logical or.

    Raises NotLowered: for sums in a dtype without atomics (float64, uint64) that would need more
    than 2^28 comparisons of an update with an element.
    """
    updates = Updates(initial, tuple(ranges), tuple(index), body)
    return updated(builder, updates, accumulate)


def updated(builder: Builder, updates: Updates, accumulate: bool) -> Value:
    """`scatter` of updates."""
    dtype = updates.initial.dtype
    wide = word_dtype(dtype) if accumulate else dtype
    widened = replace(updates, initial=updates.initial.cast(wide), body=cast(updates.body, wide))
    return converted(builder, _updated(builder, widened, accumulate), dtype)


def are_few(count: Expr) -> bool:
    """Whether each result is compared with all of so many indices, rather than these sorted."""
    most = upper_bound(count)
    return most is not None and most <= _FEW


def _updated(builder: Builder, updates: Updates, accumulate: bool) -> Value:
    initial = updates.initial
    if updates.selects:
        return _selected(builder, updates, accumulate)
    # Integers have the same sum in every order, and so has an element that one update names.
    exact = updates.competing is ONE or (accumulate and not initial.dtype.is_float)
    if not (exact or updates.is_empty):
        builder.on_deterministic()
        if builder.deterministic:
            return ordered(builder, updates, accumulate)
    if not accumulate or initial.dtype in _ATOMIC:
        combines: Literal["", "sum"] = "sum" if accumulate else ""
        return builder.scatter(initial, updates.ranges, updates.index, updates.body, combines)
    work = magnitude(updates.competing * initial.numel)
    if work is None or work > _MOST_COMPARISONS:
        cause = f"{initial.dtype.name} has no atomic sum, and {updates.competing} updates are"
        raise NotLowered(f"{cause} compared with each of {initial.numel} elements")
    return summed(builder, updates)


@dataclass(frozen=True)
class Updates:
    """``initial`` with elements set, or increased by ``body``, at every point of ``ranges``.

    A coordinate of an update that is, as it is, the index into a dimension of the result is direct:
    each position of that dimension gets the updates of one coordinate only. Updates whose other
    coordinates (``left``) differ may name the same element.
    """

    initial: Value
    ranges: tuple[Expr, ...]
    index: tuple[IndexLike, ...]
    body: Scalar

    @cached_property
    def points(self) -> tuple[Expr, ...]:
        """The coordinates of an update."""
        return tuple(positions(self.ranges))

    @cached_property
    def direct(self) -> dict[int, int]:
        """For each direct coordinate, by number, the dimension of the result that it addresses."""
        found: dict[int, int] = {}
        for dim, entry in enumerate(self.index):
            expr = entry.expr if isinstance(entry, Index) else entry
            k = next((k for k, p in enumerate(self.points) if p is expr and k not in found), None)
            if k is not None and as_symbol(self.points[k]) is not None:
                found[k] = dim
        return found

    @property
    def left(self) -> list[int]:
        """The numbers of the coordinates that are not direct."""
        return [k for k in range(len(self.ranges)) if k not in self.direct]

    @property
    def compared(self) -> list[int]:
        """The dimensions of the result that no direct coordinate addresses."""
        addressed = self.direct.values()
        return [dim for dim in range(self.initial.rank) if dim not in addressed]

    @property
    def is_empty(self) -> bool:
        """Whether the result is ``initial``: it has no elements, or there are no updates."""
        return self.initial.is_empty or has_no_elements(self.ranges)

    @property
    def left_sizes(self) -> list[Expr]:
        """The sizes of the coordinates that are left; [1] if there are none."""
        return [self.ranges[k] for k in self.left] or [ONE]

    @property
    def competing(self) -> Expr:
        """How many updates each element may be named by."""
        return product(self.left_sizes)

    @property
    def selects(self) -> bool:
        """Whether there is one update for each row of a buffer that holds one value, as one-hot."""
        is_row = self.competing is ONE and len(self.compared) == 1
        return is_row and isinstance(self.initial.body, Const) and not self.is_empty

    def moved(self, entry: IndexLike, at: Sequence[IndexLike]) -> Scalar:
        """``entry``, a scalar over the coordinates of the updates, at the update ``at``."""
        scalar = _scalar(entry)
        return Value(scalar.dtype, self.ranges, scalar).at(at)

    def reached(self, here: Sequence[Expr]) -> list[Scalar]:
        """The conditions under which the element ``here`` has updates by direct coordinates."""
        found: list[Scalar] = []
        for k, dim in self.direct.items():
            found += in_range(here[dim], self.ranges[k])
        return found

    def place(self, here: Sequence[Expr], left: Sequence[IndexLike]) -> list[IndexLike]:
        """The coordinates of the update of element ``here`` with ``left`` as its other ones."""
        others = iter(left)
        direct = self.direct
        return [here[direct[k]] if k in direct else next(others) for k in range(len(self.ranges))]


def updates_along(
    builder: Builder, value: Value, dim: int, index: Value, source: Operand
) -> Updates:
    """Elements of ``value`` along ``dim`` by those of ``source``, which ``index`` sends to them.

    The source may be a number. Tensors without dimensions have one here.
    """
    value, index = _at_least_1d(value), _at_least_1d(index)
    dim %= value.rank
    at = positions(index.sizes)
    if not (isinstance(source, Value) and source.rank):
        source = as_value(source, index.sizes, value.dtype)
    places: list[IndexLike] = list(at)
    places[dim] = data_index(builder, index.body, value.sizes[dim], dim)
    return Updates(value, index.sizes, tuple(places), cast(source.at(at), value.dtype))


def updates_of_slices(
    builder: Builder, value: Value, dim: int, index: Value, source: Value
) -> Updates:
    """Whole slices along ``dim`` by those of ``source``, which a vector sends to their places.

    Tensors without dimensions have one here.
    """
    value, index, source = map(_at_least_1d, (value, index, source))
    dim %= value.rank
    places: list[IndexLike] = list(positions(source.sizes))
    places[dim] = data_index(builder, index.at([places[dim]]), value.sizes[dim], dim)
    return Updates(value, source.sizes, tuple(places), cast(source.body, value.dtype))


def _at_least_1d(value: Value) -> Value:
    return value if value.rank else reshape(value, [ONE])


def reduced(
    builder: Builder, updates: Updates, kind: str, is_counted: bool
) -> tuple[Scalar, Scalar]:
    """(the reduction of the updates that name each element, how many they are).

    Unless they are counted (``is_counted``), the number says only whether there are any.
    """
    if are_few(updates.competing):
        return _compared(builder, updates, kind)
    if kind in ("maximum", "minimum") and updates.body.dtype is dtypes.float32:
        return _extreme(builder, updates, kind == "minimum")
    return _Sorted(builder, updates).reduced(kind, is_counted)


def _extreme(builder: Builder, updates: Updates, smallest: bool) -> tuple[Scalar, Scalar]:
    """`reduced` of float32s by atomics on their keys: the largest is the same in every order.

    No key is 0, which stands for no update; integers have none to spare.
    """
    initial = zeros(updates.initial.sizes, dtypes.uint32)
    key = extreme_key(updates.body, smallest)
    keys = builder.scatter(initial, updates.ranges, updates.index, key, "maximum").body
    named = apply("ne", keys, 0)
    neutral_value = neutral("minimum" if smallest else "maximum", dtypes.float32)
    return where(named, of_extreme_key(keys, smallest), neutral_value), cast(named, dtypes.int32)


def ordered(builder: Builder, updates: Updates, accumulate: bool) -> Value:
    """The result of the updates as if they were made in their order, the same in every run.

    Sums are added in that order, in the dtype of ``initial``, which is that of the body; of several
    updates that set an element the last one stays.
    """
    work = magnitude(updates.competing * updates.initial.numel)
    # Sorting costs about a dozen kernels: few comparisons of all pairs take less time.
    few = builder.target.machine.dispatch_operations
    if not updates.compared or (work is not None and work <= few):
        if accumulate:
            return summed(builder, updates)
        return _last_compared(builder, updates)
    return _Sorted(builder, updates).result(accumulate)


def _hits(updates: Updates) -> tuple[list[Expr], list[IndexLike], Scalar, Scalar]:
    """(symbols of the updates that compete, an update, whether it names the element, inside)."""
    here = positions(updates.initial.sizes)
    inner = list(positions(updates.left_sizes, "r"))
    at = updates.place(here, inner)
    named = []
    for dim in updates.compared:
        entry = cast(updates.moved(updates.index[dim], at), dtypes.int64)
        named.append(apply("eq", entry, Index(here[dim])))
    return inner, at, all_of(named), all_of(updates.reached(here))


def _selected(builder: Builder, updates: Updates, accumulate: bool) -> Value:
    """Every element as it is or as the only update of its row says.

    Unlike a scatter it is computed where it is read: there is nothing to be filled and changed.
    """
    initial = updates.initial
    here = positions(initial.sizes)
    (dim,) = updates.compared
    at = updates.place(here, list(positions(updates.left_sizes)))
    dtype = dtypes.int32 if _is_small(initial.sizes[dim]) else dtypes.int64
    entry = cast(updates.moved(updates.index[dim], at), dtype)
    is_named = apply("eq", entry, cast(Index(here[dim]), dtype))
    element = cast(updates.moved(updates.body, at), initial.dtype)
    element = plus(initial.body, element) if accumulate else element
    body = where(is_named, element, initial.body)
    return builder.pointwise(
        masked(all_of(updates.reached(here)), body, initial.body), initial.sizes
    )


def summed(builder: Builder, updates: Updates) -> Value:
    """``initial`` plus, for every element, the sum of the updates that name it."""
    initial = updates.initial
    total, _ = _compared(builder, updates, "sum")
    return builder.pointwise(plus(initial.body, total), initial.sizes)


def _compared(builder: Builder, updates: Updates, kind: str) -> tuple[Scalar, Scalar]:
    """`reduced`, where each element is compared with all updates that may name it."""
    sizes, dtype = updates.initial.sizes, updates.initial.dtype
    _, at, named, inside = _hits(updates)
    identity = neutral(kind, dtype)
    element = cast(updates.moved(updates.body, at), dtype)
    if not isinstance(named, Const):
        element = where(named, element, identity)
    element = masked(inside, element, identity)
    total = builder.reduce(kind, element, sizes, updates.left_sizes, name=kind)
    hit = masked(inside, cast(named, dtypes.int32), 0)
    hits = builder.reduce("sum", hit, sizes, updates.left_sizes, name="hits")
    return total.body, hits.body


def _last_compared(builder: Builder, updates: Updates) -> Value:
    """Every element as the last update that names it says."""
    initial = updates.initial
    inner, _, named, inside = _hits(updates)
    number = Index(linearize(inner, contiguous_strides(updates.left_sizes)))
    body = masked(inside, where(named, number, -1), -1)
    last = builder.reduce("maximum", body, initial.sizes, updates.left_sizes, name="last").body
    chosen = apply("maximum", last, 0)
    at = updates.place(positions(initial.sizes), _coordinates(chosen, updates.left_sizes))
    element = cast(updates.moved(updates.body, at), initial.dtype)
    is_named = last >= 0
    return builder.pointwise(masked(is_named, element, initial.body), initial.sizes)


def _coordinates(number: Scalar, sizes: Sequence[Expr]) -> list[IndexLike]:
    """The coordinates of a row-major position from data."""
    found: list[IndexLike] = []
    for k, (size, step) in enumerate(zip(sizes, contiguous_strides(sizes), strict=True)):
        entry = number if step is ONE else number // Index(step)
        found.append(entry if k == 0 else entry % Index(size))
    return found


class _Sorted:
    """Updates sorted by the elements that they name, so that those of an element are neighbours.

    There is a row of them for every point of the direct coordinates that the index depends on.
    """

    def __init__(self, builder: Builder, updates: Updates) -> None:
        self.builder = builder
        self.updates = updates
        self.count = updates.competing
        sizes = updates.initial.sizes
        self.compared_sizes = [sizes[dim] for dim in updates.compared]
        known = {symbol_keys((updates.points[k],))[0]: k for k in updates.direct}
        read = {
            known[symbol]
            for dim in updates.compared
            for symbol in scalar_symbols(_scalar(updates.index[dim]))
            if symbol in known
        }
        self.rows = sorted(read)
        largest = upper_bound(product(self.compared_sizes))  # the key of updates outside
        bits = None if largest is None else largest.bit_length()
        keys, places = sort_last(builder, self._keys(), False, places=True, bits=bits)
        assert places is not None
        self.keys, self.places = keys, places

    def _keys(self) -> Value:
        """The row-major position of the named element; behind all of them for one outside."""
        updates = self.updates
        sizes = [*(updates.ranges[k] for k in self.rows), self.count]
        *rows, number = positions(sizes)
        own = dict(zip(self.rows, rows, strict=True))
        left = dict(zip(updates.left, delinearize(number, updates.left_sizes), strict=True))
        at: list[IndexLike] = [own.get(k, left.get(k, ZERO)) for k in range(len(updates.ranges))]
        none = product(self.compared_sizes)
        dtype = dtypes.int32 if _is_small(none) else dtypes.int64
        key: Scalar = const(0, dtype)
        inside = []
        for dim, size in zip(updates.compared, self.compared_sizes, strict=True):
            entry = cast(updates.moved(updates.index[dim], at), dtypes.int64)
            inside.append(entry >= 0)
            inside.append(entry < Index(size))
            key = key * cast(Index(size), dtype) + cast(entry, dtype)
        body = where(all_of(inside), key, cast(Index(none), dtype))
        return self.builder.pointwise(body, sizes, name="named")

    def _in_row(self, value: Value, here: Sequence[Expr], position: IndexLike) -> Scalar:
        """``value``, of keys or places, at a position of the row for an element of the result."""
        direct = self.updates.direct
        return value.at([*(here[direct[k]] for k in self.rows), position])

    def _last(self) -> tuple[Scalar, Scalar]:
        """(the position in its row of the last update of an element, whether it has one)."""
        updates = self.updates
        dims = [*(updates.direct[k] for k in self.rows), *updates.compared]
        all_sizes = updates.initial.sizes
        sizes = [all_sizes[dim] for dim in dims]
        own = dict(zip(dims, positions(sizes), strict=True))
        here = [own.get(dim, ZERO) for dim in range(len(all_sizes))]
        steps = contiguous_strides(self.compared_sizes)
        number = linearize([own[dim] for dim in updates.compared], steps)
        mine = cast(Index(number), self.keys.dtype)

        def not_after(position: Scalar) -> Scalar:
            return self._in_row(self.keys, here, position) <= mine

        last = binary_search(not_after, self.count) - 1
        safe = apply("maximum", last, 0)
        is_mine = apply("eq", self._in_row(self.keys, here, safe), mine)
        is_mine &= last >= 0
        rows: list[Scalar] = []
        for k in self.rows:
            rows += in_range(own[updates.direct[k]], updates.ranges[k])
        body = masked(all_of(rows), where(is_mine, last, -1), -1)
        lasts = self.builder.pointwise(body, sizes, name="last")
        at_here = positions(all_sizes)
        position = lasts.at([at_here[dim] for dim in dims])
        named = [position >= 0, *updates.reached(at_here)]
        return (apply("maximum", position, 0), all_of(named))

    def result(self, accumulate: bool) -> Value:
        """The result of all updates."""
        updates, initial = self.updates, self.updates.initial
        here = positions(initial.sizes)
        last, is_named = self._last()
        if accumulate:
            element = plus(initial.body, self._up_to(here, last, "sum", updates.body))
        else:
            left = _coordinates(self._in_row(self.places, here, last), updates.left_sizes)
            at = updates.place(here, left)
            element = cast(updates.moved(updates.body, at), initial.dtype)
        return self.builder.pointwise(masked(is_named, element, initial.body), initial.sizes)

    def reduced(self, kind: str, is_counted: bool) -> tuple[Scalar, Scalar]:
        """See the function of this name."""
        here, body = positions(self.updates.initial.sizes), self.updates.body
        last, is_named = self._last()
        total = self._up_to(here, last, kind, body)
        total = masked(is_named, total, neutral(kind, body.dtype))
        if not is_counted:
            return total, cast(is_named, dtypes.int32)
        hits = self._up_to(here, last, "sum", const(1, dtypes.int32))
        return total, masked(is_named, hits, 0)

    def _up_to(self, here: Sequence[Expr], last: Scalar, kind: str, body: Scalar) -> Scalar:
        """The reduction of ``body`` of an element's updates up to a position in its row.

        All are scanned, element by element.

        The updates keep their layout, with all that compete along the first of their coordinates.
        """
        updates = self.updates
        order = [k for k in range(len(updates.ranges)) if k not in updates.left[1:]]
        axis = order.index(updates.left[0])
        sizes = [self.count if j == axis else updates.ranges[k] for j, k in enumerate(order)]
        points = dict(zip(order, positions(sizes), strict=True))
        row = [points[k] for k in self.rows]
        left = _coordinates(self.places.at([*row, points[updates.left[0]]]), updates.left_sizes)
        others = iter(left)
        at = [
            points[k] if k in updates.direct else next(others) for k in range(len(updates.ranges))
        ]
        values = self.builder.pointwise(updates.moved(body, at), sizes, name="ordered")
        keys = Value(self.keys.dtype, tuple(sizes), self.keys.at([*row, points[updates.left[0]]]))
        scanned = inclusive_scan(self.builder, kind, values, axis, keys=keys)
        return scanned.at(
            [last if j == axis else here[updates.direct[k]] for j, k in enumerate(order)]
        )


def _scalar(entry: IndexLike) -> Scalar:
    return Index(entry) if isinstance(entry, Expr) else entry


def _is_small(count: Expr) -> bool:
    return count.is_constant and int(count) < 1 << 31
