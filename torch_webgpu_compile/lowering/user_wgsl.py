"""Operators that users have written in WGSL: `FunctionCall`s of their functions, and their kernels.

There is one lowering for each such operator, made when it is defined (`wgsl_operators`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..dtypes import float32
from ..errors import UnsupportedOp
from ..ir.folding import fold
from ..ir.scalar import CALL_DTYPES, FunctionCall, Scalar, cast, const, index, is_host_float
from ..user_wgsl.modules import WgslFunction, WgslKernel
from .builder import Builder, operand
from .promotion import Operand
from .value import Value, has_no_elements

Lowering = Callable[..., tuple[Value | None, ...]]


def lower_function(function: WgslFunction, *, times_first: bool = False) -> Lowering:
    """The lowering of a function of scalars: a pointwise node for each of its results.

    Operands are converted to the types of its parameters, and results to the dtypes that the
    operator's results have.

    Args:
        times_first: whether the first operand is a float that all results are multiplied with.
    """
    dtypes = [CALL_DTYPES[type] for _, type in function.parameters]

    def lower(builder: Builder, *operands: Operand) -> tuple[Value | None, ...]:
        check_features(builder, function)
        sizes = builder.out.sizes
        given = operands[1:] if times_first else operands
        pairs = zip(given, dtypes, strict=True)
        args = tuple(operand(value, sizes, dtype) for value, dtype in pairs)
        made: list[Value | None] = []
        for number in range(len(function.results)):
            body: Scalar = FunctionCall(function, args, number)
            if times_first:
                body = operand(operands[0], sizes, body.dtype) * body
            is_used = builder.is_used(number)
            wanted = builder.result(number).dtype
            made.append(builder.pointwise(cast(body, wanted), sizes) if is_used else None)
        return tuple(made)

    return lower


_TYPES = {
    "shader-f16": ("f16", "write it in f32: float16 tensors are converted"),
    "shader-int64": ("i64 or u64", "write it in i32 or u32"),
    "shader-f64": ("f64", "write it in f32"),
}
"""The types that are there with a feature only, and what to do without."""


def check_features(builder: Builder, written: WgslFunction | WgslKernel) -> None:
    """Raises UnsupportedOp for types that WGSL has not on this GPU."""
    for feature in sorted(written.features - builder.target.features):
        types, step = _TYPES[feature]
        cause = f"its WGSL has values of {types}, and this GPU has no such type ({feature})"
        raise UnsupportedOp(written.name, cause, step, builder.origin.source)


Launch = Callable[..., tuple[tuple[Any, Any, Any], Sequence[Any]]]
"""Of an operator's arguments: the grid, and the kernel's numbers."""


def lower_kernel(kernel: WgslKernel, order: Sequence[int], launch: Launch) -> Lowering:
    """The lowering of a whole kernel: a `UserKernel`.

    Args:
        kernel: what is run.
        order: for each of its inputs, which of the operator's arguments it is.
        launch: given fake tensors and symbolic numbers.
    """

    def lower(builder: Builder, *values: Any) -> tuple[Value | None, ...]:
        check_features(builder, kernel)
        results = [builder.result(k) for k in range(len(kernel.outputs))]
        if all(has_no_elements(result.sizes) for result in results):
            return tuple(builder.zeros(k) for k in range(len(results)))
        arguments, named = builder.traced
        grid, given = launch(*arguments, **named)
        x, y, z = map(builder.reader.size, grid)
        pairs = zip(given, kernel.uniforms, strict=True)
        numbers = [_number(builder, kernel, value, *uniform) for value, uniform in pairs]
        return builder.user_kernel(kernel, [values[k] for k in order], numbers, (x, y, z))

    return lower


def _number(builder: Builder, kernel: WgslKernel, value: Any, name: str, type: str) -> Scalar:
    """A number of a kernel as a scalar that is known before a call.

    Raises:
        TypeError: it is no number of that type.
        UnsupportedOp: it depends on data.
    """
    if isinstance(value, (bool, int, torch.SymInt)):
        position = index(builder.reader.size(value))
        return cast(fold(position), float32) if type == "f32" else position
    if type != "f32" or not isinstance(value, (float, torch.SymFloat)):
        raise TypeError(f"{kernel.name}: {name} is {type}, got {value.__class__.__name__}")
    if isinstance(value, float):
        return const(value, float32)
    number = builder.finished(cast(builder.reader.symbolic_scalar(value), float32))
    if not is_host_float(number):
        cause = f"{name} is a number that is known only when it runs"
        raise UnsupportedOp(kernel.name, cause, "pass a tensor", builder.origin.source)
    return number
