"""Constants as WGSL literals."""

from __future__ import annotations

import math
import struct

from ...dtypes import DType, Kind, int64_in_words
from ...ir.scalar import Const, const

_WORD = (1 << 32) - 1


def zero_of(dtype: DType) -> str:
    """The literal 0 of a dtype's compute type."""
    return literal(const(0, dtype))


def one_of(dtype: DType) -> str:
    """The literal 1 of a dtype's compute type."""
    return literal(const(1, dtype))


def literal(node: Const) -> str:
    """A constant in WGSL.

    Infinities and NaN are not literals there: they come from private variables, as does -0.0.
    """
    value, dtype = node.value, node.dtype
    if dtype.kind is Kind.BOOL:
        return "true" if value else "false"
    if dtype.is_float:
        return _float_literal(float(value), dtype)
    if dtype is int64_in_words:
        return f"{dtype.compute}({int(value) & _WORD}u, {int(value) >> 32 & _WORD}u)"
    suffix = {"i32": "i", "u32": "u", "i64": "li"}[dtype.compute]
    if value == -(1 << 31) and suffix == "i":
        return "(-2147483647i - 1i)"
    if value == -(1 << 63):
        return "(-9223372036854775807li - 1li)"
    return f"({value}{suffix})" if value < 0 else f"{value}{suffix}"


def _float_literal(value: float, dtype: DType) -> str:
    if dtype.compute == "f64":
        return _signed(value, "lf") if math.isfinite(value) else f"f64({_not_finite(value)})"
    if value == 0 and math.copysign(1, value) < 0:  # Dawn's compiler makes 0.0 of the literal
        return "bitcast<f32>(tw_nzero_bits)"
    if math.isfinite(value) and abs(value) <= 3.4028235677973366e38:
        return _signed(struct.unpack("f", struct.pack("f", value))[0], "f")
    return _not_finite(value)


def _signed(value: float, suffix: str) -> str:
    return f"({value!r}{suffix})" if math.copysign(1, value) < 0 else f"{value!r}{suffix}"


def _not_finite(value: float) -> str:
    """NaN, or the infinity with the sign of ``value``, as f32."""
    if math.isnan(value):
        return "bitcast<f32>(tw_nan_bits)"
    return f"bitcast<f32>({'tw_inf_bits' if value > 0 else 'tw_ninf_bits'})"
