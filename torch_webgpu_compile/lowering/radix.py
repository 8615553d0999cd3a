"""Orders and order statistics of rows, by digits of 8 bits of their keys.

A row that fits into a workgroup's memory is sorted there, by one kernel. The elements of a longer
one move once for each digit, the last digit first: the digits of its parts are counted, the counts
summed, and every part moves its elements to their places. For a few elements of a long row nothing
moves: digits are counted from the first one on, each among elements that agree so far with the one
that is looked for.

No kernel depends on sizes but through `tile_of` and `_lanes`, and on no order of invocations.

Sources: D. Merrill, A. Grimshaw: High performance and scalable radix sorting, 2011; T. Alabi et
al.: Fast k-selection algorithms for graphics processing units, 2012.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from .. import dtypes
from ..ir.buffers import Buffer
from ..ir.scalar import Index, Scalar, apply, cast, const, where
from ..ir.sorting_nodes import (
    BINS,
    DIGIT_BITS,
    TILES,
    Compact,
    DigitCounts,
    DigitScatter,
    PartSums,
    PickDigit,
    RowSort,
)
from ..ir.spaces import iteration_symbols
from ..symbolic.sizes import ONE, Expr, as_expr, ceildiv, contiguous_strides, maximum, upper_bound
from ..target import Target
from .builder import Builder
from .sort_keys import KeyWord, key_words
from .value import IndexLike, Value, all_of, has_no_elements, positions, slice_dim, zeros

Payloads = Callable[[Scalar], Sequence[Scalar]]
"""Scalars over the rows for an element by its position there, an int64."""

# Parts of a row in which digits are counted for a selection: as many workgroups as fill a GPU with
# one row, of elements enough that a part's counts are few beside them.
_MOST_PARTS, _LEAST_PART = 128, 4096


def tile_of(size: Expr, target: Target) -> int | None:
    """The tile in which rows of ``size`` are sorted as a whole; None if none is large enough."""
    most = upper_bound(size)
    fitting = [t.size for t in TILES.values() if t.fits(target)]
    return min((size for size in fitting if most is not None and most <= size), default=None)


def _tile_of_parts(target: Target) -> int:
    """The tile in which a long row's elements are moved: an invocation has a digit, and all of them
    are in memory at once.
    """
    tiles = [t for t in TILES.values() if t.fits(target) and not t.in_turns]
    return max(t.size for t in tiles if t.workgroup == BINS)


def _lanes(parts: Expr) -> int:
    """How many invocations scan the counts of a digit, of those of a workgroup."""
    most = upper_bound(parts)
    return 256 if most is not None and most > 512 else 32


def _part(size: Expr) -> Expr:
    """Elements of a part in which a selection counts."""
    return maximum(ceildiv(size, _MOST_PARTS), _LEAST_PART)


def place_alone(place: Scalar) -> list[Scalar]:
    """The payload of an order: where an element is in its row, an int32."""
    return [cast(place, dtypes.int32)]


def order(
    builder: Builder,
    value: Value,
    descending: bool,
    payloads: Payloads = place_alone,
    count: Expr | None = None,
    bits: int | None = None,
) -> list[Value]:
    """Payloads of each row's elements in order, or of the first ``count``.

    Rows are the last dimension. Equal elements keep their order. ``bits``: see `key_words`.
    """
    size = value.sizes[-1]
    count = size if count is None else count
    sizes = (*value.sizes[:-1], count)
    if has_no_elements(sizes) or size is ONE:
        found = payloads(const(0, dtypes.int64))
        if has_no_elements(sizes):
            return [zeros(sizes, payload.dtype) for payload in found]
        return [Value(payload.dtype, sizes, payload) for payload in found]
    tile = tile_of(size, builder.target)
    if tile is not None:
        return _sort_rows(builder, value, descending, payloads, count, tile, bits)
    moved = _sort_by_digits(builder, value, descending, payloads, bits)
    return [slice_dim(payload, -1, 0, count) for payload in moved]


def first_in_order(
    builder: Builder, value: Value, descending: bool, payloads: Payloads, count: Expr
) -> list[Value]:
    """Payloads of each row's first ``count`` elements in order, of which equal ones keep theirs."""
    size = value.sizes[-1]
    sizes = (*value.sizes[:-1], count)
    if (
        has_no_elements(sizes)
        or tile_of(size, builder.target) is not None
        or not _is_selected(size, count)
    ):
        return order(builder, value, descending, payloads, count)
    chosen = _select(builder, value, descending, count)
    rows = positions(sizes)[:-1]
    taken = value.at([*rows, cast(chosen.body, dtypes.int64)])
    candidates = builder.pointwise(taken, sizes, name="candidates")

    def of_candidates(place: Scalar) -> Sequence[Scalar]:
        return payloads(cast(chosen.at([*rows, place]), dtypes.int64))

    return order(builder, candidates, descending, of_candidates)


