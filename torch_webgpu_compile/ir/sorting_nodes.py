"""The nodes that sorting and selection are made of: a digit of 8 bits at a time.

Keys are words of 32 bits whose order as unsigned numbers is that of the elements, where ties keep
their order (`lowering.sort_keys`). A row of elements has ``length``; rows are over ``ranges``. Long
rows are cut into parts: all but the last have as many elements as each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from .. import dtypes
from ..symbolic.sizes import Expr, as_expr, ceildiv
from ..target import Target
from .buffers import Buffer
from .scalar import Scalar
from .spaces import Node, Rule, Space, shape_rule

DIGIT_BITS = 8
BINS = 1 << DIGIT_BITS
"""Digits of that many bits."""


def sums_nbytes(workgroup: int, groups: int) -> int:
    """Bytes of workgroup memory for sums over the invocations of each group of a workgroup."""
    return (2 * workgroup + groups) * 4


@dataclass(frozen=True, slots=True)
class SortTiling:
    """How a workgroup orders up to ``size`` elements.

    ``workgroup`` invocations keep them in registers, and pass them through ``words`` of workgroup
    memory, which counts of their digits need, too: all at once, or some after the others.
    """

    size: int
    workgroup: int
    words: int

    @property
    def share(self) -> int:
        """Elements of an invocation."""
        return self.size // self.workgroup

    @property
    def in_turns(self) -> bool:
        """Whether memory does not hold all elements at once."""
        return self.size > self.words

    @property
    def nbytes(self) -> int:
        """Bytes of workgroup memory, the sums over invocations included."""
        return self.words * 4 + sums_nbytes(self.workgroup, 1)

    def fits(self, target: Target) -> bool:
        """Whether a workgroup may be so large."""
        within = self.workgroup <= target.max_workgroup_invocations
        return within and self.nbytes + BINS * 4 <= target.max_workgroup_nbytes


TILES = {
    tile.size: tile
    for tile in (
        SortTiling(256, 256, 2048),
        SortTiling(1024, 256, 2048),
        SortTiling(3072, 256, 3072),
        SortTiling(4096, 512, 4096),
        SortTiling(12_288, 512, 6144),
    )
}
"""By size."""


def _elements(ranges: tuple[Expr, ...], length: Expr) -> Space:
    return (("i", ranges), ("j", (length,)))


def _counts_rule(buffer: Buffer, sizes: tuple[Expr, ...]) -> Iterator[Rule]:
    yield shape_rule(buffer, sizes)
    yield buffer.dtype is dtypes.int32, f"int32 {buffer.name}"


def _payload_rules(
    outputs: Sequence[str],
    payloads: Sequence[Scalar],
    sizes: tuple[Expr, ...],
    buffers: Mapping[str, Buffer],
) -> Iterator[Rule]:
    yield len(outputs) == len(payloads), "an output for each payload"
    for name, payload in zip(outputs, payloads, strict=True):
        yield shape_rule(buffers[name], sizes)
        yield payload.dtype is buffers[name].dtype, f"a payload of {buffers[name].dtype}"
        yield payload.dtype.packing == 1, "payloads of whole words"


@dataclass(frozen=True, slots=True)
class RowSort(Node):
    """The first ``count`` elements of each row in order:

        outputs[i…, k] = payload(i…, j) of the element j that is k-th

    for each of ``payloads``. ``words`` are those of its key, both over (i…, j0), the least
    significant one first, and ``bits`` how many of the bits of each may be other than 0. A row has
    at most ``tile`` elements, of which a workgroup sorts so many: see `TILES`.
    """

    OUTPUTS: ClassVar[tuple[str, ...]] = ("outputs",)
    TILED: ClassVar[bool] = True

    outputs: tuple[str, ...]
    ranges: tuple[Expr, ...]
    length: Expr
    count: Expr
    tile: int
    bits: tuple[int, ...]
    words: tuple[Scalar, ...]
    payloads: tuple[Scalar, ...]

    @property
    def spaces(self) -> dict[str, Space]:
        elements = _elements(self.ranges, self.length)
        return {"words": elements, "payloads": elements}

    def rules(self, buffers: Mapping[str, Buffer]) -> Iterator[Rule]:
        yield self.tile in TILES, "a tile"
        yield len(self.bits) == len(self.words), "a number of bits for each word"
        yield all(word.dtype is dtypes.uint32 for word in self.words), "uint32 words"
        sizes = (*self.ranges, self.count)
        yield from _payload_rules(self.outputs, self.payloads, sizes, buffers)


@dataclass(frozen=True, slots=True)
class DigitCounts(Node):
    """output[i…, p, d]: how many elements of part p have the digit d < ``bins``.

    ``digit`` is over (i…, j0); those that are no less than ``bins`` are not counted. A part has
    ``part`` elements.
    """

    TILED: ClassVar[bool] = True

    output: str
    ranges: tuple[Expr, ...]
    length: Expr
    part: Expr
    bins: int
    digit: Scalar

    @property
    def parts(self) -> Expr:
        """Parts of a row."""
        return ceildiv(self.length, self.part)

    @property
    def spaces(self) -> dict[str, Space]:
        return {"digit": _elements(self.ranges, self.length)}

    def rules(self, buffers: Mapping[str, Buffer]) -> Iterator[Rule]:
        sizes = (*self.ranges, self.parts, as_expr(self.bins))
        yield from _counts_rule(buffers[self.output], sizes)
        yield self.bins <= BINS, f"at most {BINS} bins"
        yield self.digit.dtype is dtypes.uint32, "a uint32 digit"


@dataclass(frozen=True, slots=True)
class PartSums(Node):
    """Sums of counts[i…, p, d]: before[i…, p, d] = Σ of parts before p, totals[i…, d] = Σ of all.

    ``lanes`` invocations scan the parts of a digit together.
    """

    OUTPUTS: ClassVar[tuple[str, ...]] = ("before", "totals")
    INPUTS: ClassVar[tuple[str, ...]] = ("counts",)

    before: str
    totals: str
    counts: str
    ranges: tuple[Expr, ...]
    parts: Expr
    lanes: int

    @property
    def extents(self) -> tuple[Expr, ...]:
        return (*self.ranges, self.parts, as_expr(BINS))

    def rules(self, buffers: Mapping[str, Buffer]) -> Iterator[Rule]:
        for name in (self.before, self.counts):
            yield from _counts_rule(buffers[name], self.extents)
        yield from _counts_rule(buffers[self.totals], (*self.ranges, as_expr(BINS)))


@dataclass(frozen=True, slots=True)
class DigitScatter(Node):
    """Every element moves to its place in the order of a digit, where ties keep their order:

        outputs[i…, Σ of totals[i…, < d] + before[i…, p, d] + rank] = payload(i…, j)

    for each of ``payloads``, over (i…, j0), where d is the element's digit, p its part, of ``tile``
    elements, and rank the number of elements with that digit before it in the part. ``totals`` and
    ``before`` are those of `PartSums`.
    """

    OUTPUTS: ClassVar[tuple[str, ...]] = ("outputs",)
    INPUTS: ClassVar[tuple[str, ...]] = ("before", "totals")
    TILED: ClassVar[bool] = True

    outputs: tuple[str, ...]
    before: str
    totals: str
    ranges: tuple[Expr, ...]
    length: Expr
    tile: int
    bits: int
    digit: Scalar
    payloads: tuple[Scalar, ...]

    @property
    def spaces(self) -> dict[str, Space]:
        elements = _elements(self.ranges, self.length)
        return {"digit": elements, "payloads": elements}

    def rules(self, buffers: Mapping[str, Buffer]) -> Iterator[Rule]:
        parts = ceildiv(self.length, self.tile)
        bins = as_expr(BINS)
        yield from _counts_rule(buffers[self.before], (*self.ranges, parts, bins))
        yield from _counts_rule(buffers[self.totals], (*self.ranges, bins))
        yield self.digit.dtype is dtypes.uint32, "a uint32 digit"
        sizes = (*self.ranges, self.length)
        yield from _payload_rules(self.outputs, self.payloads, sizes, buffers)


@dataclass(frozen=True, slots=True)
class PickDigit(Node):
    """The next digit of the element that is number ``wanted``(i…), from 1, of those counted.

    Of counts[i…, p, d], it is the d with Σ of counts < d less than ``wanted`` and Σ of counts ≤ d
    no less: prefix[i…] = above(i…) | d << shift(i…), a uint32, and rest[i…] is ``wanted`` less the
    former sum.
    """

    OUTPUTS: ClassVar[tuple[str, ...]] = ("prefix", "rest")
    INPUTS: ClassVar[tuple[str, ...]] = ("counts",)

    prefix: str
    rest: str
    counts: str
    ranges: tuple[Expr, ...]
    parts: Expr
    wanted: Scalar
    above: Scalar
    shift: Scalar

    @property
    def spaces(self) -> dict[str, Space]:
        rows: Space = (("i", self.ranges),)
        return {"wanted": rows, "above": rows, "shift": rows}

    @property
    def extents(self) -> tuple[Expr, ...]:
        return (*self.ranges, self.parts, as_expr(BINS))

    def rules(self, buffers: Mapping[str, Buffer]) -> Iterator[Rule]:
        yield from _counts_rule(buffers[self.counts], self.extents)
        yield from _counts_rule(buffers[self.rest], self.ranges)
        yield shape_rule(buffers[self.prefix], self.ranges)
        yield buffers[self.prefix].dtype is dtypes.uint32, "a uint32 prefix"
        unsigned = self.above.dtype is dtypes.uint32 and self.shift.dtype is dtypes.uint32
        yield unsigned, "a uint32 prefix and shift"
        yield self.wanted.dtype is dtypes.int32, "an int32 number"


@dataclass(frozen=True, slots=True)
class Compact(Node):
    """output[i…, < ``count``]: in order, the positions of elements of kind 0, all of which are
    taken, and of the first ones of kind 1, as many as there is room for.

    ``kind`` is over (i…, j0), and counts[i…, p, 0 and 1] how many of each kind are in a part, of
    ``part`` elements. There are at least ``count`` of both together.
    """

    INPUTS: ClassVar[tuple[str, ...]] = ("counts",)
    TILED: ClassVar[bool] = True

    output: str
    counts: str
    ranges: tuple[Expr, ...]
    length: Expr
    part: Expr
    count: Expr
    kind: Scalar

    @property
    def parts(self) -> Expr:
        """Parts of a row."""
        return ceildiv(self.length, self.part)

    @property
    def spaces(self) -> dict[str, Space]:
        return {"kind": _elements(self.ranges, self.length)}

    def rules(self, buffers: Mapping[str, Buffer]) -> Iterator[Rule]:
        yield from _counts_rule(buffers[self.output], (*self.ranges, self.count))
        yield from _counts_rule(buffers[self.counts], (*self.ranges, self.parts, as_expr(2)))
        yield self.kind.dtype is dtypes.uint32, "a uint32 kind"
