"""Complex tensors from numbers, from parts, and from other dtypes; and their parts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...torch_private import convert_element_type
from .pair import COMPONENTS, Pair, as_pair, join, separate
from .registry import ComplexCall, overloads, rule

aten = torch.ops.aten


def _filled(call: ComplexCall, value: Any) -> Any:
    """A number for every element of the result, which may be a real tensor like a complex one."""
    dtype = call.result.dtype
    pair = as_pair(value, COMPONENTS.get(dtype, dtype))
    return pair if dtype in COMPONENTS else pair.re


_ZEROS = overloads(
    *(aten.zeros, aten.zeros_like, aten.new_zeros, aten.empty, aten.empty_like, aten.new_empty),
    *(aten.empty_strided, aten.new_empty_strided, aten.empty_permuted, aten._efficientzerotensor),
)
_ONES = overloads(aten.ones, aten.ones_like, aten.new_ones)

rule(*_ZEROS)(lambda call, *_, **__: _filled(call, 0))
rule(*_ONES)(lambda call, *_, **__: _filled(call, 1))
rule(
    *(aten.full.default, aten.full_like.default, aten.new_full.default, aten.scalar_tensor.default),
    *(aten.fill.Scalar, aten.fill.Tensor),
)(lambda call, *arguments, **_: _filled(call, arguments[-1]))


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


@rule(aten._to_copy.default, convert_element_type)
def _converted(call: ComplexCall, self: Any, *_: Any, **__: Any) -> Any:
    wanted, device = call.result.dtype, call.result.device
    if wanted in COMPONENTS:
        return as_pair(self, COMPONENTS[wanted]).map(lambda part: part.to(device))
    if wanted is torch.bool:
        return ~self.is_zero().to(device)
    return self.re.to(device, wanted)


@rule(aten.copy.default)
def _copy(call: ComplexCall, self: Any, src: Any, non_blocking: bool = False) -> Any:
    found = _converted(call, src)
    return found if isinstance(found, Pair) else found.expand(call.result.shape)


@rule(aten.view.dtype)
def _view_dtype(call: ComplexCall, self: Any, dtype: torch.dtype) -> Any:
    wanted, sizes = call.result.dtype, call.result.shape
    dtype = COMPONENTS.get(wanted, wanted)
    if isinstance(self, Pair):
        joined = join(self)
        self = joined.reshape(*joined.shape[:-2], -1)
    viewed = self if self.dtype == dtype else aten.view.dtype(self, dtype)
    return separate(viewed.reshape(*sizes, 2)) if wanted in COMPONENTS else viewed.reshape(sizes)
