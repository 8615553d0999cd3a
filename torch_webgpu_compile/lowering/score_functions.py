"""`ScoreFunction`s as scalars, which attention's kernels compute of each score."""

from __future__ import annotations

from collections.abc import Sequence

from .. import dtypes
from ..ir.scalar import Local, Scalar, cast
from ..symbolic.sizes import Expr
from ..torch_ops.elementwise import Reference
from ..torch_ops.score_functions import ScoreFunction
from .builder import Builder
from .elementwise import lowered_steps
from .value import IndexLike, Value, broadcast_index


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

    def given(reference: Reference) -> Value:
        if reference.source != "operand":
            return Value(dtypes.float32, sizes, Local(reference.source, dtypes.float32))
        operand, index = operands[reference.number], list[IndexLike](at)
        return Value(operand.dtype, sizes, operand.at(broadcast_index(operand, index)))

    value = lowered_steps(builder, function.steps, sizes, given, "a score_mod")
    result = value(Reference("step", len(function.steps) - 1))
    return cast(result.body, dtypes.float32)
