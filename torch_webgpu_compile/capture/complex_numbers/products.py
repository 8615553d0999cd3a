"""Products of complex matrices, convolutions and Fourier transforms, as real operators of pairs.

A complex row (k) in memory is a real row (2k) of pairs. With W (2k, 2n) made of the matrix as

    re  im
   -im  re

for each of its elements, the real product is the complex one, again as pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...torch_ops import fft as _fft  # noqa: F401  defines the operators
from .functions import elementwise
from .pair import Pair, as_pair, join, separate
from .registry import ComplexCall, rule

aten = torch.ops.aten


def _rows(z: Pair) -> Tensor:
    """(…, m, k) as real (…, m, 2k)."""
    return join(z).reshape(*z.shape[:-1], 2 * z.shape[-1])


def _columns(z: Pair) -> Tensor:
    """(…, k, n) as real (…, 2k, 2n): the matrix of the module's description."""
    k, n = z.shape[-2:]
    above, below = torch.stack((z.re, z.im), -1), torch.stack((-z.im, z.re), -1)
    return torch.stack((above, below), -3).reshape(*z.shape[:-2], 2 * k, 2 * n)


def _product(a: Pair, b: Pair) -> Pair:
    """The matrix product of (m, k) and (k, n), or of batches of both."""
    rows, columns = _rows(a), _columns(b)
    made = torch.mm(rows, columns) if rows.dim() == 2 else torch.bmm(rows, columns)
    return separate(made.reshape(*a.shape[:-1], b.shape[-1], 2))


def _unsqueezed(z: Pair, dim: int) -> Pair:
    return z.map(lambda part: part.unsqueeze(dim))


@rule(aten.mm.default, aten.bmm.default)
def _mm(call: ComplexCall, self: Any, mat2: Any) -> Pair:
    return _product(as_pair(self, call.dtype), as_pair(mat2, call.dtype))


@rule(aten.mv.default)
def _mv(call: ComplexCall, self: Any, vec: Any) -> Pair:
    vector = _unsqueezed(as_pair(vec, call.dtype), 1)
    return _product(as_pair(self, call.dtype), vector).map(lambda part: part.squeeze(1))


elementwise(aten.dot.default)(lambda a, b: (a * b).map(torch.sum))
elementwise(aten.vdot.default)(lambda a, b: (a.conj() * b).map(torch.sum))


def _outer(call: ComplexCall, self: Any, vec2: Any) -> Pair:
    a, b = as_pair(self, call.dtype), as_pair(vec2, call.dtype)
    return _unsqueezed(a, 1) * _unsqueezed(b, 0)


def _summed(call: ComplexCall, self: Any, mat2: Any) -> Pair:
    return _mm(call, self, mat2).map(lambda part: part.sum(0))


def _added(product: Callable[..., Pair]) -> Callable[..., Pair]:
    """The rule for beta · self + alpha · product; self is not read where beta is 0."""

    def apply(
        call: ComplexCall, self: Any, one: Any, other: Any, *, beta: Any = 1, alpha: Any = 1
    ) -> Pair:
        found = product(call, one, other)
        found = found if alpha == 1 else found * as_pair(alpha, call.dtype)
        if beta == 0:
            return found
        added = as_pair(self, call.dtype)
        return found + (added if beta == 1 else added * as_pair(beta, call.dtype))

    return apply


rule(aten.addmm.default, aten.baddbmm.default)(_added(_mm))
rule(aten.addbmm.default)(_added(_summed))
rule(aten.addmv.default)(_added(_mv))
rule(aten.addr.default)(_added(_outer))


@rule(aten._trilinear.default)
def _trilinear(
    call: ComplexCall,
    i1: Any,
    i2: Any,
    i3: Any,
    expand1: Any,
    expand2: Any,
    expand3: Any,
    sumdim: Any,
    unroll_dim: int = 1,
) -> Pair:
    factors = []
    for value, dims in ((i1, expand1), (i2, expand2), (i3, expand3)):
        factor = as_pair(value, call.dtype)
        for dim in dims:
            factor = _unsqueezed(factor, dim)
        factors.append(factor)
    product = factors[0] * factors[1] * factors[2]
    return product.map(lambda part: part.sum(sumdim)) if sumdim else product


def _channels(z: Pair) -> Tensor:
    """(n, c, …) as real (n, 2c, …)."""
    n, c, *rest = z.shape
    return torch.stack((z.re, z.im), 2).reshape(n, 2 * c, *rest)


@rule(aten.convolution.default)
def _convolution(
    call: ComplexCall,
    input: Any,
    weight: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Pair:
    """With twice the channels, real and imaginary next to each other, so that groups stay whole."""
    x, w = as_pair(input, call.dtype), as_pair(weight, call.dtype)
    first, second = torch.stack((w.re, -w.im), 2), torch.stack((w.im, w.re), 2)
    if transposed:  # (in, out, …)
        first, second = torch.stack((w.re, w.im), 2), torch.stack((-w.im, w.re), 2)
    a, b, *kernel = w.shape
    both = torch.stack((first, second), 1).reshape(2 * a, 2 * b, *kernel)
    added = None if bias is None else join(as_pair(bias, call.dtype)).reshape(-1)
    made = aten.convolution.default(
        *(_channels(x), both, added, stride, padding, dilation),
        *(transposed, output_padding, groups),
    )
    n, channels, *rest = made.shape
    pairs = made.reshape(n, channels // 2, 2, *rest)
    return Pair(pairs.select(2, 0), pairs.select(2, 1))


webgpu = torch.ops.webgpu

_NONE, _BY_ROOT, _BY_LENGTH = 0, 1, 2  # ATen: ``fft_norm_mode``


def _scale(normalization: int, lengths: Sequence[Any]) -> float:
    """The factor of a transform of these lengths, which are made constants."""
    numel = math.prod(int(length) for length in lengths)
    if normalization == _NONE or numel == 0:
        return 1.0
    return 1 / math.sqrt(numel) if normalization == _BY_ROOT else 1 / numel


@rule(aten._fft_c2c.default)
def _c2c(
    call: ComplexCall, self: Pair, dim: Sequence[int], normalization: int, forward: bool
) -> Pair:
    scale = _scale(normalization, [self.shape[d] for d in dim])
    return separate(webgpu.fft(join(self), dim, forward, scale))


@rule(aten._fft_r2c.default)
def _r2c(
    call: ComplexCall, self: Tensor, dim: Sequence[int], normalization: int, onesided: bool
) -> Pair:
    scale = _scale(normalization, [self.shape[d] for d in dim])
    if onesided:
        return separate(webgpu.rfft(self, dim, scale))
    return separate(webgpu.fft(join(as_pair(self, call.dtype)), dim, True, scale))


@rule(aten._fft_c2r.default)
def _c2r(
    call: ComplexCall, self: Pair, dim: Sequence[int], normalization: int, last_dim_size: Any
) -> Tensor:
    lengths = [*(self.shape[d] for d in dim[:-1]), last_dim_size]
    made: Tensor = webgpu.irfft(join(self), dim, last_dim_size, _scale(normalization, lengths))
    return made
