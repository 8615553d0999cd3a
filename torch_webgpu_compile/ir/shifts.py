"""Shifts of products of bfloat16, see `Contraction`: powers of two by which their factors fit f16.

A shift is an int32: twice the power, plus 1 where elements are too small even so. Kernels read that
in `templates/shifts.wgsl.jinja`.
"""

from __future__ import annotations

from .. import dtypes
from .factors import before_cast, is_in_memory
from .scalar import Masked, Scalar, apply, cast, const

# Of an f32: the place of its exponent, the bias of that, and the exponent of infinities and NaN.
_PLACE, _BIAS, _SPECIAL = 23, 127, 255
_LARGEST, _SMALLEST = 15, -14  # exponents of f16's normal numbers
_SMALLEST_SUBNORMAL = -17  # of a subnormal number with bfloat16's 8 bits
_FARTHEST = 126  # a shift whose power of two, and that of its opposite, is a normal number


def exponents(body: Scalar) -> tuple[Scalar, Scalar]:
    """The exponent of an f32, with its bias: of which to take the maximum, and the minimum.

    Infinities and NaN are no largest elements, and zeros no smallest ones. Subnormal numbers count
    as zeros.
    """
    bits = apply("bitcast", body, dtype=dtypes.int32)
    exponent = apply("bitwise_and", apply("shift_right", bits, _PLACE), _SPECIAL)
    is_special, is_zero = apply("eq", exponent, _SPECIAL), apply("eq", exponent, 0)
    return (
        apply("where", is_special, const(0, dtypes.int32), exponent),
        apply("where", is_zero, const(_SPECIAL, dtypes.int32), exponent),
    )


def shift_of(body: Scalar, largest: Scalar, smallest: Scalar, keeps_subnormal: bool) -> Scalar:
    """The shift of elements with these largest and smallest exponents.

    Args:
        body: an element, a cast of bfloat16.
        keeps_subnormal: whether f16's subnormal numbers are converted and multiplied as they are.
    """
    low, high = _SMALLEST, _LARGEST
    if not is_in_memory(before_cast(body)):  # not rounded to 8 bits, f16 may round it upwards
        high -= 1
    elif keeps_subnormal:
        low = _SMALLEST_SUBNORMAL
    power = apply("sub", const(_BIAS + high, dtypes.int32), largest)
    power = apply("minimum", power, _FARTHEST)
    is_missed = apply("lt", apply("add", smallest, power), _BIAS + low)
    return apply("add", apply("mul", power, 2), cast(is_missed, dtypes.int32))


def times_power(body: Scalar, shift: Scalar) -> Scalar:
    """An f32 times the power of two of a shift."""
    if isinstance(body, Masked):
        return Masked(body.condition, times_power(body.body, shift), body.other)
    exponent = apply("add", apply("shift_right", shift, 1), _BIAS)
    power = apply("bitcast", apply("shift_left", exponent, _PLACE), dtype=dtypes.float32)
    return apply("mul", body, power)
