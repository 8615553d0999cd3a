"""Complex tensors from numbers, from parts, and from other dtypes; and their parts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...torch_private import convert_element_type
from .pair import COMPONENTS, Pair, as_pair, constant, join, separate
from .registry import ComplexCall, overloads, rule

aten = torch.ops.aten


def _filled(call: ComplexCall, value: Any) -> Pair:
    """A number in every element of the result."""
    sizes, dtype = call.result.shape, COMPONENTS[call.result.dtype]
    if isinstance(value, (Pair, Tensor, complex)):
        pair = as_pair(value, dtype)
        return pair.map(lambda part: part.expand(sizes))
    return Pair(torch.full(sizes, value, dtype=dtype), torch.zeros(sizes, dtype=dtype))


def _of_number(value: Any) -> Any:
    def fill(call: ComplexCall, *_: Any, **__: Any) -> Any:
        return _filled(call, value) if call.result.is_complex() else _real_filled(call, value)

    return fill


def _real_filled(call: ComplexCall, value: Any) -> Tensor:
    """As ``_filled``, for a real tensor made like a complex one."""
    number = value.re if isinstance(value, Pair) else value
    if isinstance(number, Tensor):
        return number.to(call.result.dtype).expand(call.result.shape)
    return torch.full(call.result.shape, number, dtype=call.result.dtype)


_ZEROS = overloads(
    *(aten.zeros, aten.zeros_like, aten.new_zeros, aten.empty, aten.empty_like, aten.new_empty),
    *(aten.empty_strided, aten.new_empty_strided, aten.empty_permuted, aten._efficientzerotensor),
)
_ONES = overloads(aten.ones, aten.ones_like, aten.new_ones)

rule(*_ZEROS)(_of_number(0))
rule(*_ONES)(_of_number(1))


@rule(aten.full.default, aten.full_like.default, aten.new_full.default, aten.scalar_tensor.default)
def _full(call: ComplexCall, *arguments: Any, **_: Any) -> Any:
    return _of_number(arguments[-1])(call)


@rule(aten.fill.Scalar, aten.fill.Tensor)
def _fill(call: ComplexCall, self: Any, value: Any) -> Pair:
    return _filled(call, value)


rule(aten.zero.default)(lambda call, self: _filled(call, 0))


@rule(aten.eye.default, aten.eye.m)
def _eye(call: ComplexCall, *sizes: Any, **_: Any) -> Pair:
    re = torch.eye(*sizes, dtype=COMPONENTS[call.result.dtype])
    return Pair(re, torch.zeros_like(re))


@rule(aten.complex.default)
def _complex(call: ComplexCall, real: Tensor, imag: Tensor) -> Pair:
    if real.dtype != imag.dtype:  # PyTorch's meta function promotes, its kernels refuse
        raise RuntimeError(
            f"complex: real is {real.dtype} and imag is {imag.dtype}; convert one to the other's "
            "dtype"
        )
    sizes = call.result.shape
    return Pair(real.expand(sizes), imag.expand(sizes))


@rule(aten.polar.default)
def _polar(call: ComplexCall, abs: Tensor, angle: Tensor) -> Pair:
    return Pair(abs * torch.cos(angle), abs * torch.sin(angle))


rule(aten.view_as_real.default, aten.view_as_real_copy.default)(lambda call, self: join(self))
rule(aten.view_as_complex.default, aten.view_as_complex_copy.default)(
    lambda call, self: separate(self)
)
rule(aten.real.default)(lambda call, self: self.re if isinstance(self, Pair) else self)
rule(aten.imag.default)(lambda call, self: self.im)


@rule(aten._to_copy.default)
def _to_copy(call: ComplexCall, self: Any, **_: Any) -> Any:
    device = call.result.device
    if isinstance(self, Pair):
        return _converted(call, self.map(lambda part: part.to(device)))
    return _converted(call, self.to(device) if isinstance(self, Tensor) else self)


@rule(convert_element_type)
def _convert_element_type(call: ComplexCall, a: Any, dtype: torch.dtype) -> Any:
    return _converted(call, a)


def _converted(call: ComplexCall, value: Any) -> Any:
    wanted = call.result.dtype
    if wanted in COMPONENTS:
        return as_pair(value, COMPONENTS[wanted])
    if wanted is torch.bool:
        return (value.re != 0) | (value.im != 0)
    return value.re.to(wanted)


@rule(aten.copy.default)
def _copy(call: ComplexCall, self: Any, src: Any, non_blocking: bool = False) -> Any:
    sizes, device = call.result.shape, call.result.device
    if not call.result.is_complex():
        found: Tensor = _converted(call, src)
        return found.to(device).expand(sizes)
    pair = as_pair(src, COMPONENTS[call.result.dtype])
    return pair.map(lambda part: part.to(device).expand(sizes))


@rule(aten.view.dtype)
def _view_dtype(call: ComplexCall, self: Any, dtype: torch.dtype) -> Any:
    wanted = call.result.dtype
    if isinstance(self, Pair):
        if wanted in COMPONENTS:
            if COMPONENTS[wanted] == self.dtype:
                return self
            parts = aten.view.dtype(join(self), COMPONENTS[wanted])
            return separate(parts.reshape(*call.result.shape, 2))
        joined = join(self)
        if wanted == self.dtype:
            return joined.reshape(call.result.shape)
        return aten.view.dtype(joined.reshape(*joined.shape[:-2], -1), wanted)
    parts = aten.view.dtype(self, COMPONENTS[wanted])
    return separate(parts.reshape(*call.result.shape, 2))


@rule(aten.linspace.default, aten.logspace.default)
def _space(
    call: ComplexCall, start: Any, end: Any, steps: int, base: float = 10.0, **_: Any
) -> Pair:
    """Both halves are counted from their own end, as ATen does."""
    dtype = call.dtype
    first, last = constant(start, dtype), constant(end, dtype)
    k = torch.arange(steps, dtype=dtype)
    step = (last - first).scaled(1.0 / max(steps - 1, 1))
    up = Pair(first.re + step.re * k, first.im + step.im * k)
    left = steps - 1 - k
    down = Pair(last.re - step.re * left, last.im - step.im * left)
    half = k < steps // 2
    points = Pair(torch.where(half, up.re, down.re), torch.where(half, up.im, down.im))
    if call.op is aten.linspace.default:
        return points
    from .functions import exp

    return exp(points.scaled(torch.log(torch.full((), base, dtype=dtype))))
