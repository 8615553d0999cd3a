"""`LoopGraph`, the result of lowering, and `Schedule`, the result of the scheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from operator import or_
from typing import Any, Generic, TypeVar

from ..symbolic.sizes import ZERO, Expr, product
from ..target import Target
from .buffers import Buffer, BufferOrigin
from .nodes import HostCall, Scatter, UserKernel, inputs_of, outputs_of, reports
from .scalar import Scalar, checks_of, loads_of
from .spaces import Anchor, Node, Origin


@dataclass(frozen=True, slots=True)
class GraphOutput:
    """A result of a graph, or a value that it writes back into an input, at one position.

    Exactly one of ``buffer`` (a tensor seen through sizes, strides and offset, in elements),
    ``size`` (a symbolic integer) and ``constant`` (None or a Python number) is set.

    ``mutates``: position of the graph input that takes the value after the call, or None.
    """

    buffer: str | None = None
    sizes: tuple[Expr, ...] = ()
    strides: tuple[Expr, ...] = ()
    offset: Expr | None = None
    size: Expr | None = None
    constant: Any = None
    mutates: int | None = None


@dataclass(frozen=True, slots=True)
class GraphInput:
    """A graph argument: a buffer's name, or the size expression that an integer argument binds.

    ``static``: a parameter or buffer of a module that stays as it is from call to call, mostly.
    """

    buffer: str | None = None
    size: Expr | None = None
    static: bool = False


@dataclass(frozen=True)
class LoopGraph:
    """Buffers, and nodes in an order in which every node follows the writers of what it reads.

    ``constants`` maps buffers of origin CONSTANT to tensors' bytes (a NumPy array in the buffer's
    layout).
    """

    name: str
    buffers: dict[str, Buffer]
    nodes: tuple[Node, ...]
    inputs: tuple[GraphInput, ...]
    outputs: tuple[GraphOutput, ...]
    constants: dict[str, Any] = field(default_factory=dict)

    def with_nodes(self, nodes: tuple[Node, ...], buffers: dict[str, Buffer]) -> LoopGraph:
        """The same graph with other nodes and buffers; this one where they are equal."""
        if nodes == self.nodes and buffers == self.buffers:
            return self
        return replace(self, nodes=nodes, buffers=buffers)

    def expanded(
        self, parts_of: Callable[[Node, dict[str, Buffer]], Sequence[Node] | None]
    ) -> LoopGraph:
        """The graph in which other nodes stand for some; this one where none is replaced.

        ``parts_of(node, buffers)`` gives those, and adds their buffers, or None.
        """
        buffers = dict(self.buffers)
        nodes: list[Node] = []
        for node in self.nodes:
            parts = parts_of(node, buffers)
            nodes += [node] if parts is None else parts
        return self.with_nodes(tuple(nodes), buffers)

    def live(self) -> LoopGraph:
        """The graph without nodes on which no output depends; host calls with effects stay."""
        effects = {n for n, b in self.buffers.items() if b.origin is BufferOrigin.EFFECT}
        needed = set(self.returned) | effects
        kept: list[Node] = []
        for node in reversed(self.nodes):
            if not needed.isdisjoint(outputs_of(node)):
                kept.append(node)
                needed.update(inputs_of(node))
        used = needed | {spec.buffer for spec in self.inputs if spec.buffer is not None}
        used.update(name for node in kept for name in outputs_of(node))
        return replace(
            self,
            nodes=tuple(reversed(kept)),
            buffers={name: buffer for name, buffer in self.buffers.items() if name in used},
            constants={name: data for name, data in self.constants.items() if name in used},
        )

    def memory_of(self, name: str) -> str:
        """The buffer that owns the memory of a buffer: itself, unless it `shares` another one's."""
        while (shared := self.buffers[name].shares) is not None:
            name = shared
        return name

    def binding_count(self, names: Iterable[str], reports: bool, target: Target) -> int:
        """Storage bindings of a kernel that reads and stores these buffers.

        Buffers that share memory count once. ``reports``: whether the kernel checks indices, and so
        needs the device's status beside them.
        """
        memory = {self.memory_of(name) for name in names}
        return sum(len(self.buffers[name].windows(target)) for name in memory) + reports

    def has_bindings_for(self, node: Node, target: Target) -> bool:
        """Whether a kernel of a node alone has no more storage bindings than the target allows."""
        names = (*inputs_of(node), *outputs_of(node))
        return self.binding_count(names, reports(node), target) <= target.max_storage_buffers

    @cached_property
    def prepared(self) -> frozenset[str]:
        """Names of the buffers that a preparation computes."""
        return frozenset(n for n, b in self.buffers.items() if b.origin is BufferOrigin.PREPARED)

    @cached_property
    def given(self) -> frozenset[str]:
        """Names of the buffers that have their contents before the first node."""
        inputs = (spec.buffer for spec in self.inputs if spec.buffer is not None)
        return self.prepared.union(inputs, self.constants)

    @cached_property
    def returned(self) -> frozenset[str]:
        """The buffers that an output shows, which have to keep their values after the last node."""
        return frozenset(o.buffer for o in self.outputs if o.buffer is not None)


