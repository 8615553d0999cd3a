"""How kernels with an anchor load operands and store results, as buffers' layouts allow.

Contractions that do both alike can share a kernel: both the scheduler and code generation ask here.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TypeGuard

from ..symbolic.sizes import (
    ONE,
    ZERO,
    Expr,
    Symbol,
    atom_expr,
    iteration,
    product,
    substitute,
)
from .access import (
    VECTOR,
    Lanes,
    address_of,
    are_aligned_neighbours,
    elements_per_access,
    flat_values,
    is_multiple_of,
    lane_addresses,
    load_index,
)
from .buffers import Buffer
from .graph import (
    AnchorGroup,
    ContractionGroup,
    KernelGroup,
    Member,
    PairGroup,
    Schedule,
    SiblingGroup,
)
from .nodes import Contraction
from .scalar import Index, Load, Scalar, loads_of
from .spaces import numbered


def products_of(group: ContractionGroup) -> tuple[AnchorGroup, ...]:
    """The contractions of a kernel, each with its epilogue."""
    return (group,) if isinstance(group, AnchorGroup) else group.groups


def contraction_of(group: AnchorGroup) -> Contraction:
    """The anchor of a contraction's group."""
    assert isinstance(group.anchor, Contraction)
    return group.anchor


def are_contractions(group: KernelGroup) -> TypeGuard[ContractionGroup]:
    """Whether a group computes contractions."""
    match group:
        case SiblingGroup() | PairGroup() | AnchorGroup(anchor=Contraction()):
            return True
    return False


def contraction_groups(schedule: Schedule) -> Iterator[ContractionGroup]:
    """The groups of a schedule that compute contractions."""
    return filter(are_contractions, schedule.groups)


def access_pattern(group: AnchorGroup, buffers: Mapping[str, Buffer]) -> Hashable:
    """How a contraction's kernel loads and stores: equal for those that can share one."""
    return load_axes(contraction_of(group), buffers), len(store_lanes([group], buffers))


# -- stores ----------------------------------------------------------------------------------------


def anchor_members(groups: Iterable[AnchorGroup], buffers: Mapping[str, Buffer]) -> list[Member]:
    """The epilogues of groups, each led by the anchor's own result when that is stored."""
    members: list[Member] = []
    for group in groups:
        if group.store_anchor:
            output, index = group.anchor.output, group.anchor.result_index
            dtype = buffers[output].dtype
            load: Scalar = Load(output, tuple(Index(i) for i in index), dtype)
            members.append(Member(output, load, index, True))
        members += group.epilogue
    return members


def store_is_vector(buffers: Mapping[str, Buffer], member: Member, lanes: Lanes) -> bool:
    """Whether the lanes of a store are four aligned neighbours in memory."""
    return are_aligned_neighbours(lane_addresses(buffers[member.output], member.index, lanes))


