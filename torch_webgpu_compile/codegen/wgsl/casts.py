"""Conversions between dtypes as WGSL, one or four lanes wide."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ... import dtypes
from ...dtypes import DType, Kind, int64_in_words
from ..hardening.spelling import int64_of, known_number, suffix
from ..values import Text, in_lanes, vector_type
from .buffer_access import bits_of, value_of
from .literals import one_of, zero_of

Let = Callable[[str, int, DType], Text]
"""Names the code of a value with so many lanes of a dtype."""


def wrap(value: Text, let: Let) -> Text:
    """A narrow integer wrapped to its dtype, after arithmetic in a 32-bit register."""
    dtype = value.dtype
    if dtype.kind is Kind.UNSIGNED:
        mask = f"({(1 << dtype.bits) - 1}u)"
        code = f"({value.code} & {'vec4<u32>' if value.lanes > 1 else ''}{mask})"
    else:
        code = f"extractBits({value.code}, 0u, {dtype.bits}u)"
    return let(code, value.lanes, dtype)


def fitted(value: Text, let: Let) -> Text:
    """The result of 32-bit arithmetic in its dtype: wrapped if that is a narrower integer."""
    return wrap(value, let) if value.dtype.is_integer and value.dtype.bits < 32 else value


def converted(code: str, source: DType, dtype: DType, lanes: int = 1) -> str:
    """WGSL's own conversion of so many values, or that of integers in words."""
    if dtype is int64_in_words:
        return f"tw_words_of_{source.compute}{suffix(dtype, lanes)}({code})"
    if source is int64_in_words:
        return f"tw_words_to_{dtype.compute}{suffix(source, lanes)}({code})"
    return f"{vector_type(dtype, lanes)}({code})"


def cast(value: Text, dtype: DType, let: Let) -> Text:
    """A value converted to ``dtype`` as PyTorch converts; float to integer truncates and wraps."""
    source = value.dtype
    lanes = value.lanes
    if dtype.is_float8 and source is not dtype:
        return rounded(replace(cast(value, dtypes.float32, let), dtype=dtype), let)
    narrows = dtype.is_integer and dtype.bits < source.bits
    if source.compute == dtype.compute and not narrows:
        return Text(value.code, lanes, dtype)
    if dtype is int64_in_words or source is int64_in_words:
        made = let(converted(value.code, source, dtype, lanes), lanes, dtype)
        return replace(made, narrow=value.code) if source.compute == "i32" else fitted(made, let)
    if dtype.kind is Kind.BOOL:
        zero = f"{vector_type(source, lanes)}({zero_of(source)})"
        test = f"tw_ne{suffix(source, lanes)}" if source.is_float else None
        code = f"{test}({value.code}, {zero})" if test else f"({value.code} != {zero})"
        return let(code, lanes, dtype)
    if source.kind is Kind.BOOL:
        one, zero = (
            known_number(Text(number(dtype), 1, dtype)).widen(lanes) for number in (one_of, zero_of)
        )
        return let(f"select({zero}, {one}, {value.code})", lanes, dtype)
    code = value.code
    if dtype.kind is Kind.UNSIGNED and source.is_float:
        # PyTorch converts through a signed integer, so that -1.0 wraps to 255.
        code = converted(code, source, dtypes.int32, lanes)
    if dtype is dtypes.int64 and source.is_integer:
        wide = int64_of(code, dtype, lanes)
        if source is dtypes.uint32:  # naga 29 writes OpSConvert, which takes bit 31 for a sign
            mask = "4294967295li"
            wide = f"({wide} & {mask if lanes == 1 else f'vec4<i64>({mask})'})"
        made = let(wide, lanes, dtype)
        return replace(made, narrow=value.code) if source.compute == "i32" else made
    return fitted(let(converted(code, source, dtype, lanes), lanes, dtype), let)


def rounded(value: Text, let: Let) -> Text:
    """A float of 8 or 16 bits, computed in 32, rounded to what a buffer of its dtype holds."""
    if value.dtype.name == dtypes.float16.name:
        return _by_lane(value, "tw_f16_rounded({})".format, value.dtype, let)
    return _by_lane(
        value, lambda v: value_of(value.dtype, bits_of(value.dtype, v)), value.dtype, let
    )


def bitcast(value: Text, dtype: DType, let: Let) -> Text:
    """The bits of a value as another dtype of the same size."""
    source = value.dtype
    if source.bits >= 32:
        target = vector_type(dtype, value.lanes)
        return let(f"bitcast<{target}>({value.code})", value.lanes, dtype)
    return _by_lane(value, lambda v: value_of(dtype, bits_of(source, v)), dtype, let)


def _by_lane(value: Text, change: Callable[[str], str], dtype: DType, let: Let) -> Text:
    parts = [change(value.lane(k)) for k in range(value.lanes)]
    return let(in_lanes(dtype, parts) if value.lanes > 1 else parts[0], value.lanes, dtype)
