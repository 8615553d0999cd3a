"""The nodes of a `LoopGraph`: each computes whole buffers.

Iteration symbols are named by position: ``i0, i1, …`` over ``ranges``, ``r0, …`` over reduce
ranges; a contraction uses ``b``, ``m``, ``n``, ``k``. `iteration_symbols` makes them, with their
extents.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any, ClassVar, Union

from ..sizes import Expr, as_expr
from .attention_nodes import Attention, AttentionGradient
from .scalar import Scalar, checks_of, loads_of
from .spaces import Origin, Space, iteration_symbols, named_bodies


@dataclass(frozen=True, slots=True)
class Pointwise:
    """output[i0, i1, …] = body(i0, i1, …) for every index in ``ranges``."""

    output: str
    ranges: tuple[Expr, ...]
    body: Scalar
    origins: tuple[Origin, ...] = ()


REDUCTIONS = ("sum", "prod", "minimum", "maximum", "argmin", "argmax", "any", "all")


@dataclass(frozen=True, slots=True)
class Reduction:
    """output[i…] = kind over r… of body(i…, r…).

    ``argmin``/``argmax`` give the row-major position in the reduce ranges as int64, the first of
    equals, NaN before every number. ``minimum``/``maximum`` propagate NaN. ``any``/``all`` take and
    give bool. A float ``sum`` or ``prod`` accumulates in the dtype of the body (lowering widens f16
    and bf16).
    """

    output: str
    ranges: tuple[Expr, ...]
    reduce_ranges: tuple[Expr, ...]
    kind: str
    body: Scalar
    origins: tuple[Origin, ...] = ()


@dataclass(frozen=True, slots=True)
class Contraction:
    """output[index] = Σ over k… of lhs(b…, m…, k…) · rhs(b…, n…, k…), in their dtype.

    Both are float32, float64 or int32 (whose sums wrap). Matrix multiplication and convolution
    alike. ``index`` gives the output's logical index in the symbols b, m, n; it must be a bijection
    from those ranges to the output's elements.
    """

    output: str
    batch: tuple[Expr, ...]
    rows: tuple[Expr, ...]
    columns: tuple[Expr, ...]
    inner: tuple[Expr, ...]
    lhs: Scalar
    rhs: Scalar
    index: tuple[Expr, ...]
    origins: tuple[Origin, ...] = ()


@dataclass(frozen=True, slots=True)
class TriangularSolve:
    """output[b…, m, n] = X with Σ over k ≤ m of matrix(m, k) · X(k, n) = rhs(m, n), row by row.

    ``sizes`` is (rows, columns). ``matrix`` is a scalar over (b…, m0, k0) of which k0 ≤ m0 is read,
    without k0 = m0 where ``unit`` says that it is 1; ``rhs`` is one over (b…, m0, n0). Both are
    float32 or both are float64.
    """

    BODIES: ClassVar[tuple[str, ...]] = ("matrix", "rhs")

    output: str
    batch: tuple[Expr, ...]
    sizes: tuple[Expr, Expr]
    matrix: Scalar
    rhs: Scalar
    unit: bool
    origins: tuple[Origin, ...] = ()

    @property
    def spaces(self) -> dict[str, Space]:
        """What each of ``BODIES`` is a scalar over."""
        rows, columns = self.sizes
        outer, row = ("b", self.batch), ("m", (rows,))
        return {"matrix": (outer, row, ("k", (rows,))), "rhs": (outer, row, ("n", (columns,)))}


@dataclass(frozen=True, slots=True)
class Fourier:
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

    BODIES: ClassVar[tuple[str, ...]] = (
        *("real", "imaginary", "root_real", "root_imaginary", "factor_real", "factor_imaginary"),
    )

    output: str
    ranges: tuple[Expr, ...]
    radices: tuple[int, ...]
    forward: bool
    scale: float
    index: tuple[Expr, ...]
    real: Scalar
    imaginary: Scalar | None = None
    root_real: Scalar | None = None
    root_imaginary: Scalar | None = None
    factor_real: Scalar | None = None
    factor_imaginary: Scalar | None = None
    mirror: tuple[Expr, ...] | None = None
    origins: tuple[Origin, ...] = ()

    @property
    def length(self) -> int:
        """n"""
        return prod(self.radices)

    @property
    def spaces(self) -> dict[str, Space]:
        """What each of ``BODIES`` is a scalar over."""
        rows, n = ("i", self.ranges), as_expr(self.length)
        prefixes = {"real": "j", "imaginary": "j", "factor_real": "k", "factor_imaginary": "k"}
        roots: Space = (("w", (n - self.radices[0],)),)
        return {
            name: (rows, (prefixes[name], (n,))) if name in prefixes else roots
            for name in self.BODIES
        }


@dataclass(frozen=True, slots=True)
class Scatter:
    """Updates elements of a copy of a buffer: output[index(i…)] = or += body(i…).

    ``index`` has one scalar per dimension of the output, each in [0, size). ``initial`` names the
    buffer whose contents the output starts from; it has the output's sizes and dtype.
    ``accumulate`` adds (duplicates included), otherwise one of the duplicates wins.
    """

    output: str
    initial: str
    ranges: tuple[Expr, ...]
    index: tuple[Scalar, ...]
    body: Scalar
    accumulate: bool
    origins: tuple[Origin, ...] = ()


@dataclass(frozen=True, slots=True)
class HostCall:
    """An ATen overload run on the host.

    ``arguments`` and ``keywords`` are nested tuples of constants, `BufferArgument`s and `Expr`s
    (sizes). ``target`` is the overload's name, e.g. ``aten.sort.stable``.
    """

    outputs: tuple[str, ...]
    target: str
    arguments: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...]
    origins: tuple[Origin, ...] = ()


@dataclass(frozen=True, slots=True)
class BufferArgument:
    """A tensor argument of a `HostCall`."""

    buffer: str


WithNamedBodies = Attention | AttentionGradient | TriangularSolve | Fourier
"""Nodes of several scalars, each with a name and a space of its own."""

Node = Union[Pointwise, Reduction, Contraction, WithNamedBodies, Scatter, HostCall]


def outputs_of(node: Node) -> tuple[str, ...]:
    """Names of the buffers that a node writes."""
    match node:
        case HostCall():
            return node.outputs
        case Attention() if node.logsumexp is not None:
            return (node.output, node.logsumexp)
        case _:
            return (node.output,)


def bodies_of(node: Node) -> tuple[Scalar, ...]:
    """Every scalar expression in a node."""
    match node:
        case Pointwise() | Reduction():
            return (node.body,)
        case Contraction():
            return (node.lhs, node.rhs)
        case Attention() | AttentionGradient() | TriangularSolve() | Fourier():
            return tuple(named_bodies(node).values())
        case Scatter():
            return (*node.index, node.body)
        case HostCall():
            return ()


def map_bodies(node: Node, change: Callable[[Scalar], Scalar]) -> Node:
    """The node with ``change`` of every scalar expression in it."""
    match node:
        case Pointwise() | Reduction():
            return replace(node, body=change(node.body))
        case Contraction():
            return replace(node, lhs=change(node.lhs), rhs=change(node.rhs))
        case Attention() | AttentionGradient() | TriangularSolve() | Fourier():
            changed: dict[str, Any] = {n: change(body) for n, body in named_bodies(node).items()}
            return replace(node, **changed)
        case Scatter():
            return replace(node, index=tuple(map(change, node.index)), body=change(node.body))
        case HostCall():
            return node


def reports(node: Node) -> bool:
    """Whether the kernel that computes a node checks indices."""
    return any(checks_of(body) for body in bodies_of(node))


def inputs_of(node: Node) -> tuple[str, ...]:
    """Names of the buffers that a node reads, each once."""
    names: dict[str, None] = {}
    for body in bodies_of(node):
        for load in loads_of(body):
            names[load.buffer] = None
    if isinstance(node, Scatter):
        names[node.initial] = None
    if isinstance(node, HostCall):
        _collect_buffers((node.arguments, node.keywords), names)
    return tuple(names)


def _collect_buffers(value: Any, names: dict[str, None]) -> None:
    if isinstance(value, BufferArgument):
        names[value.buffer] = None
    elif isinstance(value, tuple):
        for item in value:
            _collect_buffers(item, names)


def anchor_symbols(node: Contraction | Attention) -> tuple[Expr, ...]:
    """The iteration symbols of an anchor's result."""
    if isinstance(node, Contraction):
        return (
            *iteration_symbols("b", node.batch),
            *iteration_symbols("m", node.rows),
            *iteration_symbols("n", node.columns),
        )
    batch, heads, queries, _, _, size = node.sizes
    return (
        *iteration_symbols("b", (batch, heads)),
        *iteration_symbols("m", (queries,)),
        *iteration_symbols("d", (size,)),
    )


def anchor_index(node: Contraction | Attention) -> tuple[Expr, ...]:
    """The logical index that one point of an anchor's space computes."""
    return node.index if isinstance(node, Contraction) else anchor_symbols(node)