def is_effect(node: Node, graph: LoopGraph) -> bool:
    """Whether a node is a host call that is made for its effect, not for a result."""
    origins = {graph.buffers[name].origin for name in outputs_of(node)}
    return isinstance(node, HostCall) and origins == {BufferOrigin.EFFECT}


@dataclass(frozen=True, slots=True)
class Member:
    """One result of a kernel group, in the group's iteration space.

    ``body`` loads other members' buffers at exactly the index where they are computed. ``index`` is
    the logical index in the output's buffer that one point of the space produces; ``store`` says
    whether the buffer is needed outside of the group. ``reduction`` is a kind of `nodes.REDUCTIONS`
    for a member that reduces the space's inner symbols, else None.
    """

    output: str
    body: Scalar
    index: tuple[Expr, ...]
    store: bool
    reduction: str | None = None
    origins: tuple[Origin, ...] = ()


@dataclass(frozen=True, slots=True)
class MapGroup:
    """Pointwise members over ``ranges`` (symbols ``i0…``): every point is independent."""

    ranges: tuple[Expr, ...]
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Reductions and pointwise members over rows (symbols ``i0…``) and elements of a row (``r0…``).

    A member without ``r`` symbols in its index is computed once per row.
    """

    rows: tuple[Expr, ...]
    elements: tuple[Expr, ...]
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class AnchorGroup:
    """A `Contraction` or `Attention` with pointwise members computed from its result.

    Members are in the anchor's symbols (b, m, n; for attention b0, b1, m0, d0). The anchor's own
    result is the first member's load of ``anchor.output``; ``store_anchor`` keeps it as a buffer as
    well. The logsumexp of an `Attention` is always stored.
    """

    anchor: Anchor
    epilogue: tuple[Member, ...]
    store_anchor: bool


@dataclass(frozen=True, slots=True)
class SingleGroup:
    """A node that is never fused."""

    node: Node


@dataclass(frozen=True, slots=True)
class SiblingGroup:
    """Contractions, each with its epilogue, that one dispatch computes side by side.

    None needs what another one computes. They have an operand, and batch and inner sizes, in
    common.
    """

    groups: tuple[AnchorGroup, ...]


@dataclass(frozen=True, slots=True)
class ForeachGroup:
    """Map groups that one dispatch computes side by side, each on buffers of its own.

    Their members are equal up to the names and layouts of buffers and up to sizes
    (`canonical.canonical_form`). None needs what another one computes.
    """

    groups: tuple[MapGroup, ...]


@dataclass(frozen=True, slots=True)
class PairGroup:
    """Two contractions of the same sizes and lhs, of which every invocation computes both.

    The second one's epilogue sees the results of the first one, at the same point.
    """

    groups: tuple[AnchorGroup, AnchorGroup]


JointPart = MapGroup | RowGroup | SingleGroup
"""What may be a part of a `JointGroup`; of nodes that are never fused, only scatters."""


@dataclass(frozen=True, slots=True)
class JointGroup:
    """Small groups of any kind that one dispatch computes side by side.

    None needs what another one computes, or writes over what another one reads. Scatters among
    them write where their initial contents are. All have known sizes.

    Attributes:
        are_alike: whether parts differ in their buffers' names only (`ir.renaming.twins_of`). Their
            code is in the kernel once, at the price of a branch in each access.
    """

    groups: tuple[JointPart, ...]
    are_alike: bool = False


ContractionGroup = AnchorGroup | SiblingGroup | PairGroup
"""What one kernel computes by tiles; the anchor of an `AnchorGroup` may be an `Attention`, too."""

KernelGroup = MapGroup | ForeachGroup | RowGroup | ContractionGroup | SingleGroup | JointGroup


@dataclass(frozen=True, slots=True)
class GroupBuffers:
    """Names of the buffers that a kernel group loads, computes and, of these, stores.

    ``reports``: whether it checks indices, and so needs the device's status beside them.
    """

    loaded: frozenset[str]
    computed: frozenset[str]
    stored: frozenset[str]
    reports: bool

    @property
    def reads(self) -> frozenset[str]:
        """The buffers that the group loads and does not compute itself."""
        return self.loaded - self.computed

    def __or__(self, other: GroupBuffers) -> GroupBuffers:
        return GroupBuffers(
            self.loaded | other.loaded,
            self.computed | other.computed,
            self.stored | other.stored,
            self.reports or other.reports,
        )


def buffers_of(group: KernelGroup) -> GroupBuffers:
    """The buffers that a kernel group loads, computes and stores."""
    match group:
        case SingleGroup(node):
            outputs = frozenset(outputs_of(node))
            return GroupBuffers(frozenset(inputs_of(node)), outputs, outputs, reports(node))
        case SiblingGroup(groups) | PairGroup(groups) | ForeachGroup(groups) | JointGroup(groups):
            return reduce(or_, map(buffers_of, groups))
        case AnchorGroup(anchor, epilogue, store_anchor):
            computed = frozenset(outputs_of(anchor))
            stored = computed if store_anchor else computed - {anchor.output}
            own = GroupBuffers(frozenset(inputs_of(anchor)), computed, stored, reports(anchor))
            return own | _buffers_of_members(epilogue)
        case MapGroup(members=members) | RowGroup(members=members):
            return _buffers_of_members(members)


def is_host_call(group: KernelGroup) -> bool:
    """Whether a group is a step of the host."""
    return isinstance(group, SingleGroup) and isinstance(group.node, HostCall)


def dispatch_count(group: KernelGroup, buffers: Mapping[str, Buffer]) -> int:
    """The kernels that code generation makes of a group: one, but none of what has no elements.

    None of a host call, which is a step of its own. A `Scatter` has two where its initial contents
    are copied first, and only the copy where it has no updates. Products with shifts have one more,
    where they are computed in matrix units.
    """
    match group:
        case SingleGroup(HostCall()):
            return 0
        case SingleGroup(Scatter() as node):
            output = buffers[node.output]
            if output.numel is ZERO:
                return 0
            return (output.shares is None) + (product(node.ranges) is not ZERO)
        case SingleGroup(UserKernel() as node):
            return int(any(buffers[name].numel is not ZERO for name in node.outputs))
        case MapGroup(ranges=points) | RowGroup(rows=points):
            return int(product(points) is not ZERO)
        case AnchorGroup(anchor=node):
            return int(buffers[node.output].numel is not ZERO)
        case SingleGroup(node):
            return int(buffers[outputs_of(node)[0]].numel is not ZERO)
        case SiblingGroup(groups) | PairGroup(groups) | ForeachGroup(groups) | JointGroup(groups):
            return int(any(dispatch_count(part, buffers) for part in groups))


def _buffers_of_members(members: tuple[Member, ...]) -> GroupBuffers:
    return GroupBuffers(
        frozenset(load.buffer for member in members for load in loads_of(member.body)),
        frozenset(member.output for member in members),
        frozenset(member.output for member in members if member.store),
        any(checks_of(member.body) for member in members),
    )


_Group = TypeVar("_Group", bound=KernelGroup)


def map_group(
    group: _Group, node: Callable[[Any], Any], member: Callable[[Member], Member]
) -> _Group:
    """The group with every node and every member changed, in order."""
    changed: dict[str, object]
    match group:
        case SingleGroup():
            changed = {"node": node(group.node)}
        case AnchorGroup(anchor, epilogue):
            changed = {"anchor": node(anchor), "epilogue": tuple(map(member, epilogue))}
        case MapGroup() | RowGroup():
            changed = {"members": tuple(map(member, group.members))}
        case SiblingGroup(groups) | PairGroup(groups) | ForeachGroup(groups) | JointGroup(groups):
            changed = {"groups": tuple(map_group(part, node, member) for part in groups)}
    return replace(group, **changed)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Schedule:
    """Kernel groups in execution order over the buffers of ``graph``.

    Each is dispatched as it stands, by as many kernels as `dispatch_count` says.
    """

    graph: LoopGraph
    groups: tuple[KernelGroup, ...]


Part = TypeVar("Part")
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class Program(Generic[Part]):
    """A graph in two parts, at any stage: the one of every call, and the preparation.

    Attributes:
        called: runs in every call.
        prepared: computes the PREPARED buffers of ``called``, which are its outputs, from static
            inputs and constants: once, and again only after one of those inputs has changed. None
            where nothing is prepared.
    """

    called: Part
    prepared: Part | None = None

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts in the order in which they run."""
        return (self.called,) if self.prepared is None else (self.prepared, self.called)

    def map(self, function: Callable[[Part], Made]) -> Program[Made]:
        """A program of what ``function`` makes of each part."""
        prepared = None if self.prepared is None else function(self.prepared)
        return Program(function(self.called), prepared)
