"""Elements whose bytes are taken for those of another dtype: ``view.dtype``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import dtypes
from ..dtypes import DType, Kind
from ..ir.scalar import Index, Scalar, apply, cast, where
from ..symbolic.sizes import ZERO, as_expr, floordiv, mod
from .builder import Builder
from .registry import lowers
from .value import Value, positions, zeros

aten = torch.ops.aten


@lowers(aten.view.dtype)
def lower_view_dtype(builder: Builder, self: Value, dtype: torch.dtype) -> Value:
    """The bytes of elements as another dtype: of the last dimension, several as one, or one as
    several, the lowest bytes first.
    """
    out, given = builder.out.dtype, self.dtype
    sizes = builder.out.sizes
    if self.is_empty:
        return zeros(sizes, out)
    if out.itemsize == given.itemsize and Kind.BOOL not in (out.kind, given.kind):
        return Value(out, self.sizes, apply("bitcast", self.body, dtype=out))
    *outer, last = positions(sizes) or (ZERO,)
    word_nbytes = min(4, max(out.itemsize, given.itemsize))
    if out.itemsize > given.itemsize:
        count = out.itemsize // given.itemsize
        parts = [_bits(self.at([*outer, last * count + k])) for k in range(count)]
        per_word = word_nbytes // given.itemsize
        words = [_joined(parts[k : k + per_word], given.bits) for k in range(0, count, per_word)]
    else:
        count = given.itemsize // out.itemsize
        index = [*outer, floordiv(last, as_expr(count))] if self.rank else []
        words = _words(self.at(index))
        part = mod(last, as_expr(count))
        per_word = word_nbytes // out.itemsize
        word = words[0]
        if len(words) > 1:
            second = apply("ge", Index(part), per_word)
            word = where(second, words[1], words[0])
        shift = cast(Index(mod(part, as_expr(per_word)) * out.bits), dtypes.uint32)
        words = [word >> shift] if per_word > 1 else [word]
    return Value(out, sizes, _of_words(words, out))


def _bits(x: Scalar) -> Scalar:
    """The bits of an element of up to 4 bytes as a uint32, 0 above them."""
    dtype = x.dtype
    if dtype.kind is Kind.BOOL or dtype is dtypes.uint8:
        return cast(x, dtypes.uint32)
    whole = {1: dtypes.uint8, 2: dtypes.int16, 4: dtypes.uint32}[dtype.itemsize]
    bits = cast(apply("bitcast", x, dtype=whole), dtypes.uint32)
    return bits & 0xFFFF if whole is dtypes.int16 else bits


def _words(x: Scalar) -> list[Scalar]:
    """The bits of an element as uint32, the lowest first."""
    if x.dtype.itemsize < 8:
        return [_bits(x)]
    whole = apply("bitcast", x, dtype=dtypes.int64)
    return [cast(part, dtypes.uint32) for part in (whole, whole >> 32)]


def _joined(parts: Sequence[Scalar], bits: int) -> Scalar:
    """uint32s of so many bits as one, the lowest first."""
    word = parts[0]
    for k, part in enumerate(parts[1:], 1):
        word = word | part << bits * k
    return word


def _of_words(words: Sequence[Scalar], dtype: DType) -> Scalar:
    """The element of a dtype whose lowest bits are those of uint32s."""
    if dtype.itemsize == 8:
        low, high = (cast(word, dtypes.int64) for word in words)
        return apply("bitcast", low | high << 32, dtype=dtype)
    (word,) = words
    if dtype.kind is Kind.BOOL:
        return cast(word & 0xFF, dtype)
    whole = {1: dtypes.uint8, 2: dtypes.int16, 4: dtypes.uint32}[dtype.itemsize]
    return apply("bitcast", cast(word, whole), dtype=dtype)