def _is_selected(size: Expr, count: Expr) -> bool:
    """Whether ``count`` of ``size`` elements are few enough to be selected before they are sorted.

    Every element is read about six times for that, and moved four times or more for an order.
    """
    if size.is_constant and count.is_constant:
        return 2 * count.constant <= size.constant
    return count is not size


def nth_in_order(builder: Builder, value: Value, number: Scalar) -> Value:
    """The int64 position of each row's element that is ``number``-th in order, from 1.

    ``number`` is an int64 over the rows. Of elements that equal it, the first one.
    """
    sizes, size = value.sizes[:-1], value.sizes[-1]
    rows = positions(sizes)
    if tile_of(size, builder.target) is not None or size is ONE:
        (places,) = order(builder, value, descending=False)
        place = cast(places.at([*rows, number - 1]), dtypes.int64)
        return builder.pointwise(place, sizes, name="place")
    found = _Selection(builder, value, descending=False).pick(number)
    (r,) = positions((size,), "r")
    words = _words(value, [*rows, r], descending=False)
    pairs = zip(words, found, strict=True)
    equal = all_of([apply("eq", word.body, threshold.body) for word, threshold in pairs])
    candidates = where(equal, Index(r), Index(size))
    return builder.reduce("minimum", candidates, sizes, (size,), name="place")


def _words(
    value: Value, index: Sequence[IndexLike], descending: bool, bits: int | None = None
) -> tuple[KeyWord, ...]:
    return key_words(value.at(index), descending, bits)


def _elements(value: Value) -> list[Expr]:
    """The index of an element by the symbols of nodes: a row's, and its position there."""
    (at,) = iteration_symbols("j", (value.sizes[-1],))
    return [*positions(value.sizes)[:-1], at]


def _sort_rows(
    builder: Builder,
    value: Value,
    descending: bool,
    payloads: Payloads,
    count: Expr,
    tile: int,
    bits: int | None,
) -> list[Value]:
    *ranges, length = value.sizes
    at = _elements(value)
    words = _words(value, at, descending, bits)
    taken = payloads(Index(at[-1]))
    outputs = _ordered(builder, taken, (*ranges, count))
    node = RowSort(
        tuple(output.name for output in outputs),
        tuple(ranges),
        length,
        count,
        tile,
        tuple(word.bits for word in words),
        tuple(builder.finished(word.body) for word in words),
        tuple(map(builder.finished, taken)),
        origins=(builder.origin,),
    )
    builder.nodes.append(node)
    return [builder.load(output) for output in outputs]


def _ordered(builder: Builder, payloads: Sequence[Scalar], sizes: Sequence[Expr]) -> list[Buffer]:
    """Buffers for payloads in order."""
    name = f"{builder.hint}_ordered"
    return [builder.new_buffer(payload.dtype, sizes, name) for payload in payloads]


def _sort_by_digits(
    builder: Builder, value: Value, descending: bool, payloads: Payloads, bits: int | None
) -> list[Value]:
    """Payloads of all elements in order."""
    at = _elements(value)
    place: Scalar = cast(Index(at[-1]), dtypes.int32)
    words = _words(value, at, descending, bits)
    moved: list[Value] = []
    for number in range(len(words)):
        word = words[number]
        if moved:  # the next word is read where its element came from
            given = [*at[:-1], cast(place, dtypes.int64)]
            word = _words(value, given, descending, bits)[number]
        key = word.body
        # A key loses the digits that are done: so all kernels but the first and the last are one.
        for left in range(word.bits, 0, -DIGIT_BITS):
            digit, taken = key & (BINS - 1), [place, key >> DIGIT_BITS]
            if left <= DIGIT_BITS:
                is_last = number == len(words) - 1
                taken = [*payloads(cast(place, dtypes.int64))] if is_last else [place]
            moved = _move(builder, value.sizes, digit, min(left, DIGIT_BITS), taken)
            place, *keys = [output.at(at) for output in moved]
            key = keys[0] if keys else key
    return moved


def _move(
    builder: Builder,
    sizes: Sequence[Expr],
    digit: Scalar,
    bits: int,
    payloads: Sequence[Scalar],
) -> list[Value]:
    """Payloads in the order of a digit, where ties keep their order."""
    *lead, length = sizes
    ranges, tile = tuple(lead), as_expr(_tile_of_parts(builder.target))
    parts = ceildiv(length, tile)
    # The counts of a digit are neighbours, as they are scanned.
    counts = _count_digits(builder, sizes, tile, BINS, digit, by_digit=True)
    sums_sizes = (*ranges, parts, as_expr(BINS))
    before = builder.new_buffer(
        dtypes.int32, sums_sizes, f"{builder.hint}_before", strides=_by_digit(sums_sizes)
    )
    totals = builder.new_buffer(dtypes.int32, (*ranges, as_expr(BINS)), f"{builder.hint}_totals")
    builder.nodes.append(
        PartSums(
            *(before.name, totals.name, counts.name, ranges, parts, _lanes(parts)),
            origins=(builder.origin,),
        )
    )
    outputs = _ordered(builder, payloads, sizes)
    node = DigitScatter(
        tuple(output.name for output in outputs),
        *(before.name, totals.name, ranges, length, int(tile), bits),
        builder.finished(digit),
        tuple(map(builder.finished, payloads)),
        origins=(builder.origin,),
    )
    builder.nodes.append(node)
    return [builder.load(output) for output in outputs]


