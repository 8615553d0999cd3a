"""`Step`s as scalars: functions of single numbers inside of kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..dtypes import DType
from ..ir.scalar import Scalar
from ..symbolic.sizes import Expr
from ..torch_ops.dtypes import dtype_of
from ..torch_ops.elementwise import Operand, Reference, Step
from .builder import Builder, ResultType
from .registry import LOWERINGS, NotLowered
from .value import Value


@dataclass
class _ScalarBuilder(Builder):
    """Lowers elementwise operators without nodes, each to the scalar that it computes."""

    def pointwise(
        self, body: Scalar, sizes: Sequence[Expr], *, name: str = "", strides: Any = None
    ) -> Value:
        """``body`` over ``sizes``; never a node."""
        return Value(body.dtype, tuple(sizes), self.finished(body))


def lowered_steps(
    builder: Builder,
    steps: Sequence[Step],
    sizes: tuple[Expr, ...],
    given: Callable[[Reference], Value],
    title: str,
) -> Callable[[Operand], Any]:
    """Lowers the steps of a function; the result gives the values of its arguments.

    Args:
        sizes: of the points where it is computed.
        given: the values of references other than to steps, of those sizes.
        title: what the function is, for errors.

    Raises NotLowered: a step has no lowering.
    """
    inner = _ScalarBuilder(builder.target, builder.reader, builder.buffers, origin=builder.origin)
    results: list[Value] = []

    def value(argument: Operand) -> Any:
        match argument:
            case Reference("step", number):
                return results[number]
            case Reference():
                return given(argument)
        return argument

    for step in steps:
        dtype = named_dtype(step.dtype, title)
        arguments = list(map(value, step.arguments))
        if step.converts:
            results.append(arguments[0].cast(dtype))
            continue
        lowering = LOWERINGS.get(step.overload)
        if lowering is None:
            raise NotLowered(f"{title} with {step.op}")
        inner.results = (ResultType(dtype, sizes),)
        results.append(lowering(inner, *arguments, **dict(step.keywords)))
    if inner.nodes:
        raise NotLowered(f"{title} that is more than arithmetic")
    return value


def named_dtype(name: str, title: str) -> DType:
    """The dtype of a name in torch.

    Raises NotLowered: no kernel has it.
    """
    found = dtype_of(getattr(torch, name))
    if found is None:
        raise NotLowered(f"{title} with {name}")
    return found
