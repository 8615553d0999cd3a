"""Shared state of one kernel's generation, and its assembly into a `KernelCall`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import UnsupportedOp
from ...ir.access import VECTOR, Lanes, are_aligned_neighbours, lane_addresses
from ...ir.buffers import Buffer
from ...ir.graph import Member
from ...ir.scalar import Scalar
from ...ir.spaces import Origin
from ...ir.workgroup_memory import WorkgroupArray
from ...plan.model import Dispatch, Kernel, KernelCall, Parameter
from ...plan.numbers import HostNumber
from ...symbolic.sizes import (
    ONE,
    ZERO,
    Atom,
    Expr,
    Symbol,
    as_expr,
    atom_expr,
    ceildiv,
    floordiv,
    linearize,
    upper_bound,
)
from ...target import Target
from ..values import Scope, Text, UniqueNames
from ..wgsl.indices import render_index
from ..wgsl.render import parameter_names, render_module
from ..wgsl.scalars import Renderer
from ..wgsl.storage import Bindings


@dataclass(frozen=True)
class KernelBody:
    """The body of a kernel, or of one of several that are joined to one.

    Attributes:
        kind: see `plan.model.Kernel`.
        inputs: the template also gets ``number``, that of a part of a joint kernel.
        workgroup_size: invocations.
        workgroups: how many have work, from number 0.
        arrays: workgroup memory, by names that the template finds in the input ``scratch``.
        iterations: the most that all loops of an invocation make together.
        template: its name, where that is not the kind.
    """

    kind: str
    inputs: dict[str, Any]
    workgroup_size: int
    workgroups: Expr
    origins: Sequence[Origin]
    flops: Expr
    arrays: dict[str, WorkgroupArray] = field(default_factory=dict)
    iterations: Expr = ZERO
    template: str = ""


@dataclass(frozen=True, slots=True)
class Computed:
    """Statements, and the value after them: at one point, or at four neighbouring ones.

    Attributes:
        guard: the condition in WGSL under which there are such points; "" for always.
        type: of an element, in WGSL.
    """

    lanes: int
    lines: list[str]
    result: str
    guard: str
    type: str


@dataclass
class KernelBuilder:
    """Collects bindings, parameters and names while a kernel is rendered."""

    target: Target
    buffers: dict[str, Buffer]
    bindings: Bindings = field(init=False)
    names: UniqueNames = field(default_factory=UniqueNames)
    parameters: dict[Parameter, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.bindings = Bindings(self.target, self.buffers)

    def name_of(self, atom: Atom | Parameter) -> str:
        """Iteration symbols are local variables; what sizes determine is a uniform parameter."""
        if isinstance(atom, Symbol) and atom.extent is not None:
            return atom.name
        expr = atom if isinstance(atom, Expr | HostNumber) else atom_expr(atom)
        if expr not in self.parameters:
            self.parameters = parameter_names([*self.parameters, expr])
        return self.parameters[expr]

    def index(self, expr: Expr) -> str:
        """An index or size expression in WGSL."""
        return render_index(expr, self.name_of)

    def address(self, buffer: str, index: Sequence[Expr]) -> str:
        """The address of an element of a buffer in WGSL."""
        found = self.buffers[buffer]
        return self.index(linearize(index, found.strides) + found.offset)

    def load_element(self, buffer: str, index: Sequence[Expr]) -> str:
        """An element of a buffer as an expression."""
        return f"{self.bindings.function(buffer, 'load')}({self.address(buffer, index)})"

    def store_element(self, buffer: str, index: Sequence[Expr], value: str) -> str:
        """The statement that stores an element."""
        return f"{self.bindings.function(buffer, 'store')}({self.address(buffer, index)}, {value});"

    def trips(self, count: Expr) -> str:
        """How often a loop runs in WGSL.

        Drivers unroll loops of known length, with a branch for each part in each access.
        """
        hidden = " + i32(tw_zero_bits)" if self.bindings.twins and count.is_constant else ""
        return self.index(count) + hidden

    def renderer(
        self, lanes: Sequence[Mapping[Symbol, Expr]], scope: Scope, **options: Any
    ) -> Renderer:
        """A `Renderer` that writes into this kernel."""
        return Renderer(self.bindings, self.names, self.name_of, lanes, scope, **options)

    def compute(
        self, body: Scalar, lanes: Lanes, guard: str = "", branches: bool = False
    ) -> Computed:
        """A scalar at these points, by itself. ``branches``: see `Renderer`."""
        scope = Scope()
        value = self.renderer(lanes, scope, branches=branches).render(body)
        count = len(lanes)
        return Computed(count, scope.lines, value.widen(count), guard, body.dtype.compute)

    def store(
        self, member: Member, value: Text, lanes: Sequence[Mapping[Symbol, Expr]]
    ) -> list[str]:
        """Statements that store a member's value at its index, one element or four."""
        buffer = self.buffers[member.output]
        addresses = lane_addresses(buffer, member.index, lanes)
        if len(lanes) == 1:
            function = self.bindings.function(member.output, "store")
            return [f"{function}({self.index(addresses[0])}, {value.code});"]
        if are_aligned_neighbours(addresses) and self.bindings.can_vectorize(buffer.dtype):
            function = self.bindings.function(member.output, "store4")
            return [f"{function}({self.index(addresses[0] // VECTOR)}, {value.widen(VECTOR)});"]
        function = self.bindings.function(member.output, "store")
        return [f"{function}({self.index(a)}, {value.lane(k)});" for k, a in enumerate(addresses)]

    def finish_body(self, body: KernelBody) -> KernelCall:
        """The kernel of one body."""
        names = {name: f"scratch_{name}" for name in body.arrays}
        declared = [declaration(names[name], array) for name, array in body.arrays.items()]
        return self.finish(
            body.kind,
            {**body.inputs, "number": None, "scratch": names, "declared": declared},
            workgroup_size=body.workgroup_size,
            workgroups=body.workgroups,
            origins=body.origins,
            flops=body.flops,
            workgroup_nbytes=sum(array.nbytes for array in body.arrays.values()),
            iterations=body.iterations,
            template=body.template,
        )

    def finish(
        self,
        kind: str,
        inputs: dict[str, Any],
        *,
        workgroup_size: int,
        workgroups: Expr,
        origins: Sequence[Origin],
        flops: Expr,
        workgroup_nbytes: int = 0,
        iterations: Expr = ZERO,
        template: str = "",
    ) -> KernelCall:
        """Renders the module and describes how it is run.

        Args:
            inputs: of the template, besides ``workgroup_size``.
            workgroups: how many have work, from number 0.
            template: its name, where that is not the kind.

        Raises:
            UnsupportedOp: the driver would end its loops too early.
        """
        limit = self.target.max_loop_iterations
        if limit and iterations.is_constant and iterations.constant > limit:
            origin = next(iter(origins), Origin(kind))
            raise UnsupportedOp(
                origin.op,
                f"a {kind} kernel would loop {iterations.constant:,} times in an invocation, and "
                f"{self.target.name} ends loops after {limit:,} without an error",
                "split the tensor, or use another driver",
                origin.source,
            )
        parameters = tuple(self.parameters)
        given = {"workgroup_size": workgroup_size, **inputs}
        wgsl = render_module(template or kind, self.bindings, parameters, given)
        bindings, kernel_bindings = self.bindings.plan_bindings()
        if len(bindings) > self.target.max_storage_buffers:
            raise self._too_many_bindings(len(bindings), origins)
        traffic = self.bindings.traffic()
        ops = tuple(dict.fromkeys(origin.op for origin in origins))
        kernel = Kernel(
            name=kernel_name(kind, ops),
            kind=kind,
            wgsl=wgsl,
            bindings=kernel_bindings,
            workgroup_size=(workgroup_size, 1, 1),
            parameter_count=len(parameters),
            workgroup_nbytes=workgroup_nbytes,
            ops=ops,
            sources=tuple(dict.fromkeys(o.source for o in origins if o.source)),
        )
        checks = tuple(self.bindings.checks)
        step = Dispatch(
            0,
            bindings,
            fold_grid(workgroups, self.target),
            parameters,
            sum((read for read, _ in traffic), ZERO),
            sum((written for _, written in traffic), ZERO),
            flops,
            checks,
            iterations if limit else ZERO,
            tuple(self.bindings.narrow),
            traffic,
        )
        return KernelCall(kernel, step)

    def _too_many_bindings(self, count: int, origins: Sequence[Origin]) -> UnsupportedOp:
        origin = next(iter(origins), Origin("a kernel"))
        return UnsupportedOp(
            origin.op,
            f"a kernel would need {count} bindings of storage buffers, this GPU allows "
            f"{self.target.max_storage_buffers}; a tensor counts once for every "
            f"{self.target.window_nbytes:,} bytes",
            "split its tensors",
            origin.source,
        )


def declaration(name: str, array: WorkgroupArray) -> str:
    """The WGSL statement that declares an array in workgroup memory."""
    return f"var<workgroup> {name}: array<{array.type}, {array.length}>;"


def kernel_name(kind: str, ops: Sequence[str]) -> str:
    """``kind`` and the names of at most four of its operators."""
    short = [op.split(".")[1 if op.count(".") > 1 else 0].strip("_") for op in ops]
    distinct = list(dict.fromkeys(name for name in short if name and name != kind))
    return "_".join([kind, *distinct[-4:]])


def fold_grid(workgroups: Expr, target: Target) -> tuple[Expr, Expr, Expr]:
    """A grid of at least ``workgroups`` in x and y, each within the target's limit.

    Kernels compute ``y · grid.x + x`` and check it against the true count.
    """
    high = upper_bound(workgroups)
    if high is not None and high <= target.max_grid:
        return workgroups, ONE, ONE
    most = as_expr(target.max_grid)
    # At least one row, where a call may turn out to have no workgroups.
    exact = workgroups.is_constant
    rows = ceildiv(workgroups, most) if exact else floordiv(workgroups, most) + 1
    return ceildiv(workgroups, rows), rows, ONE