def _by_digit(sizes: Sequence[Expr]) -> tuple[Expr, ...]:
    """Strides of counts of (rows…, parts, digits) with the parts of a digit as neighbours."""
    *rows, parts, bins = sizes
    return (*contiguous_strides((*rows, bins, parts))[:-2], ONE, parts)


def _count_digits(
    builder: Builder,
    sizes: Sequence[Expr],
    part: Expr,
    bins: int,
    digit: Scalar,
    by_digit: bool = False,
) -> Buffer:
    *ranges, length = sizes
    counted = (*ranges, ceildiv(length, part), as_expr(bins))
    strides = _by_digit(counted) if by_digit else None
    output = builder.new_buffer(dtypes.int32, counted, f"{builder.hint}_counts", strides=strides)
    node = DigitCounts(
        *(output.name, tuple(ranges), length, part, bins),
        builder.finished(digit),
        origins=(builder.origin,),
    )
    builder.nodes.append(node)
    return output


class _Selection:
    """The search for the key of an element by its number in each row's order."""

    def __init__(self, builder: Builder, value: Value, descending: bool) -> None:
        self.builder = builder
        self.value = value
        self.at = _elements(value)
        self.words = _words(value, self.at, descending)
        self.part = _part(value.sizes[-1])

    def pick(self, number: Scalar) -> tuple[Value, ...]:
        """The key of the element of each row that is ``number``-th in order, from 1.

        Its words are uint32 over the rows, the least significant one first. ``number`` is an int64
        over the rows.
        """
        rows = positions(self.value.sizes[:-1])
        wanted = cast(number, dtypes.int32)
        found: list[Value] = []
        differs: Scalar | None = None
        for word in reversed(self.words):
            prefix: Value | None = None
            for shift in reversed(range(0, word.bits, DIGIT_BITS)):
                # What differs from the digits that are known is a digit of more than 8 bits.
                known = word.body if prefix is None else word.body ^ prefix.at(rows)
                shift_by = self._shift(shift)
                digit = known >> shift_by
                if differs is not None:
                    digit = where(differs, const(BINS, dtypes.uint32), digit)
                above = const(0, dtypes.uint32) if prefix is None else prefix.body
                prefix, rest = self._next(digit, wanted, above, shift_by)
                wanted = rest.body
            assert prefix is not None
            found.insert(0, prefix)
            other = apply("ne", word.body, prefix.at(rows))
            differs = other if differs is None else differs | other
        return tuple(found)

    def _shift(self, shift: int) -> Scalar:
        """A number that kernels load: those of all digits but the first are one."""
        name = f"{self.builder.hint}_shift"
        array = np.asarray([shift], np.uint32)
        return self.builder.constant(array, dtypes.uint32, (ONE,), name).body

    def _next(
        self, digit: Scalar, wanted: Scalar, above: Scalar, shift: Scalar
    ) -> tuple[Value, Value]:
        builder, ranges = self.builder, self.value.sizes[:-1]
        counts = _count_digits(builder, self.value.sizes, self.part, BINS, digit)
        prefix = builder.new_buffer(dtypes.uint32, ranges, f"{builder.hint}_prefix")
        rest = builder.new_buffer(dtypes.int32, ranges, f"{builder.hint}_rest")
        node = PickDigit(
            prefix.name,
            rest.name,
            counts.name,
            ranges,
            counts.sizes[-2],
            builder.finished(wanted),
            builder.finished(above),
            builder.finished(shift),
            origins=(builder.origin,),
        )
        builder.nodes.append(node)
        return builder.load(prefix), builder.load(rest)


def _select(builder: Builder, value: Value, descending: bool, count: Expr) -> Value:
    """The int32 positions of each row's first ``count`` elements in order, in the order of rows."""
    selection = _Selection(builder, value, descending)
    last = selection.pick(Index(count))
    rows = positions(value.sizes[:-1])
    before: Scalar = const(False, dtypes.bool_)
    equal: Scalar = const(True, dtypes.bool_)
    for word, threshold in zip(reversed(selection.words), reversed(last), strict=True):
        limit = threshold.at(rows)
        before |= equal & (word.body < limit)
        equal &= apply("eq", word.body, limit)
    none = where(equal, const(1, dtypes.uint32), 2)
    kind = where(before, const(0, dtypes.uint32), none)
    counts = _count_digits(builder, value.sizes, selection.part, 2, kind)
    *ranges, length = value.sizes
    output = builder.new_buffer(dtypes.int32, (*ranges, count), f"{builder.hint}_chosen")
    node = Compact(
        *(output.name, counts.name, tuple(ranges), length, selection.part, count),
        builder.finished(kind),
        origins=(builder.origin,),
    )
    builder.nodes.append(node)
    return builder.load(output)
