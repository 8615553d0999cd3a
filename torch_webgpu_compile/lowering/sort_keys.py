"""Keys of elements: unsigned words whose order is that in which PyTorch sorts.

NaN is the largest, whatever its sign and bits; -0.0 is 0.0; false comes before true.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .. import dtypes
from ..dtypes import DType, Kind
from ..ir.scalar import Scalar, apply, cast, const, where
from .promotion import compute_dtype

_WORD_BITS = 32
_SIGN = 1 << 31
_ONES = (1 << 32) - 1
_INFINITY_AND_SIGN_SHIFTED = 0xFF000000  # a float's bits without its sign, shifted to the top
# Last bits of a float32 that are 0 in every number of a narrower dtype.
_UNUSED = {
    dtypes.float16: 13,
    dtypes.bfloat16: 16,
    dtypes.float8_e4m3fn: 20,
    dtypes.float8_e4m3fnuz: 20,
    dtypes.float8_e5m2: 21,
    dtypes.float8_e5m2fnuz: 21,
}


@dataclass(frozen=True, slots=True)
class KeyWord:
    """A word of a key: a uint32 of which only the last ``bits`` may be other than 0."""

    body: Scalar
    bits: int


def key_words(scalar: Scalar, descending: bool, bits: int | None = None) -> tuple[KeyWord, ...]:
    """The words of an element's key, the least significant one first.

    ``bits``: of an integer that is never negative, how many it may have.
    """
    dtype = scalar.dtype
    words: tuple[KeyWord, ...]
    if dtype is dtypes.float64:
        words = _halves(_ordered_double(scalar))
    elif dtype.is_float:
        unused = _UNUSED.get(dtype, 0)
        word = _ordered_single(cast(scalar, compute_dtype(dtype)))
        words = (KeyWord(word >> unused if unused else word, _WORD_BITS - unused),)
    elif dtype.itemsize == 8:
        words = _halves(scalar, bits)
    else:
        words = (_ordered_integer(scalar, dtype, bits),)
    if not descending:
        return words
    return tuple(KeyWord(w.body ^ ((1 << w.bits) - 1), w.bits) for w in words)


def _ordered_single(value: Scalar) -> Scalar:
    """The key of a float32: negative ones with all bits reversed, others with the sign bit."""
    bits = apply("bitcast", value, dtype=dtypes.uint32)
    magnitude = bits << 1
    negative = bits >= _SIGN
    zero = apply("eq", magnitude, 0)  # by its bits: drivers take subnormal numbers for 0
    nan = magnitude > _INFINITY_AND_SIGN_SHIFTED
    key = where(negative, bits ^ _ONES, bits ^ _SIGN)
    numbers = where(zero, _word(_SIGN), key)
    return where(nan, _word(_ONES), numbers)


def extreme_key(value: Scalar, smallest: bool) -> Scalar:
    """A uint32 that is the larger, the larger (or ``smallest``) a float32 is; of NaN it is largest.

    It is not 0, and every number has its own: -0.0 is less than 0.0.
    """
    bits = apply("bitcast", value, dtype=dtypes.uint32)
    nan = bits << 1 > _INFINITY_AND_SIGN_SHIFTED
    key = where(bits >= _SIGN, bits ^ _ONES, bits ^ _SIGN)
    return where(nan, _word(_ONES), key ^ _ONES if smallest else key)


def of_extreme_key(word: Scalar, smallest: bool) -> Scalar:
    """The float32 of an `extreme_key`."""
    key = word ^ _ONES if smallest else word
    value = apply("bitcast", where(key >= _SIGN, key ^ _SIGN, key ^ _ONES), dtype=dtypes.float32)
    return where(apply("eq", word, _ONES), math.nan, value)


def _ordered_double(value: Scalar) -> Scalar:
    """The key of a float64: an int64 in the same order."""
    bits = apply("bitcast", value, dtype=dtypes.int64)
    magnitude = bits & dtypes.int64.highest
    nan = magnitude > (0x7FF << 52)
    key = where(bits < 0, bits ^ dtypes.int64.highest, bits)
    zero = apply("eq", magnitude, 0)
    numbers = where(zero, 0, key)
    return where(nan, const(dtypes.int64.highest, dtypes.int64), numbers)


def _halves(value: Scalar, bits: int | None = None) -> tuple[KeyWord, ...]:
    """The words of an int64."""
    low = cast(value, dtypes.uint32)
    if bits is not None and bits <= _WORD_BITS:
        return (KeyWord(low, max(bits, 1)),)
    high = cast(value >> _WORD_BITS, dtypes.uint32)
    return KeyWord(low, _WORD_BITS), KeyWord(high ^ _SIGN, _WORD_BITS)


def _ordered_integer(value: Scalar, dtype: DType, bits: int | None) -> KeyWord:
    word = cast(cast(value, compute_dtype(dtype)), dtypes.uint32)
    if dtype.kind is Kind.BOOL:
        return KeyWord(word, 1)
    if bits is not None:
        return KeyWord(word, max(min(bits, dtype.bits), 1))
    if dtype.kind is Kind.UNSIGNED:
        return KeyWord(word, dtype.bits)
    half = 1 << (dtype.bits - 1)
    if dtype.bits == _WORD_BITS:
        return KeyWord(word ^ half, dtype.bits)
    return KeyWord(word + half, dtype.bits)  # small negative numbers wrap


def _word(value: int) -> Scalar:
    return const(value, dtypes.uint32)
