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

from ...torch_private import OpOverload

aten = torch.ops.aten


def _where_symbol(op: OpOverload, formula: Callable[..., Any]) -> Callable[..., Any]:
    """The rule of an operator: a formula of its tensors and its number, where that is a symbol."""

    is_keyword = op._schema.arguments[-1].kwarg_only

    def rule(*arguments: Any, **number: Any) -> Any:
        if is_keyword and not number:
            return NotImplemented
        given = *arguments, *number.values()
        is_symbol = isinstance(given[-1], torch.SymFloat) and not given[-1].node.is_constant()
        return formula(*given) if is_symbol else NotImplemented

    return rule


add, sub, mul, div = aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor
_FORMULAS: dict[Any, Callable[..., Any]] = {
    add: lambda x, y, alpha: add(x, mul(y, alpha)),
    sub: lambda x, y, alpha: sub(x, mul(y, alpha)),
    aten.add.Scalar: add,
    aten.sub.Scalar: sub,
    aten.mul.Scalar: mul,
    aten.div.Scalar: div,
    aten.addcmul.default: lambda x, y, z, value: add(x, mul(mul(y, value), z)),
    aten.addcdiv.default: lambda x, y, z, value: add(x, div(mul(y, value), z)),
    aten.lerp.Scalar: lambda x, y, weight: add(x, mul(sub(y, x), weight)),
}
DECOMPOSITIONS = {op: _where_symbol(op, formula) for op, formula in _FORMULAS.items()}
