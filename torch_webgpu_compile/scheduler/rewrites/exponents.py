"""Where products of bfloat16 know the exponents of their factors before they begin.

Matrix units multiply f16, which has 30 exponents where bfloat16 has 254. A product that has to look
at all that it loads takes half as long again (`templates/bfloat16_units.wgsl.jinja`). Here each row
of the left factor, and each column of the right one, gets a *shift*: the power of two by which its
largest element becomes one of f16's largest numbers, and whether its smallest one is too small for
f16 then. They cost a reduction, that of a weight once for many calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ... import dtypes
from ...ir.access import typical_numel
from ...ir.buffers import Buffer, intermediate
from ...ir.factors import factor_of, is_zero, units_config
from ...ir.graph import LoopGraph
from ...ir.nodes import Contraction, HostCall, Pointwise, Reduction, inputs_of, outputs_of
from ...ir.scalar import (
    Load,
    Masked,
    Op,
    Scalar,
    apply,
    cast,
    const,
    index,
    loads_of,
    scalar_symbols,
    substitute_symbols,
)
from ...ir.spaces import Node, Origin, Space, iteration_symbols, numbered, symbol_keys
from ...symbolic.sizes import ONE, Expr, product
from ...target import Target
from .. import cost

# Of an f32: the place of its exponent, the bias of that, and the exponent of infinities and NaN.
_PLACE, _BIAS, _SPECIAL = 23, 127, 255
_LARGEST, _SMALLEST = 15, -14  # exponents of f16's normal numbers
_SMALLEST_SUBNORMAL = -17  # of a subnormal number with bfloat16's 8 bits
_FARTHEST = 126  # a shift whose power of two, and that of its opposite, is a normal number
_DENSE = 2  # reads of a factor's elements beyond which it is no matrix, but windows of an image


def know_exponents(graph: LoopGraph, target: Target) -> LoopGraph:
    """The graph in which products of bfloat16 in matrix units have shifts, where that pays."""
    if not any(_is_eligible(node, target) for node in graph.nodes):
        return graph
    unchanging = _unchanging(graph)
    known: dict[_Factor, Load] = {}

    def parts_of(node: Node, buffers: dict[str, Buffer]) -> Sequence[Node] | None:
        if not isinstance(node, Contraction) or not _is_eligible(node, target):
            return None
        factors = [
            _factor(body, node.spaces[side], node.inner)
            for side, body in (("lhs", node.lhs), ("rhs", node.rhs))
        ]
        if not all(factor.is_dense(buffers) for factor in factors):
            return None
        new = [factor for factor in factors if factor not in known]
        each_call = [factor for factor in new if not unchanging.issuperset(factor.reads)]
        flops = typical_numel(2 * product(node.extents))
        moved = sum(factor.nbytes(buffers) for factor in each_call)
        if not cost.shifts_pay(flops, moved, 1 + len(each_call), target):
            return None
        made: list[Node] = []
        for factor in new:
            nodes = factor.nodes(node.output, node.origins, buffers, target)
            known[factor] = factor.load(nodes[-1].output)
            made += nodes
        lhs, rhs = (known[factor] for factor in factors)
        return [*made, replace(node, lhs_shift=lhs, rhs_shift=rhs)]

    return graph.expanded(parts_of)


def _is_eligible(node: Node, target: Target) -> bool:
    return (
        isinstance(node, Contraction)
        and bool(node.inner)
        and not cost.are_few_rows(typical_numel(product(node.rows)))
        and factor_of([node]) == "bf16"
        and units_config([node], target) is not None
    )


def _unchanging(graph: LoopGraph) -> set[str]:
    """Buffers that depend on static inputs and constants alone."""
    found = {spec.buffer for spec in graph.inputs if spec.static and spec.buffer is not None}
    found |= set(graph.constants)
    for node in graph.nodes:
        if not isinstance(node, HostCall) and found.issuperset(inputs_of(node)):
            found.update(outputs_of(node))
    return found


@dataclass(frozen=True, slots=True)
class _Factor:
    """An operand of a contraction.

    Attributes:
        body: an f32 that was bfloat16.
        outer: the iteration symbols that it depends on beside those of the inner dimensions, and
            their sizes.
        inner: sizes of the inner dimensions.
    """

    body: Scalar
    outer: tuple[tuple[Expr, Expr], ...]
    inner: tuple[Expr, ...]

    @property
    def reads(self) -> set[str]:
        return {load.buffer for load in loads_of(self.body)}

    @property
    def sizes(self) -> tuple[Expr, ...]:
        return tuple(size for _, size in self.outer)

    @property
    def numel(self) -> int:
        return typical_numel(product((*self.sizes, *self.inner)))

    def is_dense(self, buffers: Mapping[str, Buffer]) -> bool:
        read = [typical_numel(buffers[name].numel) for name in self.reads]
        return bool(self.outer) and self.numel <= _DENSE * max(read, default=0)

    def nbytes(self, buffers: Mapping[str, Buffer]) -> int:
        """What a reduction of it reads."""
        itemsize = max(buffers[name].dtype.itemsize for name in self.reads)
        return itemsize * self.numel

    def load(self, name: str) -> Load:
        """The shift, at the contraction's symbols."""
        return Load(name, tuple(index(symbol) for symbol, _ in self.outer), dtypes.int32)

    def nodes(
        self, stem: str, origins: tuple[Origin, ...], buffers: dict[str, Buffer], target: Target
    ) -> tuple[Reduction, Reduction, Pointwise]:
        """What computes the shifts: twice a power of two, plus 1 where f16 has not all elements."""
        names = [_new_name(f"{stem}_{what}", buffers) for what in ("largest", "smallest", "shift")]
        for name in names:
            buffers[name] = intermediate(name, dtypes.int32, self.sizes)
        own = iteration_symbols("i", self.sizes)
        moved = dict(zip(symbol_keys([symbol for symbol, _ in self.outer]), own, strict=True))
        reduced = iteration_symbols("r", self.inner)
        moved |= dict(zip(numbered("k", self.inner), reduced, strict=True))
        bits = apply("bitcast", substitute_symbols(self.body, moved), dtype=dtypes.int32)
        exponent = apply("bitwise_and", apply("shift_right", bits, _PLACE), _SPECIAL)
        is_special = apply("eq", exponent, _SPECIAL)
        largest = apply("where", is_special, const(0, dtypes.int32), exponent)
        # Subnormal numbers count as zeros, which are no smallest elements.
        is_zero = apply("eq", exponent, 0)
        smallest = apply("where", is_zero, const(_SPECIAL, dtypes.int32), exponent)
        first = Reduction(names[0], self.sizes, self.inner, "maximum", largest, origins)
        second = Reduction(names[1], self.sizes, self.inner, "minimum", smallest, origins)
        at = tuple(map(index, own))
        top, bottom = (Load(name, at, dtypes.int32) for name in names[:2])
        lowest_power, highest_power = _SMALLEST, _LARGEST
        if not _is_in_memory(self.body):  # not rounded to 8 bits, f16 may round it upwards
            highest_power -= 1
        elif target.keeps_subnormal_halves:
            lowest_power = _SMALLEST_SUBNORMAL
        power = apply("sub", const(_BIAS + highest_power, dtypes.int32), top)
        power = apply("minimum", power, _FARTHEST)
        lowest = apply("add", bottom, power)
        is_missed = apply("lt", lowest, _BIAS + lowest_power)
        packed = apply("add", apply("mul", power, 2), cast(is_missed, dtypes.int32))
        return first, second, Pointwise(names[2], self.sizes, packed, origins)


def _factor(body: Scalar, space: Space, inner: tuple[Expr, ...]) -> _Factor:
    symbols = scalar_symbols(body)
    outer = [
        (symbol, size)
        for prefix, sizes in space[:-1]
        for symbol, size in zip(iteration_symbols(prefix, sizes), sizes, strict=True)
        if size is not ONE and symbol_keys([symbol])[0] in symbols
    ]
    return _Factor(body, tuple(outer), inner)


def _is_in_memory(body: Scalar) -> bool:
    """Whether a cast of bfloat16 is one of elements of a buffer."""
    match body:
        case Op("cast", (Load(),), _):
            return True
        case Masked(_, inside, other):
            return is_zero(other) and _is_in_memory(inside)
    return False


def _new_name(stem: str, buffers: Mapping[str, Buffer]) -> str:
    name, count = stem, 0
    while name in buffers:
        count += 1
        name = f"{stem}_{count}"
    return name
