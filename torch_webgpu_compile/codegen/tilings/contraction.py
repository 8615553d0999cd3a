"""The tilings of contractions: what is known of their kernels' problems, and the choice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ...ir.access import VECTOR, elements_per_access, is_multiple_of
from ...ir.anchors import contraction_of, load_axes, products_of
from ...ir.buffers import Buffer
from ...ir.factors import BYTES, config_of, factor_of
from ...ir.graph import ContractionGroup, PairGroup, map_group
from ...ir.nodes import Contraction
from ...ir.shifts import times_power
from ...ir.spaces import numbered
from ...symbolic.sizes import Expr, ceildiv, product
from ...target import Target
from .matmul import (
    FewRowsTiling,
    MatmulProblem,
    MatmulTiling,
    choose_matmul_tiling,
    few_rows_tiling,
    fits,
    has_few_rows,
)
from .units import UnitsTiling, units_fit, units_key, units_tilings

MeasuredTiling = MatmulTiling | UnitsTiling
TilingTable = Mapping[str, MeasuredTiling]
"""Measured tilings, by `MatmulProblem.key` or `units_key`."""

ContractionTiling = FewRowsTiling | MatmulTiling | UnitsTiling
"""What a kernel of contractions is generated from."""


def problem_of(group: ContractionGroup, buffers: Mapping[str, Buffer]) -> MatmulProblem:
    """The problem that a kernel's tiling is chosen for."""
    nodes = [contraction_of(part) for part in products_of(group)]
    (lhs, *_), right = zip(*(load_axes(node, buffers) for node in nodes), strict=True)
    # Element by element suits every layout.
    rhs = right[0] if len(set(right)) == 1 else "scalar_inner"
    paired = isinstance(group, PairGroup)
    shapes = [(product(n.rows), product(n.columns)) for n in (nodes[:1] if paired else nodes)]
    batch, inner = product(nodes[0].batch), product(nodes[0].inner)
    factor = factor_of(nodes)
    if factor in BYTES:
        lhs, rhs = _word_axis(lhs, inner), _word_axis(rhs, inner)
        inner = ceildiv(inner, VECTOR)
    itemsize = nodes[0].lhs.dtype.itemsize
    return MatmulProblem.of((batch, inner), shapes, itemsize, (lhs, rhs), paired, factor)


def _word_axis(axis: str, inner: Expr) -> str:
    """How tiles of words are loaded, where those of elements would be along ``axis``.

    Four words along the inner dimension are one access, four along the other one are four bytes
    each of as many inner neighbours. Else a word is loaded at a time.
    """
    is_single = axis == "inner" and not is_multiple_of(inner, VECTOR * VECTOR)
    return "scalar_inner" if is_single else axis


def contraction_tilings(
    group: ContractionGroup,
    problem: MatmulProblem,
    buffers: Mapping[str, Buffer],
    target: Target,
    measured: TilingTable,
) -> tuple[ContractionTiling, ...]:
    """The tilings of the kernels of contractions: the measured one, if there is one.

    With shifts, and in matrix units, there are two: that of the products of f16, and that of what
    f16 does not hold (`computes_shifted`).
    """
    if has_few_rows(problem):
        run = 1 if problem.factor in BYTES else access_run(group, buffers)
        return (few_rows_tiling(problem, target, run),)
    units = units_tiling(group, problem, target)
    if units is None:
        return (_without_units(problem, target, measured),)
    rare: tuple[UnitsTiling, ...] = ()
    if has_shifts(group):
        rare = (units,)
        group, problem = shifted(group, problem)
        units = units_tiling(group, problem, target)
        assert units is not None  # f16 has a tiling as small, with less memory
    found = measured.get(units_key(problem, units) or "")
    if isinstance(found, UnitsTiling) and units_fit(found, problem, target):
        units = found
    return (units, *rare)


def _without_units(
    problem: MatmulProblem, target: Target, measured: TilingTable
) -> ContractionTiling:
    tiling = measured.get(problem.key or "")
    if not isinstance(tiling, MatmulTiling) or not fits(
        tiling, problem.itemsize, problem.axes, target
    ):
        tiling = choose_matmul_tiling(problem, target)
    if problem.key is None or problem.paired or not tiling.is_divisible:
        tiling = replace(tiling, strips=0)
    return tiling


def units_tiling(
    group: ContractionGroup, problem: MatmulProblem, target: Target
) -> UnitsTiling | None:
    """The tiling of a contraction in the target's matrix units; None where they cannot do it.

    With shifts and bfloat16, that of what f16 does not hold.
    """
    dtype = contraction_of(products_of(group)[0]).lhs.dtype
    config = config_of(problem.factor, dtype, target)
    if config is None:
        return None
    factor, shifts = problem.factor or "f32", has_shifts(group)
    return next(units_tilings(problem, factor, config, target, has_shifts=shifts), None)


def access_run(group: ContractionGroup, buffers: Mapping[str, Buffer]) -> int:
    """Fours of elements that one access holds of every rhs."""
    nodes = [contraction_of(part) for part in products_of(group)]
    found = (elements_per_access([n.rhs], buffers, numbered("k", n.inner), 8) for n in nodes)
    return max(1, min(found) // VECTOR)


# -- shifts ----------------------------------------------------------------------------------------


def has_shifts(group: ContractionGroup) -> bool:
    """Whether the products of a group have shifts, see `Contraction`."""
    return contraction_of(products_of(group)[0]).lhs_shift is not None


def computes_shifted(group: ContractionGroup, tiling: ContractionTiling) -> bool:
    """Whether a tiling is that of products with shifts as products of f16."""
    return isinstance(tiling, UnitsTiling) and tiling.factor == "f16" and has_shifts(group)


def shifted(
    group: ContractionGroup, problem: MatmulProblem
) -> tuple[ContractionGroup, MatmulProblem]:
    """Products with shifts as products of f16, whose results are to be shifted back."""

    def of_node(node: Contraction) -> Contraction:
        assert node.lhs_shift is not None
        assert node.rhs_shift is not None
        lhs, rhs = times_power(node.lhs, node.lhs_shift), times_power(node.rhs, node.rhs_shift)
        return replace(node, lhs=lhs, rhs=rhs)

    return map_group(group, of_node, lambda member: member), replace(problem, factor="f16")
