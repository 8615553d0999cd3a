"""Reductions and scans of complex elements that the parts cannot do on their own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedOp
from .functions import absolute, exp, log
from .pair import Pair, as_pair
from .registry import ComplexCall, rule

aten = torch.ops.aten


@rule(
    *(aten.any.default, aten.any.dim, aten.any.dims),
    *(aten.all.default, aten.all.dim, aten.all.dims),
    aten.nonzero.default,
)
def _of_nonzero(call: ComplexCall, self: Any, *args: Any, **kwargs: Any) -> Any:
    return call.op(~self.is_zero() if isinstance(self, Pair) else self, *args, **kwargs)


@rule(aten.linalg_vector_norm.default)
def _vector_norm(call: ComplexCall, self: Pair, ord: Any = 2, *args: Any, **kwargs: Any) -> Tensor:
    # The dtype asked for may be complex: that of the elements whose norm is taken.
    named = {name: value for name, value in kwargs.items() if name != "dtype"}
    size = absolute(self.to(call.dtype))
    found: Tensor = aten.linalg_vector_norm.default(size, ord, *args[:2], **named)
    return found


@rule(aten.var.correction)
def _var(call: ComplexCall, self: Pair, *args: Any, **kwargs: Any) -> Tensor:
    z = self.to(call.dtype)
    re: Tensor = aten.var.correction(z.re, *args, **kwargs)
    im: Tensor = aten.var.correction(z.im, *args, **kwargs)
    return re + im


@rule(aten.std.correction)
def _std(call: ComplexCall, self: Pair, *args: Any, **kwargs: Any) -> Tensor:
    return torch.sqrt(_var(call, self, *args, **kwargs))


@rule(aten.var_mean.correction)
def _var_mean(call: ComplexCall, self: Pair, dim: Any = None, **kwargs: Any) -> tuple[Tensor, Pair]:
    z = self.to(call.dtype)
    keep = kwargs.get("keepdim", False)
    dims = list(range(z.re.dim())) if dim is None else dim
    means = z.map(lambda part: part.mean(dims, keepdim=keep))
    return _var(call, self, dim, **kwargs), means


@rule(aten.mean.default, aten.mean.dim)
def _mean(call: ComplexCall, self: Any, dim: Any = None, keepdim: bool = False, **_: Any) -> Pair:
    """The sum over the number of elements, as in ATen: a quotient of complex numbers."""
    z = as_pair(self, call.dtype)
    dims = dim or list(range(z.re.dim()))
    count = math.prod(z.shape[axis] for axis in dims)
    return z.map(lambda part: part.sum(dims, keepdim=keepdim)) / as_pair(count, call.dtype)


@rule(aten.prod.default, aten.prod.dim_int)
def _prod(
    call: ComplexCall, self: Any, dim: int | None = None, keepdim: bool = False, **_: Any
) -> Pair:
    z = as_pair(self, call.dtype)
    if dim is None:
        return _product(z.map(lambda part: part.reshape(-1)), 0)
    if z.re.dim() == 0:
        return z
    found = _product(z, dim % z.re.dim())
    return found.map(lambda part: part.unsqueeze(dim)) if keepdim else found


def _product(z: Pair, dim: int) -> Pair:
    """The product along a dimension: halves are multiplied with each other."""
    length = int(z.shape[dim])  # a constant: it decides how many steps there are
    if length == 0:
        ones = torch.ones_like(z.re.sum(dim))
        return Pair(ones, torch.zeros_like(ones))
    while length > 1:
        half = length // 2
        paired = _narrow(z, dim, 0, half) * _narrow(z, dim, half, half)
        z = _cat([paired, _narrow(z, dim, 2 * half, 1)], dim) if length % 2 else paired
        length = half + length % 2
    return z.map(lambda part: part.select(dim, 0))


@rule(aten.cumprod.default)
def _cumprod(call: ComplexCall, self: Any, dim: int, dtype: torch.dtype | None = None) -> Pair:
    """Hillis and Steele: a step multiplies every element with the one 2^k before it."""
    z = as_pair(self, call.dtype)
    if z.re.dim() == 0:
        return z
    dim %= z.re.dim()
    length, distance = int(z.shape[dim]), 1  # as above
    while distance < length:
        kept = length - distance
        later = _narrow(z, dim, distance, kept) * _narrow(z, dim, 0, kept)
        z = _cat([_narrow(z, dim, 0, distance), later], dim)
        distance *= 2
    return z


@rule(aten.logsumexp.default)
def _logsumexp(call: ComplexCall, self: Pair, dim: Any, keepdim: bool = False) -> Pair:
    """As ATen, less the greatest real part; an infinite one is not subtracted."""
    z = self.to(call.dtype)
    if not z.re.dim():
        z, dim, keepdim = z.map(lambda part: part.unsqueeze(0)), [0], False
    dims = dim if len(dim) else list(range(z.re.dim()))
    most = z.re.amax(dims, keepdim=True)
    most = torch.where(torch.isinf(most), 0.0, most)
    terms = exp(Pair(z.re - most, z.im))
    found = log(terms.map(lambda part: part.sum(dims, keepdim=keepdim)))
    return Pair(found.re + (most if keepdim else most.squeeze(dims)), found.im)


@rule(aten.scatter.reduce, aten.scatter.value_reduce)
def _scatter(
    call: ComplexCall, self: Any, dim: int, index: Tensor, src: Any, *, reduce: str
) -> Pair:
    if reduce != "add":
        raise UnsupportedOp(str(call.op), "complex products are not scattered", "use reduce='add'")
    a, b = as_pair(self, call.dtype), as_pair(src, call.dtype)
    terms = [part.expand(index.shape) if not part.dim() else part for part in (b.re, b.im)]
    return Pair(
        torch.scatter_add(a.re, dim, index, terms[0]), torch.scatter_add(a.im, dim, index, terms[1])
    )


def _narrow(z: Pair, dim: int, start: int, length: int) -> Pair:
    return z.map(lambda part: part.narrow(dim, start, length))


def _cat(pairs: Sequence[Pair], dim: int) -> Pair:
    return Pair(torch.cat([p.re for p in pairs], dim), torch.cat([p.im for p in pairs], dim))
