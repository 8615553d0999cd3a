"""`Plan`: kernels, buffers and steps, independent of any runtime.

The Python executor replays it, the disk cache stores it (`serialize`), a browser can run it. Sizes
that are not known at compile time are `Expr`s over the plan's size symbols, evaluated once per set
of sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from .. import dtypes
from ..dtypes import DType
from ..errors import IndexCheck
from ..symbolic.nested import HostBuffer, buffers_in, leaves
from ..symbolic.sizes import ONE, ZERO, Expr, Symbol, as_expr, atom_expr, evaluate
from .numbers import HostNumber, number_symbols, symbols_in

VERSION = 9

STATUS = "device status"
"""The buffer in which kernels report what was wrong: see `Kernel`. No graph has it."""

FIRST_CHECK = Symbol("first_check", 0, None, None, None)
"""The parameter that a runtime gives to each dispatch: the number of its first check."""


USER_KERNEL = "wgsl"
"""The `Kernel.kind` of what a user has written: it may rely on WGSL's own checks of bounds."""

Parameter = Expr | HostNumber
"""A word of a kernel's uniform buffer: an i32, or the bits of a float32."""


@dataclass(frozen=True, slots=True)
class KernelBinding:
    """One storage-buffer binding of a kernel. ``writable`` is ``var<storage, read_write>``."""

    writable: bool


@dataclass(frozen=True, slots=True)
class Kernel:
    """A compute kernel.

    Bindings 0 … n−1 of group 0 are the storage buffers; when ``parameter_count`` > 0, binding n is
    a uniform buffer of ``ceil(parameter_count / 4)`` ``vec4<i32>`` that holds the step's
    parameters.

    A kernel that checks indices has `STATUS` as its last storage buffer. For an index that is out
    of range it adds 1 to word 0; who finds 0 there also writes word 1, the number of the check
    (`FIRST_CHECK` plus its position in `Dispatch.checks`), words 2 and 3, the low and the high bits
    of the index, and word 4, the size that it exceeds. The host looks at it when it waits for the
    GPU anyway, and sets it to 0.

    Attributes:
        name: readable and unique in a plan, e.g. ``matmul_add_gelu_3``.
        kind: the template: ``pointwise``, ``reduction``, ``matmul``, …
        wgsl: the whole module; the entry point is ``main``.
        workgroup_size: invocations per dimension.
        workgroup_nbytes: workgroup memory, bytes.
        ops: the ATen overloads it computes, in order.
        sources: the user's lines of code, distinct, in order.
    """

    name: str
    kind: str
    wgsl: str
    bindings: tuple[KernelBinding, ...]
    workgroup_size: tuple[int, int, int]
    parameter_count: int = 0
    workgroup_nbytes: int = 0
    ops: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()


Role = Literal["input", "constant", "intermediate", "output", "prepared", "status"]


@dataclass(frozen=True, slots=True)
class PlanBuffer:
    """Typed memory of a plan.

    Attributes:
        role: ``input`` (given by the caller), ``constant`` (data in the plan), ``intermediate``,
            ``output`` (owned by the plan until the caller takes it), ``prepared`` (an output of
            `Plan.preparation`) or ``status`` (`STATUS`, the device's own).
        slot: intermediates and outputs with the same slot share memory at different times.
        nbytes: bytes that kernels may touch, a multiple of 4 not required.
    """

    name: str
    role: Role
    dtype: DType
    sizes: tuple[Expr, ...]
    strides: tuple[Expr, ...]
    offset: Expr
    nbytes: Expr
    slot: int | None = None

    def nbytes_for(self, sizes: Mapping[str, int]) -> int:
        """``nbytes`` for these symbols; 0 where a size turns out to be 0 and makes it negative."""
        return max(0, evaluate(self.nbytes, sizes))


def layout_nbytes(
    dtype: DType, sizes: Sequence[Expr], strides: Sequence[Expr], offset: Expr = ZERO
) -> Expr:
    """Bytes from the start of memory to the end of the last element; 0 when there is none."""
    if any(size is ZERO for size in sizes):
        return ZERO
    last = offset
    for size, stride in zip(sizes, strides, strict=True):
        last = last + (size - 1) * stride
    return (last + 1) * dtype.itemsize


