"""Decides choices between integers by their ranges, where all points choose alike.

A graph at known sizes (`at_sizes`) has them where the graph with symbols had to be right for all
sizes, as the first steps of a binary search in few elements. A driver would find most of them, too;
but Mesa 22.3 decides comparisons of widened integers wrongly.
"""

from __future__ import annotations

from ..dtypes import DType, Kind
from ..symbolic.sizes import upper_bound
from .folding import fold_logic, of_constants
from .scalar import Const, Index, Op, Scalar, const, rewrite

Range = tuple[int, int]
"""The least and the greatest value that an integer may have."""


class Decisions:
    """Simplifies scalars by ranges, which are computed once for all of them."""

    def __init__(self) -> None:
        self._known: dict[Scalar, Range | None] = {}

    def simplify(self, root: Scalar) -> Scalar:
        """The same value everywhere, without choices that ranges decide."""
        return rewrite(root, self._simpler)

    def _simpler(self, node: Scalar) -> Scalar | None:
        found = of_constants(node)
        if found is not None:
            return found
        match node:
            case Op("bitwise_and" | "bitwise_or" as name, (a, b), dtype) if dtype.kind is Kind.BOOL:
                return fold_logic(name, a, b)
            case Op(name, (a, b), dtype) if a.dtype.is_integer:
                return self._decided(name, a, b, dtype)
        return None

    def _decided(self, name: str, a: Scalar, b: Scalar, dtype: DType) -> Scalar | None:
        left, right = self.range_of(a), self.range_of(b)
        if left is None or right is None:
            return None
        if name in ("minimum", "maximum"):
            smaller = a if left[1] <= right[0] else b if right[1] <= left[0] else None
            if smaller is None or name == "minimum":
                return smaller
            return b if smaller is a else a
        found = _compared(name, left, right)
        return None if found is None else const(found, dtype)

    def range_of(self, node: Scalar) -> Range | None:
        """The range of an integer; None where nothing, or only its dtype's range, is known."""
        if node not in self._known:
            self._known[node] = self._range(node)
        return self._known[node]

    def _range(self, node: Scalar) -> Range | None:
        match node:
            case Const(int(value), dtype) if dtype.is_integer:
                return value, value
            case Index(expr):
                high, low = upper_bound(expr), upper_bound(-expr)
                return None if high is None or low is None else (-low, high)
            case Op(name, args, dtype) if dtype.is_integer:
                args = args[1:] if name == "where" else args
                ranges = [self.range_of(a) for a in args if a.dtype.is_integer]
                known = [found for found in ranges if found is not None]
                if len(known) < len(args):
                    return None
                return _within(_result(name, known), dtype)
        return None


def _compared(name: str, a: Range, b: Range) -> bool | None:
    """A comparison where it is the same for all values."""
    match name:
        case "lt":
            return True if a[1] < b[0] else False if a[0] >= b[1] else None
        case "le":
            return True if a[1] <= b[0] else False if a[0] > b[1] else None
        case "gt" | "ge":
            return _compared("lt" if name == "gt" else "le", b, a)
        case "eq" | "ne":
            if a[1] < b[0] or b[1] < a[0]:
                return name == "ne"
            return name == "eq" if a == b and a[0] == a[1] else None
    return None


def _result(name: str, given: list[Range]) -> Range | None:
    """The range of an operator's result, before it wraps."""
    lows, highs = [low for low, _ in given], [high for _, high in given]
    match name:
        case "add":
            return sum(lows), sum(highs)
        case "sub":
            return lows[0] - highs[1], highs[0] - lows[1]
        case "minimum":
            return min(lows), min(highs)
        case "maximum":
            return max(lows), max(highs)
        case "where":
            return min(lows), max(highs)
        case "cast":
            return given[0]
    return None


def _within(found: Range | None, dtype: DType) -> Range | None:
    """The range if no value in it wraps."""
    if found is None:
        return None
    signed = dtype.kind is Kind.SIGNED
    low = -(1 << (dtype.bits - 1)) if signed else 0
    high = (1 << (dtype.bits - signed)) - 1
    return found if low <= found[0] and found[1] <= high else None
