"""Loops whose steps are elementwise: a `Scan`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import dtypes
from ..dtypes import DType
from ..ir.nodes import Scan, carry_name
from ..ir.scalar import Local, Scalar, cast, loads_of
from ..symbolic.sizes import Expr, as_expr, contiguous_strides
from ..torch_ops.elementwise import Operand, Reference
from ..torch_ops.scans import ScanFunction, parsed
from .builder import Builder, operand
from .elementwise import lowered_steps
from .joining import in_one_buffer
from .promotion import word_dtype
from .registry import NotLowered, lowers
from .value import IndexLike, Value, broadcast_index, positions, zeros


@lowers(torch.ops.webgpu.scan.default)
def lower_scan(
    builder: Builder,
    init: Sequence[Value],
    xs: Sequence[Value],
    constants: Sequence[Value],
    length: int | Expr,
    step: str,
    outer: int = 0,
) -> tuple[Value | None, ...]:
    """The last carries, and the rows of all steps: one node that computes each lane by itself.

    Its outputs have elements of 4 bytes or more: a word of memory has one writer.
    """
    steps, lanes = as_expr(length), init[0].sizes
    results = builder.results
    if init[0].is_empty or (steps.is_constant and not int(steps)):
        numbers = range(len(init), len(results))
        empty = (zeros((steps, *lanes), builder.result(k).dtype) for k in numbers)
        return (*init, *empty)
    given = _within_bindings(builder, [*init, *xs, *constants], len(results))
    init, xs = given[: len(init)], given[len(init) : len(init) + len(xs)]
    constants = given[len(init) + len(xs) :]
    step_bodies, row_bodies = _bodies(builder, parsed(step), init, xs, constants, steps)
    finals = tuple(k for k in range(len(init)) if builder.is_used(k))
    rows = tuple(k for k in range(len(row_bodies)) if builder.is_used(len(init) + k))
    if not finals and not rows:
        finals = (0,)
    within = contiguous_strides((*lanes[:outer], steps, *lanes[outer:]))
    strides = (within[outer], *within[:outer], *within[outer + 1 :])
    carried = [
        builder.new_buffer(word_dtype(init[k].dtype), lanes, f"{builder.hint}_last{k}")
        for k in finals
    ]
    stacked = [
        builder.new_buffer(
            word_dtype(row_bodies[k].dtype), (steps, *lanes), f"{builder.hint}_{k}", strides=strides
        )
        for k in rows
    ]
    here = positions(lanes)
    builder.nodes.append(
        Scan(
            carried=tuple(buffer.name for buffer in carried),
            rows=tuple(buffer.name for buffer in stacked),
            ranges=lanes,
            length=steps,
            finals=finals,
            init=tuple(builder.finished(value.at(here)) for value in init),
            step=step_bodies,
            row=tuple(cast(row_bodies[k], b.dtype) for k, b in zip(rows, stacked, strict=True)),
            origins=(builder.origin,),
        )
    )
    made: list[Value | None] = [None] * len(results)
    places = (*finals, *(len(init) + k for k in rows))
    for place, buffer in zip(places, (*carried, *stacked), strict=True):
        made[place] = builder.load(buffer).cast(builder.result(place).dtype)
    return tuple(made)


def _within_bindings(builder: Builder, values: Sequence[Value], written: int) -> list[Value]:
    """Values, those of a dtype in one buffer if a kernel cannot bind all beside what it writes."""
    found = list(values)
    places: dict[DType, list[int]] = {}
    for k, value in enumerate(values):
        if loads_of(value.body):
            places.setdefault(value.dtype, []).append(k)
    read = {load.buffer for value in values for load in loads_of(value.body)}
    if len(read) + written <= builder.target.max_storage_buffers:
        return found
    for numbers in places.values():
        parts = in_one_buffer(builder, [found[k] for k in numbers])
        for k, part in zip(numbers, parts, strict=True):
            found[k] = part
    return found


def _bodies(
    builder: Builder,
    function: ScanFunction,
    init: Sequence[Value],
    xs: Sequence[Value],
    constants: Sequence[Value],
    length: Expr,
) -> tuple[tuple[Scalar, ...], tuple[Scalar, ...]]:
    """The next carries and the rows of one step, over lanes and time, with `Local` carries."""
    lanes = init[0].sizes
    here = positions(lanes)
    (time,) = positions((length,), "t")

    def given(reference: Reference) -> Value:
        number = reference.number
        if reference.source == "carry":
            dtype = init[number].dtype
            return Value(dtype, lanes, Local(carry_name(number), dtype))
        if number >= len(xs):
            constant = constants[number - len(xs)]
            index: list[IndexLike] = broadcast_index(constant, here)
            return Value(constant.dtype, lanes, constant.at(index))
        x = xs[number]
        row = Value(x.dtype, x.sizes[1:], x.body)  # for its sizes
        return Value(x.dtype, lanes, x.at([time, *broadcast_index(row, here)]))

    value = lowered_steps(builder, function.steps, lanes, given, "a scan")

    def body(argument: Operand, dtype: DType) -> Scalar:
        found = value(argument)
        return builder.finished(operand(found, lanes, dtype))

    carried = tuple(body(a, carry.dtype) for a, carry in zip(function.carried, init, strict=True))
    dtypes_of_rows = (builder.result(k).dtype for k in range(len(init), len(builder.results)))
    rows = tuple(body(a, dtype) for a, dtype in zip(function.rows, dtypes_of_rows, strict=True))
    if any(part.dtype is dtypes.float64 for part in (*carried, *rows)) and not (
        builder.target.supports(dtypes.float64)
    ):
        raise NotLowered("a scan in float64")
    return carried, rows
