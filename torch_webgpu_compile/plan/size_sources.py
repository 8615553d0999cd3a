"""`size_sources`: the places among a plan's arguments that hold the values of its size symbols."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from ..errors import UnsupportedOp
from ..symbolic.sizes import Expr, Symbol, symbols_of
from .model import FIRST_CHECK, Plan, names_of


@dataclass(frozen=True, slots=True)
class SizeSource:
    """The place that holds a size symbol's value, as ``coefficient · symbol + constant``.

    Attributes:
        position: of the argument: an integer, or a tensor.
        unit: what the argument's strides and offset are multiplied with.
        field: of the tensor: ``size`` or ``stride`` of a dimension, or ``offset``, where its first
            element is in the memory that is bound for it. "" for an integer.
    """

    name: str
    position: int
    field: str
    dim: int
    coefficient: int
    constant: int
    unit: int = 1


def size_sources(
    plan: Plan, complex_inputs: Collection[int] = frozenset()
) -> tuple[SizeSource, ...]:
    """A source for each size symbol of the plan.

    Args:
        complex_inputs: positions of arguments that are complex, where the plan has real tensors
            (…, 2): their strides and offsets are twice those of the argument.

    Raises:
        UnsupportedOp: a symbol's value does not follow from the arguments.
    """
    found: dict[str, SizeSource] = {}
    for position, field_name, dim, expr in places_of(plan):
        if len(expr.terms) == 1 and len(expr.terms[0][0]) == 1:
            (atom,), coefficient = expr.terms[0]
            if isinstance(atom, Symbol) and atom.name not in found:
                of_complex = position in complex_inputs and field_name in ("stride", "offset")
                unit = 2 if of_complex else 1
                found[atom.name] = SizeSource(
                    atom.name, position, field_name, dim, coefficient, expr.constant, unit
                )
    missing = sorted(symbols_of_plan(plan) - set(found))
    if missing:
        raise UnsupportedOp(
            plan.name,
            f"the sizes {', '.join(missing)} do not follow from the graph's arguments",
            "compile with dynamic=False",
        )
    return tuple(found.values())


def places_of(plan: Plan) -> Iterator[tuple[int, str, int, Expr]]:
    """(argument, field, dimension, expression) of every integer among the arguments."""
    for position, entry in enumerate(plan.inputs):
        if entry.size is not None:
            yield position, "", 0, entry.size
    buffers = [
        (position, plan.buffers[entry.buffer])
        for position, entry in enumerate(plan.inputs)
        if entry.buffer is not None and entry.buffer in plan.buffers
    ]
    for position, buffer in buffers:
        for dim, size in enumerate(buffer.sizes):
            yield position, "size", dim, size
    for position, buffer in buffers:
        for dim, stride in enumerate(buffer.strides):
            yield position, "stride", dim, stride
        yield position, "offset", 0, buffer.offset


def symbols_of_plan(plan: Plan) -> set[str]:
    """Every size symbol that running the plan needs a value of."""
    exprs: list[Expr] = []
    for buffer in plan.buffers.values():
        exprs += (*buffer.sizes, *buffer.strides, buffer.offset, buffer.nbytes)
    for output in plan.outputs:
        exprs += (*output.sizes, *output.strides)
        exprs += [e for e in (output.offset, output.size) if e is not None]
    found: set[str] = set()
    if plan.plans is None:
        for step in plan.steps:
            exprs += step.sizes
    else:
        named = [names_of(step) for step in plan.steps]
        found = {output.buffer or "" for output in plan.outputs}.union(*(read for read, _ in named))
        found -= {"", *plan.buffers}.union(*(made for _, made in named))
    for expr in exprs:
        found.update(symbol.name for symbol in symbols_of(expr))
    return found - {FIRST_CHECK.name}  # runtimes number checks themselves
