"""Numbers that are symbols in compiled graphs, as operations on tensors.

A learning rate that a scheduler changes is a symbol to Dynamo from its second value on. PyTorch
makes a tensor of it where a product, quotient, sum or difference of two tensors takes it (see
``torch.fx.passes._tensorify_python_scalars``), and a constant of the code where another operator
does, as those of optimizers: the graph is then compiled again for each value. These rules write
such operators in terms of the former.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

Number = float | torch.SymFloat


def _is_symbol(number: Any) -> bool:
    return isinstance(number, torch.SymFloat) and not number.node.is_constant()


def _with_number(op: Callable[..., Any]) -> Callable[..., Any]:
    """The overload of ``op`` that takes a number."""

    def rule(x: Tensor, number: Number) -> Any:
        return op(x, number) if _is_symbol(number) else NotImplemented

    return rule


def _with_factor(op: Callable[..., Any]) -> Callable[..., Any]:
    """``op``, with a factor of its second tensor."""

    def rule(x: Tensor, y: Tensor, *, alpha: Number = 1) -> Any:
        return op(x, aten.mul.Tensor(y, alpha)) if _is_symbol(alpha) else NotImplemented

    return rule


def _added(op: Callable[..., Any]) -> Callable[..., Any]:
    """``x + op(value · y, z)``"""

    def rule(x: Tensor, y: Tensor, z: Tensor, *, value: Number = 1) -> Any:
        if not _is_symbol(value):
            return NotImplemented
        return aten.add.Tensor(x, op(aten.mul.Tensor(y, value), z))

    return rule


def _lerp(x: Tensor, y: Tensor, weight: Number) -> Any:
    if not _is_symbol(weight):
        return NotImplemented
    return aten.add.Tensor(x, aten.mul.Tensor(aten.sub.Tensor(y, x), weight))


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    aten.add.Tensor: _with_factor(aten.add.Tensor),
    aten.sub.Tensor: _with_factor(aten.sub.Tensor),
    aten.add.Scalar: _with_number(aten.add.Tensor),
    aten.sub.Scalar: _with_number(aten.sub.Tensor),
    aten.mul.Scalar: _with_number(aten.mul.Tensor),
    aten.div.Scalar: _with_number(aten.div.Tensor),
    aten.addcmul.default: _added(aten.mul.Tensor),
    aten.addcdiv.default: _added(aten.div.Tensor),
    aten.lerp.Scalar: _lerp,
}
