"""`ScoreFunction`s as scalars: what attention's kernels compute of each score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import dtypes
from ..dtypes import DType
from ..ir.scalar import Local, Scalar, cast
from ..symbolic.sizes import Expr
from ..torch_ops.dtypes import dtype_of
from ..torch_ops.score_functions import Argument, Reference, ScoreFunction
from .builder import Builder, ResultType
from .registry import LOWERINGS, NotLowered
from .value import IndexLike, Value, broadcast_index


@dataclass
class _ScalarBuilder(Builder):
    """Lowers elementwise operators without nodes, each to the scalar that it computes."""

    def pointwise(
        self, body: Scalar, sizes: Sequence[Expr], *, name: str = "", strides: Any = None
    ) -> Value:
        """``body`` over ``sizes``; never a node."""
        return Value(body.dtype, tuple(sizes), self.finished(body))


def lowered_function(
    builder: Builder,
    function: ScoreFunction,
    operands: Sequence[Value],
    sizes: tuple[Expr, ...],
    at: tuple[Expr, ...],
) -> Scalar:
    """A function as a float32 scalar of the locals ``score`` and ``gradient``.

    Args:
        operands: broadcastable to ``sizes``.
        sizes, at: batch, heads, queries and keys, and the position in them.

    Raises NotLowered: a step has no lowering.
    """
    inner = _ScalarBuilder(builder.target, builder.reader, builder.buffers, origin=builder.origin)
    results: list[Value] = []

    def value(argument: Argument) -> Any:
        match argument:
            case Reference("step", number):
                return results[number]
            case Reference("operand", number):
                operand, index = operands[number], list[IndexLike](at)
                return Value(operand.dtype, sizes, operand.at(broadcast_index(operand, index)))
            case Reference(source, _):
                return Value(dtypes.float32, sizes, Local(source, dtypes.float32))
        return argument

    for step in function.steps:
        lowering = LOWERINGS.get(step.overload)
        if lowering is None:
            raise NotLowered(f"a score_mod with {step.op}")
        inner.results = (ResultType(_dtype(step.dtype), sizes),)
        results.append(lowering(inner, *map(value, step.arguments)))
    if inner.nodes:
        raise NotLowered("a score_mod that is more than arithmetic")
    return cast(results[-1].body, dtypes.float32)


def _dtype(name: str) -> DType:
    found = dtype_of(getattr(torch, name))
    if found is None:
        raise NotLowered(f"a score_mod with {name}")
    return found
