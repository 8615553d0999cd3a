"""The nodes of a `LoopGraph`: each computes whole buffers.

Iteration symbols are named by position: ``i0, i1, …`` over ``ranges``, ``r0, …`` over reduce
ranges; a contraction uses ``b``, ``m``, ``n``, ``k``. `iteration_symbols` makes them, with their
extents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, ClassVar, Literal, TypeVar

from .. import dtypes
from ..dtypes import Kind
from ..symbolic.nested import HostBuffer, HostView, buffers_in, leaves
from ..symbolic.sizes import ONE, ZERO, Expr, as_expr, contiguous_strides, minimum
from ..user_wgsl.modules import WgslKernel
from .access import is_injective
from .buffers import Buffer
from .scalar import Scalar, checks_of, loads_of
from .spaces import (
    Anchor,
    Node,
    Rule,
    Space,
    dtype_rule,
    index_rules,
    named_bodies,
    numbered,
    shape_rule,
)


@dataclass(frozen=True, slots=True)
class Pointwise(Node):
    """output[i0, i1, …] = body(i0, i1, …) for every index in ``ranges``."""

    output: str
    ranges: tuple[Expr, ...]
    body: Scalar

    @property
    def spaces(self) -> dict[str, Space]:
        return {"body": (("i", self.ranges),)}

    def rules(self, buffers: Mapping[str, Buffer]) -> Iterator[Rule]:
        yield shape_rule(buffers[self.output], self.ranges)
        yield dtype_rule(self.body, buffers[self.output])


_CONTRACTED = (dtypes.float32, dtypes.float64, dtypes.int32)
REDUCTIONS = ("sum", "prod", "minimum", "maximum", "argmin", "argmax", "any", "all")


@dataclass(frozen=True, slots=True)
class Reduction(Node):
    """output[i…] = kind over r… of body(i…, r…).

    ``argmin``/``argmax`` give the row-major position in the reduce ranges as int64, the first of
    equals, NaN before every number. ``minimum``/``maximum`` propagate NaN. ``any``/``all`` take and
    give bool. A float ``sum`` or ``prod`` accumulates in the dtype of the body (lowering widens f16
    and bf16).
    """

    output: str
    kind: str
    ranges: tuple[Expr, ...]
    reduce_ranges: tuple[Expr, ...]
    body: Scalar

    @property
    def spaces(self) -> dict[str, Space]:
        return {"body": (("i", self.ranges), ("r", self.reduce_ranges))}

    def rules(self, buffers: Mapping[str, Buffer]) -> Iterator[Rule]:
        buffer = buffers[self.output]
        yield shape_rule(buffer, self.ranges)
        yield self.kind in REDUCTIONS, f"one of the reductions {REDUCTIONS}"
        wanted = dtypes.int64 if self.kind in ("argmin", "argmax") else self.body.dtype
        yield buffer.dtype is wanted, f"an output of {wanted}, not {buffer.dtype}"
        is_test = self.kind in ("any", "all")
        yield is_test == (self.body.dtype.kind is Kind.BOOL), "bool for any and all alone"


@dataclass(frozen=True, slots=True)
class Contraction(Anchor):
    """output[index] = Σ over k… of lhs(b…, m…, k…) · rhs(b…, n…, k…), in their dtype.

    Both are float32, float64 or int32 (whose sums wrap). Matrix multiplication and convolution
    alike. ``index`` gives the output's logical index in the symbols b, m, n; it must be a bijection
    from those ranges to the output's elements.

    ``lhs_shift(b…, m…)`` and ``rhs_shift(b…, n…)`` change nothing about that. Where both are there,
    operands were bfloat16, and elements at that point times two to the power of shift >> 1 are zero
    or subnormal, infinite, NaN, or at most f16's largest number; and, unless shift & 1, at least
    its smallest normal one.
    """

    TILED: ClassVar[bool] = True

    batch: tuple[Expr, ...]
    rows: tuple[Expr, ...]
    columns: tuple[Expr, ...]
    inner: tuple[Expr, ...]
    index: tuple[Expr, ...]
    lhs: Scalar
    rhs: Scalar
    lhs_shift: Scalar | None = None
    rhs_shift: Scalar | None = None

    @property
    def spaces(self) -> dict[str, Space]:
        batch, rows = ("b", self.batch), ("m", self.rows)
        columns, inner = ("n", self.columns), ("k", self.inner)
        return {
            "lhs": (batch, rows, inner),
            "rhs": (batch, columns, inner),
            "index": self.points,
            "lhs_shift": (batch, rows),
            "rhs_shift": (batch, columns),
        }

    @property
    def points(self) -> Space:
        return ("b", self.batch), ("m", self.rows), ("n", self.columns)

    @property
    def result_index(self) -> tuple[Expr, ...]:
        return self.index

    def rules(self, buffers: Mapping[str, Buffer]) -> Iterator[Rule]:
        dtype = self.lhs.dtype
        same = dtype is self.rhs.dtype and dtype in _CONTRACTED
        yield same, "float32, float64 or int32 operands"
        yield from index_rules(self.index, self.spaces["index"], buffers[self.output])
        shifts = [s for s in (self.lhs_shift, self.rhs_shift) if s is not None]
        yield len(shifts) in (0, 2), "a shift of each operand, or of none"
        yield all(shift.dtype is dtypes.int32 for shift in shifts), "int32 shifts"


@dataclass(frozen=True, slots=True)
class TriangularSolve(Node):
    """output[b…, m, n] = X with Σ over k ≤ m of matrix(m, k) · X(k, n) = rhs(m, n), row by row.

    ``sizes`` is (rows, columns). ``matrix`` is a scalar over (b…, m0, k0) of which k0 ≤ m0 is read,
    without k0 = m0 where ``unit`` says that it is 1; ``rhs`` is one over (b…, m0, n0). Both are
    float32 or both are float64.
    """

    TILED: ClassVar[bool] = True

    output: str
    batch: tuple[Expr, ...]
    sizes: tuple[Expr, Expr]
    unit: bool
    matrix: Scalar
    rhs: Scalar

    @property
    def spaces(self) -> dict[str, Space]:
        rows, columns = self.sizes
        outer, row = ("b", self.batch), ("m", (rows,))
        return {"matrix": (outer, row, ("k", (rows,))), "rhs": (outer, row, ("n", (columns,)))}

    def rules(self, buffers: Mapping[str, Buffer]) -> Iterator[Rule]:
        buffer = buffers[self.output]
        yield dtype_rule(self.matrix, buffer)
        yield dtype_rule(self.rhs, buffer)
        yield shape_rule(buffer, (*self.batch, *self.sizes))
        yield self.rhs.dtype.is_float, "floats"


@dataclass(frozen=True, slots=True)
class Factorization(Node):
    """output[b…, m, n]: the triangular factors of matrix(b…, m0, n0), in one matrix.

    With ``pivots``: U, and below its diagonal L without its ones; P · L · U is the matrix, where P
    exchanges row k with row pivots[b…, k] - 1, one after the other: the first row from k on in
    which column k is largest then, where NaN is largest. info[b…] is the first k, from 1, with
    U[k, k] = 0, or 0.

    Without: L, and zeros above its diagonal; L · Lᵀ is the matrix, of which n0 ≤ m0 is read. If it
    is not positive definite, info[b…] is the order of the first leading minor that is not, and only
    what is left of that column is defined.

    ``sizes`` is (rows, columns). All but ``info`` and ``pivots``, which are int32, is float32, or
    all is float64.
    """

    OUTPUTS: ClassVar[tuple[str, ...]] = ("output", "info", "pivots")
    LARGEST: ClassVar[int] = 240
    """Rows and columns of which one workgroup factors a matrix by itself; where it has more to do,
    llvmpipe ends its loops.
    """

    output: str
    info: str
    pivots: str | None
    batch: tuple[Expr, ...]
    sizes: tuple[Expr, Expr]
    matrix: Scalar

    @property
    def spaces(self) -> dict[str, Space]:
        rows, columns = self.sizes
        return {"matrix": (("b", self.batch), ("m", (rows,)), ("n", (columns,)))}

    def rules(self, buffers: Mapping[str, Buffer]) -> Iterator[Rule]:
        yield dtype_rule(self.matrix, buffers[self.output])
        yield self.matrix.dtype.is_float, "floats"
        yield shape_rule(buffers[self.output], (*self.batch, *self.sizes))
        yield shape_rule(buffers[self.info], self.batch)
        if self.pivots is None:
            yield self.sizes[0] is self.sizes[1], "a square matrix"
        else:
            yield shape_rule(buffers[self.pivots], (*self.batch, minimum(*self.sizes)))
        for name in (self.info, self.pivots):
            yield name is None or buffers[name].dtype is dtypes.int32, f"int32 {name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fourier(Node):
    """Discrete Fourier transforms of rows: with n the product of ``radices``,

        output[index(i…, k), part] = factor · scale · Σ over j < n of x[j] · exp(∓2πi · jk/n).

    The sign is negative ``forward``. ``ranges`` are the sizes of rows, i0…. ``real`` and
    ``imaginary`` (0 where it is None) are x, scalars over (i…, j0), the factor (1 where it is None)
    is over (i…, k0), all float32. ``index`` is in i… and k0; what it puts outside of the output is
    not wanted. The conjugates of results go to ``mirror``, by the same rule, where it is given. The
    output is float32, with a last dimension of 2 for real and imaginary part, or
    without it: the real part alone. Every element is written once.

    The roots are a scalar over (w0): the table `fourier.stage_roots`, for several radices.
    """

    output: str
    ranges: tuple[Expr, ...]
    radices: tuple[int, ...]
    forward: bool
    scale: float
    index: tuple[Expr, ...]
    mirror: tuple[Expr, ...] | None = None
    real: Scalar
    imaginary: Scalar | None = None
    root_real: Scalar | None = None
    root_imaginary: Scalar | None = None
    factor_real: Scalar | None = None
    factor_imaginary: Scalar | None = None

    @property
    def length(self) -> int:
        """n"""
        return prod(self.radices)

    @property
    def spaces(self) -> dict[str, Space]:
        rows, n = ("i", self.ranges), as_expr(self.length)
        elements, results = (rows, ("j", (n,))), (rows, ("k", (n,)))
        roots: Space = (("w", (n - self.radices[0],)),)
        return {
            **dict.fromkeys(("real", "imaginary"), elements),
            **dict.fromkeys(("root_real", "root_imaginary"), roots),
            **dict.fromkeys(("factor_real", "factor_imaginary", "index", "mirror"), results),
        }

    @property
    def extents(self) -> tuple[Expr, ...]:
        return (*self.ranges, as_expr(self.length))

    def rules(self, buffers: Mapping[str, Buffer]) -> Iterator[Rule]:
        for name, body in named_bodies(self).items():
            yield body.dtype is dtypes.float32, f"a float32 {name}"
        yield min(self.radices, default=0) > 1, "radices of at least 2"
        yield (self.root_real is not None) == (len(self.radices) > 1), "roots of its stages"
        for name in ("root", "factor"):
            parts = [getattr(self, f"{name}_{part}") is None for part in ("real", "imaginary")]
            yield parts[0] == parts[1], f"both parts of its {name}"
        buffer = buffers[self.output]
        yield buffer.dtype is dtypes.float32, "a float32 output"
        pairs = buffer.sizes[len(self.index) :]
        yield pairs in ((), (as_expr(2),)), "an index per dimension, but of a part"
        mirrored = self.mirror is None or len(self.mirror) == len(self.index)
        yield mirrored, "an index per dimension of conjugates"


@dataclass(frozen=True, slots=True)
class Scatter(Node):
    """Updates elements of a copy of a buffer: output[index(i…)] = or += body(i…), or the larger.

    ``index`` has one scalar per dimension of the output, each in [0, size). ``initial`` names the
    buffer whose contents the output starts from; it has the output's sizes and dtype.
    Duplicates are all added with ``combines`` "sum", and the largest uint32 of them and the initial
    one stays with "maximum"; with "" one of the duplicates wins.
    """

    INPUTS: ClassVar[tuple[str, ...]] = ("initial",)

    output: str
    initial: str
    ranges: tuple[Expr, ...]
    index: tuple[Scalar, ...]
    body: Scalar
    combines: Literal["", "sum", "maximum"]

    @property
    def spaces(self) -> dict[str, Space]:
        points: Space = (("i", self.ranges),)
        return {"index": points, "body": points}

    @property
    def reads_own_elements(self) -> bool:
        """Whether each point reads of ``initial`` at most the element that it alone writes.

        Then the update may be made in the memory of ``initial``: no other point sees it.
        """
        if any(load.buffer == self.initial for entry in self.index for load in loads_of(entry)):
            return False
        own = [load for load in loads_of(self.body) if load.buffer == self.initial]
        return not own or (
            not self.combines
            and all(load.index == self.index for load in own)
            and is_injective(self.index, numbered("i", self.ranges))
        )

    def rules(self, buffers: Mapping[str, Buffer]) -> Iterator[Rule]:
        output, initial = buffers[self.output], buffers[self.initial]
        yield output.sizes == initial.sizes, "the sizes of its initial buffer"
        yield output.dtype is initial.dtype, "the dtype of its initial buffer"
        yield len(self.index) == len(output.sizes), "an index per dimension"
        for entry in self.index:
            yield entry.dtype is dtypes.int64, "int64 indices"
        yield dtype_rule(self.body, output)


@dataclass(frozen=True, slots=True)
class Scan(Node):
    """A loop whose every lane is by itself: for t = 0 … ``length`` - 1

        rows[t, i…] = row(i…, t),    carry = step(i…, t),

    with the carries, of which each body may have the locals `carry_name`, as they were before that
    step. They are ``init`` at first. ``ranges`` are the sizes of the lanes, i0…; the step is t0.

    The outputs are the carries with the numbers ``finals`` after the last step, converted to their
    dtypes, then the rows, of sizes (length, lanes). Each element has a word of memory or more.
    """

    OUTPUTS: ClassVar[tuple[str, ...]] = ("carried", "rows")

    carried: tuple[str, ...]
    rows: tuple[str, ...]
    ranges: tuple[Expr, ...]
    length: Expr
    finals: tuple[int, ...]
    init: tuple[Scalar, ...]
    step: tuple[Scalar, ...]
    row: tuple[Scalar, ...]

    @property
    def spaces(self) -> dict[str, Space]:
        lanes, time = ("i", self.ranges), ("t", (self.length,))
        return {"init": (lanes,), "step": (lanes, time), "row": (lanes, time)}

    @property
    def locals(self) -> Mapping[str, tuple[str, ...]]:
        names = tuple(map(carry_name, range(len(self.init))))
        return {"step": names, "row": names}

    def rules(self, buffers: Mapping[str, Buffer]) -> Iterator[Rule]:
        yield len(self.step) == len(self.init), "a next carry for each carry"
        for before, after in zip(self.init, self.step, strict=True):
            yield before.dtype is after.dtype, f"carries of {before.dtype}, not {after.dtype}"
        yield len(self.finals) == len(self.carried), "the number of each last carry"
        yield len(self.rows) == len(self.row), "an output for each row"
        for name, number in zip(self.carried, self.finals, strict=True):
            yield shape_rule(buffers[name], self.ranges)
            yield number < len(self.init), "a carry of that number"
        for name, body in zip(self.rows, self.row, strict=True):
            yield shape_rule(buffers[name], (self.length, *self.ranges))
            yield dtype_rule(body, buffers[name])
        for name in (*self.carried, *self.rows):
            yield buffers[name].dtype.itemsize >= 4, "outputs whose elements are words"


def carry_name(number: int) -> str:
    """The local that is a carry of a `Scan`."""
    return f"carry{number}"


@dataclass(frozen=True, slots=True)
class HostCall(Node):
    """An operator of PyTorch that is no kernel, called by the host.

    Attributes:
        outputs: its results that are tensors, then the new contents of what it changes; or only the
            last of these.
        target: the overload's name, e.g. ``aten.sort.stable``.
        arguments, keywords: the latter's values are as the former, as `symbolic.nested` says.
        changed: what it changes: it is given copies, of which its arguments are `HostView`s.
        on_device: whether it is given tensors on the GPU, not copies of them on the CPU.
    """

    OUTPUTS: ClassVar[tuple[str, ...]] = ("outputs",)
    INPUTS: ClassVar[tuple[str, ...]] = ("arguments", "keywords", "changed")

    outputs: tuple[str, ...]
    target: str
    arguments: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...]
    changed: tuple[HostBuffer, ...] = ()
    on_device: bool = False

    def rules(self, buffers: Mapping[str, Buffer]) -> Iterator[Rule]:
        yield self.target.count(".") == 2, "a target namespace.name.overload"
        for leaf in leaves((self.arguments, self.keywords)):
            if isinstance(leaf, HostView):
                yield 0 <= leaf.changed < len(self.changed), "views of what it changes"


@dataclass(frozen=True, slots=True)
class UserKernel(Node):
    """A kernel that a user has written, or this package for an operator, on whole buffers.

    ``inputs`` and ``outputs`` are those of ``kernel``, in order: contiguous, from the start of
    their memory. ``numbers`` are its uniforms, scalars that are known before a call: constants,
    sizes, or float32 made of them on the host (`scalar.is_host_float`). ``grid`` are workgroups per
    dimension, ``iterations`` the most that all loops of an invocation make, 0 if nobody knows.
    """

    OUTPUTS: ClassVar[tuple[str, ...]] = ("outputs",)
    INPUTS: ClassVar[tuple[str, ...]] = ("inputs",)

    outputs: tuple[str, ...]
    inputs: tuple[HostBuffer, ...]
    kernel: WgslKernel
    numbers: tuple[Scalar, ...]
    grid: tuple[Expr, Expr, Expr]
    iterations: Expr = ZERO

    @property
    def spaces(self) -> dict[str, Space]:
        return {"numbers": (), "grid": (), "iterations": ()}

    @property
    def extents(self) -> tuple[Expr, ...]:
        return (*self.grid, *map(as_expr, self.kernel.workgroup_size))

    def rules(self, buffers: Mapping[str, Buffer]) -> Iterator[Rule]:
        yield len(self.inputs) == len(self.kernel.inputs), "a buffer for each input"
        yield len(self.outputs) == len(self.kernel.outputs), "a buffer for each output"
        yield len(self.numbers) == len(self.kernel.uniforms), "a number for each uniform"
        for name in (*taken_whole(self), *self.outputs):
            yield is_plain(buffers[name]), f"a contiguous {name}"


def is_plain(buffer: Buffer) -> bool:
    """Whether a buffer is contiguous from the start of its memory; sizes of 1 have any stride."""
    contiguous = contiguous_strides(buffer.sizes)
    rows = zip(buffer.sizes, buffer.strides, contiguous, strict=True)
    return buffer.offset is ZERO and all(
        stride is wanted for size, stride, wanted in rows if size is not ONE
    )


_Node = TypeVar("_Node", bound=Node)


def outputs_of(node: Node) -> tuple[str, ...]:
    """Names of the buffers that a node writes."""
    names: list[str] = []
    for field in node.OUTPUTS:
        value = getattr(node, field)
        names += [value] if isinstance(value, str) else value or ()
    return tuple(names)


def bodies_of(node: Node) -> tuple[Scalar, ...]:
    """Every scalar expression in a node."""
    return tuple(value for _, _, value in computed_at(node) if not isinstance(value, Expr))


def computed_at(node: Node) -> Iterator[tuple[str, Space, Scalar | Expr]]:
    """Scalars and indices of a node at the points of a space: (field, space, scalar or index)"""
    for field, space in node.spaces.items():
        value = getattr(node, field)
        for entry in value if isinstance(value, tuple) else (value,):
            if entry is not None:
                yield field, space, entry


def map_bodies(node: _Node, change: Callable[[Scalar], Scalar]) -> _Node:
    """The node with ``change`` of every scalar expression in it."""

    def changed(value: Scalar | Expr, space: Space) -> Scalar | Expr:
        return value if isinstance(value, Expr) else change(value)

    return map_computed(node, changed)


def map_computed(node: _Node, change: Callable[[Scalar | Expr, Space], Scalar | Expr]) -> _Node:
    """The node with ``change`` of every scalar and index expression in it, and its space."""
    made: dict[str, Any] = {}
    for field, space in node.spaces.items():
        value = getattr(node, field)
        if isinstance(value, tuple):
            made[field] = tuple(change(entry, space) for entry in value)
        elif value is not None:
            made[field] = change(value, space)
    return replace(node, **made)


def reports(node: Node) -> bool:
    """Whether the kernel that computes a node checks indices."""
    return any(checks_of(body) for body in bodies_of(node))


def inputs_of(node: Node) -> tuple[str, ...]:
    """Names of the buffers that a node reads, each once."""
    loaded = [load.buffer for body in bodies_of(node) for load in loads_of(body)]
    return tuple(dict.fromkeys((*loaded, *taken_whole(node))))


def taken_whole(node: Node) -> tuple[str, ...]:
    """Names of the buffers that a node reads other than by loads in its bodies."""
    values = [getattr(node, field) for field in node.INPUTS]
    named = tuple(HostBuffer(value) if isinstance(value, str) else value for value in values)
    return buffers_in(named)
