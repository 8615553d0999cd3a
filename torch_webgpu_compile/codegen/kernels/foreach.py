"""Maps that compute the same, each on its own buffers, as one kernel.

Runs of workgroups belong to the maps. Every invocation loads what its map reads, in a branch that
is uniform in its workgroup, computes the body that all maps have in common on registers, and stores
in a second branch: the body is in the kernel once, however many maps there are.
"""

from __future__ import annotations

from dataclasses import dataclass

from ... import dtypes
from ...ir.access import (
    VECTOR,
    Lanes,
    are_aligned_neighbours,
    flat_environment,
    is_multiple_of,
    lane_addresses,
)
from ...ir.buffers import Buffer
from ...ir.canonical import Canonical, canonical_form
from ...ir.graph import ForeachGroup, MapGroup, Member
from ...ir.scalar import Index, Load
from ...ir.spaces import numbered
from ...plan.model import KernelCall
from ...symbolic.sizes import ONE, ZERO, Expr, ceildiv, iteration, product, symbols_of
from ...target import Target
from ..values import Scope, Text, in_lanes, vector_type
from .builder import KernelBuilder
from .pointwise import group_flops, group_origins, memory_order


@dataclass(frozen=True)
class MapSection:
    """The template's input for one map of the kernel.

    Attributes:
        first: its first workgroup.
        count: invocations that have work, ⌈elements / width⌉. Both are text.
        loads, stores: statements.
    """

    first: str
    count: str
    loads: list[str]
    stores: list[str]


@dataclass(frozen=True)
class _Map:
    """A map while the kernel is made.

    Attributes:
        loads: what it loads, in the order of the canonical form.
        numel: elements.
        lanes: the points of an invocation; those of the last one may lie past the end.
    """

    group: MapGroup
    loads: tuple[Load, ...]
    numel: Expr
    lanes: Lanes

    @property
    def whole(self) -> bool:
        """Whether no point lies past the end."""
        return is_multiple_of(self.numel, len(self.lanes))


def generate_foreach(group: ForeachGroup, buffers: dict[str, Buffer], target: Target) -> KernelCall:
    """The kernel of a group. None of its maps is empty, but where its size is a symbol."""
    builder = KernelBuilder(target, buffers)
    forms = [_form(part, buffers) for part in group.groups]
    width = _width(group, buffers)
    parts = [
        _part(part, form, buffers, width) for part, form in zip(group.groups, forms, strict=True)
    ]
    workgroup = target.workgroup_invocations
    loads: list[list[str]] = [[] for _ in parts]
    common: list[str] = []
    declared: list[str] = []
    values: dict[Load, Text] = {}
    for number, load in enumerate(forms[0].loads):
        accesses = [_Access(builder, part, part.loads[number]) for part in parts]
        are_constant = all(access.is_constant for access in accesses)
        lanes = 1 if are_constant else width
        name = f"v{number}"
        dtype = target.in_wgsl(load.dtype)
        values[load] = Text(name, lanes, dtype)
        codes = [access.code(lanes) for access in accesses]
        if len(set(codes)) == 1 and are_constant:  # else it needs ``q``, which is a map's own
            common.append(f"let {name} = {codes[0]};")
            continue
        declared.append(f"var {name}: {vector_type(dtype, lanes)};")
        for lines, code in zip(loads, codes, strict=True):
            lines.append(f"{name} = {code};")
    lines, results = _body(builder, parts[0], values)
    segments, first = [], ZERO
    for part, loaded in zip(parts, loads, strict=True):
        count = ceildiv(part.numel, width)
        stores = [
            line
            for member, value in zip(part.group.members, results, strict=True)
            if member.store
            for line in _stores(builder, part, member, value)
        ]
        segments.append(MapSection(_size(builder, first), _size(builder, count), loaded, stores))
        first += ceildiv(count, workgroup)
    return builder.finish(
        "foreach",
        {
            "declared": declared,
            "common": common,
            "segments": segments,
            "lines": lines,
        },
        workgroup_size=workgroup,
        workgroups=first,
        origins=[origin for part in group.groups for origin in group_origins(part.members)],
        flops=sum(map(group_flops, group.groups), ZERO),
    )


def _form(group: MapGroup, buffers: dict[str, Buffer]) -> Canonical:
    form = canonical_form(group, buffers)
    assert form is not None
    return form


