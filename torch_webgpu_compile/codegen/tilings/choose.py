"""The pass `choose_tilings`: how each kernel of a schedule divides its work, as data.

Of contractions, attention, depthwise convolutions and Fourier transforms. How rows are reduced and
which maps go through tiles is in `ir` (`rows`, `transposition`), as groups depend on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from ...errors import UnsupportedOp, VerificationError
from ...ir.access import VECTOR
from ...ir.anchors import are_contractions
from ...ir.attention_nodes import Attention, AttentionGradient
from ...ir.buffers import Buffer
from ...ir.depthwise_nodes import DepthwiseConvolution, DepthwiseWeightGradient
from ...ir.factors import common_factor
from ...ir.graph import (
    AnchorGroup,
    KernelGroup,
    PairGroup,
    Schedule,
    SiblingGroup,
    SingleGroup,
    dispatch_count,
)
from ...ir.nodes import Contraction, Fourier
from ...ir.scalar import Scalar
from ...symbolic.sizes import Expr, ceildiv, product
from ...target import MatrixConfig, Target
from .attention_tilings import (
    AttentionGradientTiling,
    AttentionPartsTiling,
    AttentionTiling,
    choose_attention_gradient_tiling,
    choose_attention_parts_tiling,
    choose_attention_tiling,
    gradient_work,
)
from .attention_units import (
    AttentionGradientUnitsTiling,
    AttentionUnitsTiling,
    choose_attention_gradient_units_tiling,
    choose_attention_units_tiling,
)
from .contraction import (
    ContractionTiling,
    TilingTable,
    contraction_tilings,
    has_shifts,
    problem_of,
)
from .depthwise import (
    DepthwiseTiling,
    choose_depthwise_tiling,
    convolution_problem,
    weight_gradient_problem,
)
from .fourier import FourierTiling, choose_fourier_tiling, rows_are_neighbours
from .matmul import MatmulProblem
from .units import InUnits, dialect_of

AttentionTilings = AttentionTiling | AttentionUnitsTiling | AttentionPartsTiling
GradientTilings = AttentionGradientTiling | AttentionGradientUnitsTiling
Tiling = ContractionTiling | AttentionTilings | GradientTilings | DepthwiseTiling | FourierTiling
Tilings = tuple[Tiling, ...]
"""Those of a group's kernels, in their order; none of kernels that have no tiling to choose."""


@dataclass(frozen=True)
class TiledSchedule:
    """A schedule, and the tilings of each of its groups: what its kernels are rendered from.

    Attributes:
        problems: what the tilings of contractions were chosen for; None of other groups.
    """

    schedule: Schedule
    tilings: tuple[Tilings, ...]
    problems: tuple[MatmulProblem | None, ...]


def choose_tilings(schedule: Schedule, target: Target, measured: TilingTable) -> TiledSchedule:
    """The tilings of a schedule's groups.

    Raises:
        UnsupportedOp: no tiling fits an operator, or it has a symbolic size that tilings need.
    """
    buffers = schedule.graph.buffers
    tilings: list[Tilings] = []
    problems: list[MatmulProblem | None] = []
    for group in schedule.groups:
        problem = None
        found: Tilings = ()
        if are_contractions(group) and dispatch_count(group, buffers):
            problem = problem_of(group, buffers)
            found = contraction_tilings(group, problem, buffers, target, measured)
        elif dispatch_count(group, buffers):
            found = _tilings_of(group, buffers, target)
        tilings.append(found)
        problems.append(problem)
    return TiledSchedule(schedule, tuple(tilings), tuple(problems))


def _tilings_of(group: KernelGroup, buffers: Mapping[str, Buffer], target: Target) -> Tilings:
    """The tilings of a group without contractions. Raises UnsupportedOp."""
    match group:
        case AnchorGroup(anchor=Attention() as node):
            return (_of_parts(node, target) if node.parts > 1 else _of_attention(node, target),)
        case AnchorGroup(anchor=DepthwiseConvolution()):
            return (choose_depthwise_tiling(convolution_problem(group, buffers), target),)
        case AnchorGroup(anchor=DepthwiseWeightGradient() as node):
            return (choose_depthwise_tiling(weight_gradient_problem(node, buffers), target),)
        case SingleGroup(node=AttentionGradient() as node):
            return (_of_gradient(node, target),)
        case SingleGroup(node=Fourier() as node):
            return (_of_fourier(node, buffers, target),)
    return ()


# -- attention -------------------------------------------------------------------------------------


def _of_attention(node: Attention, target: Target) -> AttentionTiling | AttentionUnitsTiling:
    units = attention_units_tiling(node, target)
    if units is not None:
        return units
    batch, heads, queries, _, *sizes = node.sizes
    head, value_head = (VECTOR * width for width in _widths(sizes))
    tiling = choose_attention_tiling(batch * heads, queries, head, value_head, target)
    if tiling is None:
        raise _too_large(f"a head size of {int(sizes[0])} does not fit", target)
    return tiling


def attention_units_tiling(node: Attention, target: Target) -> AttentionUnitsTiling | None:
    """The tiling of attention in the target's matrix units; None where they cannot do it.

    Queries, keys and values are f16 before they are made f32 for the scores, and so that is what is
    multiplied. Probabilities become f16, as in the kernels of other systems.
    """
    batch, heads, queries, _, *sizes = node.sizes
    found = _in_units((node.query, node.key, node.value), sizes, target)
    return found and choose_attention_units_tiling(batch * heads, queries, *found, target)


