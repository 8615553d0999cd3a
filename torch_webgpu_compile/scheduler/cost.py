"""Costs on a GPU: the only module of the scheduler that decides by a `Machine`.

Passes say what a rewrite moves, computes and leaves to run side by side; functions here say whether
it is worth it. Costs are bytes of memory traffic that take as long. Numbers without a unit here are
ratios to what the `Machine` says, and were measured on an H200: `Machine.scaled` and the rates take
them to other GPUs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..target import Target

# -- rates -----------------------------------------------------------------------------------------

# The part of the rate of independent multiply-adds that products of matrices reach.
_PRODUCTS_SHARE = 1 / 2

# An access against the grain moves its bytes about this many times more often: of each 32-byte
# sector one element is used, and caches catch only a part of the rest.
_AGAINST_THE_GRAIN = 2


def node_nbytes(moved: int, flops: int, target: Target) -> float:
    """The cost of a kernel that moves so many bytes and computes so many operations."""
    return target.machine.dispatch_nbytes + moved + _products_nbytes(flops, target)


def scalar_operand_nbytes(flops: int, target: Target) -> float:
    """The cost of a convolution's loads of one element at a time, instead of four.

    It takes twice as long: on an H200, ResNet-50's convolutions reach 15 TFLOP/s so and 30 with
    vectors.
    """
    return _products_nbytes(flops, target)


def against_the_grain_nbytes(nbytes: float) -> float:
    """The cost, beside their bytes, of accesses that do not follow the memory order."""
    return _AGAINST_THE_GRAIN * nbytes


def weight_copy_pays(positions: int, target: Target) -> bool:
    """Whether a copy of a convolution's weight in another layout costs little next to it.

    The copy moves 8 bytes per element; the convolution computes two operations per element and
    position, and a quarter of their time is little.
    """
    return _products_nbytes(2 * positions, target) >= 4 * 8


def _products_nbytes(flops: int, target: Target) -> float:
    return flops / (_PRODUCTS_SHARE * target.machine.flops_per_byte)


# -- computing again or storing --------------------------------------------------------------------

# Of a body that is computed again in each reader, instead of one stored and loaded element, and as
# part of a tile's loads: operations, for each operation that an H200 does per byte of memory.
_CHEAP, _CHEAP_IN_TILES = 6 / 16, 4 / 16
# Of one that is computed for each score of attention, which costs hundreds of operations anyway.
_CHEAP_IN_SCORES = 32 / 16
_SCORES_PER_ELEMENT = 8  # at least so many for each element that it is made of
# Of one that is computed again for every tile of rows that matrix units multiply it with, instead
# of writing and reading two bytes of a dequantized weight. An estimate: nothing was measured.
_CHEAP_IN_UNITS = 3
_UNIT_ROWS = 128  # of such a tile
# Loads that replace one when a tile is loaded, and readers of what is computed from inputs alone.
_TILE_LOADS, _FEW_READERS = 2, 4
# Elements of a row that caches hold, and the readers that make its sum worth computing again.
_CACHED_ROW, _STATISTIC_ROWS = 1 << 14, 16
# Rows of the smallest tile of a product's result.
_FEW_PRODUCT_ROWS = 16


def is_within_a_dispatch(operations: float, target: Target) -> bool:
    """Whether computing takes less time than one more dispatch."""
    return operations <= target.machine.dispatch_operations


def is_cheap(operations: float, elements: int, target: Target) -> bool:
    """Whether computing takes less time than storing and loading so many elements."""
    return operations <= _CHEAP * target.machine.flops_per_byte * elements


def is_cheap_in_tiles(operations: int, loads: int, target: Target) -> bool:
    """Whether a body may be computed wherever a tile loads it: tiles load it many times."""
    cheap = operations <= _CHEAP_IN_TILES * target.machine.flops_per_byte
    return cheap and loads <= _TILE_LOADS


def is_cheap_in_scores(operations: int, target: Target) -> bool:
    """Whether a body may be computed for each score of attention, and in each of its gradients."""
    return operations <= _CHEAP_IN_SCORES * target.machine.flops_per_byte


def are_many_scores(scores: int, elements: int) -> bool:
    """Whether so many elements, of which a number for each score is made, stay in caches."""
    return scores >= _SCORES_PER_ELEMENT * elements


def is_cheap_in_units(operations: int, rows: int, target: Target) -> bool:
    """Whether an operand of so many rows' product in matrix units may be computed where it is read.

    ``rows``: of the other operand.
    """
    tiles = -(-rows // _UNIT_ROWS)
    return operations * tiles <= _CHEAP_IN_UNITS * target.machine.flops_per_byte


def are_few_readers(readers: int) -> bool:
    """Whether so many kernels may each read the inputs of what they compute again."""
    return readers <= _FEW_READERS


def stays_in_caches(length: int) -> bool:
    """Whether a row that is summed again is in the caches by then."""
    return length <= _CACHED_ROW


def makes_statistics_again(rows: int) -> bool:
    """Whether a kernel of so many rows is a product, beside which a statistic costs nothing."""
    return rows >= _STATISTIC_ROWS


def are_few_rows(rows: int) -> bool:
    """Whether a product of so many rows loads each element of its other operand once."""
    return rows <= _FEW_PRODUCT_ROWS


# -- memory ----------------------------------------------------------------------------------------


def is_small_buffer(nbytes: int, target: Target) -> bool:
    """Whether a buffer does not count where memory is weighed."""
    return nbytes <= target.machine.small_nbytes


def may_be_passed(nbytes: int, target: Target) -> bool:
    """Whether intermediates of up to so many bytes may be alive while a joint kernel runs."""
    return nbytes <= 16 * target.machine.small_nbytes


def may_be_kept(nbytes: int, held_nbytes: int, target: Target) -> bool:
    """Whether prepared buffers may take so many bytes beside the memory that a call holds."""
    return nbytes * target.machine.prepared_divisor <= held_nbytes


# -- sharing a dispatch ----------------------------------------------------------------------------


def is_small_kernel(nbytes: int, target: Target) -> bool:
    """Whether a kernel that moves so many bytes gains by sharing a dispatch with others.

    One that takes several times as long as a dispatch costs has more to lose by their registers.
    """
    return nbytes <= 4 * target.machine.dispatch_nbytes


def is_small_map(points: int, target: Target) -> bool:
    """Whether maps of so many points run side by side in the registers of one kernel.

    With more points, they fill a GPU better apart.
    """
    return points <= target.machine.scaled(16) * target.machine.workgroup_invocations


def fills_with_a_product(elements: int, target: Target) -> bool:
    """Whether a product's result of so many elements fills a GPU by itself.

    With about two workgroups, of 64 × 128 elements each, for each multiprocessor.
    """
    return elements >= target.machine.scaled(260) * 64 * 128


# -- dividing work ---------------------------------------------------------------------------------

# Rows of at least this many elements are worth a second kernel, and the shortest part of one; and
# the shortest part of a column.
_LONG_ROW, _ROW_PART, _COLUMN_PART = 1 << 17, 1 << 14, 256
_ROW_OPERATIONS = 16
# Rows that are too few; workgroups that they are divided into; and threads wanted in flight.
_FEW_ROWS, _ROW_WORKGROUPS, _THREADS = 64, 2048, 1 << 18
# Columns are divided into many parts or not at all.
_FEWEST_COLUMN_PARTS = 16


@dataclass(frozen=True, slots=True)
class _Products:
    """How fast a GPU multiplies matrices in its fastest tile.

    Attributes:
        tile: rows and columns of it.
        workgroups: that fill an H200.
        share: of the rate of independent multiply-adds.
        start: elements of the inner dimension that take as long as a workgroup's start and end do.
    """

    tile: tuple[int, int]
    workgroups: int
    share: float
    start: int


# By invocations, about three workgroups for each multiprocessor; and in matrix units, whose rate is
# that of 4096×4096×4096 in f16 without the starts and the last turn: 261 TFLOP/s on an H100.
_PRODUCTS = _Products((64, 64), 384, _PRODUCTS_SHARE, 48)
_IN_UNITS = _Products((128, 128), 264, 4.3, 300)
# The shortest worthwhile part of the inner dimension, and the most parts.
INNER_PART, _MOST_INNER_PARTS = 192, 256
# The part of a product's rate that is reached by a workgroup which is alone on a multiprocessor; by
# smaller tiles, of which there are four times as many; by several workgroups; and by larger tiles,
# which want more of them.
_ALONE, _SMALL_TILES, _SEVERAL, _LARGE_TILES = 0.8, 0.6, 0.97, 0.99
_SEVERAL_WAVES, _LARGE_WAVES = 4, 5.3
# In matrix units, workgroups that a multiprocessor has at once; and the part of their rate that
# tiles of a quarter of the size reach, and for each workgroup of the large ones that would be on a
# multiprocessor.
_UNITS_AT_ONCE, _SMALL_UNITS, _SMALL_UNITS_WAVES = 2, 0.45, 0.93
# What a product of bfloat16 gains with shifts, of the time that it takes in f16: on an H100,
# 512×2048×16384 has 180 TFLOP/s in f16, 157 of bfloat16 with shifts, and 103 without.
_SHIFTED = 0.6
# What masks of parts that do not divide the inner dimension cost beside the arithmetic. What a sum
# of its own costs, in dispatches: it waits for the product, and what follows waits for it.
_MASKED, _MASKED_IN_UNITS, _SUM = 1.08, 1.5, 2

# Gradients of depthwise weights: workgroups that fill an H200, for which the sum of parts is not
# worth a kernel more (96 take 29 µs as they are and in two parts, 192 of them 17 and 25), and those
# to have in parts. Channels of a workgroup where those are neighbours in memory, and its tile, in
# positions of all of its channels: a part has several tiles.
_TAP_WORKGROUPS, _TAP_PARTS_WORKGROUPS, _MOST_TAP_PARTS = 92, 192, 16
_TAP_CHANNELS, _TAP_TILE, _TAP_TILES = 8, 3584, 3

# Attention: with more queries its tiles are used well. Workgroups to fill an H200 with, the keys
# that one of them takes at a time, and parts of a number of keys that a call decides. A workgroup
# with few queries waits for memory most of the time, so that many of them share a multiprocessor:
# 256 heads over 1024 keys of bf16 take 250 µs whole, 31 in two to sixteen parts.
_MOST_QUERIES = 4
_ATTENTION_WORKGROUPS = 4096
_KEYS_PART, _UNKNOWN_PARTS = 64, 16
_MOST_PARTS = 64  # one kernel joins all of a row


def row_parts(rows: int, length: int, target: Target, operations: int = 0) -> int:
    """Parts that rows, whose elements are neighbours, are reduced in: 1 where they fill a GPU.

    ``operations``: of an element, which make a row as long as several are that are only loaded.
    """
    machine = target.machine
    length += length * operations // _ROW_OPERATIONS
    if rows >= machine.scaled(_FEW_ROWS) or length < _LONG_ROW:
        return 1
    return min(max(1, machine.scaled(_ROW_WORKGROUPS) // rows), length // _ROW_PART)


def column_parts(columns: int, length: int, target: Target) -> int:
    """Parts that columns, which are neighbours, are reduced in: 1 where they fill a GPU."""
    wanted = target.machine.scaled(_THREADS) // columns
    if length < 4 * _COLUMN_PART or wanted < _FEWEST_COLUMN_PARTS:
        return 1
    return min(wanted, length // _COLUMN_PART)


def shifts_pay(flops: int, nbytes: int, dispatches: int, target: Target) -> bool:
    """Whether a product of bfloat16 in matrix units is faster with shifts, see `exponents`.

    Args:
        nbytes, dispatches: what it costs to have them in each call.
    """
    product_nbytes = flops / (_IN_UNITS.share * target.machine.flops_per_byte)
    return _SHIFTED * product_nbytes > nbytes + dispatches * target.machine.dispatch_nbytes


def product_workgroups(batch: int, rows: int, columns: int, *, in_units: bool = False) -> int:
    """Workgroups of a product's fastest tile. ``in_units``: whether matrix units compute it."""
    tile = (_IN_UNITS if in_units else _PRODUCTS).tile
    return batch * -(-rows // tile[0]) * -(-columns // tile[1])


def filling_workgroups(target: Target, *, in_units: bool = False) -> int:
    """Workgroups of a product's fastest tile that fill a GPU."""
    return target.machine.scaled((_IN_UNITS if in_units else _PRODUCTS).workgroups)


def inner_part_counts(
    rows: int, columns: int, inner: int, target: Target, *, in_units: bool = False
) -> range:
    """The numbers of parts that a product's inner dimension may be worth dividing into."""
    if min(rows, columns) < min(_PRODUCTS.tile):
        return range(1, 2)
    workgroups = product_workgroups(1, rows, columns, in_units=in_units)
    filling = -(-2 * filling_workgroups(target, in_units=in_units) // workgroups)
    return range(1, 1 + max(1, min(_MOST_INNER_PARTS, inner // INNER_PART, filling)))


def parts_nbytes(
    sizes: tuple[int, int, int, int],
    parts: int,
    workgroups: int,
    target: Target,
    *,
    joined: bool,
    masked: bool,
    in_units: bool = False,
) -> float:
    """The cost of a product whose inner dimension is computed in so many parts

    Workgroups take turns on multiprocessors: 144 on 132 take twice as long as 132. On an H100,
    768×768×1024 takes 57 µs as one product of 144 workgroups, which is 21 TFLOP/s; products of 400
    and more reach 38.

    Args:
        sizes: batch, rows, columns, inner of the product.
        workgroups: of all products that share its dispatch, each in one part.
        joined: whether the sum of the parts has a kernel to join.
        masked: whether the parts do not divide the inner dimension.
        in_units: whether matrix units compute it.
    """
    batch, rows, columns, inner = sizes
    how = _IN_UNITS if in_units else _PRODUCTS
    share = workgroups / product_workgroups(batch, rows, columns, in_units=in_units)
    flops = round(share * 2 * batch * rows * columns * (inner + how.start * parts))
    waves = workgroups * parts / target.machine.multiprocessors
    used = how.share * (_used_share_of_units(waves) if in_units else _used_share(waves))
    masks = (_MASKED_IN_UNITS if in_units else _MASKED) if masked else 1
    total = flops / (used * target.machine.flops_per_byte) * masks
    if parts > 1:
        total += 2 * parts * share * 4 * batch * rows * columns
        total += 0 if joined else _SUM * target.machine.dispatch_nbytes
    return total


def _used_share(waves: float) -> float:
    """The share of the peak rate of products at so many workgroups per multiprocessor."""
    return _turns_share(waves) if waves >= 1 else _SMALL_TILES * _turns_share(4 * waves)


def _used_share_of_units(waves: float) -> float:
    """`_used_share` in matrix units, in large tiles or in small ones, whichever is faster."""
    turns = waves / _UNITS_AT_ONCE
    return max(turns / math.ceil(turns), min(_SMALL_UNITS, _SMALL_UNITS_WAVES * waves))


def _turns_share(waves: float) -> float:
    if waves <= 1:
        return _ALONE * waves
    if waves < _SEVERAL_WAVES:
        return min(_SEVERAL, waves / math.ceil(waves))
    return _LARGE_TILES if waves >= _LARGE_WAVES else _SEVERAL


def tap_parts(channels: int, positions: int, neighbours: bool, target: Target) -> int:
    """Parts that the sums of a depthwise convolution's taps are computed in; 1 or less: whole.

    Args:
        channels: of the weight.
        positions: of all images, that each tap adds up for a channel.
        neighbours: whether channels are neighbours in memory, and workgroups have several.
    """
    together = min(_TAP_CHANNELS, channels) if neighbours else 1
    workgroups = max(1, -(-channels // max(1, together)))
    if workgroups >= target.machine.scaled(_TAP_WORKGROUPS):
        return 1
    wanted = -(-target.machine.scaled(_TAP_PARTS_WORKGROUPS) // workgroups)
    return min(wanted, positions * together // (_TAP_TILES * _TAP_TILE), _MOST_TAP_PARTS)


def waits_for_key_end(nbytes: int, target: Target) -> bool:
    """Whether attention over so many bytes of keys and values first asks where its mask ends.

    Its loads wait for the answer about a quarter of what a dispatch costs; a cache that is half
    full, say, saves half of the bytes.
    """
    return nbytes / 2 >= target.machine.dispatch_nbytes / 4


def attention_parts(heads: int, queries: int, keys: int | None, target: Target) -> int:
    """Parts of the keys that attention's queries, of all heads of the batch, are computed in.

    ``keys``: None where a call decides.
    """
    if queries > _MOST_QUERIES:
        return 1
    wanted = _UNKNOWN_PARTS if keys is None else -(-keys // _KEYS_PART)
    filling = -(-target.machine.scaled(_ATTENTION_WORKGROUPS) // max(1, heads))
    return min(wanted, filling, _MOST_PARTS)