def _width(group: ForeachGroup, buffers: dict[str, Buffer]) -> int:
    """Elements per invocation; one of float64, of which four are four times the code."""
    stored = [buffers[m.output].dtype for m in group.groups[0].members if m.store]
    single = all(product(part.ranges) is ONE for part in group.groups)
    return 1 if single or dtypes.float64 in stored else VECTOR


def _part(group: MapGroup, form: Canonical, buffers: dict[str, Buffer], width: int) -> _Map:
    symbols = numbered("i", group.ranges)
    order = memory_order(group.members, symbols, buffers)
    numel = product(group.ranges)
    q = iteration("q", ceildiv(numel, width))
    lanes: Lanes = [flat_environment(symbols, q * width + k, order) for k in range(width)]
    return _Map(group, form.loads, numel, lanes)


class _Access:
    """One load of a map."""

    def __init__(self, builder: KernelBuilder, part: _Map, load: Load) -> None:
        self._builder = builder
        self._load = load
        self._part = part
        index = [entry.expr for entry in load.index if isinstance(entry, Index)]
        self._addresses = lane_addresses(builder.buffers[load.buffer], index, part.lanes)

    @property
    def is_constant(self) -> bool:
        """Whether all points load one element."""
        first = self._addresses[0]
        is_same = all(address is first for address in self._addresses)
        return is_same and all(s.extent is None for s in symbols_of(first))

    def code(self, lanes: int) -> str:
        """The loaded value, of this many lanes, as an expression of ``q``."""
        load, addresses, bindings = self._load, self._addresses, self._builder.bindings
        if lanes > 1 and are_aligned_neighbours(addresses) and bindings.can_vectorize(load.dtype):
            # Past the end there is padding to 16 bytes.
            function = bindings.function(load.buffer, "load4")
            return f"{function}({self._builder.index(addresses[0] // VECTOR)})"
        function = bindings.function(load.buffer, "load")
        codes = [f"{function}({self._at(k)})" for k in range(lanes)]
        dtype = bindings.target.in_wgsl(load.dtype)
        if lanes > 1 and len(set(codes)) > 1:
            return in_lanes(dtype, codes)
        return Text(codes[0], 1, dtype).widen(lanes)

    def _at(self, lane: int) -> str:
        address = self._builder.index(self._addresses[lane])
        if lane == 0 or self._part.whole or self.is_constant:
            return address
        # Of a lane past the end any element will do: that of the first lane is there.
        first = self._builder.index(self._addresses[0])
        return f"select({first}, {address}, {_is_inside(self._builder, self._part, lane)})"


def _size(builder: KernelBuilder, size: Expr) -> str:
    """A size in WGSL: whole, it is one parameter."""
    return str(size) if size.is_constant else builder.name_of(size)


def _is_inside(builder: KernelBuilder, part: _Map, lane: int) -> str:
    return f"q * {len(part.lanes)} + {lane} < {_size(builder, part.numel)}"


def _body(
    builder: KernelBuilder, part: _Map, loaded: dict[Load, Text]
) -> tuple[list[str], list[Text]]:
    """Statements that compute a map's members from what is loaded, and the members' values."""
    scope = Scope()
    computed: dict[str, Text] = {}

    def value_of(load: Load) -> Text | None:
        return computed.get(load.buffer, loaded.get(load))

    renderer = builder.renderer(part.lanes, scope, member=value_of)
    for member in part.group.members:
        computed[member.output] = renderer.render(member.body)
    return scope.lines, [computed[member.output] for member in part.group.members]


def _stores(builder: KernelBuilder, part: _Map, member: Member, value: Text) -> list[str]:
    """Statements that store a member's value: four elements at once, or one by one up to the end.

    The value is of the first map of the kernel; ``member`` is of this one.
    """
    lines = builder.store(member, value, part.lanes)
    if part.whole or len(part.lanes) == 1:
        return lines
    whole: list[str] = []
    if len(lines) == 1:
        if builder.buffers[member.output].shares is None:
            return lines
        # What follows an argument that is written in place may be another tensor.
        lanes = enumerate(part.lanes)
        texts = [(Text(value.lane(k), 1, value.dtype), lane) for k, lane in lanes]
        whole = lines
        lines = [line for text, lane in texts for line in builder.store(member, text, [lane])]
    lines = [
        f"if ({_is_inside(builder, part, lane)}) {{ {line} }}" if lane else line
        for lane, line in enumerate(lines)
    ]
    if not whole:
        return lines
    inside = _is_inside(builder, part, len(part.lanes) - 1)
    return [f"if ({inside}) {{ {whole[0]} }} else {{", *lines, "}"]