def _of_parts(node: Attention, target: Target) -> AttentionPartsTiling:
    head, value_head = node.sizes[4:]
    widths = int(ceildiv(head, VECTOR)), int(ceildiv(value_head, VECTOR))
    tiling = choose_attention_parts_tiling(*widths, target)
    if tiling is None:
        cause = f"a head size of {max(int(head), int(value_head))} does not fit a workgroup"
        raise UnsupportedOp("attention", cause, "use smaller heads")
    return tiling


def _of_gradient(node: AttentionGradient, target: Target) -> GradientTilings:
    units = attention_gradient_units_tiling(node, target)
    if units is not None:
        return units
    sizes = node.sizes[5:]
    width, value_width = _widths(sizes)
    owned, _, owners = gradient_work(node)
    tiling = choose_attention_gradient_tiling(owned, owners, width, value_width, target)
    if tiling is None:
        largest = max(int(size) for size in sizes)
        raise _too_large(f"gradients of a head size of {largest} do not fit", target)
    return tiling


def attention_gradient_units_tiling(
    node: AttentionGradient, target: Target
) -> AttentionGradientUnitsTiling | None:
    """The tiling of a gradient in the target's matrix units; None where they cannot do it.

    What is multiplied was f16 before it is made f32. Weights and the gradients of scores become
    f16, as in the kernels of other systems.
    """
    found = _in_units((node.query, node.key, node.value, node.gradient), node.sizes[5:], target)
    if found is None:
        return None
    sizes, config = found
    owned, _, owners = gradient_work(node)
    by_keys = node.of == "keys"
    return choose_attention_gradient_units_tiling(owned, owners, sizes, by_keys, config, target)


def _in_units(
    operands: tuple[Scalar, ...], sizes: Sequence[Expr], target: Target
) -> tuple[tuple[int, int], MatrixConfig] | None:
    """Head sizes and the units that multiply such operands; None without either."""
    config = target.matrix_config("f16", "f32", "attention")
    if config is None or common_factor(operands) != "f16":
        return None
    head, value_head = sizes
    if not (head.is_constant and value_head.is_constant):
        return None
    return (int(head), int(value_head)), config


def _widths(sizes: tuple[Expr, ...] | list[Expr]) -> list[int]:
    """Head sizes in vec4s, rounded up. Raises UnsupportedOp where they are not known."""
    if not all(size.is_constant for size in sizes):
        raise UnsupportedOp("attention", "the head size is symbolic", "mark it static")
    return [int(ceildiv(size, VECTOR)) for size in sizes]


def _too_large(what: str, target: Target) -> UnsupportedOp:
    cause = f"{what} {target.max_workgroup_nbytes} bytes of workgroup memory"
    return UnsupportedOp("attention", cause, "use smaller heads")


# -- Fourier transforms ----------------------------------------------------------------------------


def _of_fourier(node: Fourier, buffers: Mapping[str, Buffer], target: Target) -> FourierTiling:
    neighbours = rows_are_neighbours(node, buffers)
    tiling = choose_fourier_tiling(node.radices, product(node.ranges), *neighbours, target)
    if tiling is None:
        nbytes = target.max_workgroup_nbytes
        cause = f"{node.length} numbers do not fit {nbytes} bytes of workgroup memory"
        raise UnsupportedOp("fft", cause, "transform in several passes")
    return tiling


# -- the pass's result -----------------------------------------------------------------------------


def format_tilings(tiled: TiledSchedule) -> str:
    """A line for each tiling, with the number of its group in the schedule."""
    lines = [
        f"group {number}: {tiling}"
        for number, tilings in enumerate(tiled.tilings)
        for tiling in tilings
    ]
    return "\n".join([f"tilings({tiled.schedule.graph.name!r})", *lines]) + "\n"


def verify_tilings(tiled: TiledSchedule, target: Target) -> None:
    """Raises VerificationError for a tiling that is not one of its group's, or not for a target.

    What a tiling takes of workgroup memory follows from its kernel: see `verify_kernels`.
    """
    schedule = tiled.schedule
    for number, (group, tilings) in enumerate(zip(schedule.groups, tiled.tilings, strict=True)):
        kinds = _kinds_of(group) if dispatch_count(group, schedule.graph.buffers) else ()
        has_rare = are_contractions(group) and has_shifts(group) and len(tilings) > 1
        if len(tilings) != bool(kinds) + has_rare:
            raise VerificationError(f"group {number} has {len(tilings)} tilings")
        for tiling in tilings:
            if not isinstance(tiling, kinds):
                raise VerificationError(f"group {number} cannot have {tiling}")
            if not 0 < tiling.workgroup <= target.max_workgroup_invocations:
                raise VerificationError(
                    f"{tiling} of group {number} has {tiling.workgroup} invocations, and "
                    f"{target.name} allows {target.max_workgroup_invocations}"
                )
            if isinstance(tiling, InUnits) and not _offers(target, tiling):
                raise VerificationError(f"{target.name} has no units for {tiling}")


def _offers(target: Target, tiling: InUnits) -> bool:
    """Whether a target has a tiling's matrix units; without any, invocations do their work."""
    return dialect_of(target) == "lanes" or tiling.config in target.subgroup_matrix_configs


def _kinds_of(group: KernelGroup) -> tuple[type[Tiling], ...]:
    """The types of tilings that a group may have; none where there is nothing to choose."""
    match group:
        case AnchorGroup(node) | SingleGroup(node):
            return _KINDS.get(type(node), ())
        case PairGroup() | SiblingGroup():
            return _KINDS[Contraction]
    return ()


_KINDS: dict[type, tuple[type[Tiling], ...]] = {
    Contraction: get_args(ContractionTiling),
    Attention: get_args(AttentionTilings),
    AttentionGradient: get_args(GradientTilings),
    DepthwiseConvolution: (DepthwiseTiling,),
    DepthwiseWeightGradient: (DepthwiseTiling,),
    Fourier: (FourierTiling,),
}