STATUS_NBYTES = 32
STATUS_BUFFER = PlanBuffer(
    name=STATUS,
    role="status",
    dtype=dtypes.uint32,
    sizes=(as_expr(STATUS_NBYTES // 4),),
    strides=(ONE,),
    offset=ZERO,
    nbytes=as_expr(STATUS_NBYTES),
)


@dataclass(frozen=True, slots=True)
class Binding:
    """A range of a plan buffer bound to a kernel; ``nbytes`` None means to the end.

    Several bindings of one buffer are the windows through which a kernel sees a buffer that is
    larger than the adapter's binding limit. ``offset_nbytes`` is a multiple of `BINDING_ALIGNMENT`.
    """

    buffer: str
    offset_nbytes: int = 0
    nbytes: Expr | None = None


def bound_nbytes(binding: Binding, buffer: PlanBuffer, sizes: Mapping[str, int]) -> int:
    """Bytes of its buffer that a binding reaches; 0 or less where it starts behind its end."""
    left = buffer.nbytes_for(sizes) - binding.offset_nbytes
    return left if binding.nbytes is None else min(left, evaluate(binding.nbytes, sizes))


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Run a kernel. A grid dimension of 0 skips the step.

    Attributes:
        kernel: index into `Plan.kernels`.
        bindings: one per kernel binding.
        grid: workgroups per dimension, each ≤ 65,535 once evaluated.
        parameters: the kernel's uniform parameters, in order: i32 values, or floats.
        bytes_read, bytes_written, flops: least traffic and arithmetic, for reports.
        checks: the indices that the kernel checks, by their number in it.
        iterations: the most that all loops of one invocation make together, where the kernel was
            compiled for a driver that ends them (`Target.max_loop_iterations`); else 0.
        narrow: integers made from sizes that the kernel's arithmetic takes for 32-bit ones: for
            sizes for which they are not the graph is compiled again, or a runtime refuses them.
        traffic: how many of the bytes are read and written through each binding, for reports.
    """

    kernel: int
    bindings: tuple[Binding, ...]
    grid: tuple[Expr, Expr, Expr]
    parameters: tuple[Parameter, ...]
    bytes_read: Expr
    bytes_written: Expr
    flops: Expr
    checks: tuple[IndexCheck, ...] = ()
    iterations: Expr = ZERO
    narrow: tuple[Expr, ...] = ()
    traffic: tuple[tuple[Expr, Expr], ...] = ()

    def on(self, instead: Mapping[str, str]) -> Dispatch:
        """The same on other buffers, by name."""
        bindings = (replace(b, buffer=instead.get(b.buffer, b.buffer)) for b in self.bindings)
        return replace(self, bindings=tuple(bindings))

    @property
    def buffers(self) -> tuple[str, ...]:
        """The buffers that it reads or writes."""
        return tuple(binding.buffer for binding in self.bindings)

    @property
    def sizes(self) -> Iterator[Expr]:
        """Everything that is evaluated to run or to report it."""
        yield from (*self.grid, *self.narrow)
        yield from (binding.nbytes for binding in self.bindings if binding.nbytes is not None)
        for parameter in self.parameters:
            if isinstance(parameter, HostNumber):
                yield from map(atom_expr, number_symbols(parameter))
            else:
                yield parameter
        yield from (self.bytes_read, self.bytes_written, self.flops, self.iterations)
        for moved in self.traffic:
            yield from moved


@dataclass(frozen=True, slots=True)
class HostStep:
    """Have the host call an operator of PyTorch between dispatches.

    The fields are those of `ir.nodes.HostCall`; a string among the arguments is as
    `lowering.fallback` says. In a composed plan the outputs are all of the operator's results,
    "" for one that nobody needs, and numbers among the arguments are made of named ones.

    Attributes:
        numbers: those of the outputs that are no tensors; only in composed plans.
    """

    target: str
    outputs: tuple[str, ...]
    arguments: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...]
    source: str = ""
    changed: tuple[HostBuffer, ...] = ()
    on_device: bool = False
    numbers: tuple[str, ...] = ()

    @property
    def reads(self) -> tuple[str, ...]:
        """Buffers of what it changes, then of the other arguments, as `buffers_in` finds them."""
        return buffers_in((self.changed, self.arguments, self.keywords))

    @property
    def buffers(self) -> tuple[str, ...]:
        """The buffers that it reads or writes."""
        return (*filter(None, self.outputs), *self.reads)

    @property
    def sizes(self) -> Iterator[Expr]:
        """Everything that is evaluated to run it."""
        arguments = leaves((self.changed, self.arguments, self.keywords))
        return (leaf for leaf in arguments if isinstance(leaf, Expr))


# ---- composed plans


class _Between:
    """A step of a composed plan, on names of which `names_of` tells."""

    __slots__ = ()
    buffers: tuple[str, ...] = ()
    sizes: tuple[Expr, ...] = ()


@dataclass(frozen=True, slots=True)
class Run(_Between):
    """Run a nested plan.

    Attributes:
        plan: index into `Plan.plans`.
        arguments: names of values, for its inputs.
        results: names for its outputs, in order; "" for one that nobody needs. What it changes in
            place has a new name, too.
    """

    plan: int
    arguments: tuple[str, ...]
    results: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Branch(_Between):
    """Run one of several nested plans.

    Attributes:
        index: a number, or a tensor of one element, for which the step waits: the position of the
            plan to run. A truth is 1.
        plans: indices into `Plan.plans`.
        arguments, results: as of `Run`.
    """

    index: str
    plans: tuple[int, ...]
    arguments: tuple[str, ...]
    results: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Loop(_Between):
    """Run a nested plan as often as a number says, or while another plan's result holds.

    Attributes:
        body: index into `Plan.plans`. It takes ``carried``, then ``others``, and gives what the
            next turn is to carry.
        condition: of the plan that takes the same and gives one number, or one element, for which
            the step waits before each turn; None: there is a ``count``.
        count: a number: of the turns.
        carried: names of what the first turn takes.
        others: names of what every turn takes.
        results: names for what the last turn gives; "" for what nobody needs.
        stacked: positions among those of tensors of which each turn writes the next row, from row
            0 on. The loop gives them more rows when these are full; of its result there are as many
            as turns, but at least one.
    """

    body: int
    condition: int | None
    count: str | None
    carried: tuple[str, ...]
    others: tuple[str, ...]
    results: tuple[str, ...]
    stacked: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ReadNumber(_Between):
    """Wait for the GPU, and name the number that is in a tensor of one element."""

    buffer: str
    name: str


@dataclass(frozen=True, slots=True)
class SizeOf(_Between):
    """Name the size, or the stride, of a dimension of a tensor whose layout a step decided."""

    buffer: str
    field: Literal["size", "stride"]
    dim: int
    name: str


@dataclass(frozen=True, slots=True)
class Compute(_Between):
    """Name a number made of named ones, as Python computes it."""

    name: str
    value: Expr | HostNumber | float


@dataclass(frozen=True, slots=True)
class Floats(_Between):
    """A float32 tensor of named numbers, with one dimension."""

    name: str
    numbers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Seeds(_Between):
    """An int32 tensor of ``count`` rows of two: new seeds of random numbers."""

    name: str
    count: int


@dataclass(frozen=True, slots=True)
class Check(_Between):
    """Raise an error with this message unless a number is not 0."""

    condition: str
    message: str


ComposedStep = Run | Branch | Loop | ReadNumber | SizeOf | Compute | Floats | Seeds | Check
Step = Dispatch | HostStep | ComposedStep


def names_of(step: Step) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What a step of a composed plan reads, and what it gives names to; "" among these for none."""
    match step:
        case Run():
            return step.arguments, step.results
        case Branch():
            return (step.index, *step.arguments), step.results
        case Loop():
            count = () if step.count is None else (step.count,)
            return (*count, *step.carried, *step.others), step.results
        case ReadNumber() | SizeOf():
            return (step.buffer,), (step.name,)
        case Compute(name, value):
            return tuple(sorted(symbol.name for symbol in symbols_in(value))), (name,)
        case Floats():
            return step.numbers, (step.name,)
        case Seeds():
            return (), (step.name,)
        case Check():
            return (step.condition,), ()
        case HostStep():
            found = leaves((step.changed, step.arguments, step.keywords))
            numbers = [symbol.name for leaf in found for symbol in symbols_in(leaf)]
            return (*step.reads, *dict.fromkeys(numbers)), step.outputs
        case Dispatch():
            return step.buffers, ()


@dataclass(frozen=True, slots=True)
class PlanInput:
    """A caller's argument: a tensor for ``buffer``, or the integer that ``size`` evaluates to."""

    buffer: str | None = None
    size: Expr | None = None


@dataclass(frozen=True, slots=True)
class PlanOutput:
    """A result: ``buffer`` seen through sizes, strides and offset in elements; or an integer; or a
    constant.

    ``mutates``: the value is written into that argument instead of being returned. When ``buffer``
    is that argument's own, the steps have written it in place: it is all of the argument.
    """

    buffer: str | None = None
    sizes: tuple[Expr, ...] = ()
    strides: tuple[Expr, ...] = ()
    offset: Expr | None = None
    size: Expr | None = None
    constant: Any = None
    mutates: int | None = None


View = tuple[tuple[int, ...], tuple[int, ...], int]
"""Sizes, strides and offset (in elements) of a tensor within another one's memory."""


def view_at(layout: PlanBuffer | PlanOutput, sizes: Mapping[str, int]) -> View:
    """A layout for these values of size symbols."""
    return (
        tuple(evaluate(size, sizes) for size in layout.sizes),
        tuple(evaluate(stride, sizes) for stride in layout.strides),
        0 if layout.offset is None else evaluate(layout.offset, sizes),
    )


@dataclass(frozen=True)
class Plan:
    """Everything an executor needs.

    A plan is of kernels, or it is *composed* of other plans: what data decides, which of them run,
    how often and on tensors of which sizes, is decided between them. The steps of a composed plan
    give names to tensors and numbers. Its ``buffers`` are inputs only; all other tensors have the
    layout that a step gave them. Its outputs name what they return, and nothing
    else. Complex tensors are real ones (…, 2).

    Attributes:
        constants: the bytes of constant buffers.
        preparation: computes the buffers of role ``prepared``, which are its outputs and have the
            same names there, from inputs of this plan, by name. Its results stay as they are while
            the contents of those inputs do. It has no sizes to be given.
        plans: those that a composed plan runs, equal ones once; None of a plan of kernels.
    """

    name: str
    kernels: tuple[Kernel, ...]
    buffers: dict[str, PlanBuffer]
    steps: tuple[Step, ...]
    inputs: tuple[PlanInput, ...]
    outputs: tuple[PlanOutput, ...]
    constants: dict[str, bytes] = field(default_factory=dict)
    version: int = VERSION
    preparation: Plan | None = None
    plans: tuple[Plan, ...] | None = None

    def renamed(self, name: str) -> Plan:
        """The same plan by another name."""
        inner = self.preparation
        if inner is not None:
            inner = replace(inner, name=f"{name}_preparation")
        return replace(self, name=name, preparation=inner)

    @property
    def dispatch_count(self) -> int:
        """Dispatches per call, of each nested plan once."""
        own = sum(isinstance(step, Dispatch) for step in self.steps)
        return own + sum(plan.dispatch_count for plan in self.plans or ())

    @property
    def all_plans(self) -> Iterator[Plan]:
        """The plan, its preparation, and all that are nested."""
        yield self
        inner = () if self.preparation is None else (self.preparation,)
        for plan in (*inner, *(self.plans or ())):
            yield from plan.all_plans

    @property
    def calls_host(self) -> bool:
        """Whether an operator runs on the host, in it or in one of `all_plans`."""
        return any(isinstance(step, HostStep) for plan in self.all_plans for step in plan.steps)

    @property
    def returned(self) -> frozenset[str]:
        """Names of the buffers that results are in."""
        found = {out.buffer for out in self.outputs if out.mutates is None}
        return frozenset(name for name in found if name is not None)

    @property
    def prepared(self) -> tuple[str, ...]:
        """Names of the buffers of role ``prepared``; the preparation may give them in any order."""
        return tuple(name for name, buffer in self.buffers.items() if buffer.role == "prepared")


@dataclass(frozen=True, slots=True)
class KernelCall:
    """A kernel and how one step runs it: code generation's result for the planner.

    Attributes:
        step: of a plan in which the kernel has the number 0.
    """

    kernel: Kernel
    step: Dispatch

    def on(self, instead: Mapping[str, str]) -> KernelCall:
        """The same call on other buffers of the same layouts, by name."""
        return replace(self, step=self.step.on(instead))
