"""Floats of 8 bits: their values, and the nearest one to a float32 as PyTorch finds it.

Source: ``c10/util/Float8_e4m3fn.h`` and its neighbours. Kernels do the same by bits: see
``templates/math_float8.wgsl.jinja``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import dtypes
from ..dtypes import DType

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Format:
    """How eight bits are a number.

    Attributes:
        fraction: bits of the fraction.
        bias: of the exponent.
        finite_from: the codes from this on, without sign, are not finite numbers.
        too_large: the code of what is beyond the largest number, infinities included: infinity,
            the largest number (as PyTorch has it from 2.13 on; before, NaN), or NaN.
        unsigned_zero: whether there is no -0: its code is the only NaN (``fnuz``).
    """

    fraction: int
    bias: int
    finite_from: int
    too_large: int
    unsigned_zero: bool = False


FORMATS: dict[DType, Format] = {
    dtypes.float8_e4m3fn: Format(3, 7, 0x7F, 0x7E),
    dtypes.float8_e5m2: Format(2, 15, 0x7C, 0x7C),
    dtypes.float8_e4m3fnuz: Format(3, 8, 0x80, 0x80, unsigned_zero=True),
    dtypes.float8_e5m2fnuz: Format(2, 16, 0x80, 0x80, unsigned_zero=True),
}


@cache
def _values(dtype: DType) -> Array:
    """The float32 of each of the 256 codes."""
    kind = FORMATS[dtype]
    codes = np.arange(256)
    size = codes & 0x7F
    fraction = size & ((1 << kind.fraction) - 1)
    exponent = size >> kind.fraction
    implied = np.where(exponent > 0, 1 << kind.fraction, 0)
    steps = (fraction + implied).astype(np.float64)
    values = np.ldexp(steps, np.maximum(exponent, 1) - kind.bias - kind.fraction)
    values[size >= kind.finite_from] = np.nan
    if kind.too_large == kind.finite_from:
        values[size == kind.finite_from] = np.inf
    values = np.where(codes & 0x80, -values, values).astype(np.float32)
    if kind.unsigned_zero:
        values[0x80] = np.nan
    values.flags.writeable = False
    return np.asarray(values)


def decode(codes: Array, dtype: DType) -> Array:
    """The float32 values of codes (uint8)."""
    found: Array = _values(dtype)[codes]
    return found


def encode(array: Array, dtype: DType) -> Array:
    """The codes (uint8) nearest to floats, of ties the even one."""
    kind = FORMATS[dtype]
    with np.errstate(all="ignore"):
        single = np.asarray(array, np.float32)
    bits = single.view(np.uint32).astype(np.int64) if single.ndim else np.int64(single.view("u4"))
    size, sign = bits & 0x7FFFFFFF, bits >> 24 & 0x80
    dropped = 23 - kind.fraction
    half = (1 << dropped - 1) - 1
    normal = size - (127 - kind.bias << 23) + half + (size >> dropped & 1) >> dropped
    least = 128 - kind.bias << 23  # the bits of the smallest normal number
    small = np.asarray(np.minimum(size, least), np.uint32).view(np.float32)
    steps = np.rint(np.ldexp(small, kind.bias + kind.fraction - 1)).astype(np.int64)
    codes = np.where(size < least, steps, normal)
    codes = np.where(codes >= kind.finite_from, kind.too_large, codes)
    codes = np.where(size > 0x7F800000, 0x80 if kind.unsigned_zero else 0x7F, codes)
    if kind.unsigned_zero:
        sign = np.where(codes == 0, 0, sign)
    result: Array = (codes | sign).astype(np.uint8)
    return result


def rounded(array: Array, dtype: DType) -> Array:
    """Floats as float32 values that ``dtype`` has."""
    return decode(encode(array, dtype), dtype)
