"""Factors of contractions before they are cast to the type of their sums, and units for them."""

from __future__ import annotations

from collections.abc import Iterable

from .. import dtypes
from ..dtypes import DType
from ..target import MatrixConfig, Target
from .nodes import Contraction
from .scalar import Const, Load, Masked, Op, Scalar

BYTES = frozenset({"i8", "u8"})
"""Factors of which four are in a word."""

# What is multiplied before it is made the type of the sums, in which a product of two is exact:
# a smaller type, or one that has all of its values.
_FACTORS = {
    (dtypes.float16, dtypes.float32): "f16",
    (dtypes.bfloat16, dtypes.float32): "bf16",
    (dtypes.int8, dtypes.float32): "f16",
    (dtypes.uint8, dtypes.float32): "f16",
    (dtypes.int8, dtypes.int32): "i8",
    (dtypes.uint8, dtypes.int32): "u8",
}
# What matrix units multiply them as, and the type of their sums.
_UNITS = {
    "f16": ("f16", "f32"),
    "bf16": ("f16", "f32"),
    "f32": ("f32", "f32"),
    "i8": ("i8", "i32"),
    "u8": ("u8", "u32"),
}


def factor_of(nodes: Iterable[Contraction]) -> str:
    """The type of what contractions multiply, if it is smaller than that of their sums; else "".

    It is ``f16``, ``bf16``, ``i8`` or ``u8``, where all operands are casts of that.
    """
    return common_factor(body for node in nodes for body in (node.lhs, node.rhs))


def common_factor(bodies: Iterable[Scalar]) -> str:
    """`factor_of` operands by themselves, as attention has them."""
    found = set(map(_factor, bodies))
    return found.pop() if len(found) == 1 else ""


def units_config(nodes: Iterable[Contraction], target: Target) -> MatrixConfig | None:
    """The configuration of the target's matrix units that computes contractions; None: none does.

    They multiply what is f16, bfloat16 or f32 before it is made f32 for the sums: never less than
    that; and bytes, which are made int32.
    """
    nodes = list(nodes)
    (dtype,) = {node.lhs.dtype for node in nodes}
    return config_of(factor_of(nodes), dtype, target)


def config_of(factor: str, dtype: DType, target: Target) -> MatrixConfig | None:
    """The matrix configuration for a type that `factor_of` gives, and a type of sums."""
    factor = factor or ("f32" if dtype is dtypes.float32 else "")
    kernel = "bfloat16 product" if factor == "bf16" else "product"
    return target.matrix_config(*_UNITS[factor], kernel) if factor else None


def _factor(body: Scalar) -> str:
    match body:
        case Op("cast", (source,), dtype):
            return _FACTORS.get((source.dtype, dtype), "")
        case Masked(_, inside, other) if is_zero(other):
            found = _factor(inside)
            return "" if found in BYTES else found  # words have no elements that are left out
    return ""


def is_zero(value: Scalar) -> bool:
    """Whether a value is 0, which may be hidden from drivers."""
    match value:
        case Const(0) | Op("opaque", (Const(0),)):
            return True
    return False


def before_cast(body: Scalar) -> Scalar:
    """The operand of a cast, also of one that is 0 outside of a part."""
    if isinstance(body, Masked):
        inside = before_cast(body.body)
        return Masked(body.condition, inside, Const(0, inside.dtype))
    assert isinstance(body, Op)
    return body.args[0]


def is_in_memory(value: Scalar) -> bool:
    """Whether a value is an element of a buffer, or 0."""
    match value:
        case Load():
            return True
        case Const(number):
            return number == 0
        case Masked(_, inside, outside):
            return is_in_memory(inside) and is_in_memory(outside)
        case _:
            return False
