"""Products of bfloat16 in matrix units get a power of two for each row and column of their factors.

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
from ...ir.buffers import Buffer, intermediate, unused_name
from ...ir.factors import factor_of, units_config
from ...ir.graph import LoopGraph
from ...ir.nodes import Contraction, Pointwise, Reduction
from ...ir.scalar import Load, Scalar, index, loads_of, scalar_symbols, substitute_symbols
from ...ir.shifts import exponents, shift_of
from ...ir.spaces import Node, Origin, Space, iteration_symbols, numbered, symbol_keys
from ...symbolic.sizes import ONE, Expr, product, typical
from ...target import Target
from .. import cost
from .preparation import static_buffers

_DENSE = 2  # reads of a factor's elements beyond which it is no matrix, but windows of an image


def precompute_bf16_scales(graph: LoopGraph, target: Target) -> LoopGraph:
    """The graph in which products of bfloat16 in matrix units have shifts, where that pays."""
    if not any(_is_eligible(node, target) for node in graph.nodes):
        return graph
    unchanging = static_buffers(graph)
    known: dict[_Factor, str] = {}

    def parts_of(node: Node, buffers: dict[str, Buffer]) -> Sequence[Node] | None:
        if not isinstance(node, Contraction) or not _is_eligible(node, target):
            return None
        sides = [
            _factor(node.lhs, node.spaces["lhs"], node.inner),
            _factor(node.rhs, node.spaces["rhs"], node.inner),
        ]
        factors = [factor for factor, _ in sides]
        if not all(factor.is_dense(buffers) for factor in factors):
            return None
        new = [factor for factor in dict.fromkeys(factors) if factor not in known]
        each_call = [factor for factor in new if not unchanging.issuperset(factor.reads)]
        flops = typical(2 * product(node.extents))
        moved = sum(factor.nbytes(buffers) for factor in each_call)
        if not cost.shifts_pay(flops, moved, 1 + len(each_call), target):
            return None
        made: list[Node] = []
        for factor in new:
            nodes = factor.nodes(node.output, node.origins, buffers, target)
            known[factor] = nodes[-1].output
            made += nodes
        lhs, rhs = (Load(known[factor], point, dtypes.int32) for factor, point in sides)
        return [*made, replace(node, lhs_shift=lhs, rhs_shift=rhs)]

    return graph.expanded(parts_of)


def _is_eligible(node: Node, target: Target) -> bool:
    return (
        isinstance(node, Contraction)
        and bool(node.inner)
        and not cost.are_few_rows(typical(product(node.rows)))
        and factor_of([node]) == "bf16"
        and units_config([node], target) is not None
    )


@dataclass(frozen=True, slots=True)
class _Factor:
    """An operand of a contraction.

    Attributes:
        body: an f32 that was bfloat16, over i… and r….
        sizes: of the dimensions that it depends on, beside the inner ones.
        inner: sizes of the inner dimensions.
    """

    body: Scalar
    sizes: tuple[Expr, ...]
    inner: tuple[Expr, ...]

    @property
    def reads(self) -> set[str]:
        return {load.buffer for load in loads_of(self.body)}

    @property
    def numel(self) -> int:
        return typical(product((*self.sizes, *self.inner)))

    def is_dense(self, buffers: Mapping[str, Buffer]) -> bool:
        read = [typical(buffers[name].numel) for name in self.reads]
        return bool(self.sizes) and self.numel <= _DENSE * max(read, default=0)

    def nbytes(self, buffers: Mapping[str, Buffer]) -> int:
        """Bytes that a reduction of it reads."""
        itemsize = max(buffers[name].dtype.itemsize for name in self.reads)
        return itemsize * self.numel

    def nodes(
        self, stem: str, origins: tuple[Origin, ...], buffers: dict[str, Buffer], target: Target
    ) -> tuple[Reduction, Reduction, Pointwise]:
        """The nodes that compute the shifts."""
        names = [
            unused_name(f"{stem}_{what}", buffers) for what in ("largest", "smallest", "shift")
        ]
        for name in names:
            buffers[name] = intermediate(name, dtypes.int32, self.sizes)
        largest, smallest = exponents(self.body)
        first = Reduction(names[0], "maximum", self.sizes, self.inner, largest, origins=origins)
        second = Reduction(names[1], "minimum", self.sizes, self.inner, smallest, origins=origins)
        at = tuple(map(index, iteration_symbols("i", self.sizes)))
        top, bottom = (Load(name, at, dtypes.int32) for name in names[:2])
        shift = shift_of(self.body, top, bottom, target.keeps_subnormal_halves)
        return first, second, Pointwise(names[2], self.sizes, shift, origins=origins)


def _factor(
    body: Scalar, space: Space, inner: tuple[Expr, ...]
) -> tuple[_Factor, tuple[Scalar, ...]]:
    """An operand, and the index of its shift at a point of the contraction."""
    symbols = scalar_symbols(body)
    outer = [
        (symbol, size)
        for prefix, sizes in space[:-1]
        for symbol, size in zip(iteration_symbols(prefix, sizes), sizes, strict=True)
        if size is not ONE and symbol_keys([symbol])[0] in symbols
    ]
    points, sizes = [symbol for symbol, _ in outer], tuple(size for _, size in outer)
    moved = dict(zip(symbol_keys(points), iteration_symbols("i", sizes), strict=True))
    moved |= dict(zip(numbered("k", inner), iteration_symbols("r", inner), strict=True))
    factor = _Factor(substitute_symbols(body, moved), sizes, inner)
    return factor, tuple(map(index, points))
