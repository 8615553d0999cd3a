"""Arithmetic of complex elements, and comparisons. Real operands are promoted, as in ATen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverload

from .pair import Pair, as_pair, choose, constant
from .registry import Call, register, rule

aten = torch.ops.aten

_Function = TypeVar("_Function", bound=Callable[..., Any])


def elementwise(*ops: OpOverload) -> Callable[[_Function], _Function]:
    """Registers a function of pairs: every positional argument is made one."""

    def add(function: _Function) -> _Function:
        def apply(call: Call, *args: Any, **_: Any) -> Any:
            return function(*(as_pair(value, call.dtype) for value in args))

        for op in ops:
            register(op, apply)
        return function

    return add


def _times(value: Any, factor: Any, dtype: torch.dtype) -> Pair:
    pair = as_pair(value, dtype)
    return pair if factor == 1 else pair * as_pair(factor, dtype)


@rule(aten.add.Tensor, aten.add.Scalar)
def _add(call: Call, self: Any, other: Any, alpha: Any = 1) -> Pair:
    return as_pair(self, call.dtype) + _times(other, alpha, call.dtype)


@rule(aten.sub.Tensor, aten.sub.Scalar)
def _sub(call: Call, self: Any, other: Any, alpha: Any = 1) -> Pair:
    return as_pair(self, call.dtype) - _times(other, alpha, call.dtype)


@rule(aten.rsub.Tensor, aten.rsub.Scalar)
def _rsub(call: Call, self: Any, other: Any, alpha: Any = 1) -> Pair:
    return as_pair(other, call.dtype) - _times(self, alpha, call.dtype)


@elementwise(aten.mul.Tensor, aten.mul.Scalar)
def _mul(a: Pair, b: Pair) -> Pair:
    return a * b


@elementwise(aten.div.Tensor, aten.div.Scalar, aten.true_divide.Tensor, aten.true_divide.Scalar)
def _div(a: Pair, b: Pair) -> Pair:
    return a / b


@elementwise(aten.reciprocal.default)
def reciprocal(z: Pair) -> Pair:
    """``1 / z``."""
    return constant(1, z.dtype) / z


@elementwise(aten.square.default)
def _square(z: Pair) -> Pair:
    return z * z


@elementwise(aten._conj.default, aten._conj_physical.default, aten.conj_physical.default)
def _conj(z: Pair) -> Pair:
    return z.conj()


@rule(aten._conj_copy.default)
def _conj_copy(call: Call, self: Pair) -> Pair:
    return self.conj()


@rule(aten._neg_view.default, aten._neg_view_copy.default)
def _neg_view(call: Call, self: Pair) -> Pair:
    return -self


@rule(aten.addcmul.default)
def _addcmul(call: Call, self: Any, tensor1: Any, tensor2: Any, value: Any = 1) -> Pair:
    a, b = as_pair(tensor1, call.dtype), as_pair(tensor2, call.dtype)
    return as_pair(self, call.dtype) + _times(a, value, call.dtype) * b


@rule(aten.addcdiv.default)
def _addcdiv(call: Call, self: Any, tensor1: Any, tensor2: Any, value: Any = 1) -> Pair:
    a, b = as_pair(tensor1, call.dtype), as_pair(tensor2, call.dtype)
    return as_pair(self, call.dtype) + _times(a, value, call.dtype) / b


@rule(aten.lerp.Tensor, aten.lerp.Scalar)
def _lerp(call: Call, self: Any, end: Any, weight: Any) -> Pair:
    """From the nearer end, as ATen: by the absolute value of the weight."""
    start, stop, w = (as_pair(value, call.dtype) for value in (self, end, weight))
    step = stop - start
    near = start + w * step
    far = stop - step * (constant(1, call.dtype) - w)
    return choose(w.re * w.re + w.im * w.im < 0.25, near, far)


@elementwise(aten.eq.Tensor, aten.eq.Scalar)
def _eq(a: Pair, b: Pair) -> Tensor:
    return (a.re == b.re) & (a.im == b.im)


@elementwise(aten.ne.Tensor, aten.ne.Scalar)
def _ne(a: Pair, b: Pair) -> Tensor:
    return (a.re != b.re) | (a.im != b.im)


@elementwise(aten.isnan.default)
def _isnan(z: Pair) -> Tensor:
    return torch.isnan(z.re) | torch.isnan(z.im)


@elementwise(aten.isinf.default)
def _isinf(z: Pair) -> Tensor:
    return torch.isinf(z.re) | torch.isinf(z.im)


@elementwise(aten.isfinite.default)
def _isfinite(z: Pair) -> Tensor:
    return torch.isfinite(z.re) & torch.isfinite(z.im)


@elementwise(aten.logical_not.default)
def _logical_not(z: Pair) -> Tensor:
    return z.is_zero()


@elementwise(aten.logical_and.default)
def _logical_and(a: Pair, b: Pair) -> Tensor:
    return ~a.is_zero() & ~b.is_zero()


@elementwise(aten.logical_or.default)
def _logical_or(a: Pair, b: Pair) -> Tensor:
    return ~a.is_zero() | ~b.is_zero()


@elementwise(aten.logical_xor.default)
def _logical_xor(a: Pair, b: Pair) -> Tensor:
    return a.is_zero() ^ b.is_zero()


@rule(aten.nan_to_num.default)
def _nan_to_num(call: Call, self: Pair, *limits: Any, **named: Any) -> Pair:
    return Pair(
        torch.nan_to_num(self.re, *limits, **named), torch.nan_to_num(self.im, *limits, **named)
    )