def store_lanes(together: Sequence[AnchorGroup], buffers: Mapping[str, Buffer]) -> Lanes:
    """The points that an invocation stores at once: four neighbouring columns, or one.

    ``together``: a contraction, or the two of a pair.
    """
    node = contraction_of(together[0])
    columns = product(node.columns)

    def environment(n: Expr) -> dict[Symbol, Expr]:
        return {
            **flat_values("b", node.batch, iteration("b", product(node.batch))),
            **flat_values("m", node.rows, iteration("m", product(node.rows))),
            **flat_values("n", node.columns, n),
        }

    if is_multiple_of(columns, VECTOR):
        quad = iteration("n", columns // VECTOR)
        lanes = [environment(quad * VECTOR + x) for x in range(VECTOR)]
        members = anchor_members(together, buffers)
        if all(store_is_vector(buffers, m, lanes) for m in members if m.store):
            return lanes
    return [environment(iteration("n", columns))]


_PACKED = 16  # elements that 16 bytes hold, at least, of what is packed


# -- loads -----------------------------------------------------------------------------------------


def load_axes(node: Contraction, buffers: Mapping[str, Buffer]) -> tuple[str, str]:
    """How the tiles of lhs and rhs are loaded.

    "inner" or "outer": four neighbours along the inner or the outer dimension at once. Else element
    by element: "scalar_inner" or "scalar_outer", by where neighbours are nearer.
    """
    return (
        _choose_axis(buffers, node, node.lhs, "m", node.rows),
        _choose_axis(buffers, node, node.rhs, "n", node.columns),
    )


def _choose_axis(
    buffers: Mapping[str, Buffer],
    node: Contraction,
    body: Scalar,
    prefix: str,
    outer_sizes: Sequence[Expr],
) -> str:
    """Which neighbours an invocation loads at once: along the inner or the outer dimension."""
    outer_count, inner_count = product(outer_sizes), product(node.inner)
    steps: dict[str, int] = {}
    together: list[str] = []
    for axis, name, sizes, count in (
        ("inner", "k", node.inner, inner_count),
        ("outer", prefix, outer_sizes, outer_count),
    ):
        if is_multiple_of(count, VECTOR):
            flat = iteration("flat", count // VECTOR)
            lanes = [flat_values(name, sizes, flat * VECTOR + x) for x in range(VECTOR)]
            found = [[substitute(a, env) for env in lanes] for a in _addresses(buffers, body)]
            if _contiguous(found):
                return axis
            if _is_divided(sizes) and _are_evenly_spaced(found):
                together.append(axis)
        steps[axis] = _smallest_step(_addresses(buffers, body), name, sizes)
    if is_multiple_of(inner_count, VECTOR):
        # Of weights that are packed in words, whose scales may lie otherwise.
        packed = elements_per_access([body], buffers, numbered("k", node.inner), _PACKED)
        if packed >= _PACKED:
            return "inner"
    if together:
        return min(together, key=steps.__getitem__)
    return "scalar_inner" if steps["inner"] <= steps["outer"] else "scalar_outer"


def _addresses(buffers: Mapping[str, Buffer], body: Scalar) -> list[Expr]:
    """Addresses of the loads with the largest buffer: the operand itself, not masks or scales."""
    loads = [load for load in loads_of(body) if load_index(load) is not None]
    rank = max((len(load.index) for load in loads), default=0)
    largest = [(load, buffers[load.buffer]) for load in loads if len(load.index) == rank]
    return [address_of(load, buffer.strides) + buffer.offset for load, buffer in largest]


def _contiguous(found: Sequence[Sequence[Expr]]) -> bool:
    """Whether four lanes are one access, or all read the same element: several packed in one.

    Args:
        found: of each load, the addresses of the lanes.
    """
    return bool(found) and all(
        are_aligned_neighbours(addresses) or len(set(addresses)) == 1 for addresses in found
    )


def _is_divided(sizes: Sequence[Expr]) -> bool:
    """Whether symbols are found of a flat position by dividing it by sizes that a call decides.

    Each such division takes some twenty instructions. Four neighbours that lie in one line share
    theirs, though memory has them one by one: of a convolution's weight gradient, the pixels.
    """
    return any(not size.is_constant for size in sizes[1:])


def _are_evenly_spaced(found: Sequence[Sequence[Expr]]) -> bool:
    """Whether lanes, given as above, are always as far from each other: they lie in one line."""
    return bool(found) and all(
        (step := addresses[1] - addresses[0]).is_constant
        and all(b - a is step for a, b in pairwise(addresses))
        for addresses in found
    )


def _smallest_step(addresses: Iterable[Expr], prefix: str, sizes: Sequence[Expr]) -> int:
    """The distance in memory between two neighbours, 2³⁰ when unknown."""
    (flat,) = numbered("flat", (product(sizes),))
    place = flat_values(prefix, sizes, atom_expr(flat))
    found = (substitute(address, place) for address in addresses)
    steps = [substitute(at, {flat: ONE}) - substitute(at, {flat: ZERO}) for at in found]
    known = [abs(step.constant) for step in steps if step.is_constant and step.constant]
    return min(known, default=1 << 30)
