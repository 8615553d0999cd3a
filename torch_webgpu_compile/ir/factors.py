"""What contractions multiply, before it is made the type of their sums, and who can do it."""

from __future__ import annotations

from collections.abc import Iterable

from .. import dtypes
from ..dtypes import DType
from ..target import MatrixConfig, Target
from .nodes import Contraction
from .scalar import Const, Masked, Op, Scalar

_FACTORS = {dtypes.float16: "f16", dtypes.float32: "f32"}


def factor_of(nodes: Iterable[Contraction]) -> str:
    """The WGSL type of what contractions multiply, of those with sums in f32; else "".

    It is f16 where all operands are float16 before they are cast to float32.
    """
    return type_of_factors(body for node in nodes for body in (node.lhs, node.rhs))


def type_of_factors(bodies: Iterable[Scalar]) -> str:
    """The same of operands by themselves, as attention has them."""
    bodies = list(bodies)
    if any(body.dtype is not dtypes.float32 for body in bodies):
        return ""
    sources = {_source(body) for body in bodies}
    return _FACTORS.get(sources.pop(), "f32") if len(sources) == 1 else "f32"


def units_config(nodes: Iterable[Contraction], target: Target) -> MatrixConfig | None:
    """The configuration of the target's matrix units that computes contractions; None: none does.

    They multiply what is f16, or f32, before it is made f32 for the sums: never less than that.
    """
    factor = factor_of(nodes)
    return target.matrix_config(factor, "f32") if factor else None


def _source(body: Scalar) -> DType:
    """The dtype of what a cast, or one that is 0 outside of a part, is of; else the body's own."""
    match body:
        case Op(name="cast"):
            return body.args[0].dtype
        case Masked(_, inside, Const(0)):
            return _source(inside)
        case _:
            return body.dtype
