"""Classes of sizes: a kernel that a call may choose serves all sizes of one class.

Which class a size is of follows from the size alone. So what a call computes, and how fast, does
not depend on what the process has computed before. There are few, so that a loop over lengths
compiles few kernels: five by magnitude up to 3071, each of them twice, as multiples of a vector
have their own.
"""

from __future__ import annotations

from dataclasses import dataclass

_VECTOR = 4
"""Elements of one access: sizes that are multiples of it leave no rest."""

# Sizes of a class differ by a factor of less than four. They begin with three times a power of it,
# so that powers of two, as most sizes of models, are near their middle.
_FIRST, _RATIO_BITS = 3, 2

_HELD = 4096
"""Elements of a row that one workgroup holds in its memory or registers without loss: longer rows
are of another class. In the kernel for rows of up to 12,287 elements, 4096 × 4096 are sorted in
1,250 µs on an H200, in that for up to 4096 in 548."""


@dataclass(frozen=True, slots=True)
class SizeClass:
    """The sizes ``unit`` · n with ``lower`` ≤ n ≤ ``most``.

    ``most`` is None where magnitudes do not matter.
    """

    unit: int
    lower: int
    most: int | None

    def count(self, size: int) -> int | None:
        """The number n that a size of this class is given by; None for one of another class."""
        number, rest = divmod(size, self.unit)
        if rest or number < self.lower or (self.most is not None and number > self.most):
            return None
        return None if self.unit == 1 and size % _VECTOR == 0 else number


def size_class(size: int, by_magnitude: bool = True, least: int = 2) -> SizeClass | None:
    """The class of a size; None for the smallest, each of which is a case of its own.

    Args:
        by_magnitude: whether sizes of other magnitudes are in other classes.
        least: what is no such case, if they are not: 2, or 1 of numbers that are no sizes.
    """
    if size < (_FIRST if by_magnitude else least):
        return None
    unit = _VECTOR if size % _VECTOR == 0 else 1
    if not by_magnitude:
        return SizeClass(unit, 1 if unit > 1 else least, None)
    ratios = ((size // _FIRST).bit_length() - 1) // _RATIO_BITS
    first = _FIRST << ratios * _RATIO_BITS
    end = first << _RATIO_BITS
    if first <= _HELD < end:
        first, end = (first, _HELD + 1) if size <= _HELD else (_HELD + 1, end)
    return SizeClass(unit, -(-first // unit), (end - 1) // unit)
