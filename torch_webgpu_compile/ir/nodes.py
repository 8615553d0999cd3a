"""The nodes of a `LoopGraph`: each computes whole buffers.

Iteration symbols are named by position: ``i0, i1, …`` over ``ranges``, ``r0, …`` over reduce
ranges; a contraction uses ``b``, ``m``, ``n``, ``k``. `iteration_symbols` makes them, with their
extents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Union

from ..sizes import Expr, IntLike, Symbol, as_symbol, ceildiv, iteration
from .scalar import Scalar


def iteration_symbols(prefix: str, sizes: Sequence[IntLike]) -> tuple[Expr, ...]:
    """``prefix0 < sizes[0]``, ``prefix1 < sizes[1]``, …"""
    return tuple(iteration(f"{prefix}{k}", size) for k, size in enumerate(sizes))


def symbol_keys(symbols: Sequence[Expr]) -> tuple[Symbol, ...]:
    """The `Symbol`s behind symbol expressions."""
    keys = []
    for expr in symbols:
        key = as_symbol(expr)
        assert key is not None, expr
        keys.append(key)
    return tuple(keys)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a node comes from: an ATen overload and the user's line of code ("" when unknown)."""

    op: str
    source: str = ""


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

    Both are float32 or both are float64. Matrix multiplication and convolution alike. ``index``
    gives the output's logical index in the symbols b, m, n; it must be a bijection from those
    ranges to the output's elements.
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
class Attention:
    """output[b, h, q, d] = Σ over s of softmax over s (scale · Σ over e query·key + bias) · value.

    ``sizes`` is (batch, heads, queries, keys, head size, value head size). ``query`` is a scalar
    over (b0, b1, m0, k0), ``key`` over (b0, b1, n0, k0), ``value`` over (b0, b1, n0, d0) and
    ``bias`` over (b0, b1, m0, n0), all float32; the bias is added to the scaled score and may be
    -inf. ``causal`` keeps keys s ≤ q. A row whose keys are all masked gives 0, as PyTorch's kernels
    do.

    With several ``parts`` the keys are divided into runs of ceil(keys / parts), and the output, in
    float32, is [part, b, h, q, wide + 4], where wide is the value head size rounded up to 4. Over
    the part's keys it has Σ exp(score - highest) · value at the elements d, the highest score at
    wide, and Σ exp(score - highest) at wide + 1.
    """

    output: str
    sizes: tuple[Expr, Expr, Expr, Expr, Expr, Expr]
    query: Scalar
    key: Scalar
    value: Scalar
    bias: Scalar | None
    causal: bool
    scale: float
    origins: tuple[Origin, ...] = ()
    parts: int = 1

    @property
    def wide(self) -> Expr:
        """The value head size rounded up to whole vectors."""
        return ceildiv(self.sizes[5], 4) * 4


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


Node = Union[Pointwise, Reduction, Contraction, Attention, Scatter, HostCall]


def outputs_of(node: Node) -> tuple[str, ...]:
    """Names of the buffers that a node writes."""
    return node.outputs if isinstance(node, HostCall) else (node.output,)


def bodies_of(node: Node) -> tuple[Scalar, ...]:
    """Every scalar expression in a node."""
    match node:
        case Pointwise() | Reduction():
            return (node.body,)
        case Contraction():
            return (node.lhs, node.rhs)
        case Attention():
            bodies = (node.query, node.key, node.value)
            return bodies if node.bias is None else (*bodies, node.bias)
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
        case Attention():
            return replace(
                node,
                query=change(node.query),
                key=change(node.key),
                value=change(node.value),
                bias=None if node.bias is None else change(node.bias),
            )
        case Scatter():
            return replace(node, index=tuple(map(change, node.index)), body=change(node.body))
        case HostCall():
            return node


def inputs_of(node: Node) -> tuple[str, ...]:
    """Names of the buffers that a node reads, each once."""
    from .scalar import loads_of

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
