"""The scalar ops on NumPy arrays, with PyTorch's rules. Used to interpret and to fold constants.

What NumPy does not have, `lowering.special` defines by PyTorch's own functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import dtypes
from ..dtypes import DType, Kind
from . import float8

Array = npt.NDArray[Any]


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """How the interpreter represents a dtype; what NumPy does not have as (rounded) float32."""
    absent = dtype is dtypes.bfloat16 or dtype.is_float8
    return np.dtype("float32" if absent else dtype.name)


def round_to(array: Array, dtype: DType) -> Array:
    """``array`` in the representation of ``dtype``."""
    if dtype is dtypes.bfloat16:
        return round_bfloat16(array.astype(np.float32))
    if dtype.is_float8:
        return float8.rounded(array, dtype)
    if dtype.is_integer and array.dtype.kind in "iu":
        return array.astype(numpy_dtype(dtype))
    return array.astype(numpy_dtype(dtype), copy=False)


def round_bfloat16(array: Array) -> Array:
    """float32 rounded to the nearest bfloat16, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(array).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    floats = rounded.view(np.float32).reshape(np.shape(array))
    return np.where(np.isnan(array), np.float32(np.nan), floats)


def convert(name: str, array: Array, source: DType, dtype: DType) -> Array:
    """``cast`` or ``bitcast`` of an array."""
    if name == "bitcast":
        return _bitcast(array, source, dtype)
    if dtype.kind is Kind.BOOL:
        return np.not_equal(array, 0)
    if dtype.is_integer and source.is_float:
        # Through int64, as C++ compilers and c10::convert do for narrow types.
        return np.trunc(array).astype(np.int64).astype(numpy_dtype(dtype))
    return round_to(array, dtype)


def from_bits(array: Array, dtype: DType) -> Array:
    """An array of the bits of a dtype that NumPy does not have as the interpreter has it."""
    if dtype.is_float8 and array.dtype == np.uint8:
        return float8.decode(array, dtype)
    if dtype is dtypes.bfloat16 and array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array


def _bitcast(array: Array, source: DType, dtype: DType) -> Array:
    if source.is_float8:
        array = float8.encode(array, source)
    elif source is dtypes.bfloat16:
        array = (np.ascontiguousarray(array).view(np.uint32) >> 16).astype(np.uint16)
    stored = np.uint8 if dtype.is_float8 else np.uint16 if dtype is dtypes.bfloat16 else None
    bits = np.ascontiguousarray(array).view(stored or numpy_dtype(dtype))
    return from_bits(bits.reshape(np.shape(array)), dtype)


def scalar_op(name: str, operands: Sequence[Array], dtype: DType) -> Array:
    """A row of `scalar.OPS` other than the conversions."""
    result = _OPS[name](*operands)
    return round_to(np.asarray(result), dtype)


def define(name: str, function: Callable[..., Array]) -> None:
    """Says what an op computes that has no row here."""
    _OPS[name] = function


def _trunc_divide(a: Array, b: Array) -> Array:
    if a.dtype.kind == "f":
        return np.trunc(a / b)
    quotient: Array = np.floor_divide(a - np.fmod(a, b), b)
    return quotient


def _floor_divide(a: Array, b: Array) -> Array:
    if a.dtype.kind != "f":
        return np.floor_divide(a, b)
    # c10::div_floor_floating: exact where a/b rounds to an integer from below; a/0 is ±inf or NaN.
    remainder = np.fmod(a, b)
    quotient = (a - remainder) / b
    quotient = np.where((remainder != 0) & ((b < 0) != (remainder < 0)), quotient - 1, quotient)
    floor = np.floor(quotient)
    floor = np.where(quotient - floor > 0.5, floor + 1, floor)
    floor = np.where(quotient == 0, np.copysign(0, a / b), floor)
    return np.where(b == 0, a / b, floor).astype(a.dtype)


def _sign(x: Array) -> Array:
    return (x > 0).astype(x.dtype) - (x < 0).astype(x.dtype) if x.dtype.kind != "u" else np.sign(x)


def _pow(a: Array, b: Array) -> Array:
    if a.dtype.kind == "f":
        return np.power(a, b)
    # Exponents below zero give 0, except for bases 1 and -1 (c10's powi).
    positive = np.power(a, np.where(b < 0, 0, b))
    odd = np.where(b % 2 == 0, 1, -1).astype(a.dtype) if a.dtype.kind == "i" else positive
    negative = np.where(a == 1, 1, np.where(a == -1, odd, 0)) if a.dtype.kind == "i" else positive
    return np.where(b < 0, negative, positive)


_SAME_NAME = (
    "bitwise_and bitwise_or bitwise_xor "
    "add remainder fmod minimum maximum copysign nextafter abs square sqrt exp exp2 expm1 log "
    "log2 log10 log1p sin cos tan sinh cosh tanh floor ceil trunc isnan isinf where gcd"
)
_OPS: dict[str, Callable[..., Any]] = {
    **{name: getattr(np, name) for name in _SAME_NAME.split()},
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.true_divide,
    "floor_divide": _floor_divide,
    "trunc_divide": _trunc_divide,
    "pow": _pow,
    "atan2": np.arctan2,
    "shift_left": np.left_shift,
    "shift_right": np.right_shift,
    "neg": np.negative,
    "sign": _sign,
    "reciprocal": lambda x: 1 / x,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "fast_exp": np.exp,
    "asin": np.arcsin,
    "acos": np.arccos,
    "atan": np.arctan,
    "asinh": np.arcsinh,
    "acosh": np.arccosh,
    "atanh": np.arctanh,
    "erf": np.vectorize(math.erf, [np.float64]),
    "erfc": np.vectorize(math.erfc, [np.float64]),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x.astype(np.float64))),
    "round": np.rint,
    "bitwise_not": np.invert,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "opaque": np.positive,
    "exact_div": np.true_divide,
    "wide_div": np.true_divide,
}
