"""`Pair`: a complex tensor as two real ones, and what is done with pairs everywhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

COMPONENTS = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}
"""The dtype of the real and imaginary parts."""


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """A complex tensor.

    Attributes:
        re, im: its parts, of the same sizes and dtype.
        joined: the same numbers as one real tensor (…, 2), where there is one already.
    """

    re: Tensor
    im: Tensor
    joined: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Of the parts."""
        return self.re.dtype

    @property
    def shape(self) -> torch.Size:
        """The sizes of the complex tensor."""
        return self.re.shape

    def map(self, function: Callable[[Tensor], Tensor]) -> Pair:
        """A function of each part."""
        return Pair(function(self.re), function(self.im))

    def to(self, dtype: torch.dtype) -> Pair:
        """With parts of this dtype."""
        return self if dtype == self.dtype else self.map(lambda part: part.to(dtype))

    def __add__(self, other: Pair) -> Pair:
        return Pair(self.re + other.re, self.im + other.im)

    def __sub__(self, other: Pair) -> Pair:
        return Pair(self.re - other.re, self.im - other.im)

    def __mul__(self, other: Pair) -> Pair:
        """Without a special case for infinities, as ``c10::complex``."""
        return Pair(
            self.re * other.re - self.im * other.im, self.re * other.im + self.im * other.re
        )

    def __truediv__(self, other: Pair) -> Pair:
        """Smith's algorithm, as ``c10::complex``: no intermediate overflow."""
        a, b, c, d = self.re, self.im, other.re, other.im
        wide = c.abs() >= d.abs()
        large, small = torch.where(wide, c, d), torch.where(wide, d, c)
        ratio = torch.where(large == 0, 0.0, small / large)  # x/0 is x/|0| in each part
        divisor = torch.where(large == 0, large.abs(), large + small * ratio)
        re = torch.where(wide, a + b * ratio, a * ratio + b) / divisor
        im = torch.where(wide, b - a * ratio, b * ratio - a) / divisor
        return Pair(re, im)

    def __neg__(self) -> Pair:
        return Pair(-self.re, -self.im)

    def times_i(self) -> Pair:
        """``i · z``."""
        return Pair(-self.im, self.re)

    def over_i(self) -> Pair:
        """``z / i``."""
        return Pair(self.im, -self.re)

    def conj(self) -> Pair:
        """The complex conjugate."""
        return Pair(self.re, -self.im)

    def scaled(self, factor: Any) -> Pair:
        """Times a real number."""
        return Pair(self.re * factor, self.im * factor)

    def is_zero(self) -> Tensor:
        """Where both parts are 0, as a bool tensor."""
        return (self.re == 0) & (self.im == 0)


def choose(condition: Tensor, a: Pair, b: Pair) -> Pair:
    """``a`` where the condition holds, else ``b``."""
    return Pair(torch.where(condition, a.re, b.re), torch.where(condition, a.im, b.im))


def constant(value: complex, dtype: torch.dtype) -> Pair:
    """A number as a pair of 0-d tensors."""
    value = complex(value)
    return Pair(torch.full((), value.real, dtype=dtype), torch.full((), value.imag, dtype=dtype))


def as_pair(value: Any, dtype: torch.dtype) -> Pair:
    """A pair, a real tensor or a number as a pair with parts of this dtype."""
    if isinstance(value, Pair):
        return value.to(dtype)
    if isinstance(value, Tensor):
        re = value.to(dtype)
        return Pair(re, torch.zeros_like(re))
    if isinstance(value, complex):
        return constant(value, dtype)
    re = torch.full((), value, dtype=dtype)  # it may be symbolic
    return Pair(re, torch.zeros_like(re))


def join(pair: Pair) -> Tensor:
    """The numbers as a real tensor (…, 2), as they are in memory."""
    return torch.stack((pair.re, pair.im), -1) if pair.joined is None else pair.joined


def separate(joined: Tensor) -> Pair:
    """The numbers of a real tensor (…, 2)."""
    return Pair(joined.select(-1, 0), joined.select(-1, 1), joined)
