"""Schedules to WGSL kernels."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any, assert_never

from ..errors import VerificationError
from ..ir.anchors import are_contractions
from ..ir.attention_nodes import AttentionGradient
from ..ir.buffers import Buffer
from ..ir.depthwise_nodes import DepthwiseConvolution
from ..ir.graph import (
    AnchorGroup,
    ForeachGroup,
    JointGroup,
    KernelGroup,
    LoopGraph,
    MapGroup,
    PairGroup,
    RowGroup,
    Schedule,
    SiblingGroup,
    SingleGroup,
    buffers_of,
    dispatch_count,
)
from ..ir.nodes import Factorization, Fourier, HostCall, Scan, Scatter, TriangularSolve, UserKernel
from ..ir.renaming import group_key
from ..ir.sorting_nodes import Compact, DigitCounts, DigitScatter, PartSums, PickDigit, RowSort
from ..ir.spaces import Node
from ..ir.transposition import find_transposition
from ..plan.model import STATUS, Kernel, KernelCall
from ..target import Target
from .kernels.attention_gradient import generate_attention_gradient
from .kernels.attention_kernel import generate_attention
from .kernels.attention_parts import generate_attention_parts
from .kernels.contraction import generate_contraction
from .kernels.depthwise import generate_depthwise, generate_depthwise_weight_gradient
from .kernels.factorization import generate_factorization
from .kernels.foreach import generate_foreach
from .kernels.fourier import generate_fourier
from .kernels.joint import generate_joint
from .kernels.pointwise import generate_map
from .kernels.reduction import generate_rows
from .kernels.scan import generate_scan
from .kernels.scatter import generate_scatter
from .kernels.selection import generate_compact, generate_pick_digit
from .kernels.sorting import (
    generate_digit_counts,
    generate_digit_scatter,
    generate_part_sums,
    generate_row_sort,
)
from .kernels.transpose import generate_transpose
from .kernels.triangular import generate_triangular_solve
from .kernels.user_kernel import generate_user_kernel
from .tilings.attention_tilings import (
    AttentionGradientTiling,
    AttentionPartsTiling,
    AttentionTiling,
)
from .tilings.attention_units import AttentionGradientUnitsTiling, AttentionUnitsTiling
from .tilings.choose import TiledSchedule, Tiling, Tilings
from .tilings.contraction import has_shifts
from .tilings.depthwise import DepthwiseTiling
from .tilings.fourier import FourierTiling
from .tilings.matmul import FewRowsTiling, MatmulProblem, MatmulTiling
from .tilings.units import UnitsTiling

__all__ = ["Kernels", "render", "verify_kernels"]


@dataclass(frozen=True)
class Kernels:
    """A schedule, and the kernel calls and host calls that each of its groups becomes."""

    schedule: Schedule
    of_groups: tuple[tuple[KernelCall | HostCall, ...], ...]

    @property
    def calls(self) -> tuple[KernelCall | HostCall, ...]:
        """All calls, in order."""
        return tuple(chain.from_iterable(self.of_groups))


def render(
    tiled: TiledSchedule, target: Target, on_kernel: Callable[[Kernel], None] = lambda kernel: None
) -> Kernels:
    """The kernels of a schedule whose tilings are chosen.

    Models repeat their layers: groups that differ in their buffers only are rendered once.

    ``on_kernel`` is told of each kernel when its text is known.
    """
    found: list[tuple[KernelCall | HostCall, ...]] = []
    known: dict[Hashable, tuple[tuple[str, ...], tuple[KernelCall, ...]]] = {}
    schedule, buffers = tiled.schedule, tiled.schedule.graph.buffers
    for group, tilings, problem in zip(schedule.groups, tiled.tilings, tiled.problems, strict=True):
        form, names = group_key(group, buffers) or (None, ())
        key = form, tilings
        if form is not None and (same := known.get(key)) is not None:
            instead = dict(zip(same[0], names, strict=True))
            found.append(tuple(call.on(instead) for call in same[1]))
            continue
        calls = tuple(_render_group(group, buffers, target, tilings, problem))
        kernels = tuple(call for call in calls if isinstance(call, KernelCall))
        for call in kernels:
            on_kernel(call.kernel)
        if form is not None:
            known[key] = names, kernels
        found.append(calls)
    return Kernels(schedule, tuple(found))


def _render_group(
    group: KernelGroup,
    buffers: dict[str, Buffer],
    target: Target,
    tilings: Tilings,
    problem: MatmulProblem | None,
) -> Sequence[KernelCall | HostCall]:
    """One call of a group, or as many as `dispatch_count` says."""
    if isinstance(group, SingleGroup) and isinstance(group.node, HostCall):
        return [group.node]
    if isinstance(group, SingleGroup) and isinstance(group.node, Scatter):
        return generate_scatter(group.node, buffers, target)
    if not dispatch_count(group, buffers):
        return []
    if tilings:
        return [_render_tiled(group, buffers, target, tiling, problem) for tiling in tilings]
    return [_render_kernel(group, buffers, target)]


def _render_tiled(
    group: KernelGroup,
    buffers: dict[str, Buffer],
    target: Target,
    tiling: Tiling,
    problem: MatmulProblem | None,
) -> KernelCall:
    """The kernel of a group in one of its tilings."""
    match group, tiling:
        case AnchorGroup() as one, (AttentionTiling() | AttentionUnitsTiling()) as chosen:
            return generate_attention(one, buffers, target, chosen)
        case AnchorGroup() as one, AttentionPartsTiling() as chosen:
            return generate_attention_parts(one, buffers, target, chosen)
        case AnchorGroup(anchor=DepthwiseConvolution()) as one, DepthwiseTiling() as chosen:
            return generate_depthwise(one, buffers, target, chosen)
        case AnchorGroup() as one, DepthwiseTiling() as chosen:
            return generate_depthwise_weight_gradient(one, buffers, target, chosen)
        case SingleGroup(AttentionGradient() as node), (
            AttentionGradientTiling() | AttentionGradientUnitsTiling()
        ) as chosen:
            return generate_attention_gradient(node, buffers, target, chosen)
        case SingleGroup(Fourier() as node), FourierTiling() as chosen:
            return generate_fourier(node, buffers, target, chosen)
        case (AnchorGroup() | PairGroup() | SiblingGroup()) as products, (
            FewRowsTiling() | MatmulTiling() | UnitsTiling()
        ) as chosen if problem is not None:
            return generate_contraction(products, problem, buffers, target, chosen)
    raise AssertionError(f"verify_tilings lets no {group} have {tiling}")


def _render_kernel(group: KernelGroup, buffers: dict[str, Buffer], target: Target) -> KernelCall:
    """The one kernel of a group without tilings."""
    match group:
        case MapGroup():
            found = find_transposition(group, buffers, target)
            if found is not None:
                return generate_transpose(group, found, buffers, target)
            return generate_map(group, buffers, target)
        case ForeachGroup():
            return generate_foreach(group, buffers, target)
        case JointGroup():
            return generate_joint(group, buffers, target)
        case RowGroup():
            return generate_rows(group, buffers, target)
        case SingleGroup(node):
            return _KERNELS[type(node)](node, buffers, target)
        case _:
            assert_never(group)  # type: ignore[arg-type]


# Of nodes that share a kernel with no other.
_KERNELS: dict[type[Node], Callable[[Any, dict[str, Buffer], Target], KernelCall]] = {
    Compact: generate_compact,
    DigitCounts: generate_digit_counts,
    DigitScatter: generate_digit_scatter,
    Factorization: generate_factorization,
    PartSums: generate_part_sums,
    PickDigit: generate_pick_digit,
    RowSort: generate_row_sort,
    Scan: generate_scan,
    TriangularSolve: generate_triangular_solve,
    UserKernel: generate_user_kernel,
}


def verify_kernels(kernels: Kernels, target: Target) -> None:
    """Raises VerificationError for a kernel that is not its group's, or not for a target.

    WGSL is verified by its compilers.
    """
    schedule = kernels.schedule
    for number, (group, calls) in enumerate(zip(schedule.groups, kernels.of_groups, strict=True)):
        try:
            _verify_calls(group, calls, schedule.graph, target)
        except VerificationError as error:
            raise VerificationError(f"group {number}: {error}") from error


def _verify_calls(
    group: KernelGroup,
    calls: Sequence[KernelCall | HostCall],
    graph: LoopGraph,
    target: Target,
) -> None:
    dispatched = [call for call in calls if isinstance(call, KernelCall)]
    # Products with shifts may have one kernel more.
    least = dispatch_count(group, graph.buffers)
    most = least + (are_contractions(group) and has_shifts(group))
    if not least <= len(dispatched) <= most:
        raise VerificationError(f"{len(dispatched)} kernels of {least}")
    known = buffers_of(group)
    stores = {graph.memory_of(name) for name in known.stored}
    if known.reports:
        stores.add(STATUS)
    bindable = stores.union(map(graph.memory_of, known.loaded))
    for call in dispatched:
        kernel = call.kernel
        for bound, declared in zip(call.step.bindings, kernel.bindings, strict=True):
            name = bound.buffer
            memory = graph.memory_of(name) if name in graph.buffers else name
            if memory not in (stores if declared.writable else bindable):
                raise VerificationError(f"{kernel.name} binds {name}, which is not its")
        for what, has, allowed in (
            ("invocations", prod(kernel.workgroup_size), target.max_workgroup_invocations),
            ("bytes of workgroup memory", kernel.workgroup_nbytes, target.max_workgroup_nbytes),
            ("storage bindings", len(call.step.bindings), target.max_storage_buffers),
        ):
            if has > allowed:
                raise VerificationError(f"{kernel.name} has {has} {what} of {allowed}")
