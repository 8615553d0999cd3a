"""Where the values of a plan's size symbols are found among its arguments."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import UnsupportedOp
from ..plan.model import FIRST_CHECK, Plan
from ..symbolic.sizes import Expr, Symbol, symbols_of
from ..target import BINDING_ALIGNMENT


@dataclass(frozen=True, slots=True)
class SizeSource:
    """Where a size symbol's value is read: what is there is ``coefficient · symbol + constant``.

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

    def read(self, values: Sequence[Any]) -> int:
        """The symbol's value in a call: what is there, without the constant and the coefficient."""
        value = values[self.position]
        match self.field:
            case "size":
                found = int(value.shape[self.dim])
            case "stride":
                found = int(value.stride(self.dim))
            case "offset":
                found = bound_offset(value)
            case _:
                found = int(value)
        return (found * self.unit - self.constant) // self.coefficient


def bound_offset(tensor: torch.Tensor) -> int:
    """Elements from where a tensor's memory is bound, rounded down, to its first element.

    0 where that is no whole number of them. On the device the address decides: the storage itself
    may be a part of another one.
    """
    itemsize = tensor.element_size()
    if tensor.device.type == "cpu":
        return int(tensor.storage_offset()) % (BINDING_ALIGNMENT // itemsize)
    elements, rest = divmod(tensor.data_ptr() % BINDING_ALIGNMENT, itemsize)
    return 0 if rest else elements


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
    for position, field_name, dim, expr in _places(plan):
        if len(expr.terms) == 1 and len(expr.terms[0][0]) == 1:
            (atom,), coefficient = expr.terms[0]
            if isinstance(atom, Symbol) and atom.name not in found:
                of_complex = position in complex_inputs and field_name in ("stride", "offset")
                unit = 2 if of_complex else 1
                found[atom.name] = SizeSource(
                    atom.name, position, field_name, dim, coefficient, expr.constant, unit
                )
    missing = sorted(set(_symbols(plan)) - set(found))
    if missing:
        raise UnsupportedOp(
            plan.name,
            f"the sizes {', '.join(missing)} do not follow from the graph's arguments",
            "compile with dynamic=False",
        )
    return tuple(found.values())


def _places(plan: Plan) -> Iterator[tuple[int, str, int, Expr]]:
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


def _symbols(plan: Plan) -> dict[str, Symbol]:
    """Every size symbol that running the plan needs a value of."""
    exprs: list[Expr] = []
    for buffer in plan.buffers.values():
        exprs += (*buffer.sizes, *buffer.strides, buffer.offset, buffer.nbytes)
    for output in plan.outputs:
        exprs += (*output.sizes, *output.strides)
        exprs += [e for e in (output.offset, output.size) if e is not None]
    for step in plan.steps:
        exprs += step.sizes
    found: dict[str, Symbol] = {}
    for expr in exprs:
        found.update((symbol.name, symbol) for symbol in symbols_of(expr))
    found.pop(FIRST_CHECK.name, None)  # runtimes number checks themselves
    return found
